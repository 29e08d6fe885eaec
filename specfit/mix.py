"""Figures of a traffic mix from figures of its components.

A component's weight is its share of the requests. Acceptance length is tokens over rounds, so in a
mix a component counts by the rounds that its requests take: a mean of the components' lengths,
weighted by requests, would be wrong.

Figures are of sessions, each with the stats of its requests. The requests of a session are alike,
so sessions are what is resampled.
"""

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from specfit_serve.stats import DecodeStats

Sessions = Sequence[Sequence[DecodeStats]]


def each_alone(requests: Sequence[DecodeStats]) -> Sessions:
    """Requests as sessions of one."""
    return [[stats] for stats in requests]


def weights_of_tokens(
    stats: Mapping[str, Sessions], shares: Mapping[str, float]
) -> dict[str, float]:
    """Weights by request with which each component has its share of the tokens.

    Answers that are measured are cut short, longer ones by more: with weights by request a
    component of long answers would count too little.
    """
    weights = {}
    for name, sessions in stats.items():
        tokens, _, requests = counts_of(sessions).sum(0).tolist() if sessions else (0.0, 0.0, 0.0)
        weights[name] = shares[name] * requests / tokens if tokens else shares[name]
    return weights


def mixed_acceptance_length(stats: Mapping[str, Sessions], weights: Mapping[str, float]) -> float:
    """Tokens a round of the mix, from the stats of each component's sessions.

    Components without a round say nothing and are left out; nan when none has one.
    """
    sums = {name: counts_of(sessions).sum(0) for name, sessions in stats.items() if sessions}
    return float(length_of(sums, weights)) if sums else float("nan")


def length_of(
    sums: Mapping[str, Float[Tensor, "*mixes 3"]], weights: Mapping[str, float]
) -> Float[Tensor, "*mixes"]:
    """Tokens a round of mixes, from the tokens, rounds and requests of each component.

    nan where a mix has no round.
    """
    tokens, rounds = (
        torch.stack([weights[name] * of[..., i] / of[..., 2] for name, of in sums.items()]).sum(0)
        for i in (0, 1)
    )
    return tokens / rounds


def mixed_interval(
    stats: Mapping[str, Sessions],
    weights: Mapping[str, float],
    *,
    num_bootstrap: int,
    confidence: float,
    seed: int,
) -> tuple[float, float]:
    """The percentile interval of `mixed_acceptance_length`: sessions resampled by component."""
    return _percentiles(_resampled(stats, weights, num_bootstrap, seed), confidence)


def mixed_change(
    before: Mapping[str, Sessions],
    after: Mapping[str, Sessions],
    weights: Mapping[str, float],
    *,
    num_bootstrap: int,
    confidence: float,
    seed: int,
) -> tuple[float, float, float]:
    """By what share `mixed_acceptance_length` changes, and the percentile interval of that.

    Both are of the same sessions in the same order, which are drawn together.
    """
    change = mixed_acceptance_length(after, weights) / mixed_acceptance_length(before, weights) - 1
    old, new = (_resampled(stats, weights, num_bootstrap, seed) for stats in (before, after))
    return change, *_percentiles(new / old - 1, confidence)


def _resampled(
    stats: Mapping[str, Sessions],
    weights: Mapping[str, float],
    num_bootstrap: int,
    seed: int,
) -> Float[Tensor, " resamples"]:
    """Acceptance lengths of the mix; nan where what was drawn has no round."""
    generator = torch.Generator().manual_seed(seed)
    sums = {}
    for name, sessions in stats.items():
        if sessions:
            n = len(sessions)
            drawn = torch.randint(n, (num_bootstrap, n), generator=generator)
            sums[name] = counts_of(sessions)[drawn].sum(1)
    return length_of(sums, weights)


def counts_of(sessions: Sessions) -> Float[Tensor, "sessions 3"]:
    """Tokens, rounds and requests of each."""
    return torch.tensor(
        [
            (sum(s.num_tokens for s in own), sum(s.num_rounds for s in own), len(own))
            for own in sessions
        ],
        dtype=torch.float64,
    )


def _percentiles(values: Float[Tensor, " resamples"], confidence: float) -> tuple[float, float]:
    tail = (1 - confidence) / 2
    low, high = torch.nanquantile(values, torch.tensor([tail, 1 - tail]).double()).tolist()
    return low, high
