"""Search over sets by a quadratic form, ½ xᵀQx, of which units are in them.

All that predicts a set's KL here is such a form, up to a function that keeps the order: the Gram
matrix is, and so is a sum of a value per unit, with twice the values on the diagonal of Q.
"""

from dataclasses import dataclass
from functools import cache
from itertools import combinations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from specfit.quantization.knapsack import cheapest

NUM_CHAINS = 64
SWEEPS = 100  # steps of a chain, for each unit
COOLED = 1e-4  # last temperature over first


def form(
    quadratic: Float[Tensor, "units units"], sets: Bool[Tensor, "sets units"]
) -> Float[Tensor, " sets"]:
    """½ xᵀQx of each set."""
    x = sets.double()
    return ((x @ quadratic) * x).sum(-1) / 2


def random_set(
    costs: Float[Tensor, " units"], min_cost: float, generator: torch.Generator
) -> Bool[Tensor, " units"]:
    """Units in random order, one at least, until they hold `min_cost`."""
    order = torch.randperm(len(costs), generator=generator)
    num = 1 + int((costs[order].double().cumsum(0) < min_cost).sum())
    chosen = torch.zeros(len(costs), dtype=torch.bool)
    chosen[order[:num]] = True
    return chosen


@dataclass(frozen=True)
class Neighbours:
    """Sets that differ from one in a few units, fewer first, then in order of those units."""

    flips: Int[Tensor, "sets flips"]  # units that go in or out; num_units where there are fewer
    changes: Float[Tensor, " sets"]  # of the quadratic form
    costs: Float[Tensor, " sets"]


def neighbours(
    quadratic: Float[Tensor, "units units"],
    chosen: Bool[Tensor, " units"],
    costs: Float[Tensor, " units"],
    max_flips: int,
) -> Neighbours:
    """All sets of up to `max_flips` differences, whatever they cost."""
    flips = _flips(len(chosen), max_flips)
    # Row and column num_units are those of no unit: they add nothing.
    sign = torch.nn.functional.pad(1 - 2 * chosen.double(), (0, 1))
    padded = torch.nn.functional.pad(quadratic, (0, 1, 0, 1))
    inside = torch.nn.functional.pad(chosen.double(), (0, 1))
    alone = sign * (padded @ inside) + padded.diagonal() / 2
    pairs = sign * sign[:, None] * padded
    changes = alone[flips].sum(1)
    for i, j in combinations(range(max_flips), 2):
        changes = changes + pairs[flips[:, i], flips[:, j]]
    cost_changes = sign * torch.nn.functional.pad(costs.double(), (0, 1))
    return Neighbours(flips, changes, inside[:-1] @ costs.double() + cost_changes[flips].sum(1))


def flipped(chosen: Bool[Tensor, " units"], flips: Int[Tensor, " flips"]) -> Bool[Tensor, " units"]:
    """The set with some units put in or out."""
    after = torch.nn.functional.pad(chosen, (0, 1))
    after[flips] = ~after[flips]
    return after[:-1]


@cache
def _flips(num_units: int, max_flips: int) -> Int[Tensor, "sets flips"]:
    units = torch.arange(num_units)
    # combinations() of single units are flat.
    by_flips = [torch.combinations(units, n).reshape(-1, n) for n in range(1, max_flips + 1)]
    return torch.cat(
        [
            torch.nn.functional.pad(flips, (0, max_flips - flips.shape[1]), value=num_units)
            for flips in by_flips
        ]
    )


def annealed(
    quadratic: Float[Tensor, "units units"],
    costs: Float[Tensor, " units"],
    min_cost: float,
    seed: int,
) -> Bool[Tensor, " units"]:
    """A set of small ½ xᵀQx that holds `min_cost`, by simulated annealing.

    Chains start from random sets, one of them from the best set by the diagonal alone, and end with
    the descent to a set that no single unit and no swap betters. The best of them is returned; it
    is at least as good as what the diagonal alone would choose.
    """
    generator = torch.Generator().manual_seed(seed)
    diagonal = quadratic.diagonal() / 2
    starts = [random_set(costs, min_cost, generator) for _ in range(NUM_CHAINS - 1)]
    ranked = cheapest(diagonal, costs, min_cost)
    ends = _chains(torch.stack([*starts, ranked]), quadratic, costs.double(), min_cost, generator)
    ends = torch.unique(torch.cat([ends, ranked[None]]), dim=0)
    sets = torch.stack([_descended(quadratic, end, costs, min_cost) for end in ends])
    return sets[int(form(quadratic, sets).argmin())]


def _chains(
    starts: Bool[Tensor, "chains units"],
    quadratic: Float[Tensor, "units units"],
    costs: Float[Tensor, " units"],
    min_cost: float,
    generator: torch.Generator,
) -> Bool[Tensor, "chains units"]:
    """Where chains end. A step flips a unit, and with it another if that is in the other state."""
    x = starts.double()
    num_chains, num_units = x.shape
    rows = torch.arange(num_chains)
    diagonal = quadratic.diagonal() / 2
    slopes, held = x @ quadratic, x @ costs
    warmest = float(((1 - 2 * x) * slopes + diagonal).abs().mean())
    num_steps = SWEEPS * num_units
    draws = (num_steps, num_chains)
    firsts = torch.randint(num_units, draws, generator=generator)
    offsets = torch.randint(1, max(2, num_units), draws, generator=generator)
    thresholds = -torch.rand(draws, generator=generator, dtype=torch.float64).log()
    for step in range(num_steps):
        i = firsts[step]
        j = (i + offsets[step]) % num_units
        flip_i, flip_j = 1 - 2 * x[rows, i], 1 - 2 * x[rows, j]
        flip_j = flip_j * (flip_i != flip_j)
        change = flip_i * slopes[rows, i] + diagonal[i] + flip_i * flip_j * quadratic[i, j]
        change = change + flip_j * slopes[rows, j] + flip_j.abs() * diagonal[j]
        after = held + flip_i * costs[i] + flip_j * costs[j]
        temperature = warmest * COOLED ** (step / num_steps)
        accepted = (after >= min_cost) & (change < temperature * thresholds[step])
        flip_i, flip_j = flip_i * accepted, flip_j * accepted
        x[rows, i] += flip_i
        x[rows, j] += flip_j
        slopes += flip_i[:, None] * quadratic[i] + flip_j[:, None] * quadratic[j]
        held = torch.where(accepted, after, held)
    return x > 0.5


def _descended(
    quadratic: Float[Tensor, "units units"],
    chosen: Bool[Tensor, " units"],
    costs: Float[Tensor, " units"],
    min_cost: float,
) -> Bool[Tensor, " units"]:
    # Rounding of a change must not look like a gain, or two equal sets would follow one another.
    least = 1e-12 * float(quadratic.abs().sum())
    while True:
        around = neighbours(quadratic, chosen, costs, max_flips=2)
        changes = around.changes.where(around.costs >= min_cost, torch.inf)
        if float(changes.min()) >= -least:
            return chosen
        chosen = flipped(chosen, around.flips[int(changes.argmin())])
