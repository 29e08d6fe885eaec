"""What can be said about quantizing; without torch, since `--help` reads it."""

from dataclasses import dataclass
from enum import Enum

from specfit.checks import require, require_positive
from specfit_kernels.rules import ScaleRule


class Precision(Enum):
    """The format of a unit's weights."""

    nvfp4 = "nvfp4"
    fp8 = "fp8"  # E4M3, one scale a matrix
    fp8_block = "fp8_block"  # E4M3, one scale for each 128 x 128


class Activations(Enum):
    """What the NVFP4 units multiply their weights with; inputs of FP8 units are never quantized."""

    none = "none"  # W4A16
    nvfp4 = "nvfp4"  # W4A4


class Rest(Enum):
    """The format of the units that are not NVFP4; of those that could not be, as they are."""

    none = "none"  # as they are
    fp8 = "fp8"
    fp8_block = "fp8_block"


class Selector(Enum):
    """What chooses the units."""

    isolated = "isolated"  # KL a byte of each unit alone
    additive = "additive"  # a ridge regression on random sets
    coverage = "coverage"  # a fit that saturates, on the same sets
    gram = "gram"  # annealing on the second order of KL
    portfolio = "portfolio"  # all of these and random sets, judged by measurement, then small moves


class BudgetIn(Enum):
    """What `quantize.budget` counts, of the matrices that may be quantized."""

    share = "share"  # the least share of their weights that becomes NVFP4
    bits = "bits"  # the most bits a weight, on average, scales included
    # The largest mean KL, at the upper end of its interval on the selection text: as many as fit.
    kl_nats = "kl_nats"


class Granularity(Enum):
    """What is decided on together."""

    fused = "fused"  # what engines join: q, k, v; gate, up; o; down
    layer = "layer"  # a decoder layer


class Gate(Enum):
    """What the quantized target must keep, on text that nothing was chosen by.

    A checkpoint that is not what was measured passes none.
    """

    production = "production"  # KL <= .06, the same most likely token .93, perplexity +1 %
    strict = "strict"  # KL <= .01, the same most likely token .98
    report = "report"  # no figure


@dataclass
class QuantizeConfig:
    """NVFP4 weights for the target, before anything is fitted to it."""

    budget: float | None = None  # null: the target stays as it is
    budget_in: BudgetIn = BudgetIn.share
    selector: Selector = Selector.portfolio
    granularity: Granularity = Granularity.fused
    rule: ScaleRule = ScaleRule.search
    activations: Activations = Activations.none
    rest: Rest = Rest.none
    cotune: bool = False  # learn a factor on the scale of each quantized matrix
    gate: Gate = Gate.production
    # The target's own answers to training prompts, as many for each of three texts: one to fit
    # predictions of sets to, one to choose by, one to report on.
    num_passages: int = 32
    # And more, for what units do alone and in pairs: signs of pairs take thousands of tokens.
    num_unit_passages: int = 96
    context_tokens: int = 512  # of a passage's prompt, from its end
    counted_tokens: int = 64  # of its answer, from its beginning
    batch_size: int = 8  # passages a forward pass
    sets_per_unit: int = 4  # random sets measured for additive and coverage, a unit
    num_random: int = 8  # random sets that a portfolio holds its proposals against
    curve_points: int = 8  # budgets whose cost is measured beside the one that was asked for
    # A head, the folder of an artifact of `train`: how its acceptance length changes is measured.
    speculator: str | None = None

    def __post_init__(self) -> None:
        counts = ("context_tokens", "counted_tokens", "batch_size", "sets_per_unit")
        require_positive(self, "quantize", *counts)
        for name in ("num_random", "curve_points"):
            value = getattr(self, name)
            require(value >= 0, f"quantize.{name}", "be at least 0", value)
        for name in ("num_passages", "num_unit_passages"):
            value = getattr(self, name)
            require(value >= 2, f"quantize.{name}", "be at least 2", value)
        if self.budget is not None:
            self._check_budget(self.budget)

    def _check_budget(self, budget: float) -> None:
        if self.budget_in is BudgetIn.kl_nats:
            require(0 < budget < float("inf"), "quantize.budget", "be a KL above 0", budget)
        elif self.budget_in is BudgetIn.share:
            require(0 < budget <= 1, "quantize.budget", "be a share in (0, 1]", budget)
        else:
            words = f"be at least {NVFP4_BITS} bits a weight"
            require(NVFP4_BITS <= budget < float("inf"), "quantize.budget", words, budget)


NVFP4_BITS = 4.5  # four, and a scale of eight for each sixteen; a matrix has one scale more
