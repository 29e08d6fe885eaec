"""What units cost among other quantized units, fitted to the measured KL of random sets.

What a unit costs alone is measured at the wrong place: errors saturate, so that among others it
costs less, and not all units lose the same share. Here sets of about the deployed density are
measured, and the values of the units alone are only what the fit leans to where it knows nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from specfit.quantization.gram import trust
from specfit.quantization.knapsack import bytes_of
from specfit.quantization.quadratic import random_set

SPREAD = 0.1  # sets hold the deployed share of bytes, give or take as much
NUM_FOLDS = 5  # of cross-validation
STRENGTHS = tuple(10.0**e for e in range(4, -11, -2))  # from the prior alone to least squares


@dataclass(frozen=True)
class Additive:
    """KL(S) ≈ offset + Σ weights: a plane through the measured sets."""

    offset_nats: float
    weights_nats: Float[Tensor, " units"]  # below 0: a unit that makes up for others
    cv_r2: float

    def __call__(self, sets: Bool[Tensor, "sets units"]) -> Float[Tensor, " sets"]:
        return self.offset_nats + sets.double() @ self.weights_nats


@dataclass(frozen=True)
class Coverage:
    """KL(S) ≈ ceiling · (1 - ∏(1 - a_i)): each unit spoils a share of what is not yet spoilt.

    log_kept is -log(1 - a_i), which adds up over units. Source: Hill 2026, arXiv:2607.12266; its c
    is our ceiling.
    """

    ceiling_nats: float
    log_kept: Float[Tensor, " units"]  # below 0: a unit that makes up for others
    cv_r2: float

    @property
    def spoilt(self) -> Float[Tensor, " units"]:
        """The shares a_i."""
        return -torch.expm1(-self.log_kept)

    def __call__(self, sets: Bool[Tensor, "sets units"]) -> Float[Tensor, " sets"]:
        return -self.ceiling_nats * torch.expm1(-(sets.double() @ self.log_kept))


def random_sets(
    costs: Float[Tensor, " units"], share: float, num: int, seed: int
) -> Bool[Tensor, "sets units"]:
    """Different sets that hold about `share` of the bytes; fewer than `num` where there are few."""
    generator = torch.Generator().manual_seed(seed)
    sets: dict[tuple[bool, ...], Bool[Tensor, " units"]] = {}
    for _ in range(10 * num):
        offset = (2 * float(torch.rand(1, generator=generator)) - 1) * SPREAD
        chosen = random_set(costs, bytes_of(costs, min(1.0, share + offset)), generator)
        sets.setdefault(tuple(chosen.tolist()), chosen)
        if len(sets) == num:
            break
    return torch.stack(list(sets.values()))


def additive(
    sets: Bool[Tensor, "sets units"],
    kl_nats: Float[Tensor, "sets sequences"],
    alone_nats: Float[Tensor, " units"],
) -> Additive:
    """Ridge regression of KL on membership.

    Free are an offset and one factor on the values alone. What a unit has beyond those is held down
    by a ridge, and again by the share of it that halves of the text agree on: sets are many, but
    all measured on one text, whose peculiarities a fit to all of it would take for the units'.
    """
    x, alone = sets.double(), alone_nats.double()
    free = torch.stack([torch.ones(len(x), dtype=x.dtype), x @ alone], 1)
    every = torch.ones(1, len(x), dtype=torch.bool)

    def fitted(y: Tensor, rows: Tensor, strength: float) -> tuple[Tensor, Tensor]:
        kept = rows[..., None]
        return _ridge(x * kept, free * kept, y * rows, strength)

    def held_out(y: Tensor, strength: float) -> Float[Tensor, " sets"]:
        coefficients, beyond = fitted(y, _folds(len(x)), strength)
        return _of_own_fold(coefficients @ free.mT + beyond @ x.mT)

    y, *halves = _texts(kl_nats)
    strength = min(STRENGTHS, key=lambda s: float((y - held_out(y, s)).square().sum()))
    coefficients, beyond = (found[0] for found in fitted(y, every, strength))
    trusted = trust(*(fitted(half, every, strength)[1][0] for half in halves))
    offset = coefficients[0] + (1 - trusted) * (x @ beyond).mean()
    weights = coefficients[1] * alone + trusted * beyond
    cv_r2 = _r2_on_other_text([held_out(half, strength) for half in halves], halves)
    return Additive(float(offset), weights, cv_r2)


def coverage(
    sets: Bool[Tensor, "sets units"],
    kl_nats: Float[Tensor, "sets sequences"],
    alone_nats: Float[Tensor, " units"],
) -> Coverage:
    """The coverage model by cross-validation of its ceiling and of a ridge.

    Under a ceiling c, -log(1 - KL / c) is a sum over units: a regression as in `additive`, without
    an offset, its rows weighted so that errors count as they do in KL. Ceilings are looked for from
    just above the largest KL measured to a thousand times that, where the model is a sum.
    """
    x, alone = sets.double(), alone_nats.double()
    y, *halves = _texts(kl_nats)
    largest = max(float(torch.stack([y, *halves]).max()), torch.finfo(torch.float64).tiny)
    every = torch.ones(1, len(x), dtype=torch.bool)

    def fitted(y: Tensor, rows: Tensor, excess: float, strength: float) -> tuple[Tensor, Tensor]:
        ceiling = largest * (1 + 10**excess)
        kept = 1 - y / ceiling
        weights = kept * rows
        prior = -torch.log1p(-(alone / ceiling).clamp(max=0.99))
        free = (x @ prior * weights)[..., None]
        factor, beyond = _ridge(x * weights[..., None], free, -kept.log() * weights, strength)
        return factor * prior, beyond

    def held_out(y: Tensor, excess: float, strength: float) -> Float[Tensor, " sets"]:
        prior, beyond = fitted(y, _folds(len(x)), excess, strength)
        ceiling = largest * (1 + 10**excess)
        return _of_own_fold(-ceiling * torch.expm1(-(prior + beyond) @ x.mT))

    def missed(excess: float, strength: float) -> float:
        return float((y - held_out(y, excess, strength)).square().sum())

    grid = [(excess / 2, strength) for strength in STRENGTHS for excess in range(6, -7, -1)]
    excess, strength = min(grid, key=lambda point: missed(*point))
    width = 0.5
    while width > 1e-6:
        around = [excess + width * step / 3 for step in range(-3, 4)]
        excess = min(around, key=lambda e: missed(e, strength))
        width /= 3
    prior, beyond = (found[0] for found in fitted(y, every, excess, strength))
    trusted = trust(*(fitted(half, every, excess, strength)[1][0] for half in halves))
    cv_r2 = _r2_on_other_text([held_out(half, excess, strength) for half in halves], halves)
    return Coverage(largest * (1 + 10**excess), prior + trusted * beyond, cv_r2)


def r2_on_halves(
    predicted: Float[Tensor, " sets"], kl_nats: Float[Tensor, "sets sequences"]
) -> float:
    """`affine_r2` on halves of the text, averaged: `cv_r2` of a prediction from other text."""
    _, *halves = _texts(kl_nats)
    return _r2_on_other_text([predicted.double()] * 2, halves)


def affine_r2(predicted: Float[Tensor, " sets"], kl_nats: Float[Tensor, " sets"]) -> float:
    """The share of KL's variance that a straight line through `predicted` explains, held out."""
    y, folds = kl_nats.double(), _folds(len(kl_nats))
    line = torch.stack([torch.ones_like(y), predicted.double()], 1)
    coefficients = torch.linalg.pinv(line * folds[:, :, None]) @ y
    errors = (y - coefficients @ line.mT) * ~folds
    return _r2(float(errors.square().sum()), y)


def _texts(kl_nats: Float[Tensor, "sets sequences"]) -> list[Float[Tensor, " sets"]]:
    """Means over the whole text and over its halves, sequences in turn."""
    kl = kl_nats.double()
    return [kl.mean(1), kl[:, 0::2].mean(1), kl[:, 1::2].mean(1)]


def _r2_on_other_text(
    predicted: Sequence[Float[Tensor, " sets"]], halves: Sequence[Float[Tensor, " sets"]]
) -> float:
    """Of predictions from one half of the text for the other, sets held out, both ways."""
    (of_first, of_second), (first, second) = predicted, halves
    return (affine_r2(of_first, second) + affine_r2(of_second, first)) / 2


def _of_own_fold(predicted: Float[Tensor, "folds sets"]) -> Float[Tensor, " sets"]:
    """Each set's prediction by the fit that has not seen it."""
    return (predicted * ~_folds(predicted.shape[1])).sum(0)


def _folds(num: int) -> Bool[Tensor, "folds sets"]:
    """The sets that each fold is fitted to; the others it is judged by."""
    return torch.arange(num) % NUM_FOLDS != torch.arange(NUM_FOLDS)[:, None]


def _ridge(
    x: Float[Tensor, "*folds sets units"],
    free: Float[Tensor, "*folds sets free"],
    y: Float[Tensor, "*folds sets"],
    strength: float,
) -> tuple[Float[Tensor, "*folds free"], Float[Tensor, "*folds units"]]:
    """Coefficients of `free`, which cost nothing, and of `x`, whose squares do.

    Rows of zeros count for nothing.
    """
    inverse = torch.linalg.pinv(free)
    rest = x - free @ (inverse @ x)
    held = rest.mT @ rest + strength * x.shape[-2] * torch.eye(x.shape[-1], dtype=x.dtype)
    # `rest` is at right angles to `free`: what that explains of y needs not be taken out first.
    beyond = torch.linalg.solve(held, rest.mT @ y[..., None])
    coefficients = inverse @ (y[..., None] - x @ beyond)
    return coefficients.squeeze(-1), beyond.squeeze(-1)


def _r2(missed: float, y: Float[Tensor, " sets"]) -> float:
    """Of a sum of squared errors; 0 where there was nothing to explain."""
    spread = float((y - y.mean()).square().sum())
    return 1 - missed / spread if spread > 0 else 0.0
