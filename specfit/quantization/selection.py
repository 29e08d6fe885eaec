"""The choice of the units that are quantized: proposals, judged by what is measured.

The units that share a decision are one unit; a set S of them is quantized. Selectors predict KL(S)
from other text and propose the set they think best within the budget. `portfolio` takes all their
proposals and random sets beside them, measures each on the selection text, and goes on from the
best by small moves for as long as KL falls by more than the choice of text explains. All of it can
be killed: what was measured is in the journal, and everything else follows from the seed.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from tqdm import tqdm

from specfit.quantization import in_context
from specfit.quantization.config import Selector
from specfit.quantization.guides import Guides, guides_of
from specfit.quantization.knapsack import bytes_of
from specfit.quantization.measured import (
    Divergence,
    Journal,
    Measured,
    Text,
    luckiest,
    mean_interval,
)
from specfit.quantization.proposals import Predictor, of_size, proposal
from specfit.quantization.quadratic import flipped, form, neighbours, random_set

MAX_MISSES = 16  # moves in a row that do not pay, before no more are tried
TRIES_PER_UNIT, LEAST_TRIES = 4, 64  # moves in all
# Standard errors by which a set must at least be better than the best so far: where the prediction,
# from other text, agrees, and where it does not. On two thousand tokens one is some 3 % of the KL.
ERRORS_AGREED, ERRORS_ALONE = 1.0, 3.0
MOST_UNITS_OF_THREE_FLIPS = 256  # their number grows with the third power

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Budget:
    """What a selection must meet. One of the two is set.

    A share can always be met, by all units if by no fewer. Under a ceiling that no set found keeps,
    as many as fit are none: the selection is then empty, which is logged.
    """

    min_share: float | None = None  # of the units' weight bytes, above 0; at the least KL
    # Of the mean on the selection text, at the upper end of its interval; as many bytes as fit.
    max_kl_nats: float | None = None

    def __post_init__(self) -> None:
        if (self.min_share is None) == (self.max_kl_nats is None):
            raise ValueError(
                "quantize.budget must be either a share of the weight bytes or a largest KL, got "
                f"{self.min_share} and {self.max_kl_nats}"
            )
        if self.min_share is not None and not 0 < self.min_share <= 1:
            raise ValueError(
                "quantize.budget must be a share of the weight bytes above 0 and at most 1, got "
                f"{self.min_share}"
            )
        if self.max_kl_nats is not None and not 0 < self.max_kl_nats < inf:
            raise ValueError(
                f"quantize.budget must be a largest KL in nats above 0, got {self.max_kl_nats}"
            )


@dataclass(frozen=True)
class Row:
    """A set that was measured on the selection text."""

    proposer: str  # a selector's name, or `random`
    chosen: tuple[int, ...]
    share: float  # of the weight bytes
    predicted_kl_nats: float | None  # by its selector, or by the one that leads the moves
    measured_kl_nats: float
    measured_kl_nats_low: float
    measured_kl_nats_high: float


@dataclass(frozen=True)
class Move:
    """A small change of the best set so far, as it was tried."""

    added: tuple[int, ...]
    removed: tuple[int, ...]
    predicted_change_nats: float
    measured_kl_nats: float
    kept: bool


@dataclass(frozen=True)
class Selection:
    """The chosen units, ascending, and how they were found; units are numbered as the caller's."""

    chosen: tuple[int, ...]
    rows: tuple[Row, ...]  # of a portfolio: the proposals, the random sets, then what was chosen
    isolated_kl_nats: tuple[float, ...]  # of each unit alone, on the text of units
    rho_reliability: float | None  # of the Gram matrix, where it was made
    cv_r2: dict[str, float]  # by selector, on random sets held out; empty where none were measured
    moves: tuple[Move, ...]


@dataclass(frozen=True)
class _Problem:
    """A budget over measured units."""

    measured: Measured
    budget: Budget
    seed: int

    @property
    def costs(self) -> Float[Tensor, " units"]:
        return self.measured.costs

    @property
    def min_cost(self) -> float:
        """In bytes."""
        return bytes_of(self.costs, self.budget.min_share or 0.0)

    def share(self, chosen: Bool[Tensor, " units"]) -> float:
        return float(self.costs[chosen].sum() / self.costs.sum())

    def upper_kl(self, chosen: Bool[Tensor, " units"]) -> float:
        """The end of the interval of KL that a ceiling is held against."""
        return mean_interval(self.measured.kl(chosen, Text.selection), self.seed)[1]

    def left_out(self, chosen: Bool[Tensor, " units"]) -> float:
        """Under a ceiling, the bytes that are not quantized, infinity above it; else 0."""
        if self.budget.max_kl_nats is None:
            return 0.0
        fits = self.upper_kl(chosen) <= self.budget.max_kl_nats
        return float(self.costs[~chosen].sum()) if fits else inf

    def better(
        self,
        chosen: Bool[Tensor, " units"],
        best: Bool[Tensor, " units"],
        predicted_change: float,
        num_tried: int = 1,
    ) -> bool:
        """Whether `chosen` is to replace `best`.

        For its bytes under a ceiling, which it must keep; else for its KL, beyond what the choice
        of text may have done: conversations are the same for both, and their differences are what
        the standard error is of.
        """
        left_out, least = self.left_out(chosen), self.left_out(best)
        if left_out != least:
            return left_out < least
        change = self.measured.kl(chosen, Text.selection) - self.measured.kl(best, Text.selection)
        least_errors = ERRORS_AGREED if predicted_change < 0 else ERRORS_ALONE
        needed = max(least_errors, luckiest(num_tried))
        error = change.std() / len(change) ** 0.5
        return bool(change.mean() < -needed * error)

    def row(
        self, proposer: str, chosen: Bool[Tensor, " units"], predictor: Predictor | None
    ) -> Row:
        kl = self.measured.kl(chosen, Text.selection)
        predicted = None if predictor is None else float(predictor(chosen[None]))
        ids, share = self.measured.ids(chosen), self.share(chosen)
        return Row(proposer, ids, share, predicted, float(kl.mean()), *mean_interval(kl, self.seed))


def select(
    divergence: Divergence,
    budget: Budget,
    selector: Selector,
    *,
    num_sets: int,
    num_random: int,
    seed: int,
    journal: Journal,
) -> Selection:
    """The units to quantize.

    Args:
        divergence: the target; `kl` is asked once for a set and text.
        budget: what the chosen set meets, on the selection text where it is a KL.
        selector: one that proposes, whose proposal is measured and returned; or the portfolio.
        num_sets: random sets that `additive` and `coverage` are fitted to, enough to
            cross-validate.
        num_random: random sets that the portfolio measures on the selection text. They hold the
            share of the budget, or that of the best proposal under a ceiling.
        seed: of everything random.
        journal: of everything measured.

    Raises:
        ValueError: a divergence is not finite.
    """
    assert num_sets >= in_context.NUM_FOLDS
    assert bool((divergence.costs > 0).all()), "every unit has bytes"
    alone, problem = _measured_alone(divergence, budget, journal, seed)
    guides = guides_of(
        problem.measured,
        selector,
        share=_deployed_share(problem, alone),
        num_sets=num_sets,
        seed=seed,
    )
    if selector is Selector.portfolio:
        rows, tried = _portfolio(problem, guides, num_random)
    else:
        predictor = guides.predictors[selector]
        chosen = _proposed(problem, selector, predictor)
        rows, tried = [problem.row(selector.name, chosen, predictor)], []
    row = rows[-1]
    log.info(
        "quantize: %s chose %d of %d units, %.3f of their bytes, KL %.5f nats",
        *(selector.name, len(row.chosen), len(alone), row.share, row.measured_kl_nats),
    )
    if not row.chosen:
        log.warning("quantize: no set found is within %s; nothing is quantized", budget)
    return Selection(
        row.chosen, tuple(rows), alone, guides.rho_reliability, guides.cv_r2, tuple(tried)
    )


def measure_alone(divergence: Divergence, journal: Journal) -> list[float]:
    """KL of each unit alone on the text of units: with G, what no budget changes."""
    as_given = Measured(divergence, journal, range(len(divergence.costs)))
    found: list[float] = as_given.alone().mean_kl_nats.tolist()
    return found


def _measured_alone(
    divergence: Divergence, budget: Budget, journal: Journal, seed: int
) -> tuple[tuple[float, ...], _Problem]:
    """KL of each unit, and the problem in order of KL a byte."""
    alone, costs = measure_alone(divergence, journal), divergence.costs.tolist()
    order = sorted(range(len(alone)), key=lambda i: (alone[i] / costs[i], costs[i], i))
    return tuple(alone), _Problem(Measured(divergence, journal, order), budget, seed)


def _deployed_share(problem: _Problem, alone: Sequence[float]) -> float:
    if problem.budget.min_share is not None:
        return problem.budget.min_share
    isolated = Predictor.of_alone(problem.measured.ordered(alone))
    return problem.share(_proposed(problem, Selector.isolated, isolated))


def _proposed(
    problem: _Problem, selector: Selector, predictor: Predictor
) -> Bool[Tensor, " units"]:
    """The selector's set; under a ceiling, of the most units whose measured KL is below it.

    How many fit is found by bisection, as if more units always cost more. They nearly do.
    """
    costs, seed = problem.costs, problem.seed
    if problem.budget.max_kl_nats is None:
        return proposal(selector, predictor, costs, problem.min_cost, seed)
    low, high = 0, len(costs) + 1
    with tqdm(unit="set", desc=f"quantize: most units by {selector.name}") as bar:
        while high - low > 1:
            middle = (low + high) // 2
            chosen = of_size(selector, predictor, costs, middle, seed)
            low, high = (middle, high) if problem.left_out(chosen) < inf else (low, middle)
            bar.update()
    return of_size(selector, predictor, costs, low, seed)


def _portfolio(problem: _Problem, guides: Guides, num_random: int) -> tuple[list[Row], list[Move]]:
    """All proposals and random sets, measured; the last row is the best of them after its moves."""
    blend = guides.blend
    assert blend is not None
    proposers = [(selector.name, selector, p) for selector, p in guides.predictors.items()]
    proposers.append(("blend", Selector.gram, blend))
    sets = [_proposed(problem, selector, predictor) for _, selector, predictor in proposers]
    problem.measured.kls(sets, Text.selection, "proposals")
    rows = [
        problem.row(name, chosen, predictor)
        for (name, _, predictor), chosen in zip(proposers, sets, strict=True)
    ]
    best = _best(problem, blend, sets)
    share = problem.budget.min_share or problem.share(best)
    generator = torch.Generator().manual_seed(problem.seed + 1)
    min_cost = bytes_of(problem.costs, share)
    drawn = [random_set(problem.costs, min_cost, generator) for _ in range(num_random)]
    problem.measured.kls(drawn, Text.selection, "random controls")
    rows += [problem.row("random", chosen, None) for chosen in drawn]
    best = _best(problem, blend, [best, *drawn])
    best, tried = _moved(problem, blend, best, {row.chosen for row in rows})
    return [*rows, problem.row(Selector.portfolio.name, best, blend)], tried


def _best(
    problem: _Problem, predictor: Predictor, sets: Sequence[Bool[Tensor, " units"]]
) -> Bool[Tensor, " units"]:
    """The first, unless another is better: of those the least KL first.

    Under a share a set of less KL may stay second: see `_Problem.better`.
    """
    best, *others = sets
    for chosen in sorted(others, key=lambda s: problem.measured.mean(s, Text.selection)):
        now, then = predictor(torch.stack([best, chosen])).tolist()
        if problem.better(chosen, best, then - now, num_tried=len(sets)):
            best = chosen
    return best


def _moved(
    problem: _Problem,
    predictor: Predictor,
    best: Bool[Tensor, " units"],
    seen: set[tuple[int, ...]],
) -> tuple[Bool[Tensor, " units"], list[Move]]:
    """The set from which no move pays, of those tried: the most promising first."""
    num_units = len(best)
    max_tries = max(LEAST_TRIES, TRIES_PER_UNIT * num_units)
    ids = problem.measured.ids
    tried: list[Move] = []
    misses = 0
    candidates = _candidates(problem, predictor, best)
    with tqdm(total=max_tries, unit="set", desc="quantize: moves") as bar:
        while misses < MAX_MISSES and len(tried) < max_tries:
            chosen, predicted = next(candidates, (best, 0.0))
            if chosen is best:
                break
            if ids(chosen) in seen:
                continue
            seen.add(ids(chosen))
            kept = problem.better(chosen, best, predicted, num_tried=len(tried) + 1)
            after = problem.measured.mean(chosen, Text.selection)
            added, removed = ids(chosen & ~best), ids(best & ~chosen)
            tried.append(Move(added, removed, predicted, after, kept))
            bar.update()
            misses = 0 if kept else misses + 1
            if kept:
                best = chosen
                candidates = _candidates(problem, predictor, best)
    return best, tried


def _candidates(
    problem: _Problem, predictor: Predictor, best: Bool[Tensor, " units"]
) -> Iterator[tuple[Bool[Tensor, " units"], float]]:
    """Sets a move away and their predicted change of KL, in the order in which they are tried.

    Under a share those that hold it, the lowest KL first. Under a ceiling those of more bytes, or
    of as many at a lower KL: first those predicted to fit, the largest first, then the others, the
    lowest KL first.
    """
    max_flips = 3 if len(best) <= MOST_UNITS_OF_THREE_FLIPS else 2
    around = neighbours(predictor.quadratic, best, problem.costs, max_flips)
    now = form(predictor.quadratic, best[None])
    changes = predictor.to_nats(now + around.changes) - predictor.to_nats(now)
    ceiling = problem.budget.max_kl_nats
    if ceiling is None:
        allowed = around.costs >= problem.min_cost
        order = changes.argsort(stable=True)
    else:
        held = float(problem.costs[best].sum())
        allowed = (around.costs > held) | ((around.costs == held) & (changes < 0))
        misfit = problem.upper_kl(best) + changes > ceiling
        order = torch.where(misfit, changes, -around.costs).argsort(stable=True)
        order = order[misfit[order].int().argsort(stable=True)]
    for idx in order[allowed[order]].tolist():
        yield flipped(best, around.flips[idx]), float(changes[idx])
