"""Where the assistant speaks in a rendered conversation, whatever the template.

Masks made from the difference of two renderings slip when a template rewrites history (Qwen 3 drops
earlier reasoning), and regular expressions know one template only. Here every message carries
marks, characters that no text uses, and the rendering itself says where they end up.

*Start of turn i.* Render the messages before it with the generation prompt, as a server does when
the model has to speak. What follows the last mark there is the prompt's end; in the whole
conversation the same text follows the same mark, and the model speaks from its end on. History may
have less than the generation prompt (DeepSeek R1's `<think>`), or other text before it (Hermes 2
ends a tool's message in history only): then the turn is rendered with a mark for its only content,
and speaks from where that mark would be.

*End of turn i.* What follows the turn's last mark is compared with the rendering that stops after
turn i (for the last turn, with one that goes on): only what the turn itself writes is in both. The
model stops with the end-of-sequence token in it, else with the last special token in it. If they
part before any (gpt-oss ends a final turn with another token), it is the next special token.

A template with `{% generation %}` blocks is believed instead.
"""

import re
from collections import Counter
from dataclasses import dataclass

from specfit_data.template import ChatTemplate, RenderError, TemplateMessage

Span = tuple[int, int]  # half-open

FIRST_MARK = 0xF0000  # plane 15 is for private use
HEADER_MARK = "\U000ffffd"
MARKS = re.compile("[\U000f0000-\U000ffffd]")


@dataclass(frozen=True)
class StopTokens:
    """What a turn may end with, as text."""

    special: re.Pattern[str]  # any special token
    eos: str | None


@dataclass(frozen=True)
class Turn:
    """What the model generates of one message, as characters of the text."""

    spans: tuple[Span, ...]  # one, unless the template has several generation blocks in a message
    as_asked: bool  # the very end of the prompt stands before it


class MarkedChat:
    """The first messages of a conversation as `text`, with marks that say where each one went.

    Raises:
        RenderError: the template refuses the messages, or renders otherwise because of the marks.
    """

    def __init__(
        self,
        template: ChatTemplate,
        num_messages: int,
        *,
        generation_prompt: bool,
        stop_tokens: StopTokens,
    ) -> None:
        self._template = template
        self._generation_prompt = generation_prompt
        self._stop_tokens = stop_tokens
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
        self._blocks = self._generation_blocks() if template.marks_generation else None

    def turn(self, message_idx: int) -> Turn:
        """What the model generates as message `message_idx`.

        Raises:
            RenderError: it cannot be located.
        """
        if self._blocks is not None:
            if message_idx not in self._blocks:
                raise RenderError(f"message {message_idx}: no generation block holds it")
            return Turn(tuple(self._blocks[message_idx]), as_asked=False)
        start, as_asked = self._start_of(message_idx)
        end = self._end_of(message_idx)
        if start >= end:
            raise RenderError(f"message {message_idx}: the turn ends before it starts")
        return Turn(((start, end),), as_asked)

    def check_kept(self, message_idx: int) -> None:
        """Whether a message is in the text, once, with all of its tool calls.

        Raises:
            RenderError: it is not.
        """
        where = f"message {message_idx} ({self._messages[message_idx]['role']})"
        counts = Counter(MARKS.findall(self._rendered))
        own = [mark for mark, owner in self._owner_by_mark.items() if owner == message_idx]
        if own and not any(counts[mark] for mark in own):
            raise RenderError(f"{where}: the template drops it")
        for mark in own:
            if mark in self._call_marks and not counts[mark]:
                raise RenderError(f"{where}: the template drops a tool call")
            # The name of a call may come back with its result, as in gpt-oss.
            if mark not in self._call_marks and counts[mark] > 1:
                raise RenderError(f"{where}: the template renders it twice")

    def _generation_blocks(self) -> dict[int, list[Span]]:
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

    def _start_of(self, message_idx: int) -> tuple[int, bool]:
        if message_idx == 0:
            raise RenderError("it begins with an assistant turn")
        asked = self._template.render(self._messages[:message_idx], True)
        anchor = "".join(MARKS.findall(asked)[-1:])
        occurrence = asked.count(anchor)
        prompt_end = _after(anchor, asked, occurrence)
        turn = _after(anchor, self._rendered, occurrence)
        first = MARKS.search(turn)
        if first is None or self._owner_by_mark[first[0]] != message_idx:
            raise RenderError(f"message {message_idx}: it does not follow the message before it")
        as_asked = turn.startswith(prompt_end)
        header = prompt_end if as_asked else self._header_of(message_idx, anchor, occurrence)
        if not turn.startswith(header):
            raise RenderError(f"message {message_idx}: no known header precedes it")
        return len(self.text) - _plain_length(turn) + len(header), as_asked

    def _header_of(self, message_idx: int, anchor: str, occurrence: int) -> str:
        """What stands before the content of a turn that is nothing but content."""
        messages = [*self._messages]
        messages[message_idx] = {"role": "assistant", "content": HEADER_MARK}
        rendered = self._template.render(messages, self._generation_prompt)
        return _after(anchor, rendered, occurrence).partition(HEADER_MARK)[0]

    def _end_of(self, message_idx: int) -> int:
        in_order = dict.fromkeys(MARKS.findall(self._rendered))
        marks = [mark for mark in in_order if self._owner_by_mark[mark] == message_idx]
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
        stops = list(self._stop_tokens.special.finditer(until_next))
        if not stops:
            raise RenderError(f"message {message_idx}: no special token ends it")
        own = [stop for stop in stops if stop.end() <= num_shared]
        eos = [stop for stop in own if stop[0] == self._stop_tokens.eos]
        stop = (eos[:1] or own[-1:] or stops[:1])[0]
        return len(self.text) - _plain_length(tail) + stop.end()

    def _went_on(self, turns: list[TemplateMessage], mark: str) -> str:
        """What follows `mark` when one more message comes, or none where that is refused."""
        role = "tool" if "tool_calls" in turns[-1] else "user"
        try:
            return _after(
                mark, self._template.render([*turns, {"role": role, "content": "-"}], False)
            )
        except RenderError:
            return _after(mark, self._rendered)

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


def _after(mark: str, rendered: str, occurrence: int = 1) -> str:
    """What follows an occurrence of `mark` in `rendered`, or all of it for no mark."""
    if not mark:
        return rendered
    parts = rendered.split(mark, occurrence)
    if len(parts) <= occurrence:
        raise RenderError("the template rewrites what was said before")
    return parts[-1]


def _num_shared(*texts: str) -> int:
    """The length of the prefix that `texts` have in common."""
    columns = enumerate(zip(*texts, strict=False))
    return next((i for i, column in columns if len(set(column)) > 1), min(map(len, texts)))


def _plain_length(rendered: str) -> int:
    return len(rendered) - len(MARKS.findall(rendered))
