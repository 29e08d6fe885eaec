"""Acceptance length by replay: exact draft-and-verify rounds, without running the target.

The answer of a recorded conversation is what the target said, so what it would verify is known.
All rounds that could start anywhere in it are drafted at once, as chains; then the rounds that
decoding would really have are walked. For greedy answers this is the acceptance length of greedy
decoding; for sampled ones, of greedy drafts verified against samples.
"""

from collections.abc import Iterable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specfit.speculators.batches import TrainBatch, chain_starts, pack
from specfit.speculators.eagle3 import Eagle3
from specfit.speculators.unroll import unroll
from specfit.targets.target import HiddenStates
from specfit_serve.stats import DecodeStats, Round


@torch.no_grad()
def replay(
    head: Eagle3,
    documents: Iterable[HiddenStates],
    *,
    num_draft_tokens: int,
    embeddings: Float[Tensor, "vocab hidden"],
    target_ids: Int[Tensor, "draft"],
) -> list[DecodeStats]:
    """The stats of each document's last answer."""
    found = []
    for document in documents:
        batch = pack([document]).to(embeddings.device)
        starts = chain_starts(batch)
        steps = unroll(
            head,
            batch,
            starts,
            num_steps=num_draft_tokens,
            embeddings=embeddings,
            target_ids=target_ids,
            teacher_forced=False,
        )
        kept = _num_kept(batch, starts, [step.tokens for step in steps])
        rounds = _walk(kept, document.loss_mask, num_draft_tokens)
        found.append(DecodeStats.from_rounds(rounds, num_draft_tokens))
    return found


def _num_kept(
    batch: TrainBatch, starts: Int[Tensor, "chains"], drafted: list[Int[Tensor, "chains"]]
) -> dict[int, int]:
    """By chain start: how many of the drafted tokens the document goes on with."""
    n = len(batch.tokens)
    right = torch.ones_like(starts, dtype=torch.bool)
    kept = torch.zeros_like(starts)
    for s, tokens in enumerate(drafted):
        place = starts + s + 2
        right = right & (place < n) & (tokens == batch.tokens[place.clamp(max=n - 1)])
        kept += right
    return dict(zip(starts.tolist(), kept.tolist(), strict=True))


def _walk(kept: dict[int, int], loss_mask: Tensor, num_draft_tokens: int) -> list[Round]:
    """The rounds of the last answer; its first token comes from the prefill."""
    learned = loss_mask.nonzero().flatten().tolist()
    end = learned[-1] + 1
    first = end - 1
    while first > 0 and loss_mask[first - 1]:
        first -= 1
    rounds = []
    own = first  # the newest token
    while own + 1 < end:
        room = end - own - 2  # drafts beyond the answer's last token but one are not counted
        taken = min(kept[own - 1], room)
        rounds.append(Round(own + 1 - first, min(num_draft_tokens, room), taken))
        own += taken + 1
    return rounds
