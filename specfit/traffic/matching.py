"""What a source has, taken so that lengths are as a profile wants them."""

from bisect import bisect_left
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np

from specfit.traffic.config import Quantiles
from specfit.traffic.draw import lognormal, quantile

Number = int | float  # checked annotations do not take an int for a float
SHARES = (0.1, 0.5, 0.9)  # at which quantiles are shown


def wanted_lengths(quantiles: Quantiles, num: int) -> list[float]:
    """`num` lengths that lie as the lognormal does: its quantiles at (i + 1/2) / num, ascending."""
    return [quantile(quantiles, (i + 0.5) / num) for i in range(num)]


def nearest(lengths: Sequence[Number], wanted: Sequence[Number]) -> list[int]:
    """Indices into `lengths`, one for each of `wanted`, each used once.

    Longest first, since those are scarce: each takes the nearest by ratio of what is left, of two
    equally near the earlier. Where `lengths` are fewer, the shortest of `wanted` go without.
    """
    order = sorted(range(len(lengths)), key=lambda i: (lengths[i], i))
    free = [lengths[i] for i in order]
    taken: list[int] = []
    for want in sorted(wanted, reverse=True)[: len(lengths)]:
        at = bisect_left(free, want)
        # What lies below and above; as ratios, for lengths that spread over decades.
        if at == len(free) or (at > 0 and want * want <= free[at - 1] * free[at]):
            at -= 1
        # The first of equals.
        at = bisect_left(free, free[at])
        free.pop(at)
        taken.append(order.pop(at))
    return taken


def distance(values: Sequence[Number], quantiles: Quantiles) -> float:
    """Kolmogorov and Smirnov's: the largest gap between what is there and the lognormal, 0 to 1."""
    mu, sigma = lognormal(quantiles)
    found = np.sort(np.asarray(values, dtype=np.float64))
    n = len(found)
    if sigma == 0:
        # All mass at the median: what is on its other side is the gap.
        below, at_most = (found < quantiles.median).mean(), (found <= quantiles.median).mean()
        return float(max(below, 1 - at_most))
    law = NormalDist(mu, sigma)
    cdf = np.array([law.cdf(x) for x in np.log(np.maximum(found, 1e-9))])
    above, under = np.arange(1, n + 1) / n - cdf, cdf - np.arange(n) / n
    return float(max(above.max(), under.max()))


def quantiles_of(values: Sequence[Number]) -> list[float]:
    """Of a sample, at SHARES."""
    return [float(x) for x in np.quantile(np.asarray(values, dtype=np.float64), SHARES)]


def quantiles_wanted(quantiles: Quantiles) -> list[float]:
    """Of the lognormal, at SHARES."""
    return [quantile(quantiles, share) for share in SHARES]
