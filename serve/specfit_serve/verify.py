"""Verification: which drafted tokens the target keeps, and the token it adds itself."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from specfit_serve.protocols import Draft


@dataclass(frozen=True)
class Verification:
    """The outcome of one round: it emits num_kept tokens of the draft, then the own token."""

    num_kept: Int[Tensor, " rows"]  # 0..the row's draft length
    own_tokens: Int[Tensor, " rows"]


def clip(draft: Draft, max_lengths: Sequence[int], device: torch.device) -> Draft:
    """Cuts rows to `max_lengths` and columns that no row uses; what is padding becomes token 0."""
    limits = torch.tensor(max_lengths, device=device)
    lengths = torch.minimum(draft.lengths.to(device), limits)
    width = int(lengths.max())
    padding = torch.arange(width, device=device) >= lengths.unsqueeze(1)
    return Draft(
        tokens=draft.tokens[:, :width].to(device).masked_fill(padding, 0),
        lengths=lengths,
        probs=None if draft.probs is None else draft.probs[:, :width].to(device),
    )


def sample(
    probs: Float[Tensor, "rows vocab"], uniforms: Float[Tensor, " rows"]
) -> Int[Tensor, " rows"]:
    """Tokens by inversion of the cumulative distribution, one uniform of [0, 1) each.

    `probs` need not be normalized. A token of probability 0 is never returned.

    Raises:
        ValueError: the probabilities of a row have no positive, finite sum.
    """
    # float64: with a float32 sum the last token could be rounded out of reach, or past the end.
    cumulative = probs.double().cumsum(-1)
    totals = cumulative[:, -1:]
    valid = (totals > 0) & totals.isfinite()
    if not bool(valid.all()):
        raise ValueError(
            "logits must be finite, the target's and the head's, got probabilities with a sum of "
            f"{float(totals[~valid][0])}"
        )
    points = uniforms.double().unsqueeze(-1) * totals
    return torch.searchsorted(cumulative, points, right=True).squeeze(-1)


def target_distribution(
    logits: Float[Tensor, "rows seq vocab"],
    temperatures: Float[Tensor, " rows"],
    top_p: float | Float[Tensor, " rows"],
) -> Float[Tensor, "rows seq vocab"]:
    """What the target samples from, in float32: temperature first, then the nucleus.

    A row of temperature 0 has all its mass on the first of the largest logits. The nucleus is the
    smallest set of most probable tokens whose mass is at least `top_p`, in (0, 1].
    """
    greedy = temperatures == 0
    scale = torch.where(greedy, 1.0, temperatures).float()
    probs = torch.softmax(logits.float() / scale[:, None, None], dim=-1)
    if isinstance(top_p, Tensor) or top_p < 1:
        limits = torch.as_tensor(top_p, device=probs.device).expand(len(probs))
        # The others stay as they are, to the bit.
        cut = limits < 1
        ordered, order = probs[cut].sort(dim=-1, descending=True, stable=True)
        outside = ordered.cumsum(-1) - ordered >= limits[cut, None, None]
        outside[..., 0] = False
        nucleus = ordered.scatter(-1, order, ordered.masked_fill(outside, 0.0))
        probs[cut] = nucleus / nucleus.sum(-1, keepdim=True)
    if greedy.any():
        best = logits[greedy].argmax(-1, keepdim=True)
        probs[greedy] = torch.zeros_like(probs[greedy]).scatter(-1, best, 1.0)
    return probs


def verify_greedy(logits: Float[Tensor, "rows seq vocab"], draft: Draft) -> Verification:
    """Keeps the drafted tokens that the target alone would have chosen, up to the first other.

    `logits` are of the own token and the draft that went in: seq = k + 1. The output is the
    target's greedy output, token for token, whatever was drafted.
    """
    choices = logits.argmax(-1)
    num_kept = _num_leading(draft.tokens == choices[:, :-1], draft.lengths)
    return Verification(num_kept, choices.gather(1, num_kept.unsqueeze(1)).squeeze(1))


def verify_sampled(
    target_probs: Float[Tensor, "rows seq vocab"], draft: Draft, uniforms: Float[Tensor, "rows seq"]
) -> Verification:
    """Keeps a prefix of the draft, so that what is emitted is distributed as the target's samples.

    Draft token t at i is kept with probability min(1, target_probs[i, t] / draft_probs[i, t]). The
    first that is not kept gives way to a sample of max(0, target - draft), normalized; when all are
    kept, the last row of `target_probs` gives one more. seq = k + 1. The first of a row's uniforms
    chooses the own token, the others decide on the draft.

    Source: Leviathan et al. 2023, arXiv:2211.17192. Its p is our target, its q our draft.
    """
    drafted = draft.tokens.unsqueeze(-1)
    target = target_probs[:, :-1].gather(-1, drafted).squeeze(-1)
    # u < target / draft, without the division. A point mass has draft = 1.
    limits = uniforms[:, 1:]
    if draft.probs is not None:
        limits = limits * draft.probs.gather(-1, drafted).squeeze(-1)
    num_kept = _num_leading(limits < target, draft.lengths)

    rows = torch.arange(len(num_kept), device=num_kept.device)
    own = target_probs[rows, num_kept]
    rejected = (num_kept < draft.lengths).nonzero().squeeze(-1)
    if len(rejected) > 0:
        at = num_kept[rejected]
        if draft.probs is None:
            residual = own[rejected].scatter(-1, drafted[rejected, at], 0.0)
        else:
            residual = (own[rejected] - draft.probs[rejected, at]).clamp(min=0)
        # Where rounding leaves no residual, target and draft are equal and either will do.
        own[rejected] = torch.where(residual.sum(-1, keepdim=True) > 0, residual, own[rejected])
    return Verification(num_kept, sample(own, uniforms[:, 0]))


def _num_leading(
    kept: Bool[Tensor, "rows k"], lengths: Int[Tensor, " rows"]
) -> Int[Tensor, " rows"]:
    inside = torch.arange(kept.shape[1], device=kept.device) < lengths.unsqueeze(1)
    return (kept & inside).long().cumprod(1).sum(1)
