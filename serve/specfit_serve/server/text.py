"""Tokens to text as they come, and the strings at which an answer stops."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
CONTEXT_TOKENS = 6  # of the prompt, that the first tokens of an answer are read after
MAX_WINDOW = 16  # tokens that are decoded again with each new one, while nothing is held back


@runtime_checkable
class Text(Protocol):
    """The target's tokenizer, as a server needs it.

    `decode` is called from the decode loop's thread, the others from any but that.
    """

    @property
    def reads_tools(self) -> bool:
        """Whether the chat template knows what to do with tools."""

    def encode(self, text: str) -> list[int]:
        """A prompt that is no conversation."""

    def render(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]
    ) -> list[int]:
        """A conversation, up to where the assistant speaks.

        Raises:
            ValueError: the chat template refuses it, or there is none.
        """

    def decode(self, tokens: Sequence[int]) -> str:
        """Their text; special tokens have none, and U+FFFD stands for bytes that are no UTF-8."""

    def piece(self, token: int) -> tuple[str, bytes]:
        """One token as it is written, special ones too, and its bytes."""


class Detokenizer:
    """Text of tokens that come one by one: all that will not change whatever comes next.

    A character whose bytes are spread over tokens is held back until it is whole. What has been
    given out, and what `flush` adds, is the text of all tokens together; but where bytes that are
    no UTF-8 follow a whole character, a decoder of byte tokens may count U+FFFD otherwise.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], context: Sequence[int]) -> None:
        """`context` is the prompt: whether a word begins with a space may depend on its end."""
        self._decode = decode
        self._window = list(context[-CONTEXT_TOKENS:])
        self._shown = decode(self._window)  # of the window's text
        if self._shown.endswith(REPLACEMENT):
            self._window, self._shown = [], ""
        self._whole = len(self._window)  # tokens of the window that `_shown` is the text of

    def push(self, token: int) -> str:
        """What the next token adds."""
        self._window.append(token)
        text = self._decode(self._window)
        if text.endswith(REPLACEMENT) or len(text) < len(self._shown):
            return ""
        added = text[len(self._shown) :]
        self._shown = text
        if len(self._window) > MAX_WINDOW:
            # A cut where a text was whole lies between characters.
            del self._window[: self._whole]
            self._shown = self._decode(self._window)
        self._whole = len(self._window)
        return added

    def flush(self) -> str:
        """What was held back: no more tokens come."""
        return self._decode(self._window)[len(self._shown) :]


class StopStrings:
    """Lets text through up to the first of some strings, and no part of one before it is sure."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self.found: str | None = None

    def push(self, text: str) -> str:
        """What of the text so far may be shown now; after a stop was `found`, nothing more."""
        self._held += text
        found = [(at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            end, self.found = min(found)
        else:
            end = len(self._held) - max(map(self._num_begun, self._stops), default=0)
        shown, self._held = self._held[:end], self._held[end:]
        return shown

    def flush(self) -> str:
        """What was held back: no more text comes."""
        return self._held

    def _num_begun(self, stop: str) -> int:
        """How many characters at the end are the beginning of `stop`."""
        most = min(len(stop) - 1, len(self._held))
        return next((n for n in range(most, 0, -1) if self._held.endswith(stop[:n])), 0)
