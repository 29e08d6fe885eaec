"""A conversation as the target reads it: its text, its tokens, and who speaks them."""

import re
from bisect import bisect_left
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedTokenizerBase

from specfit_data.conversations import Conversation, Message, TokenizedConversation, ToolCall
from specfit_data.sessions import Session
from specfit_data.template import ChatTemplate, RenderError
from specfit_data.turns import MarkedChat, Span, StopTokens

__all__ = ["RenderError", "Rendered", "Renderer"]

# Answers that stand for one that is not known yet.
PLACEHOLDERS = ("Yes.", "That depends on two things")


@dataclass(frozen=True)
class Rendered:
    """One rendered conversation; a span is a half-open range of tokens of one assistant turn."""

    text: str
    input_ids: list[int]
    spans: list[Span]  # ascending; each with the token that ends the turn

    def tokenized(self) -> TokenizedConversation:
        """The same as tensors."""
        loss_mask = torch.zeros(len(self.input_ids), dtype=torch.bool)
        for start, end in self.spans:
            loss_mask[start:end] = True
        return TokenizedConversation(torch.tensor(self.input_ids, dtype=torch.long), loss_mask)


class Renderer:
    """Renders conversations through the chat template of one target, as servers render them.

    Args:
        tokenizer: the target's, one that gives character offsets.

    Raises:
        ValueError: the tokenizer gives no offsets, or has no chat template.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if not tokenizer.is_fast:
            raise ValueError(f"target.path must have a fast tokenizer, got {type(tokenizer)}")
        if not tokenizer.chat_template:
            raise ValueError("target.path must have a chat template, its tokenizer has none")
        self._tokenizer = tokenizer
        special = {str(t) for t in tokenizer.added_tokens_decoder.values() if t.special}
        longest_first = sorted(special | set(tokenizer.all_special_tokens), key=len, reverse=True)
        pattern = re.compile("|".join(map(re.escape, longest_first)))
        self._stop_tokens = StopTokens(pattern, tokenizer.eos_token)

    def prompt(self, conversation: Conversation, loss_on: str) -> Rendered:
        """What a server gives the model to answer: all but a final assistant turn.

        The spans are of the turns in the history; there are none when only the last turn is
        learned, as that one is still to come.

        Args:
            conversation: the messages and tools.
            loss_on: all_turns | last_turn.

        Raises:
            RenderError: the template cannot express it, or a turn cannot be located.
        """
        messages = conversation.messages
        num_messages = len(messages) - (bool(messages) and messages[-1].role == "assistant")
        if num_messages == 0:
            raise RenderError("nothing is asked")
        template = ChatTemplate(self._tokenizer, conversation)
        asked = self._asked(template, num_messages + template.num_added)
        learned = _learned(template, conversation, num_messages, loss_on)
        return self._tokenized(asked.text, [s for i in learned for s in asked.turn(i).spans])

    def full(self, conversation: Conversation, loss_on: str) -> Rendered:
        """The last assistant turn and all before it, up to the token that ends it.

        It is the prompt and what the template writes for the answer, not the template's rendering
        of both: Mistral's forgets the system message once an answer is there.

        Args:
            conversation: the messages and tools.
            loss_on: all_turns | last_turn.

        Raises:
            RenderError: as for `prompt`, or there is no assistant turn.
        """
        turns = [i for i, m in enumerate(conversation.messages) if m.role == "assistant"]
        if not turns:
            raise RenderError("no assistant turn")
        last = turns[-1]
        if last == 0:
            raise RenderError("it begins with an assistant turn")
        template = ChatTemplate(self._tokenizer, conversation)
        answer_idx = last + template.num_added
        asked = self._asked(template, answer_idx)
        whole = self._chat(template, answer_idx + 1, generation_prompt=False)
        whole.check_kept(answer_idx)
        turn = whole.turn(answer_idx)
        start, end = turn.spans[0][0], turn.spans[-1][1]
        if turn.as_asked:
            history, text = asked, asked.text + whole.text[start:end]
            answer = [(len(asked.text), len(text))]
        else:
            history, text, answer = whole, whole.text[:end], list(turn.spans)
        learned = _learned(template, conversation, last, loss_on)
        spans = [span for i in learned for span in history.turn(i).spans]
        if conversation.messages[last].learn:
            spans += answer
        return self._tokenized(text, spans)

    def follow_up(self, session: Session, follow_up_idx: int) -> list[int]:
        """The tokens that a later request adds behind the answer before it.

        They are what follows the token that ends that answer, up to and including the header of the
        next: a request's tokens are those of the one before, its answer with that token, and these.
        A server that renders the conversation anew reads the same, unless the template rewrites
        history (Qwen 3 drops reasoning) or the answer's text is tokenized otherwise than it was
        generated. A follow-up of tool results is taken to answer as many calls.

        Raises:
            RenderError: as for `prompt`, or what is added depends on the answer.
        """
        first, other = (self._behind(session, follow_up_idx, said)[1] for said in PLACEHOLDERS)
        if first != other:
            raise RenderError(f"follow-up {follow_up_idx} depends on the answer before it")
        return first

    def end_of_turn(self, session: Session) -> list[int]:
        """The tokens that end an answer which more follows, for one that was cut short.

        None where `session` has no follow-ups.

        Raises:
            RenderError: as for `follow_up`.
        """
        if not session.follow_ups:
            return []
        # After an answer in words, whatever comes first: what is cut short is no whole call.
        going_on = replace(session, follow_ups=((Message("user", "-"),),))
        return self._behind(going_on, 0, PLACEHOLDERS[0])[0]

    def _behind(self, session: Session, idx: int, said: str) -> tuple[list[int], list[int]]:
        """What ends the answer before follow-up `idx` if that is `said`, and what comes then."""
        messages = list(session.request)
        for added in session.follow_ups[: idx + 1]:
            messages += [_placeholder(added, said), *added]
        conversation = replace(session.first, messages=tuple(messages))
        template = ChatTemplate(self._tokenizer, conversation)
        chat = self._asked(template, len(template.messages))
        answer_idx = len(template.messages) - len(session.follow_ups[idx]) - 1
        start, end = chat.turn(answer_idx).spans[-1]
        said_end = chat.text.find(said, start) + len(said)
        input_ids, starts = self._tokenize(chat.text)
        first, last = bisect_left(starts, said_end), bisect_left(starts, end)
        return input_ids[first:last], input_ids[last:]

    def _asked(self, template: ChatTemplate, num_messages: int) -> MarkedChat:
        """What a server is given."""
        asked = self._chat(template, num_messages, generation_prompt=True)
        for i in range(num_messages):
            asked.check_kept(i)
        return asked

    def _chat(
        self, template: ChatTemplate, num_messages: int, *, generation_prompt: bool
    ) -> MarkedChat:
        return MarkedChat(
            template,
            num_messages,
            generation_prompt=generation_prompt,
            stop_tokens=self._stop_tokens,
        )

    def _tokenized(self, text: str, spans: list[Span]) -> Rendered:
        input_ids, starts = self._tokenize(text)
        return Rendered(text, input_ids, [_token_span(starts, span) for span in spans])

    def _tokenize(self, text: str) -> tuple[list[int], list[int]]:
        """The tokens of `text`, and the character at which each one starts."""
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        starts, previous_end = [], 0
        for start, end in encoded["offset_mapping"]:
            # Byte-level tokenizers may trim a token's leading spaces from its offsets: they are
            # part of it all the same, so it starts where the one before it ended. Pieces of one
            # character all have that character's offsets.
            starts.append(min(start, previous_end))
            previous_end = max(previous_end, end)
        return list(encoded["input_ids"]), starts


def _learned(
    template: ChatTemplate, conversation: Conversation, num_messages: int, loss_on: str
) -> list[int]:
    """The turns of the history that are learned, as indices of the template's messages."""
    if loss_on == "last_turn":
        return []
    assert loss_on == "all_turns", loss_on
    messages = enumerate(conversation.messages[:num_messages], start=template.num_added)
    return [i for i, m in messages if m.role == "assistant" and m.learn]


def _placeholder(added: tuple[Message, ...], said: str) -> Message:
    """An answer that `added` may follow: a call for each tool result in it."""
    results = [message for message in added if message.role == "tool"]
    name = re.sub(r"\W", "_", said)
    calls = tuple(ToolCall(result.tool_call_id, name, {}) for result in results)
    return Message("assistant", "" if calls else said, tool_calls=calls)


def _token_span(starts: list[int], span: Span) -> Span:
    """The tokens that start inside the characters `span`: one that straddles its start is given."""
    first, last = bisect_left(starts, span[0]), bisect_left(starts, span[1])
    if first == last:
        raise RenderError("an assistant turn without a token")
    return first, last
