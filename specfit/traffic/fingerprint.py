"""Counts of the traffic, the noise they are released with, and the profile read from them.

The unit of privacy is one request: data sets that differ in one request more or less (add or
remove) give any release with probabilities within a factor exp(epsilon). Someone who sent n of a
window's requests is protected by n times epsilon; sessions are no unit here, since bounding what
one adds would mean keeping its id, and ids do not leave the request.

A request adds at most 1 to one cell of each table, so each table has an L1 sensitivity of 1, and
all m tables together m. (Laplace(2/epsilon) for all would be right for two tables.) The budget is
split: table i gets epsilon_i = epsilon x its share and noise with P(x) ~ exp(-epsilon_i |x|); by
composition the release costs the sum, epsilon. Which tables there are follows from the
configuration alone. Requests that cannot be read are a cell of the component table, and the number
of requests is the noisy sum of that table: there is no exact figure in a release.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specfit.traffic.config import ComponentConfig, ProfileConfig, Quantiles
from specfit.traffic.draw import P90
from specfit.traffic.simplex import Values, project, projected_counts, unmixed

KIND = "fingerprint"
MAX_COMPONENTS = 64
TOKEN_BUCKETS = 21  # [2^b, 2^(b+1)) tokens, the last one open: 2^20 and more
TURN_BUCKETS = 11  # the same of a request's turn
# Of epsilon, by table: most to what a profile needs most.
SHARES = {
    "component": Fraction(1, 4),
    "new_tokens": Fraction(1, 4),
    "output_tokens": Fraction(1, 4),
    "turn": Fraction(3, 20),
    "tools": Fraction(1, 20),
    "accepted": Fraction(1, 20),
}
# In standard deviations of the noise: cells below FLOOR are taken for empty, and figures of a
# component are given where its requests in a table are above CLEAR times those of their sum. Chosen
# on drawn traffic of six components and 5,000 requests, where medians and p90s of lengths then
# came back with a standard deviation of 4 to 10 %, those of turns 16 %.
FLOOR = 2.0
CLEAR = 16.0
NUM_BOOTSTRAP = 1000
CONFIDENCE = 0.95
EDGE = 1e-9  # shares below it, or within it of 1, have no normal quantile to speak of


@dataclass(frozen=True)
class Request:
    """What is counted of one request; the text stays in memory, for the classifier, and in no repr.

    `accepted` is the number of rounds, then the rounds in which each drafted position was kept.
    """

    text: str = field(repr=False)
    has_tools: bool
    turn: int  # 1: the session's first request
    prompt_tokens: int | None
    new_share: float  # of the prompt: what came after the answer before; 1 of a first request
    output_tokens: int | None
    accepted: tuple[int, ...] | None


class Counts:
    """Exact counts, in memory only."""

    def __init__(self, profile: ProfileConfig, num_draft_tokens: int) -> None:
        """`num_draft_tokens` of the rounds whose accepted tokens are counted; 0: none are.

        Raises:
            ValueError: there are too many components.
        """
        self.prefix_tokens = {c.name: c.shared_prefix_tokens for c in profile.components}
        self.components = list(self.prefix_tokens)
        n = len(self.components)
        if n > MAX_COMPONENTS:
            raise ValueError(f"profile.components must be at most {MAX_COMPONENTS}, got {n}")
        shapes: dict[str, tuple[int, ...]] = {
            "component": (n + 1,),  # the last: could not be read
            "new_tokens": (n, 2, TOKEN_BUCKETS),  # of first requests, of later ones
            "output_tokens": (n, TOKEN_BUCKETS),
            "turn": (n, TURN_BUCKETS),
            "tools": (n, 2),
        }
        if num_draft_tokens:
            shapes["accepted"] = (n, num_draft_tokens + 1)
        self.tables = {name: np.zeros(shape, np.int64) for name, shape in shapes.items()}

    def add(self, request: Request, component: str, generator: random.Random) -> None:
        """Counts a request: at most 1 in each table.

        Of its rounds one is drawn, and counted by how many tokens it accepted: otherwise a long
        answer would move many counts. So requests weigh alike there, whatever their rounds.
        """
        i = self.components.index(component)
        tables = self.tables
        tables["component"][i] += 1
        tables["turn"][i, _bucket(request.turn, TURN_BUCKETS)] += 1
        tables["tools"][i, int(request.has_tools)] += 1
        if request.output_tokens is not None:
            tables["output_tokens"][i, _bucket(request.output_tokens, TOKEN_BUCKETS)] += 1
        if request.prompt_tokens is not None:
            later = request.turn > 1
            bucket = _bucket(self._new_tokens(request, component), TOKEN_BUCKETS)
            tables["new_tokens"][i, int(later), bucket] += 1
        if "accepted" in tables and request.accepted is not None and request.accepted[0] > 0:
            drawn = generator.randrange(request.accepted[0])
            kept = sum(rounds > drawn for rounds in request.accepted[1:])
            tables["accepted"][i, min(kept, tables["accepted"].shape[1] - 1)] += 1

    def _new_tokens(self, request: Request, component: str) -> int:
        """Of a later request, what is new; of a first one, what follows the shared prefix."""
        assert request.prompt_tokens is not None
        if request.turn > 1:
            return round(request.prompt_tokens * request.new_share)
        # A prompt that is shorter than the prefix does not have it: another component's, probably.
        after = request.prompt_tokens - self.prefix_tokens[component]
        return after if after > 0 else request.prompt_tokens

    def add_unreadable(self) -> None:
        """Counts a request of which nothing else is known."""
        self.tables["component"][-1] += 1


@dataclass(frozen=True)
class Release:
    """Counts with their noise; what is computed from them costs nothing more."""

    components: list[str]
    epsilon: float
    epsilons: dict[str, Fraction]  # by table; their sum is epsilon
    tables: dict[str, NDArray[np.float64]]


def release(counts: Counts, epsilon: float, generator: random.Random) -> Release:
    """All tables with noise; `epsilon` is what they cost together.

    `generator` must be `random.SystemRandom()`, whose bits are the operating system's and have no
    seed, for anything that leaves the machine.
    """
    epsilons = split(epsilon, list(counts.tables))
    tables = {}
    for name, table in counts.tables.items():
        noisy = [n + noise(epsilons[name], generator) for n in table.ravel().tolist()]
        tables[name] = np.array(noisy, np.float64).reshape(table.shape)
    return Release(counts.components, epsilon, epsilons, tables)


def split(epsilon: float, tables: Sequence[str]) -> dict[str, Fraction]:
    """The epsilon of each table, in the proportions of SHARES; their sum is `epsilon`, exactly."""
    total = sum(SHARES[name] for name in tables)
    return {name: Fraction(str(epsilon)) * SHARES[name] / total for name in tables}


def noise(epsilon: Fraction, generator: random.Random) -> int:
    """An integer x with P(x) = (1 - a) / (1 + a) · a^|x|, a = exp(-epsilon), exactly.

    Laplace noise in floating point is not what the proof speaks of: the numbers that a logarithm
    of a random double can reach have gaps, and which gaps a sum falls into tells the count (Mironov
    2012, "On significance of the least significant bits"). Here counts, noise and sums are
    integers, and epsilon = s / t is a fraction: every decision compares integers with uniform
    integers, so the probabilities are those above and no rounding takes part. How long it takes
    depends on what is drawn, not on the count it is added to.

    Source: Canonne, Kamath, Steinke 2020, arXiv:2004.00010, algorithms 1 and 2 (scale t / s).
    """
    s, t = epsilon.numerator, epsilon.denominator
    while True:
        fine = generator.randrange(t)
        if not _bernoulli_exp(fine, t, generator):
            continue
        coarse = 0
        while _bernoulli_exp(1, 1, generator):
            coarse += 1
        size = (fine + t * coarse) // s
        negative = generator.randrange(2) == 1
        if not (negative and size == 0):  # else 0 would come twice as often
            return -size if negative else size


def _bernoulli_exp(numerator: int, denominator: int, generator: random.Random) -> bool:
    """True with probability exp(-numerator / denominator), which lies in [0, 1] as a fraction."""
    k = 1
    while generator.randrange(denominator * k) < numerator:
        k += 1
    return k % 2 == 1


def record(found: Release, confusion: Values, *, min_requests: int, window: str) -> dict[str, Any]:
    """fingerprint.json: what the noisy counts say of the traffic, or that they are suppressed.

    Suppressing looks at the noisy number of requests only, so that it tells nothing more. Weights
    are the counts by predicted component, taken back through the classifier's confusion (rows:
    true) and projected onto the simplex. Their intervals are from resampling requests and noise
    (`NUM_BOOTSTRAP` times); what the confusion itself may be off is not in them.
    """
    n = len(found.components)
    by_component = found.tables["component"][:n]
    result: dict[str, Any] = {
        "kind": KIND,
        "window": window,
        "unit": "request",
        "neighbours": "one request added or removed",
        "noise": "two-sided geometric",
        "epsilon": found.epsilon,
        "min_requests": min_requests,
        "suppressed": bool(by_component.sum() < min_requests),
    }
    if result["suppressed"]:
        return result
    counts = {
        name: {"epsilon": float(found.epsilons[name]), "counts": table.astype(np.int64).tolist()}
        for name, table in found.tables.items()
    }
    weights, low, high = _weights(by_component, confusion, float(found.epsilons["component"]))
    gain = np.linalg.norm(np.linalg.inv(confusion), axis=0)  # of noise, by taking counts back
    rows: list[dict[str, Any]] = [
        {"name": name, "weight": weights[i], "weight_low": low[i], "weight_high": high[i]}
        for i, name in enumerate(found.components)
    ]
    for name, table in found.tables.items():
        if name != "component":
            deviations = gain * _deviation(float(found.epsilons[name]))
            true = unmixed(confusion, table)
            for i, row in enumerate(rows):
                row.update(_described(name, true[i], float(deviations[i])))
    return result | {
        "num_requests": int(by_component.sum()),
        "num_unreadable": int(found.tables["component"][n]),
        "confidence": CONFIDENCE,
        "confusion": confusion.tolist(),  # on public data; in the order of the components
        "components": rows,
        "counts": counts,
    }


def _weights(
    counts: Values, confusion: Values, epsilon: float
) -> tuple[list[float], list[float], list[float]]:
    """The mix, and the ends of its intervals."""

    def mix(observed: Values) -> Values:
        true = unmixed(confusion, observed)
        return project(true / max(1.0, true.sum()))

    generator = np.random.default_rng(0)  # of what was released already: no secret
    predicted = projected_counts(counts)
    num = round(float(predicted.sum()))
    drawn = generator.multinomial(num, predicted / predicted.sum(), NUM_BOOTSTRAP)
    sizes = generator.geometric(-np.expm1(-epsilon), (2, *drawn.shape))
    resampled = np.stack([mix(row) for row in (drawn + sizes[0] - sizes[1]).astype(np.float64)])
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(resampled, [tail, 1 - tail], axis=0)
    return mix(counts).tolist(), low.tolist(), high.tolist()


def _deviation(epsilon: float) -> float:
    """Standard deviation of the noise."""
    ratio = math.exp(-epsilon)
    return math.sqrt(2 * ratio) / (1 - ratio)


def _described(name: str, row: Values, deviation: float) -> dict[str, Any]:
    """Figures of one component, from its counts in table `name`; None where noise hides them.

    `deviation` is the standard deviation of the noise in a count.
    """
    match name:
        case "new_tokens":
            return {
                "prompt_tokens": _lengths(row[0], deviation),
                "new_tokens_per_turn": _lengths(row[1], deviation),
            }
        case "output_tokens":
            return {name: _lengths(row, deviation)}
        case "turn":
            return {"turns": _turns(row, deviation)}
    shares = _shares(row, deviation)
    if name == "tools":
        return {"tools_share": None if shares is None else float(shares[1])}
    survival = None if shares is None else (shares[::-1].cumsum()[::-1])[1:].tolist()
    return {
        "acceptance_by_position": survival,
        "acceptance_length": None if survival is None else 1 + sum(survival),
    }


def _shares(row: Values, deviation: float) -> Values | None:
    """Of the cells; None where there are too few requests to tell them from the noise."""
    if row.sum() <= CLEAR * deviation * math.sqrt(len(row)):
        return None
    seen: Values = np.where(row > FLOOR * deviation, row, 0.0)
    return seen / float(seen.sum())


def _lengths(row: Values, deviation: float) -> dict[str, float] | None:
    """Median and p90 of the lengths.

    Between the edges of buckets the logarithm of a length goes with the normal quantile of its
    share: exact for a lognormal, and near for others.
    """
    shares = _shares(row, deviation)
    if shares is None:
        return None
    below = np.clip(shares.cumsum(), EDGE, 1 - EDGE).tolist()
    normal = [NormalDist().inv_cdf(share) for share in [EDGE, *below]]
    at = np.interp([0.0, P90], normal, np.arange(len(normal), dtype=np.float64))
    median, p90 = (2**at).tolist()
    return {"median": median, "p90": p90}


def _turns(row: Values, deviation: float) -> dict[str, float] | None:
    """Median and p90 of a session's requests, though no session is known.

    A session has one t-th request if it has t or more: requests at turn t over requests at turn 1
    are the share of sessions with at least t (windows cut as many sessions at their start as at
    their end). In a bucket [2^b, 2^(b+1)) that is a mean over its turns, which stands for sessions
    beyond their middle; turns are rounded, so t or more are those beyond t - 1/2.
    """
    shares = _shares(row, deviation)
    if shares is None or shares[0] == 0:
        return None
    widths = 2.0 ** np.arange(len(row))
    beyond = np.minimum.accumulate(shares / widths / shares[0])
    if beyond[1] <= 0.1:  # nine of ten sessions have one request
        return {"median": 1.0, "p90": 1.0}
    # Between the middles as between the edges of lengths; np.interp wants ascending normals.
    below = np.clip(1 - beyond, EDGE, 1 - EDGE).tolist()
    normal = [NormalDist().inv_cdf(share) for share in below]
    at = np.exp(np.interp([0.0, P90], normal, np.log(1.5 * widths - 1)))
    median, p90 = np.maximum(at, 1.0).tolist()
    return {"median": median, "p90": p90}


def _bucket(count: int, num_buckets: int) -> int:
    return min(max(1, count).bit_length(), num_buckets) - 1


def fingerprint_profile(found: dict[str, Any], base: ProfileConfig) -> ProfileConfig:
    """`base` with the weights and lengths of a release.

    What a release does not say stays: names, sources, temperatures, prefixes, think times, arrivals
    and lengths that noise hides. Components without weight are left out.

    Raises:
        ValueError: it is no release, was suppressed, or is of other components.
    """
    if found.get("kind") != KIND:
        raise ValueError("profile.from_fingerprint must be a fingerprint.json, got another file")
    if found["suppressed"]:
        raise ValueError(
            "profile.from_fingerprint must be a release, got a window that was suppressed: it has "
            f"fewer than {found['min_requests']} requests"
        )
    rows = {row["name"]: row for row in found["components"]}
    names = [c.name for c in base.components]
    if set(rows) != set(names):
        raise ValueError(
            f"profile.components must be those of the fingerprint ({', '.join(rows)}), "
            f"got {', '.join(names)}"
        )
    kept = [_component(c, rows[c.name]) for c in base.components if rows[c.name]["weight"] > 0]
    return replace(base, components=kept, from_fingerprint=None)


def _component(base: ComponentConfig, row: dict[str, Any]) -> ComponentConfig:
    def found(name: str) -> Quantiles | None:
        quantiles: Quantiles | None = getattr(base, name)
        return quantiles if row[name] is None else Quantiles(**row[name])

    turns = found("turns")
    several = turns is not None and turns.p90 > 1
    return replace(
        base,
        weight=row["weight"],
        prompt_tokens=found("prompt_tokens"),
        output_tokens=found("output_tokens"),
        turns=turns if several else None,
        new_tokens_per_turn=found("new_tokens_per_turn") if several else None,
        think_seconds=base.think_seconds if several else None,
    )
