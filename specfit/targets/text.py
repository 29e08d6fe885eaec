"""A target's tokenizer as the server needs it: prompts to tokens, tokens to text."""

import copy
import json
import re
import threading
from collections.abc import Sequence
from typing import Any

from specfit_data.conversations import Conversation, Message, ToolCall
from specfit_data.template import ChatTemplate, RenderError

_SOME_TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


class TargetText:
    """See `specfit_serve.server.text.Text`."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        # Tokenizers that two threads use at once may raise; the decode loop has one of its own.
        self._decoding = copy.deepcopy(tokenizer)
        self._lock = threading.Lock()
        self._size = len(tokenizer)
        self._is_bytes = "ByteLevel" in str(tokenizer.backend_tokenizer.decoder)
        self._added = {i: str(t) for i, t in tokenizer.added_tokens_decoder.items()}

    @property
    def reads_tools(self) -> bool:
        """Whether the chat template writes the schemas of tools."""
        if not self._tokenizer.chat_template:
            return False
        asking = _conversation([{"role": "user", "content": "?"}], [_SOME_TOOL])
        return ChatTemplate(self._tokenizer, asking).reads_tools

    def encode(self, text: str) -> list[int]:
        """With what the tokenizer puts before a text."""
        with self._lock:
            return [int(i) for i in self._tokenizer(text).input_ids]

    def render(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]
    ) -> list[int]:
        """As training rendered them.

        Raises:
            ValueError: the template refuses them, or there is none.
        """
        if not self._tokenizer.chat_template:
            raise ValueError("the target's tokenizer has no chat template")
        with self._lock:
            template = ChatTemplate(self._tokenizer, _conversation(messages, tools))
            try:
                text = template.render(template.messages, add_generation_prompt=True)
            except RenderError as error:
                raise ValueError(str(error)) from error
            return [int(i) for i in self._tokenizer(text, add_special_tokens=False).input_ids]

    def decode(self, tokens: Sequence[int]) -> str:
        """Their text, without special tokens."""
        known = [i for i in tokens if i < self._size]  # logits may have rows that are no token
        text: str = self._decoding.decode(
            known, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def piece(self, token: int) -> tuple[str, bytes]:
        """How a token is written, and its bytes: those of a part of a character, too."""
        if token in self._added:
            return self._added[token], self._added[token].encode()
        if token >= self._size:
            return "", b""
        written: str = self._tokenizer.convert_ids_to_tokens(token)
        if self._is_bytes:
            data = bytes(_BYTE_OF[c] for c in written)
        elif found := re.fullmatch(r"<0x([0-9A-F]{2})>", written):
            data = bytes.fromhex(found[1])
        else:
            data = written.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode()
        return data.decode(errors="replace"), data


def _byte_of() -> dict[str, int]:
    """The byte that each character of a byte-level token stands for.

    Printable bytes stand for themselves, the others are moved past 255 in their order: GPT-2's.
    """
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    moved = [byte for byte in range(256) if byte not in printable]
    characters = {chr(byte): byte for byte in printable}
    return characters | {chr(256 + i): byte for i, byte in enumerate(moved)}


_BYTE_OF = _byte_of()


def _conversation(
    messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]
) -> Conversation:
    found = tuple(
        Message(
            role=message["role"],
            content=message.get("content") or "",
            tool_calls=tuple(_call(call) for call in message.get("tool_calls", ())),
            tool_call_id=message.get("tool_call_id"),
            reasoning=message.get("reasoning_content"),
        )
        for message in messages
    )
    return Conversation(found, tuple(tools), id="", source="", licence="")


def _call(call: dict[str, Any]) -> ToolCall:
    """Raises ValueError unless the arguments are a JSON object."""
    function = call["function"]
    try:
        arguments = json.loads(function["arguments"])
    except RecursionError:
        raise ValueError(f"arguments of {function['name']} are nested too deeply") from None
    if not isinstance(arguments, dict):
        raise ValueError(f"arguments of {function['name']} must be a JSON object")
    return ToolCall(call.get("id"), function["name"], arguments)
