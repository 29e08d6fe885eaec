"""What was chosen against what else could have been, on text that nothing was chosen by."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from specfit.quantization.divergence import ModelDivergence
from specfit.quantization.fidelity import CONFIDENCE, NUM_BOOTSTRAP
from specfit.quantization.measured import Journal, Measured, Text, mean_interval, put_finite
from specfit.quantization.selection import Selection
from specfit_kernels.rules import ScaleRule
from specfit_serve.bootstrap import percentiles, resamples


@dataclass(frozen=True)
class Comparison:
    """KL of the chosen set over that of another, on the report text."""

    against: str  # who proposed that one; `amax`: the same units by the scales of other engines
    num_sets: int  # means of all of them
    kl_mean_nats: float
    kl_ratio: float  # below 1: what was chosen loses less
    kl_ratio_low: float
    kl_ratio_high: float


@dataclass(frozen=True)
class CurvePoint:
    """What a budget costs: the units of least KL a byte alone, up to a share."""

    share: float  # of the weights that may be quantized
    num_units: int
    kl_mean_nats: float  # on the selection text
    kl_mean_nats_low: float
    kl_mean_nats_high: float


def compare(
    divergence: ModelDivergence, selection: Selection, journal: Journal, seed: int
) -> list[Comparison]:
    """The chosen set against each proposer's, and against `amax` scales; before any co-tuning.

    Nothing chosen, or nothing proposed, loses nothing, and there is nothing to compare.
    """
    if not selection.chosen:
        return []
    measured = Measured(divergence, journal, range(len(divergence.costs)))

    def kl(ids: Iterable[int]) -> Float[Tensor, " sequences"]:
        return measured.kl(_mask(divergence, ids), Text.report)

    own = kl(selection.chosen)
    proposed: dict[str, list[tuple[int, ...]]] = {}
    for row in selection.rows[:-1]:  # the last is what was chosen
        if row.chosen:
            proposed.setdefault(row.proposer, []).append(row.chosen)
    found = [
        _comparison(name, own, torch.stack([kl(ids) for ids in sets]), seed)
        for name, sets in proposed.items()
    ]
    if divergence.switch.rule is not ScaleRule.amax:
        by_amax = _by_amax(divergence, selection.chosen, journal)
        found.append(_comparison(ScaleRule.amax.name, own, by_amax[None], seed))
    return found


def budget_curve(
    divergence: ModelDivergence, alone: list[float], journal: Journal, seed: int, num_points: int
) -> list[CurvePoint]:
    """Of sets that grow by the units' KL alone, a byte; `num_points` of about equal steps."""
    costs = divergence.costs.tolist()
    measured = Measured(divergence, journal, range(len(costs)))
    order = sorted(range(len(costs)), key=lambda i: (alone[i] / costs[i], i))
    held = torch.tensor([costs[i] for i in order], dtype=torch.float64).cumsum(0) / sum(costs)
    steps = torch.arange(1, num_points + 1, dtype=torch.float64) / max(1, num_points)
    sizes = torch.searchsorted(held, steps - 1e-9) + 1
    found = []
    for size in sorted({min(int(size), len(order)) for size in sizes}):
        kl = measured.kl(_mask(divergence, order[:size]), Text.selection)
        low_high = mean_interval(kl, seed)
        found.append(CurvePoint(float(held[size - 1]), size, float(kl.mean()), *low_high))
    return found


def _by_amax(
    divergence: ModelDivergence, chosen: tuple[int, ...], journal: Journal
) -> Float[Tensor, " sequences"]:
    key = " ".join(["report amax", *map(str, chosen)])
    values = journal.get(key)
    if values is None:
        rule = divergence.switch.rule
        divergence.requantize(ScaleRule.amax, {})
        values = divergence.kl(_mask(divergence, chosen), Text.report).double().tolist()
        divergence.requantize(rule, {})
        put_finite(journal, key, values, f"units {list(chosen)} with {ScaleRule.amax.name} scales")
    return torch.tensor(values, dtype=torch.float64)


def _mask(divergence: ModelDivergence, ids: Iterable[int]) -> Bool[Tensor, " units"]:
    chosen = torch.zeros(len(divergence.costs), dtype=torch.bool)
    chosen[list(ids)] = True
    return chosen


def _comparison(
    against: str,
    own: Float[Tensor, " sequences"],
    others: Float[Tensor, "sets sequences"],
    seed: int,
) -> Comparison:
    """Sequences are drawn for both sides at once; sets are not drawn."""
    other = others.mean(0)
    drawn = resamples(len(own), NUM_BOOTSTRAP, seed)
    low, high = percentiles(own[drawn].mean(1) / other[drawn].mean(1), CONFIDENCE)
    mean = float(other.mean())
    return Comparison(against, len(others), mean, float(own.mean()) / mean, low, high)
