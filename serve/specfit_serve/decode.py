"""The decode loop: draft, verify, emit, over slots that are refilled as answers end."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter

import torch
from jaxtyping import Float
from torch import Tensor

from specfit_serve.arrivals import Arrivals, Incoming, Request
from specfit_serve.emitted import Emitted, FinishReason
from specfit_serve.protocols import DecodeTarget, Draft, DraftLength, GradedProposer, Proposer
from specfit_serve.repetition import TokenClass
from specfit_serve.sequences import Decoded, DecodeSettings, InFlight
from specfit_serve.stats import Round
from specfit_serve.verify import (
    Verification,
    clip,
    target_distribution,
    verify_greedy,
    verify_sampled,
)

__all__ = ["DecodeSettings", "Decoded", "FinishReason", "Request", "decode"]


def decode(
    target: DecodeTarget,
    proposer: Proposer,
    requests: Sequence[Request] | Arrivals,
    settings: DecodeSettings,
    *,
    draft_length: DraftLength | None = None,
    token_classes: Sequence[TokenClass] | None = None,
    on_progress: Callable[[int], None] = lambda _: None,
    on_emitted: Callable[[list[Emitted]], None] | None = None,
) -> Iterator[Decoded]:
    """Answers `requests`, each as soon as it is finished.

    `draft_length` chooses the number of draft tokens each round, at most `num_draft_tokens`;
    without it there are always as many.
    With `token_classes` (one per token of the vocabulary) a repetition guard watches every answer.
    `on_progress` is called after every pass with the number of tokens that it is further: those of
    a prompt, which take their time too, and those emitted; each counts once.
    `on_emitted` is told, after every pass that emits, what each answer has got.

    `Arrivals` are looked at between passes: who has come waits for a free slot, then for its
    prefill, and joins the others in their next round. `Revocable` ones may give requests up.

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
    return _decode(
        target, proposer, incoming, settings, draft_length, token_classes, on_progress, on_emitted
    )


def _decode(
    target: DecodeTarget,
    proposer: Proposer,
    incoming: Incoming,
    settings: DecodeSettings,
    draft_length: DraftLength | None,
    token_classes: Sequence[TokenClass] | None,
    on_progress: Callable[[int], None],
    on_emitted: Callable[[list[Emitted]], None] | None,
) -> Iterator[Decoded]:
    # Sequences are those put back. They come first, and find no room again before an answer has
    # ended, since the others only grow; nor does anyone behind them.
    waiting: deque[Request | InFlight] = deque()
    active: list[InFlight] = []  # in slots 0..n-1
    try:
        while True:
            slot = 0
            while slot < settings.batch_size:
                if slot < len(active):
                    held = active[slot]
                    if held.finish_reason is None and not incoming.is_revoked(held.request):
                        slot += 1
                        continue
                    # Its id is free, should the answer's reader ask again at once.
                    incoming.ended(held.request)
                    if held.finish_reason is not None:
                        yield held.decoded(slot)
                    target.release(slot)
                waiting.extend(incoming.take())
                _drop_revoked(incoming, waiting)
                if waiting and _has_room(target, slot, waiting[0]):
                    entering = waiting.popleft()
                    if isinstance(entering, Request):
                        entering = InFlight.of(entering, target, settings, token_classes)
                    active[slot : slot + 1] = [entering]
                    on_progress(_prefill(target, proposer, entering, slot, on_emitted))
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
            on_progress(_round(target, proposer, active, settings, draft_length, on_emitted))
    finally:
        incoming.close()
        for slot in range(len(active)):
            target.release(slot)


@torch.no_grad()
def _prefill(
    target: DecodeTarget,
    proposer: Proposer,
    sequence: InFlight,
    slot: int,
    on_emitted: Callable[[list[Emitted]], None] | None,
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
        first = _verify(output.logits, nothing, [sequence], draws)
        sequence.emit(first.own_tokens.tolist())
    proposer.start(slot, sequence.tokens, None if output.features is None else output.features[0])
    ended = perf_counter()
    sequence.prefill_seconds += ended - began
    if was_put_back:
        return 0
    sequence.first_token_at = sequence.finished_at = ended
    if on_emitted is not None:
        on_emitted([sequence.emitted(1, None, output.logits[0])])
    return len(sequence.tokens)


@torch.no_grad()
def _round(
    target: DecodeTarget,
    proposer: Proposer,
    active: list[InFlight],
    settings: DecodeSettings,
    draft_length: DraftLength | None,
    on_emitted: Callable[[list[Emitted]], None] | None,
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
    verification = _verify(output.logits, draft, active, uniforms[:, most:])
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

    counts = []
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
        counts.append(count)
    if on_emitted is not None:
        rows = zip(active, counts, output.logits, strict=True)
        on_emitted([s.emitted(count, s.rounds[-1], logits) for s, count, logits in rows])
    return sum(counts)


def _chosen_length(
    draft_length: DraftLength, proposer: Proposer, active: list[InFlight], limit: int
) -> int:
    grades: Sequence[int] = [0] * len(active)
    if isinstance(proposer, GradedProposer):
        grades = proposer.grades([s.tokens for s in active], limit)
    return draft_length.choose([s.request.id for s in active], grades, limit)


def _verify(
    logits: Float[Tensor, "rows seq vocab"],
    draft: Draft,
    sequences: Sequence[InFlight],
    uniforms: Float[Tensor, "rows draws"],
) -> Verification:
    if all(s.request.temperature == 0 for s in sequences):
        return verify_greedy(logits, draft)
    temperatures = torch.tensor([s.request.temperature for s in sequences], device=logits.device)
    top_ps = [s.top_p for s in sequences]
    # A number where it is one: that of all, or none is cut off.
    top_p = top_ps[0] if len(set(top_ps)) == 1 else torch.tensor(top_ps, device=logits.device)
    target_probs = target_distribution(logits, temperatures, top_p)
    return verify_sampled(target_probs, draft, uniforms[:, : logits.shape[1]].to(logits.device))


def _drop_revoked(incoming: Incoming, waiting: deque[Request | InFlight]) -> None:
    """Takes out who is next and not wanted any more; those behind have their turn."""
    while waiting:
        request = waiting[0] if isinstance(waiting[0], Request) else waiting[0].request
        if not incoming.is_revoked(request):
            return
        incoming.ended(request)
        waiting.popleft()


def _has_room(target: DecodeTarget, slot: int, entering: Request | InFlight) -> bool:
    """Whether its tokens and the next one have columns in `slot`."""
    tokens = entering.prompt if isinstance(entering, Request) else entering.tokens
    return target.reserve(slot, len(tokens) + 1)


def _crowded_out(target: DecodeTarget, active: list[InFlight]) -> list[InFlight]:
    """Takes out the last sequences until the others have columns for a round without a draft."""
    taken: list[InFlight] = []
    slot = 0
    while slot < len(active):
        if target.reserve(slot, len(active[slot].tokens)):
            slot += 1
        else:
            taken.append(active.pop())
            target.release(len(active))
    assert active, "alone, a sequence has room"
    return taken


def _num_fitting(target: DecodeTarget, active: list[InFlight], limit: int) -> int:
    """How many draft tokens, at most `limit`, all sequences have columns for."""
    for k in range(limit, 0, -1):
        if all(target.reserve(slot, len(s.tokens) + k) for slot, s in enumerate(active)):
            return k
    return 0


def _fill_hole(target: DecodeTarget, proposer: Proposer, active: list[InFlight], slot: int) -> None:
    """Takes the finished sequence out of `slot` and puts the last one there."""
    last = active.pop()
    if slot < len(active):
        target.move(len(active), slot)
        proposer.move(len(active), slot)
        active[slot] = last
