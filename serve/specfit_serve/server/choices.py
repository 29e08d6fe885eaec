"""One answer on its way to a client: what the loop emits becomes parts of text."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from specfit_serve.arrivals import Request
from specfit_serve.emitted import Emitted, TokenLogprobs
from specfit_serve.server.errors import ApiError
from specfit_serve.server.text import Detokenizer, StopStrings
from specfit_serve.stats import Round

Finish = Literal["stop", "length"]


@dataclass(frozen=True)
class Part:
    """What a client may see of an answer since the last part."""

    choice_idx: int
    text: str
    tokens: list[int]
    logprobs: list[TokenLogprobs] | None
    finish_reason: Finish | None = None
    stop_reason: str | int | None = None  # the stop string, the stop token, or `repetition`


Parts = asyncio.Queue[Part | ApiError]  # of all answers to one HTTP request


@dataclass
class Choice:
    """One answer. Lives in the decode loop's thread, apart from its `parts`."""

    idx: int
    request: Request
    parts: Parts
    decode: Callable[[Sequence[int]], str]
    stops: list[str]
    num_tokens: int = 0  # of the answer so far, that which ended it included
    num_prompt_tokens: int = field(init=False)
    last_at: float | None = None  # perf_counter() when the latest tokens came

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.request.prompt)
        self._text = Detokenizer(self.decode, self.request.prompt)
        self._stop = StopStrings(self.stops)
        self._tokens: list[int] = []  # that no part had yet
        self._logprobs: list[TokenLogprobs] = []

    def take(self, emitted: Emitted) -> tuple[Part | None, Round | None]:
        """What a client may see now, if anything, and the round as far as it counts.

        An answer that a stop string ends is looked at token by token, so that it ends alike
        whatever was drafted.
        """
        shown, finish = "", _finish(emitted)
        last = len(emitted.tokens) - 1
        for i, token in enumerate(emitted.tokens):
            self.num_tokens += 1
            self._tokens.append(token)
            if emitted.logprobs is not None:
                self._logprobs.append(emitted.logprobs[i])
            if emitted.finish_reason == "stop" and i == last:
                break  # the token that stops is no text
            shown += self._stop.push(self._text.push(token))
            if self._stop.found is not None:
                break
        if finish is not None and self._stop.found is None:
            shown += self._stop.push(self._text.flush())
            if self._stop.found is None:
                shown += self._stop.flush()
        if self._stop.found is not None:
            finish = "stop"
        part = self._part(shown, finish, emitted) if shown or finish else None
        return part, _counted(emitted.round, i + 1)

    def _part(self, shown: str, finish: Finish | None, emitted: Emitted) -> Part:
        tokens, self._tokens = self._tokens, []
        logprobs, self._logprobs = self._logprobs, []
        return Part(
            choice_idx=self.idx,
            text=shown,
            tokens=tokens,
            logprobs=None if emitted.logprobs is None else logprobs,
            finish_reason=finish,
            stop_reason=self._stop_reason(emitted),
        )

    def _stop_reason(self, emitted: Emitted) -> str | int | None:
        if self._stop.found is not None:
            return self._stop.found
        if emitted.finish_reason == "repetition":
            return "repetition"
        ended = emitted.finish_reason == "stop" and emitted.tokens[-1] in self.request.stop_ids
        return emitted.tokens[-1] if ended else None


def _finish(emitted: Emitted) -> Finish | None:
    match emitted.finish_reason:
        case None:
            return None
        case "length":
            return "length"
        case _:
            return "stop"


def _counted(round_: Round | None, num_tokens: int) -> Round | None:
    """The round up to its token `num_tokens`, which counts as the own one, as at an EOS."""
    if round_ is None or num_tokens == round_.num_kept + 1:
        return round_
    return Round(round_.start, num_tokens - 1, num_tokens - 1)
