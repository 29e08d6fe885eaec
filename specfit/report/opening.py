"""What a reader decides from: the first screen of the report."""

from collections.abc import Callable
from typing import Any

from specfit.report.acceptance import MIX, NGRAM, PLAIN, Acceptance, Traffic
from specfit.report.document import Block, Cell, Column, Table, Text, Tile, Tiles
from specfit.report.figures import (
    NOT_MEASURED,
    Estimate,
    compare,
    count,
    is_all,
    ratio,
    share,
    yes_no,
)

PROPOSER_WORDS = {PLAIN: "plain decoding", NGRAM: "ngram"}


def title(measured: Acceptance, provenance: dict[str, Any]) -> str:
    """The head and its target, by name."""
    return f"{measured.head} for {provenance.get('target', {}).get('name', 'an unnamed target')}"


def lead(measured: Acceptance, provenance: dict[str, Any]) -> str:
    """The profile and the machine."""
    profile = provenance.get("profile", {}).get("name", "unnamed")
    device = measured.device or "an unnamed device"
    if measured.num_threads is not None:
        device += f" with {count(measured.num_threads, 'thread')}"
    if measured.engine:
        device += f", by {'transformers' if measured.engine == 'torch' else 'our kernels'}"
    ks = sorted({r["num_draft_tokens"] for r in measured.rows if r["proposer"] == measured.head})
    choice = f", the fastest of {', '.join(map(str, ks))}," if len(ks) > 1 else ""
    return (
        f"A draft head fitted to the traffic profile {profile}; measured on held-out prompts at "
        f"k = {measured.num_draft_tokens}{choice} on {device}."
    )


def opening(measured: Acceptance, provenance: dict[str, Any], parity: list[Any]) -> list[Block]:
    """The answers: a sentence, four tiles, one table."""
    return [
        Text(verdict(measured)),
        Tiles(
            [
                _length_tile(measured),
                _speed_tile(measured),
                _equality_tile(measured),
                _parity_tile(parity),
            ]
        ),
        _table(measured, _request_shares(provenance)),
    ]


def verdict(measured: Acceptance) -> str:
    """Which of the proposers is faster, as far as the intervals tell."""
    traffic = measured.traffic[0]
    words = {1: "faster than", 0: "not told apart from", -1: "slower than"}
    parts = []
    for rival in (PLAIN, NGRAM):
        order = compare(measured.speed(measured.head, traffic), measured.speed(rival, traffic))
        relation = "not compared with" if order is None else words[order]
        parts.append(f"{relation} {PROPOSER_WORDS[rival]}")
    sentence = f"On {_place(traffic)}, {measured.head} is {' and '.join(parts)} in tokens/s."
    components = [t for t in measured.traffic if t.component != MIX]
    won = [t for t in components if measured.fastest(t) == (measured.head, [])]
    if measured.fastest(traffic) is not None and len(components) > 1:
        sentence += f" It is the fastest, its interval apart, on {len(won)} of {len(components)} "
        sentence += "kinds of traffic."
    return sentence


def _place(traffic: Traffic) -> str:
    name = "the mix" if traffic.component == MIX else traffic.component
    if traffic.temperature is None:
        return f"{name}, each component at its own temperature"
    return f"{name} at temperature {traffic.temperature:g}"


def _length_tile(measured: Acceptance) -> Tile:
    traffic = measured.traffic[0]
    return Tile(
        f"Acceptance length at k = {measured.num_draft_tokens}",
        measured.length(measured.head, traffic),
        ["tokens a round", *_beside(measured, measured.length)],
    )


def _speed_tile(measured: Acceptance) -> Tile:
    traffic = measured.traffic[0]
    speed = measured.speed(measured.head, traffic)
    gain = ratio(speed, measured.speed(PLAIN, traffic))
    return Tile(
        "Tokens/s, one request at a time",
        speed,
        [f"speed-up {gain}", *_beside(measured, measured.speed)],
    )


def _beside(measured: Acceptance, figure: Callable[[str, Traffic], Estimate]) -> list[str]:
    return [f"{name} {figure(name, measured.traffic[0])}" for name in measured.proposers[1:]]


def _equality_tile(measured: Acceptance) -> Tile:
    equal = measured.equal_plain()
    label = "Greedy output equal to plain"
    if equal is None:
        return Tile(label, NOT_MEASURED, ["no answer was decoded both ways"])
    if equal:
        rows = (measured.row(measured.head, t) for t in measured.traffic if t.component != MIX)
        compared = [row for row in rows if row and row.get("outputs_equal_plain") is not None]
        num_prompts = sum(row.get("num_prompts") or 0 for row in compared)
        return Tile(label, "yes", [f"token for token, on {count(num_prompts, 'prompt')}"])
    mine = [d for d in measured.differences if d["proposer"] == measured.head]
    num_answers = len({(d["component"], d["id"]) for d in mine})
    margins = [d["margin"] for d in mine if d.get("margin") is not None]
    widest = f"{max(margins):.2g}" if margins else NOT_MEASURED
    return Tile(label, "no", [f"{count(num_answers, 'answer')} apart", f"widest margin {widest}"])


def _parity_tile(parity: list[Any]) -> Tile:
    label = "Exports that draft the same tokens"
    checks = {row["engine"]: is_all(row.get("drafted_tokens_equal")) for row in parity}
    if not checks:
        return Tile(label, NOT_MEASURED, ["nothing was exported"])
    num_equal = sum(check is True for check in checks.values())
    details = [f"{engine}: {yes_no(check)}" for engine, check in checks.items()]
    return Tile(label, f"{num_equal} of {len(checks)}", details)


def _table(measured: Acceptance, request_shares: dict[str, float]) -> Table:
    names = measured.proposers
    rows: list[list[Cell]] = []
    for traffic in measured.traffic:
        row = measured.row(measured.head, traffic) or {}
        lengths: list[Cell] = [measured.length(name, traffic) for name in names]
        speeds: list[Cell] = [measured.speed(name, traffic) for name in names]
        rows.append(
            [
                traffic.component,
                traffic.temperature_text,
                *lengths,
                *speeds,
                _fastest(measured, traffic),
                _equal(row.get("outputs_equal_plain"), traffic),
                share(1.0 if traffic.component == MIX else request_shares.get(traffic.component)),
            ]
        )
    level = "" if measured.confidence is None else f"{100 * measured.confidence:g} % "
    return Table(
        f"By kind of traffic at k = {measured.num_draft_tokens}. In parentheses, the {level}"
        "interval, and of tokens/s the range of the prompts timed. "
        f"{MIX}: the mix that the profile describes. Fastest: of those whose intervals meet, any "
        "may be.",
        [
            Column("component"),
            Column("temperature", numeric=True),
            *(Column(name, numeric=True, group="acceptance length") for name in names),
            *(Column(name, numeric=True, group="tokens/s") for name in names),
            Column("fastest"),
            Column("equal to plain"),
            Column("requests", numeric=True),
        ],
        rows,
    )


def _fastest(measured: Acceptance, traffic: Traffic) -> str:
    found = measured.fastest(traffic)
    if found is None:
        return NOT_MEASURED
    best, rivals = found
    return " or ".join([best, *rivals])


def _equal(check: bool | None, traffic: Traffic) -> str:
    return "sampled" if check is None and (traffic.temperature or 0) > 0 else yes_no(check)


def _request_shares(provenance: dict[str, Any]) -> dict[str, float]:
    weights = {c["name"]: c["weight"] for c in provenance.get("profile", {}).get("components", [])}
    total = sum(weights.values())
    return {name: weight / total for name, weight in weights.items()}
