"""How much of the training each component is: shares of the answer tokens that are learned from."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specfit.checks import require
from specfit.traffic.config import FitConfig, Mixture, ProfileConfig
from specfit.traffic.draw import mean

PLAIN = "none"  # of the proposers, the one that drafts nothing


@dataclass(frozen=True)
class Share:
    """Of one component, in the profile and in the training."""

    component: str
    requests: float  # of the profile's requests
    tokens: float  # of the profile's output tokens
    training: float  # of the answer tokens that are learned from


def token_shares(
    profile: ProfileConfig, measured_tokens: Mapping[str, float] | None = None
) -> dict[str, float]:
    """Of the profile's output tokens, by component.

    Tokens a request are those of `output_tokens`, or else of `measured_tokens`. Where a component
    has neither, requests stand for tokens in all of them.
    """
    tokens: dict[str, float] = {}
    for c in profile.components:
        if c.output_tokens is not None:
            tokens[c.name] = mean(c.output_tokens)
        elif measured_tokens is not None and c.name in measured_tokens:
            tokens[c.name] = measured_tokens[c.name]
    if len(tokens) < len(profile.components):
        tokens = {c.name: 1.0 for c in profile.components}
    return normalized({c.name: c.weight * tokens[c.name] for c in profile.components})


def known_token_shares(profile: ProfileConfig) -> dict[str, float] | None:
    """Of the profile's output tokens; None where it does not say how long answers are."""
    known = all(c.output_tokens is not None for c in profile.components)
    return token_shares(profile) if known else None


def mixture(
    profile: ProfileConfig,
    config: FitConfig,
    *,
    measured_tokens: Mapping[str, float] | None = None,
    measured: Sequence[Mapping[str, Any]] | None = None,
) -> list[Share]:
    """The share of each component, the floor included.

    Args:
        profile: the traffic.
        config: which mixture, and its floor.
        measured_tokens: of an answer on average, by component, where the profile does not say.
        measured: rows of acceptance.json, for `recoverable`.

    Raises:
        ValueError: `recoverable` finds a component unmeasured, or nothing to recover; a ceiling is
            of no component.
    """
    tokens = token_shares(profile, measured_tokens)
    for name in config.ceilings:
        require(name in tokens, f"fit.ceilings.{name}", f"be of {', '.join(tokens)}", name)
    match config.mixture:
        case Mixture.profile:
            wanted = tokens
        case Mixture.uniform:
            wanted = normalized(dict.fromkeys(tokens, 1.0))
        case Mixture.recoverable:
            assert measured is not None
            wanted = recoverable(tokens, acceptance_lengths(measured), config.ceilings)
    even = 1 / len(tokens)
    return [
        Share(
            c.name,
            c.weight,
            tokens[c.name],
            (1 - config.floor) * wanted[c.name] + config.floor * even,
        )
        for c in profile.components
    ]


def recoverable(
    tokens: Mapping[str, float], lengths: Mapping[str, float], ceilings: Mapping[str, float]
) -> dict[str, float]:
    """Shares of the latency that a better head could save: tokens x (1/length - 1/ceiling).

    A token of a component costs 1/length rounds. One at its ceiling has nothing left to save.

    Raises:
        ValueError: a component was not measured, or all are at their ceilings.
    """
    missing = [name for name in tokens if name not in lengths]
    if missing:
        raise ValueError(f"fit.measured must have rows of {', '.join(missing)}")
    rounds = {
        name: share * max(0.0, 1 / lengths[name] - 1 / ceilings.get(name, math.inf))
        for name, share in tokens.items()
    }
    if not any(rounds.values()):
        raise ValueError("fit.ceilings must be above a measured acceptance length; all are reached")
    return normalized(rounds)


def acceptance_lengths(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Of the first head and k of acceptance.json, by component; those without a round are not."""
    lengths = {row["component"]: row["acceptance_length"] for row in of_first_head(rows)}
    return {name: length for name, length in lengths.items() if length is not None}


def of_first_head(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The components' rows of the head that was fitted, at the first k and temperature.

    Raises:
        ValueError: there is no head.
    """
    heads = [row for row in rows if row.get("coverage") is not None]
    if not heads:
        raise ValueError("fit.measured must have rows of a head")
    name, k = heads[0]["proposer"], heads[0]["num_draft_tokens"]
    found: dict[str, Mapping[str, Any]] = {}
    for row in heads:
        if (row["proposer"], row["num_draft_tokens"]) == (name, k):
            found.setdefault(row["component"], row)
    return list(found.values())


def normalized(values: Mapping[str, float]) -> dict[str, float]:
    """The same, as shares of their sum."""
    total = sum(values.values())
    return {name: value / total for name, value in values.items()}
