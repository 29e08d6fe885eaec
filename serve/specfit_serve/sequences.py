"""A request on its way through the decode loop: settings, what is in flight, what comes out."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from specfit_serve.arrivals import Request, max_length
from specfit_serve.emitted import Emitted, FinishReason, logprobs_of
from specfit_serve.protocols import DecodeTarget
from specfit_serve.repetition import RepetitionGuard, TokenClass
from specfit_serve.stats import Round


@dataclass(frozen=True)
class DecodeSettings:
    """How requests are decoded.

    As far as the target's logits depend on no other request, a greedy answer does not either; nor
    does a sampled one, unless the drafts do: by what they are made of, or where columns run short.
    """

    num_draft_tokens: int  # asked of the proposer each round; the most, if adaptive
    max_new_tokens: int
    batch_size: int  # sequences in flight at once
    top_p: float = 1.0  # of requests without one of their own
    seed: int = 0  # likewise

    def __post_init__(self) -> None:
        for name, least in (("num_draft_tokens", 0), ("max_new_tokens", 1), ("batch_size", 1)):
            value = getattr(self, name)
            if value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must lie in (0, 1], got {self.top_p}")


@dataclass(frozen=True)
class Decoded:
    """An answer, and how it came about."""

    id: str
    slot: int  # that it was decoded in; the next answer that is asked for may be there, too
    tokens: list[int]  # of the answer; the EOS or stop token that ended it included
    finish_reason: FinishReason  # length: max_new_tokens, its slot, or the whole cache, is used up
    rounds: list[Round]  # the first token comes from the prefill and belongs to none
    loop_start: int | None  # with `repetition`: the index in `tokens` at which the loop starts
    # A round's time is shared out equally among the sequences in it.
    prefill_seconds: float  # of the prompt: the target's, and what the proposer makes of it
    target_seconds: float  # of the rounds: passes and their verification
    draft_seconds: float  # of the rounds
    # By perf_counter(); what is emitted has been there since then, though it is given out later.
    arrived_at: float | None  # the request's
    first_token_at: float
    finished_at: float


@dataclass
class InFlight:
    """A request in flight."""

    request: Request
    tokens: list[int]  # prompt and answer
    max_length: int  # of `tokens`
    stop_ids: frozenset[int]  # tokens that end it
    top_p: float
    generator: torch.Generator
    guard: RepetitionGuard | None
    rounds: list[Round] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    loop_start: int | None = None
    prefill_seconds: float = 0.0
    target_seconds: float = 0.0
    draft_seconds: float = 0.0
    first_token_at: float = 0.0
    finished_at: float = 0.0  # when the latest token came

    @classmethod
    def of(
        cls,
        request: Request,
        target: DecodeTarget,
        settings: DecodeSettings,
        token_classes: Sequence[TokenClass] | None,
    ) -> "InFlight":
        seed = request.seed if request.seed is not None else f"{settings.seed}/{request.id}"
        digest = hashlib.sha256(seed.encode()).digest()
        most, room = settings.max_new_tokens, max_length(target, settings.num_draft_tokens)
        if request.max_new_tokens is not None:
            most = min(most, request.max_new_tokens)
        return cls(
            request=request,
            tokens=list(request.prompt),
            max_length=min(len(request.prompt) + most, room),
            stop_ids=request.stop_ids | (frozenset() if request.ignores_eos else target.eos_ids),
            top_p=settings.top_p if request.top_p is None else request.top_p,
            generator=torch.Generator().manual_seed(int.from_bytes(digest[:8], "little")),
            # Whoever ignores the EOS wants an answer of a known length.
            guard=None
            if token_classes is None or request.ignores_eos
            else RepetitionGuard(token_classes),
        )

    def uniforms(self, count: int) -> Float[Tensor, " count"]:
        """Draws of the request's own, always as many a round, whatever the other rows do."""
        return torch.rand(count, dtype=torch.float64, generator=self.generator)

    def emit(self, tokens: Iterable[int]) -> int:
        """Appends `tokens` up to the one that ends the answer; returns how many."""
        count = 0
        for token in tokens:
            self.tokens.append(token)
            count += 1
            if token in self.stop_ids:
                self.finish_reason = "stop"
            elif self.guard is not None and (start := self.guard.push(token)) is not None:
                self.finish_reason, self.loop_start = "repetition", start
            elif len(self.tokens) == self.max_length:
                self.finish_reason = "length"
            if self.finish_reason is not None:
                break
        return count

    def emitted(
        self, num_tokens: int, round_: Round | None, logits: Float[Tensor, "seq vocab"]
    ) -> Emitted:
        """What the last pass gave: the newest `num_tokens`, chosen by `logits`, a row each."""
        tokens = self.tokens[len(self.tokens) - num_tokens :]
        wanted = self.request.num_logprobs
        return Emitted(
            id=self.request.id,
            tokens=tokens,
            round=round_,
            logprobs=None if wanted is None else logprobs_of(logits, tokens, wanted),
            finish_reason=self.finish_reason,
        )

    def decoded(self, slot: int) -> Decoded:
        assert self.finish_reason is not None
        return Decoded(
            id=self.request.id,
            slot=slot,
            tokens=self.tokens[len(self.request.prompt) :],
            finish_reason=self.finish_reason,
            rounds=self.rounds,
            loop_start=self.loop_start,
            prefill_seconds=self.prefill_seconds,
            target_seconds=self.target_seconds,
            draft_seconds=self.draft_seconds,
            arrived_at=self.request.arrived_at,
            first_token_at=self.first_token_at,
            finished_at=self.finished_at,
        )
