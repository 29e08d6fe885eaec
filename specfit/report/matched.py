"""Which traffic it was, how well the head matches it, where it is slow and why, and what to do."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from specfit.report.acceptance import MIX, NGRAM, Acceptance, Traffic
from specfit.report.document import Block, Cell, Column, Section, Table, Text
from specfit.report.figures import (
    DASH,
    NOT_MEASURED,
    Estimate,
    compare,
    number,
    share,
)

Record = Mapping[str, Any]

# What is said to be why: thresholds of this page, which decide words and no figure.
LEAST_COVERAGE = 0.97  # of an answer's tokens that the draft vocabulary has
LEAST_TRAINED = 0.5  # of its share of the tokens that a component has in the training
MOST_DISTANCE = 0.2  # Kolmogorov and Smirnov's, of lengths from those that are wanted
LEAST_ROUNDS = 100  # of which a component's figures are


@dataclass(frozen=True)
class Matched:
    """One component."""

    component: str
    requests: float
    tokens: float
    rounds: float  # share of all rounds: of the latency
    training: float
    length: Estimate
    coverage: float | None
    reasons: list[str]


def matched(record: Record, measured: Acceptance) -> list[Matched]:
    """Every component of the profile that was measured, the largest share of the rounds first."""
    found = []
    by_name = {t.component: t for t in measured.traffic if t.component != MIX}
    for fitted in record["fit"]["mixture"]:
        traffic = by_name.get(fitted["component"])
        row = None if traffic is None else measured.row(measured.head, traffic)
        if traffic is None or row is None or not row.get("acceptance_length"):
            continue
        found.append(
            Matched(
                traffic.component,
                fitted["requests"],
                fitted["tokens"],
                fitted["tokens"] / row["acceptance_length"],
                fitted["taken"],
                measured.length(measured.head, traffic),
                row.get("coverage"),
                list(_reasons(record, measured, traffic, fitted, row)),
            )
        )
    total = sum(m.rounds for m in found)
    found = [replace(m, rounds=m.rounds / total) for m in found]
    return sorted(found, key=lambda m: -m.rounds)


def section(record: Record, measured: Acceptance) -> Section:
    """The first section of the report."""
    found = matched(record, measured)
    return Section(
        "Traffic", [Text(_slowest(found)), _table(found), *_turns(measured), *_next(record, found)]
    )


def _table(found: Sequence[Matched]) -> Table:
    rows: list[list[Cell]] = [
        [
            m.component,
            share(m.requests),
            share(m.tokens),
            share(m.rounds),
            share(m.training),
            m.length,
            NOT_MEASURED if m.coverage is None else share(m.coverage),
            "; ".join(m.reasons) or DASH,
        ]
        for m in found
    ]
    return Table(
        "What each component is of the traffic, and of the time: rounds are what takes it. A "
        "component whose share of the rounds is above that of its tokens is slower than the mix.",
        [
            Column("component"),
            Column("requests", numeric=True, group="share of the"),
            Column("tokens", numeric=True, group="share of the"),
            Column("rounds", numeric=True, group="share of the"),
            Column("training", numeric=True, group="share of the"),
            Column("acceptance length", numeric=True),
            Column("can be drafted", numeric=True),
            Column("why"),
        ],
        rows,
    )


def _slowest(found: Sequence[Matched]) -> str:
    if not found:
        return f"By component: {NOT_MEASURED}."
    if len(found) == 1:
        return f"The traffic is of one kind, {found[0].component}."
    worst = min(found, key=lambda m: m.length.value or 0.0)
    best = max(found, key=lambda m: m.length.value or 0.0)
    apart = compare(worst.length, best.length)
    relation = "is slowest" if apart == -1 else "seems slowest, within the intervals,"
    return (
        f"{worst.component} {relation} with an acceptance length of {worst.length}, against "
        f"{best.length} on {best.component}. Most of the time, {share(found[0].rounds)} of the "
        f"rounds, goes to {found[0].component}."
    )


def _reasons(
    record: Record, measured: Acceptance, traffic: Traffic, fitted: Record, row: Record
) -> list[str]:
    found = []
    coverage = row.get("coverage")
    if coverage is not None and coverage < LEAST_COVERAGE:
        found.append(f"{share(1 - coverage)} of its tokens cannot be drafted")
    if fitted["capped"]:
        found.append(f"training {fitted['capped']}: too few answers")
    elif fitted["taken"] < LEAST_TRAINED * fitted["tokens"]:
        found.append("little of it in the training")
    ngram = measured.row(NGRAM, traffic)
    if ngram is not None and (ngram.get("acceptance_length") or 0) >= row["acceptance_length"]:
        found.append("answers repeat prompts: n-grams draft as well")
    if (row["temperature"] or 0) > 0:
        found.append(f"sampled at {row['temperature']:g}")
    far = [
        one["quantity"].replace("_", " ")
        for one in record["prompts"].get("lengths", [])
        if (one["component"], one["split"]) == (traffic.component, "test")
        and (one["distance"] or 0) > MOST_DISTANCE
    ]
    if far:
        found.append(f"measured on other lengths than wanted ({', '.join(far)})")
    if row["num_rounds"] < LEAST_ROUNDS:
        found.append(f"few rounds measured ({row['num_rounds']})")
    return found


def _turns(measured: Acceptance) -> list[Block]:
    """Acceptance by the turn of a session, where sessions have several."""
    rows: list[list[Cell]] = []
    for traffic in measured.traffic:
        row = measured.row(measured.head, traffic)
        by_turn = [] if row is None else row.get("by_turn") or []
        if len(by_turn) > 1:
            rows += [
                [
                    traffic.component,
                    str(one["turn"]),
                    number(one["acceptance_length"], 2),
                    number(one["num_prompts"]),
                    number(one["num_rounds"]),
                ]
                for one in by_turn
            ]
    if not rows:
        return []
    return [
        Table(
            "By the turn of a session, without an interval: later turns have what the target said "
            "before in their context.",
            [
                Column("component"),
                Column("turn", numeric=True),
                Column("acceptance length", numeric=True),
                Column("requests", numeric=True),
                Column("rounds", numeric=True),
            ],
            rows,
        )
    ]


def _next(record: Record, found: Sequence[Matched]) -> list[Block]:
    """What to do, as commands."""
    key = record["provenance"].get("keys", {}).get("measure", "KEY")
    steps = []
    scarce = [m.component for m in found if any("too few answers" in r for r in m.reasons)]
    if scarce:
        steps.append(
            f"Give {', '.join(scarce)} more conversations: a source of the component, or a larger "
            "data.num_train."
        )
    if any("cannot be drafted" in reason for m in found for reason in m.reasons):
        steps.append("Enlarge speculator.draft_vocab_size.")
    if len(found) > 1:
        steps.append(
            "Train where time can still be saved: fit.mixture=recoverable "
            f"fit.measured=artifacts/measure/{key} (fit.ceilings has what specialists reach)."
        )
    if any("n-grams draft as well" in reason for m in found for reason in m.reasons):
        steps.append("Serve with the suffix tree beside the head (`hybrid` in stage=bench).")
    best = [
        row
        for row in record["latency"]["rows"]
        if row["kind"] == "best" and row["component"] in (MIX, *(m.component for m in found[:1]))
    ]
    if best:
        alone = min(best, key=lambda row: (row["component"] != MIX, row["concurrency"]))
        steps.append(
            f"Serve with k = {alone['best_k']} at a concurrency of {alone['concurrency']}; what k "
            "is best under load is under Predicted latency."
        )
    steps.append(
        "Compare new traffic with this one: specfit stage=drift drift.new=LOG or FINGERPRINT."
    )
    return [Text("What to do next. " + " ".join(steps))]
