"""A profile from the requests that a log shows."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from specfit.traffic.config import (
    ArrivalConfig,
    ArrivalKind,
    ComponentConfig,
    ProfileConfig,
    Quantiles,
)
from specfit.traffic.draw import mean_turns
from specfit.traffic.observed import Observed, new_tokens, sessions_of, think_seconds
from specfit.traffic.simplex import check_confusion, project, unmixed

MIN_REQUESTS = 50  # of a log: of fewer, a 90th percentile is that of five
FEW_SESSIONS = 20  # of a component: its quantiles are rough, and the record says so
PREFIX_SHARE = 0.25  # of a component's sessions that must share a prefix
NUM_BOOTSTRAP = 1000
LEAST_CV = 1e-3  # of arrivals: a gamma distribution knows no clockwork

Sessions = dict[str, list[list[Observed]]]  # by component


@runtime_checkable
class Classifies(Protocol):
    """What tells components apart: `specfit.traffic.classifier.Classifier`."""

    @property
    def components(self) -> list[str]:
        """Their names."""

    @property
    def confusion(self) -> NDArray[np.float64]:
        """P(predicted j | true i) at [i, j], by the order of `components`."""

    def component(self, text: str, has_tools: bool) -> str:
        """Of a request, by its first user message."""


@dataclass(frozen=True)
class Fitted:
    """A profile, and a record of how it came about: JSON values, no text and no ids."""

    profile: ProfileConfig
    record: dict[str, Any]


def fit_profile(
    requests: Iterable[Observed],
    base: ProfileConfig,
    classifier: Classifies | None,
    *,
    where: str = "the log",
    seed: int = 0,
) -> Fitted:
    """The profile of a log's traffic.

    Of a component these are fitted: its weight, medians and 90th percentiles of its lengths, turns
    and think times, and its shared prefix. Arrivals become a gamma distribution of the intervals
    between sessions. Names, sources, temperatures, slo, scale and max_turns are the base's, and so
    is what a log does not show; the record says what that is.

    A session's component is its first request's. Shares of the requests are corrected by the
    classifier's confusion, ŵ = project(C⁻¹h); lengths are not: those of a component are of what the
    classifier takes for it. A component that does not occur is left out.

    Args:
        requests: as a log has them.
        base: the profile to begin with; its components are what the classifier was trained on.
        classifier: may be None for a base of one component, and must know the base's otherwise.
        where: the log, for messages.
        seed: of the bootstrap.

    Raises:
        ValueError: there are too few requests, or their components cannot be told.
    """
    # The text goes as soon as it has said what it can.
    kept = [
        replace(request, text=None, component=_component(request, base, classifier, where))
        for request in requests
    ]
    if len(kept) < MIN_REQUESTS:
        raise ValueError(f"{where} must have at least {MIN_REQUESTS} requests, got {len(kept)}")
    sessions = sessions_of(kept)
    by_component: Sessions = defaultdict(list)
    for session in sessions:
        by_component[session[0].component or ""].append(session)
    weights = _weights(by_component, base, classifier, seed)
    arrival, arrival_row = _arrival(sessions, base.arrival)
    components, rows = _components(by_component, base, weights)
    profile = replace(
        base, components=components, arrival=arrival, from_logs=None, from_fingerprint=None
    )
    occurring = {row["name"] for row in rows}
    record = {
        "num_requests": len(kept),
        "num_sessions": len(sessions),
        "components": rows,
        "dropped": [c.name for c in base.components if c.name not in occurring],
        "arrival": arrival_row,
        "confusion": _confusion(classifier) if len(base.components) > 1 else None,
        "notes": _notes(kept, arrival_row["fitted"]),
    }
    return Fitted(profile, record)


def _component(
    request: Observed, base: ProfileConfig, classifier: Classifies | None, where: str
) -> str:
    names = [c.name for c in base.components]
    if len(names) == 1:
        return names[0]
    if classifier is None or request.text is None:
        raise ValueError(
            f"profile.components must be one where {where} has requests without text, since "
            f"nothing else tells components apart, got {', '.join(names)}; begin with profile=local"
        )
    return classifier.component(request.text, request.has_tools)


def _weights(
    by_component: Sessions,
    base: ProfileConfig,
    classifier: Classifies | None,
    seed: int,
) -> dict[str, tuple[float, float, float]]:
    """Of each component, its share of the requests and the ends of that share's 95 % interval.

    The interval is of sessions drawn again, with the confusion as it was measured.
    """
    names = [c.name for c in base.components]
    if classifier is None or len(names) == 1:
        return dict.fromkeys(names, (1.0, 1.0, 1.0))
    if sorted(classifier.components) != sorted(names):
        known = ", ".join(classifier.components)
        raise ValueError(
            f"profile.components must be those of the classifier ({known}), got {', '.join(names)}"
        )
    names = classifier.components
    check_confusion(classifier.confusion, names)
    num_turns = [[len(session) for session in by_component[name]] for name in names]
    turns = np.array([n for own in num_turns for n in own], dtype=np.float64)
    label = np.repeat(np.arange(len(names)), [len(own) for own in num_turns])

    def shares(drawn: NDArray[np.intp]) -> NDArray[np.float64]:
        counts = np.bincount(label[drawn], weights=turns[drawn], minlength=len(names))
        return project(unmixed(classifier.confusion, counts / counts.sum()))

    generator = np.random.default_rng(seed)
    drawn = [shares(generator.integers(0, len(turns), len(turns))) for _ in range(NUM_BOOTSTRAP)]
    low, high = np.percentile(drawn, [2.5, 97.5], axis=0)
    weights = shares(np.arange(len(turns)))
    return {
        name: (float(weights[i]), float(low[i]), float(high[i])) for i, name in enumerate(names)
    }


def _confusion(classifier: Classifies | None) -> dict[str, Any]:
    """What shares were corrected by."""
    assert classifier is not None, "_component() has refused that"
    return {"components": classifier.components, "rows": classifier.confusion.tolist()}


def _components(
    by_component: Sessions, base: ProfileConfig, weights: dict[str, tuple[float, float, float]]
) -> tuple[list[ComponentConfig], list[dict[str, Any]]]:
    """The components that occur, and what the record says of each."""
    components, rows = [], []
    for component in base.components:
        own = by_component.get(component.name, [])
        weight, low, high = weights[component.name]
        if weight > 0 and own:
            fitted, row = _fitted(component, own)
            components.append(fitted)
            rows.append(row | {"weight": weight, "weight_low": low, "weight_high": high})
    total = sum(row["weight"] for row in rows)
    for fitted, row in zip(components, rows, strict=True):
        fitted.weight = row["weight"] / total
        row["mean_turns_of_profile"] = mean_turns(fitted, base.max_turns)
    return components, rows


def _fitted(
    base: ComponentConfig, sessions: list[list[Observed]]
) -> tuple[ComponentConfig, dict[str, Any]]:
    """The component with what its sessions show, and how many of each figure there were."""
    prefix, num_sharing = _shared_prefix([s[0] for s in sessions])
    pairs = [pair for s in sessions for pair in pairwise(s)]
    # In the sessions that do not share it, too, so that whole prompts stay as long as they are.
    prompts = [max(1, s[0].prompt_tokens - prefix) for s in sessions]
    turns = _quantiles([len(s) for s in sessions])
    assert turns is not None
    several = turns.p90 > 1
    added = _quantiles([n for p in pairs if (n := new_tokens(*p)) is not None])
    waited = _quantiles([t for p in pairs if (t := think_seconds(*p)) is not None])
    answers = [r.output_tokens for s in sessions for r in s if r.output_tokens is not None]
    outputs = _quantiles([max(1, n) for n in answers])
    fitted = replace(
        base,
        prompt_tokens=_quantiles(prompts),
        output_tokens=outputs or base.output_tokens,
        turns=turns if several else None,
        new_tokens_per_turn=added or base.new_tokens_per_turn if several else None,
        think_seconds=waited or base.think_seconds if several else None,
        shared_prefix_tokens=prefix,
    )
    row = {
        "name": base.name,
        "num_requests": sum(map(len, sessions)),
        "num_sessions": len(sessions),
        "num_answers_with_length": len(answers),
        "num_sessions_with_prefix": num_sharing,
        # A lognormal of two quantiles need not have the mean: where these differ, shares of the
        # requests drawn from the profile are still its weights, but sessions are not as long.
        "mean_turns": sum(map(len, sessions)) / len(sessions),
        "few_sessions": len(sessions) < FEW_SESSIONS,
        "from_base": [
            name
            for name, found in (
                ("output_tokens", outputs),
                ("new_tokens_per_turn", added),
                ("think_seconds", waited),
            )
            if found is None and getattr(fitted, name) is not None
        ],
    }
    return fitted, row


def _quantiles(values: Sequence[int] | Sequence[float]) -> Quantiles | None:
    """Of the sample, between neighbours as numpy has them; None of no values."""
    if not values:
        return None
    middle, high = np.quantile(np.asarray(values, dtype=np.float64), [0.5, 0.9]).tolist()
    return Quantiles(middle, high)


def _shared_prefix(first: list[Observed]) -> tuple[int, int]:
    """Tokens of the shared prefix of sessions, by their first requests, and how many begin so.

    It is the longest one that at least a quarter of the sessions, and two, begin with, short of a
    whole prompt; its tokens are the median over those.
    """
    ends: dict[int, list[int]] = defaultdict(list)
    for request in first:
        for link in request.links:
            if link.end_tokens < request.prompt_tokens:
                ends[link.digest].append(link.end_tokens)
    enough = max(2, math.ceil(PREFIX_SHARE * len(first)))
    shared = [(round(median(e)), len(e)) for e in ends.values() if len(e) >= enough]
    return max(shared, default=(0, 0))


def _arrival(
    sessions: list[list[Observed]], base: ArrivalConfig
) -> tuple[ArrivalConfig, dict[str, Any]]:
    """Gamma arrivals with the rate and the cv of the sessions' intervals, or the base's."""
    begun = [s[0].arrival_seconds for s in sessions]
    starts = sorted(t for t in begun if t is not None)
    intervals = np.diff(starts)
    if len(starts) < len(sessions) or len(intervals) < 2 or intervals.sum() <= 0:
        return base, {"fitted": False}
    rate = len(intervals) / float(intervals.sum())
    cv = max(LEAST_CV, float(intervals.std() / intervals.mean()))
    arrival = ArrivalConfig(kind=ArrivalKind.gamma, rate=rate, cv=cv, concurrency=base.concurrency)
    return arrival, {"fitted": True, "rate": rate, "cv": cv, "num_intervals": len(intervals)}


def _notes(requests: list[Observed], knows_arrivals: bool) -> list[str]:
    """What a reader of the record should know of the log, in sentences."""
    notes = []
    known = Counter(r.output_tokens is not None for r in requests)
    if known[False]:
        notes.append(
            f"{known[False]} of {len(requests)} requests are logged without the answer's length."
        )
    if all(r.think_seconds is None and r.finished_seconds is None for r in requests):
        notes.append(
            "The log does not say when answers ended: think times have the answers in them."
        )
    stamps = [r.arrival_seconds for r in requests if r.arrival_seconds is not None]
    if not knows_arrivals:
        notes.append("Time stamps do not say when sessions began: arrivals are the base profile's.")
    elif all(t == int(t) for t in stamps):
        notes.append(
            "Time stamps are whole seconds: shorter intervals and think times are not seen."
        )
    return notes
