"""The profile's own arrivals on the predicted machine: goodput by rate and by k."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from specfit.prediction.config import PredictConfig
from specfit.prediction.server import Acceptance, Costs
from specfit.prediction.simulate import sweep
from specfit.traffic.config import ArrivalKind, ProfileConfig

RATES = (0.25, 0.5, 1.0, 2.0, 4.0)  # times the profile's own
Row = Mapping[str, Any]


def can_be_drawn(profile: ProfileConfig) -> bool:
    """Whether the profile says enough to simulate it at several rates."""
    drawn = all(c.prompt_tokens and c.output_tokens for c in profile.components)
    return drawn and profile.arrival.kind is ArrivalKind.gamma


def survival(lengths: Sequence[float]) -> list[float]:
    """P(position i is kept), from acceptance lengths at 0, 1, ... drafted tokens.

    A position is kept only behind the one before it, but lengths that were measured apart may
    differ as if it were otherwise; then neighbours share the mean of what they add (pooling
    adjacent violators), and none adds less than nothing.
    """
    pools: list[tuple[float, int]] = []  # what the positions of each add together, and how many
    for before, after in pairwise(lengths):
        added, num = after - before, 1
        while pools and pools[-1][0] / pools[-1][1] < added / num:
            more, others = pools.pop()
            added, num = added + more, num + others
        pools.append((added, num))
    return [max(0.0, added / num) for added, num in pools for _ in range(num)]


def simulated_rows(
    config: PredictConfig,
    profile: ProfileConfig,
    costs: Costs,
    lengths: Mapping[str, Sequence[float]],
    seed: int,
) -> list[dict[str, Any]]:
    """Rows of kind `simulated`, at `predict.rates` and with every k.

    Args:
        config: rates, sessions and the server.
        profile: what arrives.
        costs: of passes.
        lengths: by component, acceptance lengths at 0, 1, ... drafted tokens.
        seed: of the traffic.
    """
    acceptance = {name: Acceptance.from_positions(survival(own)) for name, own in lengths.items()}
    most = min(len(own) for own in lengths.values()) - 1
    # Said once for the formula and the simulation.
    disaggregated = config.disaggregated or config.server.disaggregated
    rates = config.rates or [times * profile.arrival.rate for times in RATES]
    return sweep(
        profile,
        costs,
        acceptance,
        replace(config.server, disaggregated=disaggregated),
        rates=rates,
        num_draft_tokens=range(most + 1),
        num_sessions=config.num_sessions,
        seed=seed,
    )
