"""The plots of a report: one style, colours that the colour-blind tell apart, intervals drawn."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, PercentFormatter

from specfit.report.acceptance import MIX, NGRAM, PLAIN, Acceptance, Traffic
from specfit.report.document import Image
from specfit.report.figures import Estimate, Number, estimate

INK = "#1b1f24"
QUIET = "#5b6470"
RULE = "#d8dde3"
BLUE, ORANGE, GREEN, GREY = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#7a828c",
)  # Okabe and Ito's, and a grey
LOOKS = {PLAIN: (GREY, "s"), NGRAM: (ORANGE, "^")}  # colour and marker
DRAFT_MODEL_LOOK = (BLUE, "o")
OTHER_HEAD_LOOK = (GREEN, "D")

STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9.0,
    "axes.edgecolor": QUIET,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "axes.axisbelow": True,
    "grid.color": RULE,
    "grid.linewidth": 0.7,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "xtick.color": QUIET,
    "ytick.color": QUIET,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "savefig.dpi": 160,
}
WIDTH = 8.4  # inches


def measured_plots(folder: Path, measured: Acceptance) -> dict[str, Image]:
    """Acceptance, survival, speed and, where it was measured, context: one PNG each."""
    k = measured.num_draft_tokens
    images = {
        "acceptance_length": _save(
            folder / "acceptance_length.png",
            _lengths(measured),
            f"Dot plot of acceptance length by kind of traffic and proposer at k = {k}.",
            f"Acceptance length at k = {k}, with intervals; plain decoding emits one a round.",
        ),
        "survival": _save(
            folder / "survival.png",
            _survival(measured),
            f"Line plots of survival by drafted position at k = {k}, a panel a kind of traffic.",
            f"Survival at k = {k}: how much of the draft is kept. A curve's points sum to what "
            "drafting adds to a round.",
        ),
        "tokens_per_second": _save(
            folder / "tokens_per_second.png",
            _speeds(measured),
            f"Bar chart of tokens a second by kind of traffic and proposer at k = {k}.",
            f"Tokens/s at k = {k}, one request at a time, with intervals.",
        ),
    }
    if any(row.get("by_context") for row in measured.rows):
        images["context"] = _save(
            folder / "context.png",
            _contexts(measured),
            f"Line plots of acceptance length by tokens of context at k = {k}.",
            f"Acceptance length at k = {k} by the context that a round starts from.",
        )
    return images


def _window(num_steps: int) -> int:
    return max(1, num_steps // 50)


def _smoothed(values: list[Number]) -> list[Number]:
    """Means over the last `_window` values, over fewer at the start."""
    window = _window(len(values))
    parts = [values[max(0, i + 1 - window) : i + 1] for i in range(len(values))]
    return [sum(part) / len(part) for part in parts]


def training_plot(
    folder: Path, log: list[dict[str, Any]], evals: list[dict[str, Any]], kept_step: int | None
) -> dict[str, Image]:
    """Loss, accuracy and measured acceptance over the optimizer steps; nothing of an empty log."""
    if not log:
        return {}
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 6.2), layout="constrained")
        loss, accuracy, length = figure.subplots(3, 1, sharex=True)
        steps = [row["step"] for row in log]
        loss.plot(steps, _smoothed([row["loss"] for row in log]), color=INK, linewidth=1.1)
        loss.set(ylabel="loss")
        _accuracies(accuracy, steps, log)
        _evals(length, evals, kept_step)
        for axes in (loss, accuracy, length):
            axes.grid(axis="y")
        length.set(xlabel="optimizer step", ylabel="acceptance length,\ntokens a round")
    image = _save(
        folder / "training.png",
        figure,
        "Three line plots over the optimizer steps: loss, accuracy by drafting step, and "
        "acceptance length on validation conversations.",
        f"Training; loss and accuracy are means over {_window(len(log))} steps. The kept "
        "checkpoint has the longest measured acceptance; intervals are in the last panel.",
    )
    return {"training": image}


def interval_plot(axes: Axes, y: Number, figure: Estimate, color: str, marker: str) -> None:
    """A dot at `figure` and a line over its interval; nothing where it was not measured."""
    if figure.value is None:
        return
    if figure.low is not None and figure.high is not None:
        axes.hlines(y, figure.low, figure.high, color=color, linewidth=2)
    axes.plot(figure.value, y, marker, color=color, markersize=6)


def save(path: Path, figure: Figure) -> None:
    """Writes a PNG in the style of the report."""
    with matplotlib.rc_context(STYLE):
        figure.savefig(path, metadata={"Software": None})


def _save(path: Path, figure: Figure, alt: str, caption: str) -> Image:
    save(path, figure)
    return Image(path.name, alt, caption)


def _look(proposer: str, measured: Acceptance) -> tuple[str, str]:
    return LOOKS.get(proposer, DRAFT_MODEL_LOOK if proposer == measured.head else OTHER_HEAD_LOOK)


def _legend(figure: Figure, measured: Acceptance, proposers: list[str]) -> None:
    handles = []
    for name in proposers:
        color, marker = _look(name, measured)
        handles.append(Line2D([], [], color=color, marker=marker, linestyle="", label=name))
    figure.legend(handles=handles, loc="outside upper left", ncols=len(proposers))


def _name(measured: Acceptance, traffic: Traffic) -> str:
    name = "the mix" if traffic.component == MIX else traffic.component
    if len({t.temperature for t in measured.traffic}) == 1:
        return name
    return f"{name}\ntemperature {traffic.temperature_text}"


def _categories(
    measured: Acceptance, draw: Callable[[Axes, Number, str, Traffic], None]
) -> tuple[Figure, Axes]:
    # One row a kind of traffic, one line of it a proposer.
    names, rows = measured.proposers, measured.traffic
    figure = Figure(figsize=(WIDTH, 1.0 + 0.27 * len(names) * len(rows)), layout="constrained")
    axes = figure.subplots()
    for i, traffic in enumerate(rows):
        for j, proposer in enumerate(names):
            draw(axes, i + _band(measured) * (j - (len(names) - 1) / 2), proposer, traffic)
    axes.set_yticks(range(len(rows)), [_name(measured, traffic) for traffic in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.grid(axis="x")
    return figure, axes


def _band(measured: Acceptance) -> float:
    return 0.8 / len(measured.proposers)  # of the unit between two kinds of traffic


def _lengths(measured: Acceptance) -> Figure:
    def draw(axes: Axes, y: Number, proposer: str, traffic: Traffic) -> None:
        interval_plot(axes, y, measured.length(proposer, traffic), *_look(proposer, measured))

    with matplotlib.rc_context(STYLE):
        figure, axes = _categories(measured, draw)
        axes.set_xlabel("acceptance length, tokens a round")
        axes.set_xlim(left=0.95)
        _legend(figure, measured, measured.proposers)
    return figure


def _speeds(measured: Acceptance) -> Figure:
    def draw(axes: Axes, y: Number, proposer: str, traffic: Traffic) -> None:
        speed = measured.speed(proposer, traffic)
        if speed.value is None:
            return
        axes.barh(y, speed.value, 0.85 * _band(measured), color=_look(proposer, measured)[0])
        if speed.low is not None and speed.high is not None:
            axes.hlines(y, speed.low, speed.high, color=INK, linewidth=1.4)
            axes.plot([speed.low, speed.high], [y, y], "|", color=INK, markersize=6)

    with matplotlib.rc_context(STYLE):
        figure, axes = _categories(measured, draw)
        axes.set_xlabel("tokens/s")
        axes.set_xlim(left=0)
        _legend(figure, measured, measured.proposers)
    return figure


def _panels(
    measured: Acceptance, draw: Callable[[Axes, str, Traffic], None], ylabel: str, xlabel: str
) -> Figure:
    # One panel a kind of traffic, one line a proposer that drafts.
    num_columns = min(3, len(measured.traffic))
    num_rows = -(-len(measured.traffic) // num_columns)
    figure = Figure(figsize=(WIDTH, 0.8 + 2.1 * num_rows), layout="constrained")
    grid = figure.subplots(num_rows, num_columns, sharex=True, sharey=True, squeeze=False)
    proposers = [name for name in measured.proposers if name != PLAIN]
    for axes in grid.flat[len(measured.traffic) :]:
        axes.set_visible(False)
    for axes, traffic in zip(grid.flat, measured.traffic, strict=False):
        axes.set_title(_name(measured, traffic).replace("\n", ", "))
        axes.grid(axis="y")
        for proposer in proposers:
            draw(axes, proposer, traffic)
    figure.supylabel(ylabel, fontsize=9)
    figure.supxlabel(xlabel, fontsize=9)
    _legend(figure, measured, proposers)
    return figure


def _survival(measured: Acceptance) -> Figure:
    def draw(axes: Axes, proposer: str, traffic: Traffic) -> None:
        row = measured.row(proposer, traffic) or {}
        shares = row.get("acceptance_by_position") or []
        color, marker = _look(proposer, measured)
        positions = range(1, len(shares) + 1)
        axes.plot(positions, shares, f"{marker}-", color=color, markersize=5)
        axes.set_ylim(0, 1)
        axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))

    with matplotlib.rc_context(STYLE):
        return _panels(measured, draw, "survival, share of the rounds", "drafted position")


def _contexts(measured: Acceptance) -> Figure:
    def draw(axes: Axes, proposer: str, traffic: Traffic) -> None:
        row = measured.row(proposer, traffic) or {}
        buckets = row.get("by_context") or []
        color, marker = _look(proposer, measured)
        starts = [bucket["low"] for bucket in buckets]
        lengths = [bucket["acceptance_length"] for bucket in buckets]
        axes.plot(starts, lengths, f"{marker}-", color=color, markersize=5)

    with matplotlib.rc_context(STYLE):
        return _panels(
            measured,
            draw,
            "acceptance length, tokens a round",
            "context, tokens (the low end of each range)",
        )


def _accuracies(axes: Axes, steps: list[int], log: list[dict[str, Any]]) -> None:
    num_drafting_steps = max(len(row.get("accuracy", [])) for row in log)
    colors = matplotlib.colormaps["viridis"]
    for s in range(num_drafting_steps):
        values = _smoothed([row["accuracy"][s] for row in log])
        color = colors(0.85 * s / max(1, num_drafting_steps - 1))
        axes.plot(steps, values, color=color, linewidth=1.1, label=f"drafting step {s + 1}")
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.set(ylabel="accuracy")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))


def _evals(axes: Axes, evals: list[dict[str, Any]], kept_step: int | None) -> None:
    for row in evals:
        length = estimate(row, "acceptance_length")
        if length.low is not None and length.high is not None:
            axes.vlines(row["step"], length.low, length.high, color=BLUE, linewidth=1.4)
    steps = [row["step"] for row in evals]
    axes.plot(steps, [row["acceptance_length"] for row in evals], "o-", color=BLUE, markersize=4)
    for row in evals:
        if row["step"] == kept_step:
            axes.plot(
                row["step"],
                row["acceptance_length"],
                "o",
                color=ORANGE,
                label="kept",
                markersize=11,
                markerfacecolor="none",
                markeredgewidth=1.6,
            )
            axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
