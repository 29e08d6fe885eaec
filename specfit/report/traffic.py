"""The page of a traffic profile: what it is, drawn, and what the sources cover of it."""

from collections.abc import Callable, Mapping, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from specfit.report import pages, plots
from specfit.report.document import Block, Cell, Column, Document, Image, Section, Table, Text
from specfit.report.figures import (
    DASH,
    NOT_MEASURED,
    Number,
    estimate,
    number,
    share,
    yes_no,
)
from specfit.traffic.draw import Session

Record = Mapping[str, Any]

NUM_BINS = 40
QUANTITIES = {
    "prompt_tokens": "prompt tokens",
    "new_tokens_per_turn": "new tokens a turn",
    "turns": "turns",
    "shared_prefix_tokens": "shared prefix tokens",
}


def write_page(folder: Path, record: Record, sessions: Sequence[Session]) -> None:
    """Writes profile.html, profile.md and their plots."""
    images = [_mix(folder, record)]
    if sessions:
        images += [_lengths(folder, sessions), _arrivals(folder, sessions)]
    document = Document(
        f"The traffic profile {record['profile']['name']}",
        lead(record),
        [],
        [
            Section("What it is", [*images, what(record), *drawn(record)]),
            *logs(record["logs"]),
            coverage(record),
        ],
    )
    pages.write(folder, "profile", document)


def lead(record: Record) -> str:
    """Arrivals, promises and scale, in two sentences."""
    arrival, slo = record["arrival"], record["slo"]
    match arrival["kind"]:
        case "gamma":
            said = f"{arrival['rate']:g} sessions a second begin, at a cv of {arrival['cv']:g}"
        case "closed":
            said = f"{arrival['concurrency']} sessions are in flight at any time"
        case _:
            said = f"Sessions begin as in {arrival['file']}"
    text = f"{said}; promised are {slo['ttft_ms']:g} ms to the first token and {slo['itl_ms']:g} ms"
    text += " between tokens."
    if record["scale"] != 1 or record["max_turns"] is not None:
        text += f" For a small machine, contexts are divided by {record['scale']:g}"
        if record["max_turns"] is not None:
            text += f" and sessions end after {record['max_turns']} requests"
        text += "; answers are as long as they are."
    return text


def what(record: Record) -> Table:
    """Components with their shares."""
    rows: list[list[Cell]] = [
        [
            row["component"],
            share(row["requests"]),
            share(row["output_tokens"]),
            f"{row['temperature']:g}",
            ", ".join(row["sources"]),
        ]
        for row in record["rows"]
    ]
    return Table(
        "The components. A mix of requests is another mix of tokens: figures of the mix are tokens "
        "over rounds.",
        [
            Column("component"),
            Column("requests", numeric=True, group="share of the"),
            Column("output tokens", numeric=True, group="share of the"),
            Column("temperature", numeric=True),
            Column("sources"),
        ],
        rows,
    )


def drawn(record: Record) -> list[Block]:
    """What was drawn from it, with the prefix hits of an unbounded cache."""
    if not record["drawn"]:
        return [Text("Lengths are as the sources have them: there is nothing to draw.")]
    keys = ("prompt_tokens", "new_tokens", "output_tokens", "turns")
    rows: list[list[Cell]] = [
        [
            row["component"],
            number(row["num_sessions"]),
            number(row["num_requests"]),
            *(_three(row[key]) for key in keys),
            share(row["prefix_hit"]),
        ]
        for row in record["drawn"]
    ]
    arrivals = record["arrivals"]
    said = ""
    if arrivals is not None:
        said = f" Drawn: {arrivals['rate_per_second']:.3g} sessions/s, cv {arrivals['cv']:.2f}."
    return [
        Table(
            "Sessions drawn from the profile, on its scale: p10, median and p90. Prompts are "
            "whole: prefix, what came before and what is new. Prefix hits are those of an "
            f"unbounded cache.{said}",
            [
                Column("component"),
                Column("sessions", numeric=True),
                Column("requests", numeric=True),
                Column("prompt tokens", numeric=True),
                Column("new tokens, later turns", numeric=True),
                Column("output tokens", numeric=True),
                Column("turns", numeric=True),
                Column("prefix hits", numeric=True),
            ],
            rows,
        )
    ]


def logs(record: Record | None) -> list[Section]:
    """How the profile was fitted to a log, and how often the classifier is wrong."""
    if record is None:
        return []
    rows: list[list[Cell]] = [
        [
            row["name"],
            estimate({key: 100 * row[key] for key in row if key.startswith("weight")}, "weight", 1),
            number(row["num_sessions"]),
            ", ".join(row["from_base"]) or DASH,
            yes_no(row["few_sessions"]),
        ]
        for row in record["components"]
    ]
    said = (
        f"{number(record['num_requests'])} requests of {number(record['num_sessions'])} sessions "
        f"in {record['log']}."
    )
    if record["dropped"]:
        said += f" Not seen, and dropped: {', '.join(record['dropped'])}."
    blocks: list[Block] = [
        Text(" ".join([said, *record["notes"]])),
        Table(
            "Components of the log: shares of the requests in percent, corrected by the "
            "classifier's confusion, with 95 % intervals over sessions.",
            [
                Column("component"),
                Column("requests, %", numeric=True),
                Column("sessions", numeric=True),
                Column("as the base profile has it"),
                Column("few sessions"),
            ],
            rows,
        ),
    ]
    if record["confusion"] is not None:
        blocks.append(_confusion(record["confusion"]))
    return [Section("From logs", blocks)]


def _confusion(confusion: Record) -> Table:
    names = confusion["components"]
    return Table(
        "What the classifier takes requests for, in percent: a row a true component, on held-out "
        "texts of the public sources. Their wording is alike within a source, so real requests are "
        "mistaken more often than this.",
        [Column("true"), *(Column(name, numeric=True, group="predicted") for name in names)],
        [
            [name, *(number(100 * share, 1) for share in row)]
            for name, row in zip(names, confusion["rows"], strict=True)
        ],
    )


def coverage(record: Record) -> Section:
    """What the sources gave, beside what the profile asks for."""
    rows: list[list[Cell]] = [
        [
            row["component"],
            row["split"],
            QUANTITIES[row["quantity"]],
            DASH if row["wanted"] is None else _three(row["wanted"]),
            _three(row["got"]),
            NOT_MEASURED if row["distance"] is None else f"{row['distance']:.2f}",
            "as the sources are" if row["covered"] is None else yes_no(row["covered"]),
        ]
        for row in record["coverage"]
    ]
    return Section(
        "What the sources cover",
        [
            Table(
                "Lengths of the conversations that were taken, beside those wanted: p10, median "
                "and p90. Distance: Kolmogorov and Smirnov's, 0 to 1. What is not covered is "
                "measured on the nearest that there is.",
                [
                    Column("component"),
                    Column("split"),
                    Column("of"),
                    Column("wanted", numeric=True),
                    Column("taken", numeric=True),
                    Column("distance", numeric=True),
                    Column("covered"),
                ],
                rows,
            )
        ],
    )


def _three(values: Sequence[Number] | None) -> str:
    return DASH if values is None else " / ".join(number(round(v)) for v in values)


def _colors(num: int) -> list[str]:
    colors = [plots.BLUE, plots.ORANGE, plots.GREEN, plots.GREY, "#cc79a7", "#e69f00", "#56b4e9"]
    return list(islice(cycle(colors), num))


def _mix(folder: Path, record: Record) -> Image:
    rows = record["rows"]
    with matplotlib.rc_context(plots.STYLE):
        figure = Figure(figsize=(plots.WIDTH, 1.7), layout="constrained")
        axes = figure.subplots()
        for y, key in enumerate(("output_tokens", "requests")):
            left = 0.0
            for row, color in zip(rows, _colors(len(rows)), strict=True):
                name = row["component"] if y == 1 else None
                axes.barh(y, row[key], left=left, color=color, height=0.6, label=name)
                left += row[key]
        axes.set_yticks([0, 1], ["by output tokens", "by requests"])
        axes.set_xlim(0, 1)
        axes.xaxis.set_major_formatter(PercentFormatter(1))
        axes.legend(ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    plots.save(folder / "mix.png", figure)
    return Image(
        "mix.png",
        "Two stacked bars: the mix by requests, and by output tokens.",
        "The mix by requests, and what that is by output tokens.",
    )


def _lengths(folder: Path, sessions: Sequence[Session]) -> Image:
    names = list(dict.fromkeys(s.component for s in sessions))
    with matplotlib.rc_context(plots.STYLE):
        figure = Figure(figsize=(plots.WIDTH, 2.6), layout="constrained")
        panels = figure.subplots(1, 3)
        of: dict[str, Callable[[Session], list[int]]] = {
            "prompt tokens": lambda s: s.prompts(),
            "output tokens": lambda s: [turn.output_tokens for turn in s.turns],
            "turns a session": lambda s: [len(s.turns)],
        }
        for axes, (title, values) in zip(panels, of.items(), strict=True):
            found = {
                name: [v for s in sessions if s.component == name for v in values(s)]
                for name in names
            }
            most = max(max(own) for own in found.values())
            bins = np.geomspace(1, max(2, most), NUM_BINS)
            for name, color in zip(names, _colors(len(names)), strict=True):
                weights = np.full(len(found[name]), 1 / len(found[name]))
                axes.hist(
                    found[name], bins, weights=weights, histtype="step", color=color, label=name
                )
            axes.set_xscale("log")
            axes.set(title=title)
            axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        panels[0].legend(fontsize=7)
    plots.save(folder / "lengths.png", figure)
    return Image(
        "lengths.png",
        "Histograms of prompt tokens, output tokens and turns, by component.",
        "Drawn from the profile: shares of requests by length, and of sessions by turns.",
    )


def _arrivals(folder: Path, sessions: Sequence[Session]) -> Image:
    times = np.array([s.start_seconds for s in sessions])
    with matplotlib.rc_context(plots.STYLE):
        figure = Figure(figsize=(plots.WIDTH, 1.8), layout="constrained")
        axes = figure.subplots()
        axes.hist(times, bins=100, color=plots.BLUE)
        axes.set(xlabel="seconds", ylabel="sessions that begin")
    plots.save(folder / "arrivals.png", figure)
    return Image(
        "arrivals.png",
        "Histogram of the times at which sessions begin.",
        "When sessions begin, in a hundred steps: how they bunch.",
    )
