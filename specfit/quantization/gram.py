"""How the errors of two units add up: the Gram matrix of what each does to the logits.

Quantizing unit i alone moves a token's logits by δ_i. With p the target's probabilities,
g_i = √p ⊙ (δ_i - p·δ_i) and G_ij = E⟨g_i, g_j⟩ over tokens. As long as a set moves the logits by
the sum of its units' δ, and by little, its divergence from the target is

    KL(S) ≈ ½ xᵀGx nats a token,  x_i = 1 where unit i is in S.

rho_ij = G_ij / √(G_ii G_jj) is below 0 where two units cancel. It takes thousands of tokens to know
even its sign, so G is made twice, on halves of the text, and is trusted as far as they agree.
"""

import torch
from jaxtyping import Float
from torch import Tensor


class GramSum:
    """G over tokens that come in chunks; products in float32, sums over tokens in float64."""

    def __init__(self, num_units: int) -> None:
        self.num_tokens = 0
        self.sum = torch.zeros(num_units, num_units, dtype=torch.float64)

    def add(
        self,
        log_probs: Float[Tensor, "tokens vocab"],
        perturbations: Float[Tensor, "units tokens vocab"],
    ) -> Float[Tensor, " units"]:
        """Some tokens more: the target's log-probabilities and δ of every unit.

        Returns the sum over these tokens of each unit's KL alone, exactly and not to second order:
        log E[exp(δ - E δ)], expectations under p. Takes twice the memory of `perturbations` beside
        it; chunks are for the caller to cut.
        """
        probs = log_probs.float().exp()
        moved = perturbations.float()
        moved = moved - torch.einsum("tv,utv->ut", probs, moved)[..., None]
        # Through exp(x) - 1, since what is summed may be far below float32's step at 1.
        excess = torch.einsum("tv,utv->ut", probs, moved.expm1()).double()
        moved *= probs.sqrt()
        by_token = moved.transpose(0, 1)
        self.sum += (by_token @ by_token.mT).double().sum(0).cpu()
        self.num_tokens += log_probs.shape[0]
        return excess.log1p().sum(1).cpu()

    @property
    def mean(self) -> Float[Tensor, "units units"]:
        """G; nan before the first token."""
        return self.sum / self.num_tokens


def correlations(gram: Float[Tensor, "units units"]) -> Float[Tensor, "units units"]:
    """rho; 0 for a unit whose quantization changes nothing."""
    scale = gram.diagonal().clamp(min=0).rsqrt()
    scale = torch.where(scale.isfinite(), scale, 0.0)
    return gram * scale * scale[:, None]


def reliability(
    half_a: Float[Tensor, "units units"], half_b: Float[Tensor, "units units"]
) -> float:
    """How much of the rho_ij, i < j, would be seen again on another such text; see `trust`."""
    above = torch.ones_like(half_a, dtype=torch.bool).triu(1)
    return trust(correlations(half_a)[above], correlations(half_b)[above])


def trust(half_a: Float[Tensor, " n"], half_b: Float[Tensor, " n"]) -> float:
    """How much of what two halves of a text say would be seen again on another such text: 0..1.

    Spearman and Brown's 2r / (1 + r), as the whole text is twice a half. r is the halves' agreement
    about zero and not about their mean, as zero is what values are shrunk to:
    r = Σ ab / √(Σ a² Σ b²). 0 where all are 0, or there are none.
    """
    a, b = half_a.double(), half_b.double()
    scale = float((a @ a * (b @ b)).sqrt())
    if scale == 0:
        return 0.0
    agreement = max(0.0, float(a @ b) / scale)
    return min(1.0, 2 * agreement / (1 + agreement))


def shrunk(
    half_a: Float[Tensor, "units units"], half_b: Float[Tensor, "units units"]
) -> Float[Tensor, "units units"]:
    """The mean of the halves, what is off the diagonal times `reliability`.

    It stays positive semidefinite: with r in 0..1 it is r times a mean of Gram matrices plus 1 - r
    times its diagonal, which is not negative.
    """
    gram = (half_a + half_b).double() / 2
    trusted = reliability(half_a, half_b)
    return trusted * gram + (1 - trusted) * gram.diagonal().diag()
