"""Of a simulated server: latencies and goodput by rate, and the best k at each."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from specfit.report import plots
from specfit.report.document import Block, Cell, Column, Image, Table
from specfit.report.figures import estimate, number, share

Row = Mapping[str, Any]
ALL = "all"


def blocks(folder: Path, rows: Sequence[Row]) -> list[Block]:
    """The plot, which goes to `folder`, and two tables; nothing of no rows."""
    own = [row for row in rows if row["kind"] == "simulated"]
    if not own:
        return []
    return [_plot(folder, own), _best(own), _by_component(own)]


def _best(rows: Sequence[Row]) -> Table:
    found: list[list[Cell]] = [
        [
            number(row["sessions_per_second"], 3),
            str(row["num_draft_tokens"]),
            estimate(_in_percent(row), "goodput_share", 1),
            number(row["goodput_requests_per_second"], 2),
            number(row["ttft_ms_mean"], 0),
            number(row["ttft_ms_p99"], 0),
            number(row.get("itl_ms_mean"), 1),
            number(row.get("itl_ms_p99"), 1),
            share(row["utilization"]),
            number(row["mean_batch"], 1),
            share(row["prefix_hit_rate"]),
        ]
        for row in rows
        if row["component"] == ALL and row["is_best_k"]
    ]
    return Table(
        "The profile's arrivals on a simulated server, by the rate at which sessions begin, with "
        "the k that meets most promises there. Promises are those of the profile's slo: a request "
        "counts if it meets both. 95 % intervals by batch means.",
        [
            Column("sessions/s", numeric=True),
            Column("best k", numeric=True),
            Column("promises met, %", numeric=True),
            Column("goodput, requests/s", numeric=True),
            Column("mean", numeric=True, group="TTFT, ms"),
            Column("p99", numeric=True, group="TTFT, ms"),
            Column("mean", numeric=True, group="ITL, ms"),
            Column("p99", numeric=True, group="ITL, ms"),
            Column("utilization", numeric=True),
            Column("batch", numeric=True),
            Column("prefix hits", numeric=True),
        ],
        found,
    )


def _in_percent(row: Row) -> dict[str, Any]:
    keys = ("goodput_share", "goodput_share_low", "goodput_share_high")
    return {key: 100 * row[key] for key in keys if key in row}


def _by_component(rows: Sequence[Row]) -> Table:
    rates = sorted({row["sessions_per_second"] for row in rows})
    middle = rates[len(rates) // 2]
    found: list[list[Cell]] = [
        [
            row["component"],
            number(row["num_requests"]),
            share(row["goodput_share"]),
            number(row["ttft_ms_p50"], 0),
            number(row["ttft_ms_p99"], 0),
            number(row.get("itl_ms_mean"), 1),
            number(row["latency_ms_p50"], 0),
            share(row["prefix_hit_rate"]),
        ]
        for row in rows
        if row["sessions_per_second"] == middle and row["is_best_k"] and row["component"] != ALL
    ]
    return Table(
        f"The same by component, at {number(middle, 3)} sessions/s.",
        [
            Column("component"),
            Column("requests", numeric=True),
            Column("promises met", numeric=True),
            Column("p50", numeric=True, group="TTFT, ms"),
            Column("p99", numeric=True, group="TTFT, ms"),
            Column("ITL, ms", numeric=True),
            Column("latency p50, ms", numeric=True),
            Column("prefix hits", numeric=True),
        ],
        found,
    )


def _plot(folder: Path, rows: Sequence[Row]) -> Image:
    ks = sorted({row["num_draft_tokens"] for row in rows})
    shades = matplotlib.colormaps["viridis"]
    with matplotlib.rc_context(plots.STYLE):
        figure = Figure(figsize=(plots.WIDTH, 2.6), layout="constrained")
        goodput, latency = figure.subplots(1, 2)
        for i, k in enumerate(ks):
            own = [r for r in rows if (r["num_draft_tokens"], r["component"]) == (k, ALL)]
            own = sorted(own, key=lambda row: float(row["sessions_per_second"]))
            rates = [row["sessions_per_second"] for row in own]
            color = plots.GREY if k == 0 else shades(0.15 + 0.7 * i / len(ks))
            label = "no drafts" if k == 0 else f"k = {k}"
            shares = [row["goodput_share"] for row in own]
            goodput.plot(rates, shares, "o-", color=color, label=label, markersize=3)
            latency.plot(
                rates, [row["latency_ms_mean"] for row in own], "o-", color=color, markersize=3
            )
        for axes in (goodput, latency):
            axes.set_xscale("log")
            axes.set_xlabel("sessions/s")
            axes.grid(axis="y")
        goodput.set(title="promises met", ylim=(0, 1.02))
        goodput.yaxis.set_major_formatter(PercentFormatter(1))
        latency.set(title="mean latency of a request, ms", yscale="log")
        goodput.legend(fontsize=7)
    plots.save(folder / "goodput.png", figure)
    return Image(
        "goodput.png",
        "Line plots over the rate of sessions: promises met, and mean latency, a line a k.",
        "The profile's arrivals simulated: how many requests meet both promises, and how long an "
        "answer takes, by the rate at which sessions begin and by k.",
    )
