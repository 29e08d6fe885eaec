"""The sections on what was measured: acceptance, positions, speed, equality, context."""

import json
from collections.abc import Callable
from typing import Any

from specfit.report.acceptance import PLAIN, Acceptance, Row, Traffic
from specfit.report.document import Block, Cell, Column, Image, Section, Table, Text
from specfit.report.figures import (
    DASH,
    NOT_MEASURED,
    estimate,
    number,
    percent_change,
    share,
    yes_no,
)

MAX_DIFFERENCES = 100  # rows on the page; report.json holds all

SETTING = [
    Column("component"),
    Column("temperature", numeric=True),
    Column("k", numeric=True),
    Column("proposer"),
]


def sections(measured: Acceptance, images: dict[str, Image]) -> list[Section]:
    """Every figure of `acceptance.json`, a row a setting."""
    found = [
        _acceptance(measured, images),
        _positions(measured, images),
        _speed(measured, images),
        _equality(measured),
    ]
    if measured.heads:
        found.insert(1, _heads(measured))
    if any(row.get("by_context") for row in measured.rows):
        found.append(_context(measured, images))
    return found


def _setting(row: Row) -> list[Cell]:
    temperature = Traffic(row["component"], row["temperature"]).temperature_text
    k = NOT_MEASURED if row["num_draft_tokens"] is None else str(row["num_draft_tokens"])
    return [row["component"], temperature, DASH if row["proposer"] == PLAIN else k, row["proposer"]]


def _rows(measured: Acceptance, cells: Callable[[Row], list[Cell]]) -> list[list[Cell]]:
    return [_setting(row) + cells(row) for row in measured.ordered]


def _pictures(images: dict[str, Image], *names: str) -> list[Block]:
    return [images[name] for name in names if name in images]


def _acceptance(measured: Acceptance, images: dict[str, Image]) -> Section:
    def cells(row: Row) -> list[Cell]:
        return [
            estimate(row, "acceptance_length"),
            number(row.get("acceptance_length_per_request_mean"), 2),
            number(row.get("first_20_acceptance_length"), 2),
            number(row.get("num_prompts")),
            number(row.get("num_rounds")),
            number(row.get("num_tokens")),
            number(row.get("num_looped")),
        ]

    table = Table(
        "Acceptance length pools all rounds; beside it, the mean of the requests' own and that of "
        "their first 20 tokens, for which no interval is measured.",
        [
            *SETTING,
            *(
                Column(title, numeric=True)
                for title in (
                    "acceptance length",
                    "mean of requests",
                    "first 20 tokens",
                    "prompts",
                    "rounds",
                    "tokens",
                    "looped",
                )
            ),
        ],
        _rows(measured, cells),
    )
    return Section("Acceptance", [*_pictures(images, "acceptance_length"), table])


def _heads(measured: Acceptance) -> Section:
    cells: list[list[Cell]] = [
        [
            row["component"],
            "own" if row["temperature"] is None else f"{row['temperature']:g}",
            number(row["num_draft_tokens"]),
            row["instead_of"],
            number(row["num_prompts"]),
            number(row["acceptance_length_before"], 3),
            number(row["acceptance_length_after"], 3),
            percent_change(row, "acceptance_length_change"),
        ]
        for row in measured.heads
    ]
    titles = ["prompts", "of that head", f"of {measured.head}", "change, %"]
    table = Table(
        f"Acceptance length of another head and of {measured.head}, the fitted one, on the same "
        "prompts of the served target; what the fitted one changes, with the interval of pairs. "
        "full_precision: fitted in the same way to the target before it was quantized.",
        [*SETTING[:3], Column("instead of"), *(Column(title, numeric=True) for title in titles)],
        cells,
    )
    return Section("Fitted head and other heads", [table])


def _positions(measured: Acceptance, images: dict[str, Image]) -> Section:
    rows = [row for row in measured.ordered if row["proposer"] != PLAIN]
    longest = max(row["num_draft_tokens"] for row in rows)

    def at_positions(row: Row, key: str) -> list[Cell]:
        values = row.get(key) or [None] * row["num_draft_tokens"]
        return [*(share(v) for v in values), *[DASH] * (longest - len(values))]

    keys = {
        "survival": "acceptance_by_position",
        "conditional acceptance": "conditional_acceptance",
    }
    columns = [
        Column(str(i + 1), numeric=True, group=group) for group in keys for i in range(longest)
    ]
    cells = [
        _setting(row) + [cell for key in keys.values() for cell in at_positions(row, key)]
        for row in rows
    ]
    caption = (
        "Share of the rounds that keep a position (survival), and share of those that reached it "
        "(conditional acceptance). No interval is measured by position."
    )
    return Section(
        "Positions",
        [*_pictures(images, "survival"), Table(caption, [*SETTING, *columns], cells)],
    )


def _speed(measured: Acceptance, images: dict[str, Image]) -> Section:
    def cells(row: Row) -> list[Cell]:
        return [
            estimate(row, "tokens_per_second", digits=1),
            DASH if row["proposer"] == PLAIN else measured.speed_up(row),
            share(row.get("draft_time_share")),
        ]

    table = Table(
        "One request at a time; the gain shrinks as a server's batch grows.",
        [
            *SETTING,
            Column("tokens/s", numeric=True),
            Column("speed-up", numeric=True),
            Column("draft time", numeric=True),
        ],
        _rows(measured, cells),
    )
    return Section("Speed", [*_pictures(images, "tokens_per_second"), table])


def _equality(measured: Acceptance) -> Section:
    checked = [row for row in measured.ordered if row.get("outputs_equal_plain") is not None]
    blocks: list[Block] = []
    if checked:
        blocks.append(
            Table(
                "Whether every greedy answer equals plain decoding's, token for token.",
                [*SETTING, Column("equal to plain")],
                [[*_setting(row), yes_no(row["outputs_equal_plain"])] for row in checked],
            )
        )
    else:
        blocks.append(Text(f"Equality of greedy output with plain decoding: {NOT_MEASURED}."))
    if measured.differences:
        blocks.append(_differences(measured.differences))
    elif checked:
        blocks.append(Text("No answer differs."))
    return Section("Equality with plain decoding", blocks)


def _differences(differences: list[Any]) -> Table:
    widest = sorted(differences, key=lambda d: -(d.get("margin") or 0.0))[:MAX_DIFFERENCES]
    rows: list[list[Cell]] = [
        [
            d["component"],
            d["proposer"],
            str(d["id"]),
            number(d.get("position")),
            NOT_MEASURED if d.get("margin") is None else f"{d['margin']:.3g}",
            json.dumps(d.get("plain_token"), ensure_ascii=False),
            json.dumps(d.get("token"), ensure_ascii=False),
        ]
        for d in widest
    ]
    count = f"{len(differences):,}"
    if len(widest) < len(differences):
        count = f"the {len(widest)} widest of {count}; report.json holds all"
    return Table(
        f"Answers that part from plain decoding's ({count}), the widest margin first. A margin of "
        "rounding size is a tie that another order of summation breaks; a wide one is a fault.",
        [
            Column("component"),
            Column("proposer"),
            Column("answer"),
            Column("position", numeric=True),
            Column("margin", numeric=True),
            Column("plain token"),
            Column("token"),
        ],
        rows,
    )


def _context(measured: Acceptance, images: dict[str, Image]) -> Section:
    rows = [row for row in measured.ordered if row.get("by_context")]
    ranges = sorted({(b["low"], b["high"]) for row in rows for b in row["by_context"]})

    def by_range(row: Row, key: str, digits: int) -> list[Cell]:
        values = {(b["low"], b["high"]): b.get(key) for b in row["by_context"]}
        return [number(values[r], digits) if r in values else DASH for r in ranges]

    columns = [
        Column(f"{number(low)}{DASH}{number(high)}", numeric=True, group=group)
        for group in ("acceptance length", "rounds")
        for low, high in ranges
    ]
    cells = [
        _setting(row) + by_range(row, "acceptance_length", 2) + by_range(row, "num_rounds", 0)
        for row in rows
    ]
    table = Table(
        "Acceptance length by the tokens of context that a round starts from. No interval is "
        "measured by context.",
        [*SETTING, *columns],
        cells,
    )
    return Section("Context length", [*_pictures(images, "context"), table])
