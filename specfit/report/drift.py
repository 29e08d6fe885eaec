"""The page on drift: the verdict, and the two profiles side by side."""

import json
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from specfit.report import pages, plots
from specfit.report.document import (
    Block,
    Cell,
    Column,
    Definitions,
    Document,
    Image,
    Section,
    Table,
    Tile,
    Tiles,
)
from specfit.report.figures import (
    DASH,
    NOT_MEASURED,
    Number,
    estimate,
    number,
    percent_change,
    share,
)

Record = dict[str, Any]
SIDES = ("old", "new")
VERDICTS = {
    "keep": "keep the draft model",
    "refit": "refit the draft model",
    "retrain": "train the draft model anew",
}
TERMS = {
    "acceptance length": "Tokens emitted a round, the target's own included: of a mix, tokens over "
    "rounds, from each component's measured length and the tokens that its requests bring.",
    "total variation": "Half of the sum of differences between two mixes: the share that moved.",
    "Jensen-Shannon": "What one request tells of which of the two mixes it is from, 0 to 1 bit.",
    "Kolmogorov-Smirnov": "The largest difference between the shares of two distributions that lie "
    "below a length, 0 to 1.",
    "interval": "95 %, from those of the components' measured acceptance lengths, as lognormals; "
    "errors of the profiles' weights and lengths are not in it.",
}


def write_page(folder: Path) -> None:
    """drift.html, drift.md and drift.png, from drift.json in the folder."""
    record = json.loads((folder / "drift.json").read_text(encoding="utf-8"))
    document = Document(
        f"Drift from {record['old']} to {record['new']}",
        f"Verdict: {VERDICTS[record['verdict']]}. {record['reason']}",
        [_tiles(record)],
        [
            Section("The mixes", [_plot(folder, record), _mixes(record)]),
            Section("Lengths", [_lengths(record)]),
            Section("What the words mean", [Definitions(TERMS)]),
        ],
    )
    pages.write(folder, "drift", document)


def _tiles(record: Record) -> Block:
    distances = record["distances"]
    tiles = [
        Tile(
            "total variation of the mixes",
            number(distances["total_variation_by_requests"], 3),
            [
                f"by tokens: {number(distances['total_variation_by_tokens'], 3)}",
                f"Jensen-Shannon: {number(distances['jensen_shannon_bits'], 4)} bits",
            ],
        )
    ]
    acceptance = record["acceptance"]
    if acceptance is not None:
        k = acceptance["num_draft_tokens"]
        tiles += [
            Tile(
                "change of acceptance length, %",
                _in_percent(acceptance, "acceptance_length_change"),
                [
                    f"k = {k}",
                    f"old: {estimate(acceptance, 'acceptance_length_old')}",
                    f"new: {estimate(acceptance, 'acceptance_length_new')}",
                ],
            ),
            Tile(
                "change of time a token, %",
                _in_percent(acceptance, "ms_per_token_change"),
                [
                    f"{side}: {number(acceptance.get(f'ms_per_token_{side}'), 2)} ms"
                    for side in SIDES
                ],
            ),
        ]
    return Tiles(tiles)


def _in_percent(row: Record, key: str) -> str:
    return percent_change(row, key) if key in row else NOT_MEASURED


def _mixes(record: Record) -> Table:
    unmeasured = (record["acceptance"] or {}).get("unmeasured_new", {})
    rows: list[list[Cell]] = [
        [
            row["component"],
            *(share(row[f"request_share_{side}"]) for side in SIDES),
            *(_or_dash(row[f"token_share_{side}"]) for side in SIDES),
            *(_prefix(row[f"shared_prefix_tokens_{side}"]) for side in SIDES),
            "no" if row["component"] in unmeasured or record["acceptance"] is None else "yes",
        ]
        for row in record["components"]
    ]
    return Table(
        "Each component's share of the requests and of the output tokens, and the tokens that its "
        "sessions begin with.",
        [
            Column("component"),
            *(
                Column(side, numeric=True, group=group)
                for group in ("requests", "tokens", "shared prefix")
                for side in SIDES
            ),
            Column("acceptance measured"),
        ],
        rows,
    )


def _or_dash(value: Number | None) -> str:
    return DASH if value is None else share(value)


def _prefix(tokens: Number | None) -> str:
    return DASH if tokens is None else number(tokens)


def _lengths(record: Record) -> Table:
    rows: list[list[Cell]] = [
        [
            f"{row['component']}: {length['length'].replace('_', ' ')}",
            *(_quantile(length[side], q) for side in SIDES for q in ("median", "p90")),
            DASH
            if length["kolmogorov_smirnov"] is None
            else number(length["kolmogorov_smirnov"], 3),
        ]
        for row in record["components"]
        for length in row["lengths"]
        if length["old"] or length["new"]
    ]
    return Table(
        "Lengths that a profile gives, in tokens, requests or seconds as their names say.",
        [
            Column("length"),
            *(Column(q, numeric=True, group=side) for side in SIDES for q in ("median", "p90")),
            Column("Kolmogorov-Smirnov", numeric=True),
        ],
        rows,
    )


def _quantile(quantiles: dict[str, Number] | None, name: str) -> str:
    return DASH if quantiles is None else f"{quantiles[name]:,.4g}"


def _plot(folder: Path, record: Record) -> Image:
    rows = record["components"][::-1]  # the first on top
    with matplotlib.rc_context(plots.STYLE):
        figure = Figure(figsize=(plots.WIDTH, 1.0 + 0.5 * len(rows)), layout="constrained")
        axes = figure.subplots()
        for side, offset, color in (("old", 0.2, plots.GREY), ("new", -0.2, plots.BLUE)):
            shares = [100 * row[f"request_share_{side}"] for row in rows]
            axes.barh([y + offset for y in range(len(rows))], shares, 0.36, color=color, label=side)
        axes.set_yticks(range(len(rows)), [row["component"] for row in rows])
        axes.set_xlabel("share of the requests, %")
        axes.grid(axis="x")
        figure.legend(loc="outside upper left", ncols=2)
    plots.save(folder / "drift.png", figure)
    return Image(
        "drift.png",
        "Bar chart of each component's share of the requests, old and new.",
        "Shares of the requests by component: old grey, new blue.",
    )
