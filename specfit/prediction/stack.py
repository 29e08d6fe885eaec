"""The itemised stack: what each change multiplies tokens a second of one user by."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from specfit.checks import require
from specfit.prediction.config import (
    ChangeConfig,
    FactorConfig,
    HardwareConfig,
    ModelConfig,
    StackConfig,
)
from specfit.prediction.model import Load, Traffic, configured, token_seconds

Row = dict[str, Any]


@dataclass(frozen=True)
class State:
    """A service between two changes."""

    model: ModelConfig
    hardware: HardwareConfig
    num_draft_tokens: int = 0
    disaggregated: bool = False

    def changed(self, change: ChangeConfig) -> "State":
        """With it made."""
        model, hardware = self.model, self.hardware
        if change.format is not None:
            parts = {name: getattr(model, name) for name in ("attention", "shared", "experts")}
            parts = {name: replace(part, format=change.format) for name, part in parts.items()}
            model = replace(model, **parts)
        for name in ("achieved_bandwidth", "seconds_per_layer", "communication_seconds_per_layer"):
            constant = getattr(change, name)
            if constant is not None:
                hardware = replace(hardware, **{name: constant})
        k, apart = change.num_draft_tokens, change.disaggregated
        return State(
            model,
            hardware,
            self.num_draft_tokens if k is None else k,
            self.disaggregated if apart is None else apart,
        )

    def tokens_per_second(self, traffic: Traffic, load: Load) -> float:
        """Of one user."""
        k = self.num_draft_tokens
        load = replace(load, disaggregated=self.disaggregated)
        model = configured(self.model, self.hardware)
        return 1 / token_seconds(model, traffic, load, k, traffic.lengths[k].value)


def stack_rows(
    config: StackConfig,
    model: ModelConfig,
    hardware: HardwareConfig,
    traffic: Traffic,
    hit_rate: float,
) -> list[Row]:
    """A row a factor, in order, and one of all together.

    Args:
        config: the changes.
        model: before `config.start`.
        hardware: likewise, with all its values.
        traffic: what is served.
        hit_rate: share of the prompts' tokens that a prefix cache has.

    Raises:
        ValueError: more tokens are drafted than acceptance is known for, or weights do not fit.
    """
    changes = [("start", config.start)]
    changes += [(f"factors[{i}].change", f.change) for i, f in enumerate(config.factors)]
    for name, change in changes:
        known, k = len(traffic.lengths) - 1, change.num_draft_tokens or 0
        key = f"predict.stack.{name}.num_draft_tokens"
        require(0 <= k <= known, key, f"lie in [0, {known}], where acceptance is known", k)
    load = Load(config.concurrency, hit_rate)
    before = State(model, hardware).changed(config.start)
    rate = before.tokens_per_second(traffic, load)
    rows: list[Row] = [{"kind": "factor", "name": config.start_name, **_speed(rate)}]
    for factor in config.factors:
        after = before.changed(factor.change)
        rows.append(_row(factor, before, after, traffic, load))
        before = after
    rows.extend(_totals(config, rows))
    return rows


def _row(factor: FactorConfig, before: State, after: State, traffic: Traffic, load: Load) -> Row:
    def gain(at: Load) -> float:
        return after.tokens_per_second(traffic, at) / before.tokens_per_second(traffic, at)

    limit = load
    if factor.limit_concurrency is not None:
        limit = replace(limit, concurrency=factor.limit_concurrency)
    if factor.limit_hit_rate is not None:
        limit = replace(limit, hit_rate=factor.limit_hit_rate)
    found = gain(load)
    return {
        "kind": "factor",
        "name": factor.name,
        "factor": found,
        **_speed(after.tokens_per_second(traffic, load)),
        **_beside(found, factor.expected_low, factor.expected_high),
        "limit": factor.limit,
        "limit_concurrency": limit.concurrency,
        "limit_hit_rate": limit.hit_rate,
        "limit_factor": gain(limit),
        "adds_devices": factor.adds_devices,
    }


def _speed(tokens_per_second: float) -> Row:
    return {
        "tokens_per_second_per_user": tokens_per_second,
        "ms_per_token": 1e3 / tokens_per_second,
    }


def _beside(found: float, low: float, high: float) -> Row:
    """The figure's range as expected, and on which side of it the figure lies."""
    side = "above" if found > high else "below" if found < low else "within"
    return {"expected_low": low, "expected_high": high, "side": side}


def _totals(config: StackConfig, rows: list[Row]) -> Iterator[Row]:
    start, *factors = rows
    rates = [row["tokens_per_second_per_user"] for row in (start, factors[-1])]
    both = (config.expected_start, config.expected_end)
    for name, rate, (low, high) in zip(("start", "end"), rates, both, strict=True):
        yield {"kind": "stack_rate", "name": name, **_speed(rate), **_beside(rate, low, high)}
    whole = rates[1] / rates[0]
    least = config.expected_end[0] / config.expected_start[1]
    most = config.expected_end[1] / config.expected_start[0]
    yield {"kind": "stack_total", "name": "all", "factor": whole, **_beside(whole, least, most)}
    same = prod(row["factor"] for row in factors if not row["adds_devices"])
    yield {
        "kind": "stack_total",
        "name": "on the same devices",
        "factor": same,
        **_beside(same, *config.expected_same_devices),
    }
