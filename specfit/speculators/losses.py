"""Losses between a draft distribution q and the target's p, a value a position, in fp32.

p is over the target's whole vocabulary and is never renormalized to the draft vocabulary: tokens
outside it count as what the head cannot get right. With D the draft vocabulary:

kl  Σ_D p (log p - log q)   forward; its gradient weighs a position by the mass p has in D
tv  1 - Σ_D min(p, q)       one minus the probability that a sampled draft token is kept
lk  -log Σ_D min(p, q)      likelihood of acceptance (arXiv:2602.23881)
ce  -log q(argmax p)        0 where the most likely token is outside D
"""

import re

import torch
from jaxtyping import Float, Int
from torch import Tensor

LOSSES = ("kl", "tv", "lk", "ce")


def parse_loss(text: str) -> dict[str, float]:
    """`lk` or `0.5*kl+0.5*tv` as weights by loss.

    Raises:
        ValueError: a name is not a loss, or a factor is not a positive number.
    """
    weights: dict[str, float] = {}
    for term in text.replace(" ", "").split("+"):
        match = re.fullmatch(r"(?:(\d+\.?\d*|\.\d+)\*)?([a-z]+)", term)
        factor = float(match[1] or 1) if match else 0.0
        if match is None or match[2] not in LOSSES or match[2] in weights or factor == 0:
            raise ValueError(
                f"train.loss must be a sum of {', '.join(LOSSES)}, each once and with an optional "
                f"positive factor (0.5*kl+0.5*tv), got {text}"
            )
        weights[match[2]] = factor
    return weights


def draft_loss(
    weights: dict[str, float],
    draft_logits: Float[Tensor, "n draft"],
    target_log_probs: Float[Tensor, "n draft"],
    top_draft_ids: Int[Tensor, "n"],
) -> Float[Tensor, "n"]:
    """The weighted sum of losses at each position.

    Args:
        weights: as `parse_loss` gives them.
        draft_logits: of the head.
        target_log_probs: log p of the draft vocabulary's tokens, with the whole vocabulary's
            normalizer.
        top_draft_ids: draft id of the target's most likely token, -1 where it has none.
    """
    log_q = draft_logits.float().log_softmax(-1)
    total = torch.zeros(len(log_q), device=log_q.device)
    if "kl" in weights:
        p = target_log_probs.exp()
        total = total + weights["kl"] * (p * (target_log_probs - log_q)).sum(-1)
    if "tv" in weights or "lk" in weights:
        overlap = torch.minimum(target_log_probs, log_q).exp().sum(-1)
        total = total + weights.get("tv", 0) * (1 - overlap)
        # A position whose whole mass is outside D would be log 0.
        total = total - weights.get("lk", 0) * overlap.clamp(min=1e-6).log()
    if "ce" in weights:
        known = top_draft_ids >= 0
        picked = log_q.gather(-1, top_draft_ids.clamp(min=0)[:, None]).squeeze(-1)
        total = total - weights["ce"] * torch.where(known, picked, torch.zeros_like(picked))
    return total
