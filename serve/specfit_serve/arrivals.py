"""Requests, and how they reach the decode loop: all at once, or while it runs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from specfit_serve.protocols import DecodeTarget


@dataclass(frozen=True)
class Request:
    """A prompt to answer."""

    id: str  # random draws depend on it and on the settings' seed alone, or on `seed`
    prompt: Sequence[int]
    temperature: float  # 0: greedy
    max_new_tokens: int | None = None  # None: the settings', which are the most
    ignores_eos: bool = False  # as load generators want it: the answer's length is known
    arrived_at: float | None = None  # perf_counter() when it came, if that is known
    top_p: float | None = None  # None: the settings'
    seed: str | None = None  # random draws depend on it alone
    stop_ids: frozenset[int] = frozenset()  # tokens that end the answer, beside the target's
    num_logprobs: int | None = None  # of likeliest tokens, with those emitted; None: no logprobs


@runtime_checkable
class Arrivals(Protocol):
    """Requests that come while others are decoded.

    `decode` calls all of these from the thread that it runs in. Who fills it from another one
    (a server) makes it safe, and should look at a request with `check` before it is taken.
    """

    def take(self) -> Sequence[Request]:
        """Those that have come since the last call, in their order; does not wait."""

    def wait(self) -> bool:
        """Called when nothing is in flight: waits for a request; False: none comes any more."""

    def close(self) -> None:
        """Nobody takes any more: all is answered, or decoding was given up."""


@runtime_checkable
class Revocable(Arrivals, Protocol):
    """Arrivals whose requests may be given up."""

    def is_revoked(self, id: str) -> bool:
        """Whether nobody wants this answer any more; asked between passes.

        Where that is so the request leaves its slot, or the queue, at once, and its id is free. No
        `Decoded` comes of it.
        """


class Incoming:
    """Requests on their way into the loop, each checked when it comes.

    Raises:
        ValueError: a request cannot be answered, or its id is that of another in flight; of a
            sequence at once, else when it is taken. The message names the request.
    """

    def __init__(
        self, requests: Sequence[Request] | Arrivals, target: DecodeTarget, num_draft_tokens: int
    ) -> None:
        self._target = target
        self._num_draft_tokens = num_draft_tokens
        self._ids: set[str] = set()
        self._arrivals = requests if isinstance(requests, Arrivals) else None
        self._revocable = requests if isinstance(requests, Revocable) else None
        self._given = [] if isinstance(requests, Arrivals) else self._checked(requests)

    def take(self) -> Sequence[Request]:
        """What is new."""
        if self._arrivals is not None:
            return self._checked(self._arrivals.take())
        taken, self._given = self._given, []
        return taken

    def wait(self) -> bool:
        """Whether anything comes; returns when it has."""
        return self._arrivals is not None and self._arrivals.wait()

    def is_revoked(self, request: Request) -> bool:
        """Whether it is to leave without an answer."""
        return self._revocable is not None and self._revocable.is_revoked(request.id)

    def ended(self, request: Request) -> None:
        """Its id is free again."""
        self._ids.remove(request.id)

    def close(self) -> None:
        """Nothing is taken any more."""
        if self._arrivals is not None:
            self._arrivals.close()

    def _checked(self, requests: Sequence[Request]) -> list[Request]:
        for request in requests:
            if request.id in self._ids:
                raise ValueError(f"request {request.id}: ids must be distinct, got it twice")
            self._ids.add(request.id)
            check(request, self._target, self._num_draft_tokens)
        return list(requests)


def max_length(target: DecodeTarget, num_draft_tokens: int) -> int:
    """The most tokens of a sequence, its prompt included, when it is alone."""
    return min(target.max_length - num_draft_tokens, target.num_columns)


def check(request: Request, target: DecodeTarget, num_draft_tokens: int) -> None:
    """Refuses what cannot be answered.

    Raises:
        ValueError: it does not fit, or a value is out of its range; the message names the request.
    """
    name = f"request {request.id}"
    room = max_length(target, num_draft_tokens) - 1
    if not 1 <= len(request.prompt) <= room:
        raise ValueError(
            f"{name}: the prompt must have 1 to {room} tokens, got {len(request.prompt)} "
            f"(slots of {target.max_length} columns, {target.num_columns} in all, "
            f"{num_draft_tokens} draft tokens)"
        )
    if not all(0 <= token < target.vocab_size for token in request.prompt):
        raise ValueError(
            f"{name}: prompt tokens must lie in [0, {target.vocab_size}), "
            f"got {min(request.prompt)} to {max(request.prompt)}"
        )
    if request.temperature < 0:
        raise ValueError(f"{name}: temperature must be at least 0, got {request.temperature}")
    if request.top_p is not None and not 0 < request.top_p <= 1:
        raise ValueError(f"{name}: top_p must lie in (0, 1], got {request.top_p}")
    if request.num_logprobs is not None and request.num_logprobs < 0:
        raise ValueError(f"{name}: num_logprobs must be at least 0, got {request.num_logprobs}")
    if request.max_new_tokens is not None and request.max_new_tokens < 1:
        raise ValueError(f"{name}: max_new_tokens must be at least 1, got {request.max_new_tokens}")
