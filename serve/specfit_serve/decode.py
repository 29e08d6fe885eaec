"""The decode loop: draft, verify, emit, over slots that are refilled as answers end."""

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from specfit_serve.arrivals import Arrivals, Incoming, Request, max_length
from specfit_serve.protocols import DecodeTarget, Draft, DraftLength, GradedProposer, Proposer
from specfit_serve.repetition import RepetitionGuard, TokenClass
from specfit_serve.stats import Round
from specfit_serve.verify import (
    Verification,
    clip,
    target_distribution,
    verify_greedy,
    verify_sampled,
)

__all__ = ["DecodeSettings", "Decoded", "FinishReason", "Request", "decode"]

FinishReason = Literal["stop", "length", "repetition"]


@dataclass(frozen=True)
class DecodeSettings:
    """How requests are decoded.

    As far as the target's logits depend on no other request, a greedy answer does not either; nor
    does a sampled one, unless the drafts do: by what they are made of, or where columns run short.
    """

    num_draft_tokens: int  # asked of the proposer each round; the most, if adaptive
    max_new_tokens: int
    batch_size: int  # sequences in flight at once
    top_p: float = 1.0
    seed: int = 0

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
    tokens: list[int]  # of the answer; the EOS that stopped it included
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


def decode(
    target: DecodeTarget,
    proposer: Proposer,
    requests: Sequence[Request] | Arrivals,
    settings: DecodeSettings,
    *,
    draft_length: DraftLength | None = None,
    token_classes: Sequence[TokenClass] | None = None,
    on_progress: Callable[[int], None] = lambda _: None,
) -> Iterator[Decoded]:
    """Answers `requests`, each as soon as it is finished.

    `draft_length` chooses the number of draft tokens each round, at most `num_draft_tokens`;
    without it there are always as many.
    With `token_classes` (one per token of the vocabulary) a repetition guard watches every answer.
    `on_progress` is called after every pass with the number of tokens that it is further: those of
    a prompt, which take their time too, and those emitted; each counts once.

    `Arrivals` are looked at between passes: who has come waits for a free slot, then for its
    prefill, and joins the others in their next round.

    Raises:
        ValueError: a prompt does not fit, or an id occurs twice; the message names the request. Of
            a sequence before anything runs, of arrivals when they are taken.

    Where the target's cache has no room for another prompt, it waits for an answer to end. Where it
    has none for all answers to grow, drafts are cut; at last the sequences of the highest slots are
    put back, and when an answer has ended they are prefilled again and go on. So no answer is cut
    short by others. Whoever stops asking for answers gives the columns of all back.
    """
    if settings.batch_size > target.num_slots:
        raise ValueError(
            f"batch_size must be at most the target's {target.num_slots} slots, "
            f"got {settings.batch_size}"
        )
    incoming = Incoming(requests, target, settings.num_draft_tokens)
    return _decode(target, proposer, incoming, settings, draft_length, token_classes, on_progress)


def _decode(
    target: DecodeTarget,
    proposer: Proposer,
    incoming: Incoming,
    settings: DecodeSettings,
    draft_length: DraftLength | None,
    token_classes: Sequence[TokenClass] | None,
    on_progress: Callable[[int], None],
) -> Iterator[Decoded]:
    # Sequences are those put back. They come first, and find no room again before an answer has
    # ended, since the others only grow; nor does anyone behind them.
    waiting: deque[Request | _Sequence] = deque()
    active: list[_Sequence] = []  # in slots 0..n-1
    try:
        while True:
            slot = 0
            while slot < settings.batch_size:
                if slot < len(active) and active[slot].finish_reason is None:
                    slot += 1
                    continue
                if slot < len(active):
                    # Its id is free, should the answer's reader ask again at once.
                    incoming.ended(active[slot].request)
                    yield active[slot].decoded(slot)
                    target.release(slot)
                waiting.extend(incoming.take())
                if waiting and _has_room(target, slot, waiting[0]):
                    entering = waiting.popleft()
                    if isinstance(entering, Request):
                        entering = _Sequence.of(entering, target, settings, token_classes)
                    active[slot : slot + 1] = [entering]
                    on_progress(_prefill(target, proposer, entering, slot, settings))
                elif slot < len(active):
                    _fill_hole(target, proposer, active, slot)
                else:
                    break
            if not active:
                assert not waiting, "alone, whatever waits has room"
                if incoming.wait():
                    continue
                return
            waiting.extendleft(_crowded_out(target, active))
            on_progress(_round(target, proposer, active, settings, draft_length))
    finally:
        incoming.close()
        for slot in range(len(active)):
            target.release(slot)


@dataclass
class _Sequence:
    """A request in flight."""

    request: Request
    tokens: list[int]  # prompt and answer
    max_length: int  # of `tokens`
    eos_ids: frozenset[int]
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
    ) -> "_Sequence":
        digest = hashlib.sha256(f"{settings.seed}/{request.id}".encode()).digest()
        most, room = settings.max_new_tokens, max_length(target, settings.num_draft_tokens)
        if request.max_new_tokens is not None:
            most = min(most, request.max_new_tokens)
        return cls(
            request=request,
            tokens=list(request.prompt),
            max_length=min(len(request.prompt) + most, room),
            eos_ids=frozenset() if request.ignores_eos else target.eos_ids,
            generator=torch.Generator().manual_seed(int.from_bytes(digest[:8], "little")),
            guard=None if token_classes is None else RepetitionGuard(token_classes),
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
            if token in self.eos_ids:
                self.finish_reason = "stop"
            elif self.guard is not None and (start := self.guard.push(token)) is not None:
                self.finish_reason, self.loop_start = "repetition", start
            elif len(self.tokens) == self.max_length:
                self.finish_reason = "length"
            if self.finish_reason is not None:
                break
        return count

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


@torch.no_grad()
def _prefill(
    target: DecodeTarget,
    proposer: Proposer,
    sequence: _Sequence,
    slot: int,
    settings: DecodeSettings,
) -> int:
    """Runs the prompt in `slot`; its last position gives the answer's first token.

    Of a sequence that was put back all but the newest token are run, and none is new.
    """
    began = perf_counter()
    was_put_back = len(sequence.tokens) > len(sequence.request.prompt)
    tokens = sequence.tokens[:-1] if was_put_back else sequence.tokens
    prompt = torch.tensor([tokens], device=target.device)
    start = torch.zeros(1, dtype=torch.long, device=target.device)
    output = target.forward(prompt, start, slot, last_only=True)
    if not was_put_back:
        nothing, draws = Draft(prompt[:, :0], start), sequence.uniforms(1)[None]
        first = _verify(output.logits, nothing, [sequence], draws, settings)
        sequence.emit(first.own_tokens.tolist())
    proposer.start(slot, sequence.tokens, None if output.features is None else output.features[0])
    ended = perf_counter()
    sequence.prefill_seconds += ended - began
    if not was_put_back:
        sequence.first_token_at = sequence.finished_at = ended
    return 0 if was_put_back else len(sequence.tokens)


@torch.no_grad()
def _round(
    target: DecodeTarget,
    proposer: Proposer,
    active: list[_Sequence],
    settings: DecodeSettings,
    draft_length: DraftLength | None,
) -> int:
    """Drafts for all sequences, verifies in one pass and emits; returns the number of tokens."""
    most = settings.num_draft_tokens
    uniforms = torch.stack([s.uniforms(2 * most + 1) for s in active]).to(target.device)
    temperatures = torch.tensor([s.request.temperature for s in active], device=target.device)
    rooms = [s.max_length - len(s.tokens) - 1 for s in active]
    fitting = _num_fitting(target, active, min(most, max(rooms)))
    rooms = [min(room, fitting) for room in rooms]
    # Both stages end by reading their result, so that the clock is right on a GPU as well.
    began = perf_counter()
    k = most
    if draft_length is not None:
        k = _chosen_length(draft_length, proposer, active, fitting)
    draft = proposer.propose([s.tokens for s in active], k, temperatures, uniforms[:, :k])
    draft = clip(draft, rooms, target.device)
    drafted = perf_counter()
    newest = torch.tensor([s.tokens[-1:] for s in active], device=target.device)
    starts = torch.tensor([len(s.tokens) - 1 for s in active], device=target.device)
    output = target.forward(torch.cat([newest, draft.tokens], dim=1), starts, first_slot=0)
    verification = _verify(output.logits, draft, active, uniforms[:, most:], settings)
    num_kept, own_tokens = verification.num_kept.tolist(), verification.own_tokens.tolist()
    verified = perf_counter()
    proposer.observe(output.features, verification.num_kept)
    observed = perf_counter()
    lengths, tokens = draft.lengths.tolist(), draft.tokens.tolist()
    if draft_length is not None:
        draft_length.record(
            num_asked=[min(k, room) for room in rooms],
            num_drafted=lengths,
            num_kept=num_kept,
            draft_seconds=drafted - began + observed - verified,
            verify_seconds=verified - drafted,
        )

    num_emitted = 0
    for s, length, row, kept, own in zip(
        active, lengths, tokens, num_kept, own_tokens, strict=True
    ):
        start = len(s.tokens) - len(s.request.prompt)
        count = s.emit([*row[:kept], own])
        # An answer that ended inside the draft has its last token counted as the own one.
        s.rounds.append(Round(start, length if count == kept + 1 else count - 1, count - 1))
        s.target_seconds += (verified - drafted) / len(active)
        s.draft_seconds += (drafted - began + observed - verified) / len(active)
        s.finished_at = observed
        num_emitted += count
    return num_emitted


def _chosen_length(
    draft_length: DraftLength, proposer: Proposer, active: list[_Sequence], limit: int
) -> int:
    grades: Sequence[int] = [0] * len(active)
    if isinstance(proposer, GradedProposer):
        grades = proposer.grades([s.tokens for s in active], limit)
    return draft_length.choose([s.request.id for s in active], grades, limit)


def _verify(
    logits: Float[Tensor, "rows seq vocab"],
    draft: Draft,
    sequences: Sequence[_Sequence],
    uniforms: Float[Tensor, "rows draws"],
    settings: DecodeSettings,
) -> Verification:
    if all(s.request.temperature == 0 for s in sequences):
        return verify_greedy(logits, draft)
    temperatures = torch.tensor([s.request.temperature for s in sequences], device=logits.device)
    target_probs = target_distribution(logits, temperatures, settings.top_p)
    return verify_sampled(target_probs, draft, uniforms[:, : logits.shape[1]].to(logits.device))


def _has_room(target: DecodeTarget, slot: int, entering: Request | _Sequence) -> bool:
    """Whether its tokens and the next one have columns in `slot`."""
    tokens = entering.prompt if isinstance(entering, Request) else entering.tokens
    return target.reserve(slot, len(tokens) + 1)


def _crowded_out(target: DecodeTarget, active: list[_Sequence]) -> list[_Sequence]:
    """Takes out the last sequences until the others have columns for a round without a draft."""
    taken: list[_Sequence] = []
    slot = 0
    while slot < len(active):
        if target.reserve(slot, len(active[slot].tokens)):
            slot += 1
        else:
            taken.append(active.pop())
            target.release(len(active))
    assert active, "alone, a sequence has room"
    return taken


def _num_fitting(target: DecodeTarget, active: list[_Sequence], limit: int) -> int:
    """How many draft tokens, at most `limit`, all sequences have columns for."""
    for k in range(limit, 0, -1):
        if all(target.reserve(slot, len(s.tokens) + k) for slot, s in enumerate(active)):
            return k
    return 0


def _fill_hole(
    target: DecodeTarget, proposer: Proposer, active: list[_Sequence], slot: int
) -> None:
    """Takes the finished sequence out of `slot` and puts the last one there."""
    last = active.pop()
    if slot < len(active):
        target.move(len(active), slot)
        proposer.move(len(active), slot)
        active[slot] = last
