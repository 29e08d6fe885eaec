"""Figures of acceptance from the recorded rounds of requests."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from specfit.mix import Sessions, mixed_acceptance_length, mixed_change, mixed_interval
from specfit.turns import session_id
from specfit_serve.bootstrap import acceptance_interval
from specfit_serve.stats import DecodeStats, Round

CONTEXT_EDGES = [0, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144]
FIRST_TOKENS = 20


@dataclass(frozen=True)
class Measured:
    """One answer."""

    id: str
    component: str
    proposer: str
    temperature: float
    num_draft_tokens: int
    num_prompt_tokens: int
    tokens: list[int]
    finish_reason: str
    loop_start: int | None
    rounds: list[list[int]]  # start, num_drafted, num_kept of each
    turn: int = 0  # of its session

    @property
    def session(self) -> str:
        """The id of its session's first request."""
        return session_id(self.id)

    def stats(self, first: int = 0, last: int | None = None) -> DecodeStats:
        """Of the rounds that start at answer tokens first..last-1, those of a loop left out."""
        end = min(x for x in (last, self.loop_start, len(self.tokens) + 1) if x is not None)
        rounds = [Round(*r) for r in self.rounds if first <= r[0] < end]
        return DecodeStats.from_rounds(rounds, self.num_draft_tokens)


def by_session(measured: Sequence[Measured]) -> dict[str, list[DecodeStats]]:
    """The stats of the requests of each session."""
    found: dict[str, list[DecodeStats]] = {}
    for m in measured:
        found.setdefault(m.session, []).append(m.stats())
    return found


@dataclass(frozen=True)
class Timed:
    """One answer that was decoded alone, for its speed."""

    component: str
    proposer: str
    temperature: float
    num_draft_tokens: int
    num_tokens: int  # emitted by rounds
    num_rounds: int
    num_prompt_tokens: int
    target_seconds: float
    draft_seconds: float


@dataclass(frozen=True)
class Intervals:
    """How intervals are made."""

    num_bootstrap: int
    confidence: float
    seed: int


def component_row(
    measured: Sequence[Measured], timed: Sequence[Timed], intervals: Intervals
) -> dict[str, Any]:
    """The figures of one component, proposer, temperature and k."""
    first = measured[0]
    per_request = [m.stats() for m in measured]
    pooled = sum(per_request[1:], per_request[0])
    row = _row(first.component, first, pooled, len(measured))
    row["num_sessions"] = len({m.session for m in measured})
    if pooled.num_rounds:
        sessions = [sum(own[1:], own[0]) for own in by_session(measured).values()]
        low, high = acceptance_interval(
            sessions, intervals.num_bootstrap, intervals.confidence, intervals.seed
        )
        lengths = [s.acceptance_length for s in per_request if s.num_rounds]
        row |= {
            "acceptance_length_low": low,
            "acceptance_length_high": high,
            "acceptance_length_per_request_mean": sum(lengths) / len(lengths),
        }
    early = [m.stats(last=FIRST_TOKENS) for m in measured]
    early_pooled = sum(early[1:], early[0])
    row["first_20_acceptance_length"] = _length(early_pooled)
    row["by_context"] = _by_context(measured)
    row["by_turn"] = _by_turn(measured)
    row["num_looped"] = sum(m.loop_start is not None for m in measured)
    return row | _speed(timed)


def mix_row(
    measured: Mapping[str, Sequence[Measured]],
    timed: Mapping[str, Sequence[Timed]],
    weights: Mapping[str, float],
    intervals: Intervals,
) -> dict[str, Any]:
    """The same of the whole profile: tokens over rounds, components by their share of requests."""
    stats = {name: list(by_session(own).values()) for name, own in measured.items()}
    everything = [s for own in stats.values() for session in own for s in session]
    first = next(iter(measured.values()))[0]
    row = _row("all", first, sum(everything[1:], everything[0]), len(everything))
    if len({own[0].temperature for own in measured.values()}) > 1:
        row["temperature"] = None
    if row["num_rounds"]:
        low, high = mixed_interval(
            stats,
            weights,
            num_bootstrap=intervals.num_bootstrap,
            confidence=intervals.confidence,
            seed=intervals.seed,
        )
        row |= {
            "acceptance_length": mixed_acceptance_length(stats, weights),
            "acceptance_length_low": low,
            "acceptance_length_high": high,
        }
    # By position a mix has no one figure here: its rounds are weighted, not counted.
    for name in ("acceptance_by_position", "conditional_acceptance"):
        del row[name]
    row["num_sessions"] = sum(map(len, stats.values()))
    row["num_looped"] = sum(m.loop_start is not None for own in measured.values() for m in own)
    return row | _mixed_speed(stats, timed, weights)


def changes(
    before: Sequence[Measured],
    after: Sequence[Measured],
    weights: Mapping[str, float],
    intervals: Intervals,
) -> list[dict[str, Any]]:
    """How acceptance length changes on the same requests, of each component and of the mix.

    A component none of whose requests has a round on both sides is left out.
    """
    others = {m.id: m for m in after}
    by_component: dict[str, dict[str, list[tuple[DecodeStats, DecodeStats]]]] = {}
    for m in before:
        pair = (m.stats(), others[m.id].stats())
        if pair[0].num_rounds and pair[1].num_rounds:
            by_component.setdefault(m.component, {}).setdefault(m.session, []).append(pair)
    rows = []
    shown = [[name] for name in weights if name in by_component]
    for names in [*shown, [*by_component]] if len(shown) > 1 else shown:
        old, new = (
            {n: [[pair[i] for pair in own] for own in by_component[n].values()] for n in names}
            for i in (0, 1)
        )
        change, low, high = mixed_change(old, new, weights, **asdict(intervals))
        rows.append(
            {
                "component": names[0] if len(names) == 1 else "all",
                "num_prompts": sum(len(own) for found in old.values() for own in found),
                "acceptance_length_before": mixed_acceptance_length(old, weights),
                "acceptance_length_after": mixed_acceptance_length(new, weights),
                "acceptance_length_change": change,
                "acceptance_length_change_low": low,
                "acceptance_length_change_high": high,
            }
        )
    return rows


def worst_component(rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The row of the fitted head, at its best k, whose interval begins lowest.

    Raises:
        ValueError: no component of a head was measured.
    """
    own = [r for r in rows if r.get("coverage") is not None and r["acceptance_length"] is not None]
    if not own:
        raise ValueError("acceptance.json must have a component of a head with rounds, got none")
    best: dict[tuple[str, float], Mapping[str, Any]] = {}
    for row in own:
        place = (row["component"], row["temperature"])
        if row["proposer"] == own[0]["proposer"] and (
            place not in best or row["acceptance_length_low"] > best[place]["acceptance_length_low"]
        ):
            best[place] = row
    return min(best.values(), key=lambda row: float(row["acceptance_length_low"]))


def _row(component: str, first: Measured, stats: DecodeStats, num_prompts: int) -> dict[str, Any]:
    return {
        "component": component,
        "proposer": first.proposer,
        "temperature": first.temperature,
        "num_draft_tokens": first.num_draft_tokens,
        "num_prompts": num_prompts,
        "num_rounds": stats.num_rounds,
        "num_tokens": stats.num_tokens,
        "acceptance_length": _length(stats),
        "acceptance_by_position": list(stats.acceptance_by_position) if stats.num_rounds else None,
        "conditional_acceptance": list(stats.conditional_acceptance),
    }


def _length(stats: DecodeStats) -> float | None:
    return stats.acceptance_length if stats.num_rounds else None


def _by_context(measured: Sequence[Measured]) -> list[dict[str, Any]]:
    """Rounds by the number of tokens before them, prompt included."""
    rows = []
    for low, high in pairwise(CONTEXT_EDGES):
        parts = [
            m.stats(first=max(0, low - m.num_prompt_tokens), last=high - m.num_prompt_tokens)
            for m in measured
            if high > m.num_prompt_tokens
        ]
        stats = sum(parts[1:], parts[0]) if parts else None
        if stats is not None and stats.num_rounds:
            rows.append(
                {
                    "low": low,
                    "high": high,
                    "acceptance_length": stats.acceptance_length,
                    "num_rounds": stats.num_rounds,
                }
            )
    return rows


def _by_turn(measured: Sequence[Measured]) -> list[dict[str, Any]]:
    """Rounds by the turn of the session that they are of, from 1."""
    rows = []
    for turn in sorted({m.turn for m in measured}):
        own = [m for m in measured if m.turn == turn]
        stats = sum((m.stats() for m in own[1:]), own[0].stats())
        if stats.num_rounds:
            row = {"turn": turn + 1, "num_prompts": len(own), "num_rounds": stats.num_rounds}
            rows.append(row | {"acceptance_length": stats.acceptance_length})
    return rows


def _speed(timed: Sequence[Timed]) -> dict[str, Any]:
    """Tokens a second of decoding alone, prefill left out; low and high are the range of prompts.

    A few prompts are too few to resample.
    """
    timed = [t for t in timed if t.num_tokens]
    if not timed:
        return {}
    draft = sum(t.draft_seconds for t in timed)
    seconds = draft + sum(t.target_seconds for t in timed)
    figures = {
        "tokens_per_second": sum(t.num_tokens for t in timed) / seconds,
        "draft_time_share": draft / seconds,
        # Of these answers alone, for whoever asks what a round took.
        "timed_acceptance_length": sum(t.num_tokens for t in timed)
        / sum(t.num_rounds for t in timed),
        "timed_context_tokens": sum(
            (t.num_prompt_tokens + t.num_tokens / 2) * t.num_tokens for t in timed
        )
        / sum(t.num_tokens for t in timed),
    }
    if len(timed) > 1:
        rates = [t.num_tokens / (t.draft_seconds + t.target_seconds) for t in timed]
        figures |= {"tokens_per_second_low": min(rates), "tokens_per_second_high": max(rates)}
    return figures


def _mixed_speed(
    stats: Mapping[str, Sessions],
    timed: Mapping[str, Sequence[Timed]],
    weights: Mapping[str, float],
) -> dict[str, Any]:
    """Of the mix; low and high if every prompt were its component's slowest, or its fastest."""
    speeds: dict[str, dict[str, float]] = {name: _speed(own) for name, own in timed.items()}
    if not all(speeds.values()):
        return {}
    # By component, tokens of the requests that one request of the mix stands for: of the answers
    # measured, since those timed are cut short.
    tokens: dict[str, float] = {}
    for name in timed:
        requests = [s.num_tokens for session in stats[name] for s in session]
        tokens[name] = weights[name] * sum(requests) / len(requests)

    def rate(figure: str) -> float:
        return sum(tokens.values()) / sum(tokens[n] / speeds[n][figure] for n in tokens)

    names = ["tokens_per_second"]
    if all("tokens_per_second_low" in speed for speed in speeds.values()):
        names += ["tokens_per_second_low", "tokens_per_second_high"]
    seconds = {n: tokens[n] / speeds[n]["tokens_per_second"] for n in tokens}
    draft = sum(seconds[n] * speeds[n]["draft_time_share"] for n in tokens)
    return {name: rate(name) for name in names} | {
        "draft_time_share": draft / sum(seconds.values())
    }
