"""Whether what an engine makes of an exported head drafts as the head that was trained."""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specfit.draft_vocab import DraftVocab
from specfit.export.twins import Twin
from specfit.speculators.batches import TrainBatch
from specfit.speculators.eagle3 import Eagle3
from specfit.speculators.unroll import unroll

# Of logits in fp32 that are summed in another order, over the largest of them. Weights are the same
# numbers: a head is kept in bf16, and written in nothing smaller.
TOLERANCE = 2.0**-12


@torch.no_grad()
def compare(
    trained: tuple[Eagle3, DraftVocab],
    batch: TrainBatch,
    twin: Twin,
    aux: Float[Tensor, "seq aux hidden"],
    embeddings: Float[Tensor, "vocab hidden"],
    num_draft_tokens: int,
) -> dict[str, Any]:
    """Greedy drafts of both from every token of one document.

    Args:
        trained: the head, and what it can draft.
        batch: the document, with the states that the trained head reads.
        twin: an engine's reading of the exported head.
        aux: the states that the twin asks for.
        embeddings: the target's.
        num_draft_tokens: of each chain.

    Returns:
        `drafted_tokens_equal`, the share of drafted tokens that are the same;
        `max_logit_difference`, the largest between logits of one draft token, as far as chains
        drafted the same before; `max_logit`, the largest logit; and `is_equal`: draft ids
        mean the same, all tokens are the same, or so near to a tie that rounding decides, and the
        logits differ by rounding.
    """
    head, vocab = trained
    tokens, logits = _drafts(head, vocab, batch, embeddings, num_draft_tokens)
    twin = twin.to(batch.tokens.device)
    other_tokens, other_logits = twin.draft(batch.tokens, aux, embeddings, num_draft_tokens)
    equal = tokens == other_tokens
    largest = float(logits.abs().max())
    row = {
        "num_drafted_tokens": tokens.numel(),
        "drafted_tokens_equal": float(equal.float().mean()),
        "max_logit": largest,
    }
    if logits.shape != other_logits.shape:
        return row | {"max_logit_difference": float("inf"), "is_equal": False}
    # A chain that has drafted another token reads others from there on.
    same_before = torch.cat([torch.ones_like(equal[:1]), equal[:-1]]).cummin(0).values
    differences = (logits - other_logits).abs().amax(-1)[same_before]
    difference = float(differences.max())
    first_two = logits.topk(min(2, logits.shape[-1]), dim=-1).values
    margin = first_two[..., 0] - first_two[..., -1]
    decided_by_rounding = margin <= 2 * TOLERANCE * largest
    fine = bool((equal | ~same_before | decided_by_rounding).all())
    # Of ids that were not drafted here, too.
    fine &= torch.equal(twin.target_ids.cpu(), vocab.target_ids.cpu())
    is_equal = fine and difference <= TOLERANCE * largest
    return row | {"max_logit_difference": difference, "is_equal": is_equal}


def _drafts(
    head: Eagle3,
    vocab: DraftVocab,
    batch: TrainBatch,
    embeddings: Float[Tensor, "vocab hidden"],
    num_draft_tokens: int,
) -> tuple[Int[Tensor, "k entries"], Float[Tensor, "k entries draft"]]:
    device = batch.tokens.device
    steps = unroll(
        head.to(device),
        batch,
        torch.arange(len(batch.tokens) - 1, device=device),
        num_steps=num_draft_tokens,
        embeddings=embeddings,
        target_ids=vocab.target_ids.to(device),
        teacher_forced=False,
    )
    found = list(steps)
    return torch.stack([s.tokens for s in found]), torch.stack([s.logits for s in found])
