"""Where the assistant speaks in a rendered conversation, whatever the template.

Masks made from the difference of two renderings slip when a template rewrites history (Qwen 3 drops
earlier reasoning), and regular expressions know one template only. Here every message carries
marks, characters that no text uses, and the rendering itself says where they end up.

*Start of turn i.* Render the messages before it with the generation prompt, as a server does when
the model has to speak. What follows the last mark there is the prompt's end; in the whole
conversation the same text follows the same mark, and the model speaks from its end on. History may
lack the tail of a generation prompt (DeepSeek R1's `<think>`): then the turn is rendered with a
mark for its only content, and what precedes that mark is where both agree.

*End of turn i.* What follows the turn's last mark is compared with the rendering that stops after
turn i (for the last turn, with one that goes on): only what the turn itself writes is in both. The
last special token in it is the one that the model stops with. If they part before any (gpt-oss ends
a final turn with another token), it is the next special token of the whole conversation.

A template with `{% generation %}` blocks is believed instead.
"""

import re
from collections import Counter

from specfit_data.template import ChatTemplate, RenderError, TemplateMessage

Span = tuple[int, int]  # half-open

FIRST_MARK = 0xF0000  # plane 15 is for private use
HEADER_MARK = "\U000ffffd"
MARKS = re.compile("[\U000f0000-\U000ffffd]")


class MarkedChat:
    """The first messages of a conversation as `text`, with marks that say where each one went.

    Raises:
        RenderError: the template refuses the conversation, drops a message or a tool call, renders
            one twice, or renders differently because of the marks.
    """

    def __init__(self, template: ChatTemplate, num_messages: int, generation_prompt: bool) -> None:
        self._template = template
        self._generation_prompt = generation_prompt
        plain = template.messages[:num_messages]
        self.text = template.render(plain, generation_prompt)
        if MARKS.search(self.text):
            raise RenderError("it uses the private characters that marks are made of")
        self._owner_by_mark: dict[str, int] = {}
        self._call_marks: set[str] = set()
        self._messages = [self._marked(i, message) for i, message in enumerate(plain)]
        self._rendered = template.render(self._messages, generation_prompt)
        if MARKS.sub("", self._rendered) != self.text:
            raise RenderError("marks change what the template renders")
        self._check_marks()

    def span_of(self, message_idx: int, special_tokens: re.Pattern[str]) -> Span:
        """The characters of `text` that the model generates as message `message_idx`.

        Raises:
            RenderError: they cannot be located.
        """
        start, end = self._start_of(message_idx), self._end_of(message_idx, special_tokens)
        if start >= end:
            raise RenderError(f"message {message_idx}: the turn ends before it starts")
        return start, end

    def generation_spans(self) -> dict[int, list[Span]]:
        """The template's own generation blocks, by the message that each one holds.

        Raises:
            RenderError: a block holds no message, or more than one.
        """
        rendered, blocks = self._template.render_generation(self._messages, self._generation_prompt)
        spans: dict[int, list[Span]] = {}
        for start, end in blocks:
            owners = {self._owner_by_mark[mark] for mark in MARKS.findall(rendered[start:end])}
            if len(owners) != 1:
                raise RenderError(f"a generation block holds {len(owners)} messages")
            spans.setdefault(owners.pop(), []).append(
                (_plain_length(rendered[:start]), _plain_length(rendered[:end]))
            )
        return spans

    def _start_of(self, message_idx: int) -> int:
        if message_idx == 0:
            raise RenderError("it begins with an assistant turn")
        asked = self._template.render(self._messages[:message_idx], True)
        anchor = "".join(MARKS.findall(asked)[-1:])
        prompt_end = _after(anchor, asked)
        turn = _after(anchor, self._rendered)
        first = MARKS.search(turn)
        if first is None or self._owner_by_mark[first[0]] != message_idx:
            raise RenderError(f"message {message_idx}: it does not follow the message before it")
        if not turn.startswith(prompt_end):
            header = self._header_of(message_idx, anchor)
            if not (prompt_end.startswith(header) and turn.startswith(header)):
                raise RenderError(f"message {message_idx}: no generation prompt precedes it")
            prompt_end = header
        return len(self.text) - _plain_length(turn) + len(prompt_end)

    def _header_of(self, message_idx: int, anchor: str) -> str:
        """What stands before the content of a turn that is nothing but content."""
        messages = [*self._messages]
        messages[message_idx] = {"role": "assistant", "content": HEADER_MARK}
        rendered = self._template.render(messages, self._generation_prompt)
        return _after(anchor, rendered).partition(HEADER_MARK)[0]

    def _end_of(self, message_idx: int, special_tokens: re.Pattern[str]) -> int:
        marks = [m for m in MARKS.findall(self._rendered) if self._owner_by_mark[m] == message_idx]
        if not marks:
            raise RenderError(f"message {message_idx}: the assistant says nothing")
        mark = marks[-1]
        tail = _after(mark, self._rendered)
        until_next = MARKS.split(tail, maxsplit=1)[0]
        turns = self._messages[: message_idx + 1]
        stopped = _after(mark, self._template.render(turns, False))
        is_last = message_idx == len(self._messages) - 1
        went_on = self._went_on(turns, mark) if is_last else tail
        num_shared = _num_shared(until_next, stopped, went_on)
        ends = [found.end() for found in special_tokens.finditer(until_next)]
        if not ends:
            raise RenderError(f"message {message_idx}: no special token ends it")
        inside = [end for end in ends if end <= num_shared]
        return len(self.text) - _plain_length(tail) + (inside[-1] if inside else ends[0])

    def _went_on(self, turns: list[TemplateMessage], mark: str) -> str:
        """What follows `mark` when one more message comes, or none where that is refused."""
        role = "tool" if "tool_calls" in turns[-1] else "user"
        try:
            return _after(
                mark, self._template.render([*turns, {"role": role, "content": "-"}], False)
            )
        except RenderError:
            return _after(mark, self._rendered)

    def _check_marks(self) -> None:
        counts = Counter(MARKS.findall(self._rendered))
        kept = {self._owner_by_mark[mark] for mark in counts}
        for mark, owner in self._owner_by_mark.items():
            role = self._messages[owner]["role"]
            if counts[mark] > 1:
                raise RenderError(f"message {owner} ({role}): the template renders it twice")
            if owner not in kept:
                raise RenderError(f"message {owner} ({role}): the template drops it")
            if mark in self._call_marks and mark not in counts:
                raise RenderError(f"message {owner} ({role}): the template drops a tool call")

    def _marked(self, message_idx: int, message: TemplateMessage) -> TemplateMessage:
        marked = dict(message)
        for key in ("content", "reasoning_content"):
            if key in message:
                marked[key] = self._mark(message[key], message_idx, message["role"])
        if "tool_calls" in message:
            marked["tool_calls"] = [
                self._marked_call(c, message_idx) for c in message["tool_calls"]
            ]
        return marked

    def _marked_call(self, call: TemplateMessage, message_idx: int) -> TemplateMessage:
        name = self._mark(call["function"]["name"], message_idx, "assistant")
        self._call_marks.add(name[-1])
        return {**call, "function": {**call["function"], "name": name}}

    def _mark(self, text: str, message_idx: int, role: str) -> str:
        """Puts a mark into `text`, inside the whitespace around it, which templates trim.

        At the end of what the assistant says, as what follows it matters; elsewhere in the middle,
        as templates look at how a user's message starts and ends (Qwen 3 for `<tool_response>`).
        An empty text stays empty, as templates ask whether it is.
        """
        said = text.strip()
        if not said:
            return text
        mark = chr(FIRST_MARK + len(self._owner_by_mark))
        self._owner_by_mark[mark] = message_idx
        cut = len(text.rstrip()) if role == "assistant" else text.index(said) + len(said) // 2
        return text[:cut] + mark + text[cut:]


def _after(mark: str, rendered: str) -> str:
    """What follows `mark` in `rendered`, or all of it for no mark."""
    if mark not in rendered:
        raise RenderError("the template rewrites what was said before")
    return rendered.partition(mark)[2] if mark else rendered


def _num_shared(*texts: str) -> int:
    """The length of the prefix that `texts` have in common."""
    columns = enumerate(zip(*texts, strict=False))
    return next((i for i, column in columns if len(set(column)) > 1), min(map(len, texts)))


def _plain_length(rendered: str) -> int:
    return len(rendered) - len(MARKS.findall(rendered))
