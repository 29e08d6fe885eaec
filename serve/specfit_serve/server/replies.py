"""The JSON of answers: whole, and in the chunks of a stream."""

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from specfit_serve.emitted import TokenLogprobs
from specfit_serve.server.choices import Part
from specfit_serve.server.schema import ChatRequest, CommonRequest
from specfit_serve.server.text import Text

MIN_LOGPROB = -9999.0  # OpenAI's for "very unlikely": JSON has no infinity


@dataclass
class Reply:
    """Writes down the answers to one request; `prompts` has several for completions alone."""

    asked: CommonRequest
    model: str
    text: Text
    prompts: Sequence[Sequence[int]]
    id: str = field(init=False)
    created: int = field(init=False)

    def __post_init__(self) -> None:
        self.is_chat = isinstance(self.asked, ChatRequest)
        self.id = f"{'chatcmpl' if self.is_chat else 'cmpl'}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        # Of each choice: where its next token begins in its text, as far as pieces tell.
        self._offsets = [0] * (self.asked.n * len(self.prompts))
        self._num_tokens = 0

    # --- Whole ---

    def whole(self, parts: Sequence[Part]) -> dict[str, Any]:
        """The body, of all parts of all choices."""
        self._num_tokens = sum(len(part.tokens) for part in parts)
        choices = []
        for idx in range(len(self._offsets)):
            joined = _joined([part for part in parts if part.choice_idx == idx])
            content: dict[str, Any] = {"text": joined.text}
            if self.is_chat:
                content = {"message": {"role": "assistant", "content": joined.text}}
            choices.append(content | self._about(joined) | self._prompt_ids(idx))
        body = self._head("chat.completion" if self.is_chat else "text_completion")
        body |= {"choices": choices, "usage": self.usage()}
        return body | self._chat_prompt_ids()

    # --- In chunks ---

    def begin(self) -> list[dict[str, Any]]:
        """Chunks that come before any token."""
        if not self.is_chat:
            return []
        delta = {"role": "assistant", "content": ""}
        empty = {"logprobs": None, "finish_reason": None}
        return [
            self._chunk([{"index": i, "delta": delta} | empty]) | self._chat_prompt_ids()
            for i in range(len(self._offsets))
        ]

    def chunk(self, part: Part) -> dict[str, Any]:
        """What one part adds."""
        self._num_tokens += len(part.tokens)
        content: dict[str, Any] = {"text": part.text}
        if self.is_chat:
            content = {"delta": {"content": part.text} if part.text else {}}
        return self._chunk([content | self._about(part)])

    def end(self) -> list[dict[str, Any]]:
        """Chunks that come after all tokens."""
        if not self.asked.includes_usage:
            return []
        return [self._chunk([]) | {"usage": self.usage()}]

    def usage(self) -> dict[str, int]:
        """Tokens so far; a prompt counts once, however many answers it gets."""
        prompt = sum(map(len, self.prompts))
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self._num_tokens,
            "total_tokens": prompt + self._num_tokens,
        }

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        head = self._head("chat.completion.chunk" if self.is_chat else "text_completion")
        usage = {"usage": None} if self.asked.includes_usage else {}
        return head | {"choices": choices} | usage

    def _about(self, part: Part) -> dict[str, Any]:
        about: dict[str, Any] = {
            "index": part.choice_idx,
            "logprobs": self._logprobs(part),
            "finish_reason": part.finish_reason,
            "stop_reason": part.stop_reason,
        }
        if self.asked.return_token_ids:
            about["token_ids"] = part.tokens
        return about

    def _prompt_ids(self, choice_idx: int) -> dict[str, Any]:
        if self.is_chat or not self.asked.return_token_ids:
            return {}
        return {"prompt_token_ids": list(self.prompts[choice_idx // self.asked.n])}

    def _chat_prompt_ids(self) -> dict[str, Any]:
        if not self.is_chat or not self.asked.return_token_ids:
            return {}
        return {"prompt_token_ids": list(self.prompts[0])}

    # --- Logprobs ---

    def _logprobs(self, part: Part) -> dict[str, Any] | None:
        if part.logprobs is None:
            return None
        pairs = list(zip(part.tokens, part.logprobs, strict=True))
        if self.is_chat:
            return {"content": [self._chat_logprobs(*pair) for pair in pairs]}
        return self._completion_logprobs(part.choice_idx, pairs)

    def _chat_logprobs(self, token: int, logprobs: TokenLogprobs) -> dict[str, Any]:
        top = zip(logprobs.top_ids, logprobs.top_logprobs, strict=True)
        found = self._chat_logprob(token, logprobs.logprob)
        return found | {"top_logprobs": [self._chat_logprob(*pair) for pair in top]}

    def _chat_logprob(self, token: int, logprob: float) -> dict[str, Any]:
        text, data = self.text.piece(token)
        return {"token": text, "logprob": max(logprob, MIN_LOGPROB), "bytes": list(data)}

    def _completion_logprobs(
        self, choice_idx: int, pairs: Sequence[tuple[int, TokenLogprobs]]
    ) -> dict[str, Any]:
        texts = [self.text.piece(token)[0] for token, _ in pairs]
        offsets = []
        for text in texts:
            offsets.append(self._offsets[choice_idx])
            self._offsets[choice_idx] += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [max(p.logprob, MIN_LOGPROB) for _, p in pairs],
            "top_logprobs": [self._by_text(p) for _, p in pairs],
            "text_offset": offsets,
        }

    def _by_text(self, logprobs: TokenLogprobs) -> dict[str, float]:
        """Of tokens that are written alike, as parts of characters are, the likeliest."""
        found: dict[str, float] = {}
        for token, logprob in zip(logprobs.top_ids, logprobs.top_logprobs, strict=True):
            found.setdefault(self.text.piece(token)[0], max(logprob, MIN_LOGPROB))
        return found


def _joined(parts: Sequence[Part]) -> Part:
    """All parts of one choice, as one."""
    last = parts[-1]
    logprobs = None
    if last.logprobs is not None:
        logprobs = [found for part in parts for found in part.logprobs or []]
    return Part(
        choice_idx=last.choice_idx,
        text="".join(part.text for part in parts),
        tokens=[token for part in parts for token in part.tokens],
        logprobs=logprobs,
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
    )
