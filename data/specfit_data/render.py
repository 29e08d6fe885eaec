"""A conversation as the target reads it: its text, its tokens, and who speaks them."""

import re
from bisect import bisect_left
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerBase

from specfit_data.conversations import Conversation, TokenizedConversation
from specfit_data.template import ChatTemplate, RenderError
from specfit_data.turns import MarkedChat, Span

__all__ = ["RenderError", "Rendered", "Renderer"]


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
        self._special_tokens = re.compile("|".join(map(re.escape, longest_first)))

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
        learned = _learned(conversation, num_messages) if loss_on == "all_turns" else []
        return self._render(conversation, num_messages, learned, generation_prompt=True)

    def full(self, conversation: Conversation, loss_on: str) -> Rendered:
        """Everything up to and including the last assistant turn; arguments as for `prompt`.

        Raises:
            RenderError: as for `prompt`, or the assistant says nothing at all.
        """
        turns = [i for i, m in enumerate(conversation.messages) if m.role == "assistant"]
        if not turns:
            raise RenderError("no assistant turn")
        learned = _learned(conversation, turns[-1] + 1)
        if loss_on == "last_turn":
            learned = [i for i in learned if i == turns[-1]]
        return self._render(conversation, turns[-1] + 1, learned, generation_prompt=False)

    def _render(
        self,
        conversation: Conversation,
        num_messages: int,
        learned: list[int],
        *,
        generation_prompt: bool,
    ) -> Rendered:
        template = ChatTemplate(self._tokenizer, conversation)
        # Schemas may have become a system message in front.
        num_added = len(template.messages) - len(conversation.messages)
        chat = MarkedChat(template, num_messages + num_added, generation_prompt)
        turns = [i + num_added for i in learned]
        if template.marks_generation:
            blocks = chat.generation_spans()
            missing = [i for i in turns if i not in blocks]
            if missing:
                raise RenderError(f"message {missing[0]}: no generation block holds it")
            spans = [span for i in turns for span in blocks[i]]
        else:
            spans = [chat.span_of(i, self._special_tokens) for i in turns]
        input_ids, starts = self._tokenize(chat.text)
        return Rendered(chat.text, input_ids, [_token_span(starts, span) for span in spans])

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


def _learned(conversation: Conversation, num_messages: int) -> list[int]:
    messages = conversation.messages[:num_messages]
    return [i for i, m in enumerate(messages) if m.role == "assistant" and m.learn]


def _token_span(starts: list[int], span: Span) -> Span:
    """The tokens that start inside the characters `span`: one that straddles its start is given."""
    first, last = bisect_left(starts, span[0]), bisect_left(starts, span[1])
    if first == last:
        raise RenderError("an assistant turn without a token")
    return first, last
