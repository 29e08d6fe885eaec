"""Which sets the selectors would quantize, and what KL they expect of a set."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from specfit.quantization.config import Selector
from specfit.quantization.in_context import Additive, Coverage
from specfit.quantization.knapsack import bytes_of, cheapest
from specfit.quantization.quadratic import annealed, form


@dataclass(frozen=True)
class Predictor:
    """The KL that a selector expects: `to_nats`, which keeps the order, of ½ xᵀQx."""

    quadratic: Float[Tensor, "units units"]
    to_nats: Callable[[Tensor], Tensor]

    def __call__(self, sets: Bool[Tensor, "sets units"]) -> Float[Tensor, " sets"]:
        """Nats a token, of the text that the predictor knows."""
        return self.to_nats(form(self.quadratic, sets))

    @classmethod
    def of_alone(cls, alone_nats: Float[Tensor, " units"]) -> "Predictor":
        """The sum of what the units cost alone."""
        return cls((2 * alone_nats.double()).diag(), lambda sums: sums)

    @classmethod
    def of_gram(cls, gram: Float[Tensor, "units units"]) -> "Predictor":
        """To second order, from the Gram matrix (gram.py)."""
        return cls(gram.double(), lambda sums: sums)

    @classmethod
    def of_additive(cls, fit: Additive) -> "Predictor":
        """The plane that was fitted."""
        return cls((2 * fit.weights_nats).diag(), lambda sums: fit.offset_nats + sums)

    @classmethod
    def of_blend(cls, gram: Float[Tensor, "units units"], fit: Additive) -> "Predictor":
        """The mean of both: they know other text and err apart."""
        quadratic = (gram.double() + (2 * fit.weights_nats).diag()) / 2
        return cls(quadratic, lambda sums: fit.offset_nats / 2 + sums)

    @classmethod
    def of_coverage(cls, fit: Coverage) -> "Predictor":
        """What is spoilt of the ceiling: least where the sum of `log_kept` is."""
        return cls((2 * fit.log_kept).diag(), lambda sums: -fit.ceiling_nats * torch.expm1(-sums))


def proposal(
    selector: Selector,
    predictor: Predictor,
    costs: Float[Tensor, " units"],
    min_cost: float,
    seed: int,
) -> Bool[Tensor, " units"]:
    """The set of least expected KL that holds `min_cost` bytes, as the selector looks for it."""
    values = predictor.quadratic.diagonal() / 2
    match selector:
        case Selector.isolated:
            return ranked(values, costs, min_cost)
        case Selector.additive | Selector.coverage:
            return cheapest(values, costs, min_cost)
        case Selector.gram:
            return annealed(predictor.quadratic, costs, min_cost, seed)
        case Selector.portfolio:
            raise AssertionError("a portfolio is made of the proposals of the others")


def of_size(
    selector: Selector,
    predictor: Predictor,
    costs: Float[Tensor, " units"],
    num_units: int,
    seed: int,
) -> Bool[Tensor, " units"]:
    """A set of some number of units, or of as many bytes.

    The first in order of value a byte, so that a smaller set is part of a larger one. `gram` has no
    such order: its sets hold the bytes of the first units of its diagonal.
    """
    order = (predictor.quadratic.diagonal() / costs.double()).argsort(stable=True)[:num_units]
    if selector is Selector.gram and num_units > 0:
        return annealed(predictor.quadratic, costs, bytes_of(costs[order], 1.0), seed)
    chosen = torch.zeros(len(costs), dtype=torch.bool)
    chosen[order] = True
    return chosen


def ranked(
    values: Float[Tensor, " units"], costs: Float[Tensor, " units"], min_cost: float
) -> Bool[Tensor, " units"]:
    """Units of least value a byte first, while they stay below `min_cost`; then an exact fill.

    Ties go to the lower unit.
    """
    order = (values.double() / costs.double()).argsort(stable=True)
    held = costs.double()[order].cumsum(0)
    taken, rest = order[held < min_cost], order[held >= min_cost]
    chosen = torch.zeros(len(costs), dtype=torch.bool)
    chosen[taken] = True
    missing = min_cost - float(costs[taken].double().sum())
    chosen[rest] = cheapest(values[rest], costs[rest], missing)
    return chosen
