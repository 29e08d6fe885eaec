"""Whether an exported head still is the head that was trained."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from specfit.draft_vocab import DraftVocab
from specfit.speculators.batches import TrainBatch, chain_starts
from specfit.speculators.eagle3 import Eagle3
from specfit.speculators.unroll import unroll


@torch.no_grad()
def compare(
    trained: tuple[Eagle3, DraftVocab],
    exported: tuple[Eagle3, DraftVocab],
    batch: TrainBatch,
    embeddings: Float[Tensor, "vocab hidden"],
    num_draft_tokens: int,
) -> dict[str, Any]:
    """Drafts of both from every chain start of `batch`.

    Returns:
        `drafted_tokens_equal`, the share of drafted tokens that are the same, and
        `max_logit_difference`, the largest between logits of one draft token.
    """
    starts = chain_starts(batch)

    def drafts(head: Eagle3, vocab: DraftVocab) -> tuple[Tensor, Tensor]:
        steps = unroll(
            head.to(batch.tokens.device),
            batch,
            starts,
            num_steps=num_draft_tokens,
            embeddings=embeddings,
            target_ids=vocab.target_ids.to(batch.tokens.device),
            teacher_forced=False,
        )
        found = list(steps)
        return torch.stack([s.tokens for s in found]), torch.stack([s.logits for s in found])

    tokens, logits = drafts(*trained)
    other_tokens, other_logits = drafts(*exported)
    return {
        "num_drafted_tokens": tokens.numel(),
        "drafted_tokens_equal": float((tokens == other_tokens).float().mean()),
        "max_logit_difference": float((logits - other_logits).abs().max()),
    }
