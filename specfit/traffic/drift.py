"""How far two profiles are apart, and what that does to a draft model that was fitted to one."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from enum import Enum
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specfit.traffic.config import ComponentConfig, ProfileConfig, Quantiles
from specfit.traffic.draw import lognormal, mean
from specfit.traffic.fingerprint_config import DriftConfig

Row = Mapping[str, Any]
Served = tuple[str, float]  # a component and the temperature that it is served at

MIX = "all"
LENGTHS = [f.name for f in fields(ComponentConfig) if f.type == Quantiles | None]
NUM_DRAWS = 4000
CONFIDENCE = 0.95  # of the intervals in acceptance.json, and of those here


class Verdict(Enum):
    """What to do about the draft model, from the least effort to the most."""

    keep = 0
    refit = 1
    retrain = 2


@dataclass(frozen=True)
class Change:
    """A relative change, and the ends of its interval."""

    value: float
    low: float
    high: float


def drift(
    old: ProfileConfig, new: ProfileConfig, rows: Sequence[Row] | None, config: DriftConfig
) -> dict[str, Any]:
    """drift.json: distances, the change that measured acceptance predicts, and the verdict.

    Args:
        old: the traffic that the draft model was fitted to.
        new: the traffic now.
        rows: of acceptance.json; None if nothing was measured.
        config: the thresholds, and which rows count.

    Raises:
        ValueError: no row is of `config`'s proposer and number of draft tokens, or none of a
            component of the old profile.
    """
    distances = _distances(old, new)
    found: dict[str, Any] = {
        "old": old.name,
        "new": new.name,
        "distances": distances,
        "components": _components(old, new),
        "acceptance": None,
        "thresholds": {
            name: getattr(config, name)
            for name in ("reuse_above", "refit_above", "max_unmeasured", "max_distance")
        },
    }
    if rows is None:
        verdict, reason = _by_distance(distances, config)
        return found | {"verdict": verdict.name, "reason": reason, "decided": None}
    measured = _measured(rows, config)
    acceptance = _predicted(old, new, measured)
    acceptance["unmeasured_old"] = _unmeasured(old, measured)
    acceptance["unmeasured_new"] = _unmeasured(new, measured)
    verdict, reason, decided = _by_acceptance(acceptance, config)
    return found | {
        "acceptance": acceptance,
        "verdict": verdict.name,
        "reason": reason,
        "decided": decided,
    }


def total_variation(old: Mapping[str, float], new: Mapping[str, float]) -> float:
    """Half of the sum of differences between two mixes: the share that changed sides, 0..1."""
    return sum(abs(old.get(name, 0) - new.get(name, 0)) for name in old.keys() | new.keys()) / 2


def jensen_shannon_bits(old: Mapping[str, float], new: Mapping[str, float]) -> float:
    """What one request tells of which mix it is from, 0..1 bits."""
    bits = 0.0
    for name in old.keys() | new.keys():
        middle = (old.get(name, 0) + new.get(name, 0)) / 2
        bits += sum(p * math.log2(p / middle) / 2 for m in (old, new) if (p := m.get(name, 0)) > 0)
    return max(0.0, bits)


def kolmogorov_smirnov(old: Quantiles, new: Quantiles) -> float:
    """The largest difference between the distribution functions of two lognormals, 0..1.

    It lies where the densities of their logarithms cross, or at the point where one has no spread.
    """
    (m, s), (n, t) = lognormal(old), lognormal(new)
    if s == 0 and t == 0:
        return float(m != n)
    if s == 0 or t == 0:
        point, wide = (m, NormalDist(n, t)) if s == 0 else (n, NormalDist(m, s))
        return max(wide.cdf(point), 1 - wide.cdf(point))
    a, b = 1 / t**2 - 1 / s**2, m / s**2 - n / t**2
    c = (n / t) ** 2 - (m / s) ** 2 + 2 * math.log(t / s)
    # a x² + 2 b x + c = 0, by the form that does not cancel; one root where the spreads are equal.
    q = -(b + math.copysign(math.sqrt(max(0.0, b * b - a * c)), b))
    crossings = [over / under for over, under in ((q, a), (c, q)) if under != 0]
    f, g = NormalDist(m, s), NormalDist(n, t)
    return max((abs(f.cdf(x) - g.cdf(x)) for x in crossings), default=0.0)


def tokens_per_request(component: ComponentConfig) -> float | None:
    """Of an answer on average, which no scale shortens; None where the profile does not say."""
    return None if component.output_tokens is None else mean(component.output_tokens)


def _requests(profile: ProfileConfig) -> dict[str, float]:
    total = sum(c.weight for c in profile.components)
    return {c.name: c.weight / total for c in profile.components}


def _tokens(profile: ProfileConfig) -> dict[str, float] | None:
    """Shares of the output tokens; None where a component has no output length."""
    shares = {}
    for component in profile.components:
        tokens = tokens_per_request(component)
        if tokens is None:
            return None
        shares[component.name] = component.weight * tokens
    return {name: share / sum(shares.values()) for name, share in shares.items()}


def _distances(old: ProfileConfig, new: ProfileConfig) -> dict[str, float | None]:
    requests = _requests(old), _requests(new)
    tokens = _tokens(old), _tokens(new)
    known = tokens[0] is not None and tokens[1] is not None
    return {
        "total_variation_by_requests": total_variation(*requests),
        "total_variation_by_tokens": total_variation(tokens[0] or {}, tokens[1] or {})
        if known
        else None,
        "jensen_shannon_bits": jensen_shannon_bits(*requests),
    }


def _components(old: ProfileConfig, new: ProfileConfig) -> list[dict[str, Any]]:
    """Of each component of either profile: shares, lengths and prefixes, side by side."""
    sides = [{c.name: c for c in profile.components} for profile in (old, new)]
    shares = [(_requests(profile), _tokens(profile) or {}) for profile in (old, new)]
    result = []
    for name in sides[0] | sides[1]:
        before, after = (side.get(name) for side in sides)
        row: dict[str, Any] = {"component": name}
        for side, component, (requests, tokens) in zip(
            ("old", "new"), (before, after), shares, strict=True
        ):
            row[f"request_share_{side}"] = requests.get(name, 0.0)
            row[f"token_share_{side}"] = tokens.get(name)
            row[f"shared_prefix_tokens_{side}"] = component and component.shared_prefix_tokens
        row["lengths"] = [
            _length(length, getattr(before, length, None), getattr(after, length, None))
            for length in LENGTHS
        ]
        result.append(row)
    return result


def _length(name: str, old: Quantiles | None, new: Quantiles | None) -> dict[str, Any]:
    return {
        "length": name,
        "old": old and asdict(old),
        "new": new and asdict(new),
        "kolmogorov_smirnov": kolmogorov_smirnov(old, new) if old and new else None,
    }


def _measured(rows: Sequence[Row], config: DriftConfig) -> dict[Served, Row]:
    """The rows of the proposer that decides, by component and temperature."""
    own = [
        row
        for row in rows
        if row["proposer"] == config.proposer and row["component"] != MIX and row["num_rounds"]
    ]
    ks = sorted({row["num_draft_tokens"] for row in own})
    if not ks:
        names = ", ".join(sorted({row["proposer"] for row in rows}))
        raise ValueError(
            f"drift.proposer must be one that was measured, got {config.proposer}; "
            f"there are {names}"
        )
    k = ks[-1] if config.num_draft_tokens is None else config.num_draft_tokens
    if k not in ks:
        raise ValueError(f"drift.num_draft_tokens must be one of {ks}, as measured, got {k}")
    return {
        (row["component"], float(row["temperature"])): row
        for row in own
        if row["num_draft_tokens"] == k
    }


def _served(component: ComponentConfig) -> Served:
    return component.name, float(component.temperature)


def _unmeasured(profile: ProfileConfig, measured: Mapping[Served, Row]) -> dict[str, float]:
    """Shares of the requests, of components without a row at their temperature."""
    shares = _requests(profile)
    return {c.name: shares[c.name] for c in profile.components if _served(c) not in measured}


def _predicted(
    old: ProfileConfig, new: ProfileConfig, measured: Mapping[Served, Row]
) -> dict[str, Any]:
    """Acceptance length and time of both mixes, over the components that were measured.

    Intervals: the logarithm of each component's acceptance length is drawn from a normal with the
    measured value as its mean and the measured interval as its own; both mixes are computed from
    the same draws. Errors of the weights are not in them, nor those of what a round takes.
    """
    generator = np.random.default_rng(0)
    drawn = {served: _draws(row, generator) for served, row in measured.items()}
    exact = {served: np.array([row["acceptance_length"]]) for served, row in measured.items()}
    mixes = [_mix(profile, measured) for profile in (old, new)]
    if not mixes[0]:
        names = ", ".join(sorted({name for name, _ in measured}))
        raise ValueError(
            f"drift.old must have a component that was measured at its temperature ({names}), got "
            f"{old.name}"
        )
    result: dict[str, Any] = {"num_draft_tokens": next(iter(measured.values()))["num_draft_tokens"]}
    result["confidence"] = CONFIDENCE
    for side, mix in zip(("old", "new"), mixes, strict=True):
        if mix:
            result |= _figures(
                f"acceptance_length_{side}", _length_of(mix, exact), _length_of(mix, drawn)
            )
    if not mixes[1]:
        return result
    change = _length_of(mixes[1], exact) / _length_of(mixes[0], exact) - 1
    changes = _length_of(mixes[1], drawn) / _length_of(mixes[0], drawn) - 1
    result |= _figures("acceptance_length_change", change, changes)
    if all(measured[s].get("tokens_per_second") for mix in mixes for s in mix):
        before, after = (_ms_per_token(mix, measured, exact) for mix in mixes)
        times = [_ms_per_token(mix, measured, drawn) for mix in mixes]
        result |= {"ms_per_token_old": float(before[0]), "ms_per_token_new": float(after[0])}
        result |= _figures("ms_per_token_change", after / before - 1, times[1] / times[0] - 1)
    return result


def _mix(profile: ProfileConfig, measured: Mapping[Served, Row]) -> dict[Served, float]:
    """Output tokens of one request of the mix, by component: the profile's, or else as measured."""
    found = {}
    for component in profile.components:
        served = _served(component)
        if served in measured:
            row = measured[served]
            tokens = tokens_per_request(component)
            of_measured = row["num_tokens"] / row["num_prompts"]
            found[served] = component.weight * (of_measured if tokens is None else tokens)
    return found


def _length_of(
    mix: Mapping[Served, float], lengths: Mapping[Served, NDArray[np.float64]]
) -> NDArray[np.float64]:
    """Tokens over rounds."""
    rounds = sum(tokens / lengths[served] for served, tokens in mix.items())
    return np.asarray(sum(mix.values()) / rounds)


def _ms_per_token(
    mix: Mapping[Served, float],
    measured: Mapping[Served, Row],
    lengths: Mapping[Served, NDArray[np.float64]],
) -> NDArray[np.float64]:
    """Rounds times what a round took of the component's answers that were timed, over tokens."""
    ms = sum(
        tokens
        / lengths[s]
        * 1e3
        * measured[s]["timed_acceptance_length"]
        / measured[s]["tokens_per_second"]
        for s, tokens in mix.items()
    )
    return np.asarray(ms / sum(mix.values()))


def _draws(row: Row, generator: np.random.Generator) -> NDArray[np.float64]:
    width = math.log(row["acceptance_length_high"] / row["acceptance_length_low"])
    deviation = width / (2 * NormalDist().inv_cdf((1 + CONFIDENCE) / 2))
    center = math.log(row["acceptance_length"])
    return np.exp(generator.normal(center, deviation, NUM_DRAWS))


def _figures(name: str, value: NDArray[np.float64], draws: NDArray[np.float64]) -> dict[str, float]:
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(draws, [tail, 1 - tail]).tolist()
    return {name: float(value[0]), f"{name}_low": low, f"{name}_high": high}


def verdict_of(change: float, config: DriftConfig) -> Verdict:
    """By the thresholds, which themselves belong to the worse side: "above" is above."""
    if change > config.reuse_above:
        return Verdict.keep
    return Verdict.refit if change > config.refit_above else Verdict.retrain


def _by_acceptance(
    acceptance: Mapping[str, Any], config: DriftConfig
) -> tuple[Verdict, str, bool | None]:
    """The verdict, why, and whether both ends of the interval give the same one."""
    unmeasured = acceptance["unmeasured_new"]
    share = sum(unmeasured.values())
    unknown = (
        f"{100 * share:.1f} % of the new requests are of components that were not measured at "
        f"their temperature ({', '.join(unmeasured)})"
    )
    if "acceptance_length_change" not in acceptance:
        return Verdict.refit, f"{unknown}: nothing can be predicted, so at least a refit.", None
    change, *ends = (acceptance[f"acceptance_length_change{end}"] for end in ("", "_low", "_high"))
    verdict = verdict_of(change, config)
    decided = {verdict_of(end, config) for end in ends} == {verdict}
    low, high = ends
    reason = (
        f"The acceptance length is predicted to change by {_change(change)} ({_change(low)} to "
        f"{_change(high)}), {_place(verdict, config)}"
    )
    if share > config.max_unmeasured and verdict is Verdict.keep:
        return Verdict.refit, f"{unknown}, which is no basis to keep the draft model.", None
    if not decided:
        reason += ", though the interval reaches across a threshold"
    if unmeasured:
        reason += f"; {unknown}"
    return verdict, reason + ".", decided


def _place(verdict: Verdict, config: DriftConfig) -> str:
    reuse, refit = _change(config.reuse_above), _change(config.refit_above)
    match verdict:
        case Verdict.keep:
            return f"which is above {reuse}"
        case Verdict.refit:
            return f"which is not above {reuse} but above {refit}"
        case Verdict.retrain:
            return f"which is not above {refit}"


def _change(relative: float) -> str:
    return f"{100 * relative:+.1f} %"


def _by_distance(distances: Mapping[str, float | None], config: DriftConfig) -> tuple[Verdict, str]:
    """Without measured acceptance nothing says that a head is lost, so never more than a refit."""
    names = ("total_variation_by_requests", "total_variation_by_tokens")
    name, value = max(
        ((name, value) for name in names if (value := distances[name]) is not None),
        key=lambda pair: pair[1],
    )
    beyond = value > config.max_distance
    words = name.replace("_", " ")
    reason = (
        f"The {words} is {value:.3f}, {'beyond' if beyond else 'within'} "
        f"{config.max_distance:g}; no acceptance was measured."
    )
    return Verdict.refit if beyond else Verdict.keep, reason
