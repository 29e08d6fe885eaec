"""The cheapest set of units that holds enough bytes."""

from math import ceil, gcd

import torch
from jaxtyping import Bool, Float
from torch import Tensor

MAX_CELLS = 1 << 26  # of the table, a byte each


def bytes_of(costs: Float[Tensor, " units"], share: float) -> float:
    """That share of all bytes, less a hair: ten of thirty are 1/3, however that was rounded."""
    return share * float(costs.double().sum()) * (1 - 1e-9)


def cheapest(
    values: Float[Tensor, " units"], costs: Float[Tensor, " units"], min_cost: float
) -> Bool[Tensor, " units"]:
    """The set of least Σ values with Σ costs ≥ min_cost; values may be negative.

    Dynamic programming over costs in multiples of a grid. Exact where the costs are whole numbers
    and the table, units x min_cost / their greatest common divisor, has at most MAX_CELLS cells:
    shapes of one model have large common divisors. Else the grid is as fine as the table allows
    and costs are rounded down to it. The set still meets `min_cost` then, and its Σ values is at
    most that of the best set for min_cost + (units + 1) · grid.
    """
    assert float(costs.double().sum()) >= min_cost, "no set holds as much"
    grid = _grid(costs, min_cost)
    steps = [int(cost // grid) for cost in costs.tolist()]
    need = max(0, ceil(min_cost / grid))
    if sum(steps) < need:  # only where they were rounded
        return torch.ones(len(costs), dtype=torch.bool)
    # best[n]: the least value of sets of the units so far that hold at least n steps.
    best = torch.full((need + 1,), torch.inf, dtype=torch.float64)
    best[0] = 0
    taken = torch.zeros(len(costs), need + 1, dtype=torch.bool)
    for unit, value in enumerate(values.tolist()):
        step = min(steps[unit], need)
        with_unit = value + torch.cat([best[:1].expand(step), best[: need + 1 - step]])
        taken[unit] = with_unit < best
        best = torch.minimum(best, with_unit)
    chosen = torch.zeros(len(costs), dtype=torch.bool)
    for unit in reversed(range(len(costs))):
        if taken[unit, need]:
            chosen[unit] = True
            need = max(0, need - steps[unit])
    return chosen


def _grid(costs: Float[Tensor, " units"], min_cost: float) -> float:
    finest = max(min_cost, 0.0) * len(costs) / MAX_CELLS
    listed = costs.tolist()
    if all(cost == int(cost) for cost in listed):
        divisor = gcd(*map(int, listed))
        if divisor >= finest:
            return float(divisor)
    return finest if finest > 0 else 1.0
