"""Confidence intervals of acceptance lengths, clustered by request.

Rounds of one answer are alike, so requests are resampled, each with all its rounds. Acceptance
length is pooled (tokens over rounds), never a mean of the requests' lengths. Requests without
rounds, whose answer was over after the prefill, say nothing and are left out.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specfit_serve.stats import DecodeStats


def acceptance_interval(
    stats_per_request: Sequence[DecodeStats], num_bootstrap: int, confidence: float, seed: int
) -> tuple[float, float]:
    """The percentile interval of the pooled acceptance length.

    Raises:
        ValueError: no request has a round.
    """
    stats = [s for s in stats_per_request if s.num_rounds > 0]
    drawn = resamples(len(stats), num_bootstrap, seed)
    return percentiles(_acceptance_lengths(stats, drawn), confidence)


def paired_difference_interval(
    a: Sequence[DecodeStats],
    b: Sequence[DecodeStats],
    num_bootstrap: int,
    confidence: float,
    seed: int,
) -> tuple[float, float]:
    """The percentile interval of a's pooled acceptance length minus b's, on the same requests.

    Raises:
        ValueError: `a` and `b` are not equally long, or no request has rounds in both.
    """
    if len(a) != len(b):
        raise ValueError(f"paired stats must be of the same requests, got {len(a)} and {len(b)}")
    pairs = [(x, y) for x, y in zip(a, b, strict=True) if x.num_rounds > 0 and y.num_rounds > 0]
    drawn = resamples(len(pairs), num_bootstrap, seed)
    differences = _acceptance_lengths([x for x, _ in pairs], drawn) - _acceptance_lengths(
        [y for _, y in pairs], drawn
    )
    return percentiles(differences, confidence)


def resamples(
    num_requests: int, num_bootstrap: int, seed: int
) -> Int[Tensor, "resamples requests"]:
    """Indices of what is drawn, with replacement, for each resample.

    Raises:
        ValueError: there is nothing to draw from.
    """
    if num_requests == 0:
        raise ValueError("an interval must be of at least 1 request with rounds, got 0")
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(num_requests, (num_bootstrap, num_requests), generator=generator)


def _acceptance_lengths(
    stats: Sequence[DecodeStats], resamples: Int[Tensor, "resamples requests"]
) -> Float[Tensor, " resamples"]:
    tokens = torch.tensor([s.num_tokens for s in stats])
    rounds = torch.tensor([s.num_rounds for s in stats])
    return tokens[resamples].sum(1).double() / rounds[resamples].sum(1)


def percentiles(values: Float[Tensor, " resamples"], confidence: float) -> tuple[float, float]:
    """The interval that leaves as much of `values` below it as above."""
    tails = torch.tensor([(1 - confidence) / 2, (1 + confidence) / 2], dtype=values.dtype)
    low, high = values.quantile(tails).tolist()
    return low, high
