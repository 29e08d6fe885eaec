"""Figures of a traffic mix from figures of its components.

A component's weight is its share of the requests. Acceptance length is tokens over rounds, so in a
mix a component counts by the rounds that its requests take: a mean of the components' lengths,
weighted by requests, would be wrong.
"""

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from specfit_serve.stats import DecodeStats


def mixed_acceptance_length(
    stats: Mapping[str, Sequence[DecodeStats]], weights: Mapping[str, float]
) -> float:
    """Tokens a round of the mix, from the stats of each component's requests.

    Components without a round say nothing and are left out; nan when none has one.
    """
    tokens = rounds = 0.0
    for name, requests in stats.items():
        if requests:
            share = weights[name] / len(requests)
            tokens += share * sum(s.num_tokens for s in requests)
            rounds += share * sum(s.num_rounds for s in requests)
    return tokens / rounds if rounds else float("nan")


def mixed_interval(
    stats: Mapping[str, Sequence[DecodeStats]],
    weights: Mapping[str, float],
    *,
    num_bootstrap: int,
    confidence: float,
    seed: int,
) -> tuple[float, float]:
    """The percentile interval of `mixed_acceptance_length`: requests resampled by component."""
    return _percentiles(_resampled(stats, weights, num_bootstrap, seed), confidence)


def mixed_change(
    before: Mapping[str, Sequence[DecodeStats]],
    after: Mapping[str, Sequence[DecodeStats]],
    weights: Mapping[str, float],
    *,
    num_bootstrap: int,
    confidence: float,
    seed: int,
) -> tuple[float, float, float]:
    """By what share `mixed_acceptance_length` changes, and the percentile interval of that.

    Both are of the same requests in the same order, which are drawn together.
    """
    change = mixed_acceptance_length(after, weights) / mixed_acceptance_length(before, weights) - 1
    old, new = (_resampled(stats, weights, num_bootstrap, seed) for stats in (before, after))
    return change, *_percentiles(new / old - 1, confidence)


def _resampled(
    stats: Mapping[str, Sequence[DecodeStats]],
    weights: Mapping[str, float],
    num_bootstrap: int,
    seed: int,
) -> Float[Tensor, " resamples"]:
    """Acceptance lengths of the mix; nan where what was drawn has no round."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.zeros(num_bootstrap, dtype=torch.float64)
    rounds = torch.zeros(num_bootstrap, dtype=torch.float64)
    for name, requests in stats.items():
        n = len(requests)
        if n == 0:
            continue
        drawn = torch.randint(n, (num_bootstrap, n), generator=generator)
        share = weights[name] / n
        counts = torch.tensor([(s.num_tokens, s.num_rounds) for s in requests]).double()
        tokens += share * counts[drawn, 0].sum(1)
        rounds += share * counts[drawn, 1].sum(1)
    return tokens / rounds


def _percentiles(values: Float[Tensor, " resamples"], confidence: float) -> tuple[float, float]:
    tail = (1 - confidence) / 2
    low, high = torch.nanquantile(values, torch.tensor([tail, 1 - tail]).double()).tolist()
    return low, high
