"""The section on latency: the stack of formats, what drafts add to it, and what passes cost."""

import json
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from specfit.report import pages, plots
from specfit.report.document import (
    Block,
    Column,
    Definitions,
    Document,
    Image,
    Section,
    Table,
    Text,
)
from specfit.report.figures import count, estimate, number, share, yes_no

Record = dict[str, Any]
ALL = "all"
TERMS = {
    "tokens/s": "Tokens after an answer's first over the seconds they took, one request at a time, "
    "greedy: the median of the repetitions, with the least and the largest.",
    "over plain": "Tokens/s over those of the same weights without drafts, in the same repetition.",
    "predicted": "The same ratio, of the rounds as they went: of what passes of their widths took "
    "beforehand, and what the drafts took.",
    "k": "Tokens drafted a round; `up to` where it follows what drafts cost and bring, down to 0.",
    "floor": "Bytes of weights, keys and values over the speed at which this machine reads memory, "
    "measured in the same run.",
    "edits": "Prompts that ask for a small change to a file, and for all of it.",
}


def write_page(folder: Path) -> None:
    """bench.html, bench.md and latency.png, from bench.json in the folder."""
    record = json.loads((folder / "bench.json").read_text(encoding="utf-8"))
    document = Document(
        f"Latency of {record['target']}",
        lead(record),
        [],
        [section(folder, record), Section("What the words mean", [Definitions(TERMS)])],
    )
    pages.write(folder, "bench", document)


def lead(record: Record) -> str:
    """The outcome in a sentence."""
    drafted = [r for r in _decoded(record) if "speculative_over_plain" in r]
    best = max(drafted, key=lambda row: row["tokens_per_second"])
    plain = next(
        r for r in _decoded(record) if r["proposer"] == "none" and r["format"] == best["format"]
    )
    return (
        f"{_name(best)} with weights in {best['format']}: {best['tokens_per_second']:.1f} "
        f"tokens/s, {best['speculative_over_plain']:.2f} times plain decoding at "
        f"{plain['tokens_per_second']:.1f}, on {count(record['num_threads'], 'thread')} "
        f"({record['cpu_path']})."
    )


def section(folder: Path, record: Record) -> Section:
    """The plot goes to `folder`."""
    blocks: list[Block] = [
        Text(
            f"{count(record['num_threads'], 'thread')} of {record['processor']} "
            f"({record['cpu_path']}); memory is read at "
            f"{record['read_bytes_per_second'] / 1e9:.1f} GB/s; a drafted token of the head takes "
            f"{record['draft_ms']:.2f} ms."
        ),
        _plot(folder, record),
        _stack(record),
        _drafts(record),
        _passes(record),
    ]
    return Section("Latency on this machine", blocks)


def _decoded(record: Record, component: str = ALL) -> list[Record]:
    rows = (row for row in record["rows"] if row["kind"] == "decode")
    return [row for row in rows if row["component"] == component]


def _name(row: Record) -> str:
    if row["proposer"] in ("none", "transformers", "llama.cpp"):
        return "plain" if row["proposer"] == "none" else str(row["proposer"])
    k = (
        f"k up to {row['num_draft_tokens']}"
        if row["adaptive"]
        else f"k = {row['num_draft_tokens']}"
    )
    return f"{row['proposer']}, {k}"


def _stack(record: Record) -> Table:
    one = {r["format"]: r for r in record["rows"] if r["kind"] == "pass" and r["num_tokens"] == 1}
    rows = [row for row in _decoded(record) if "speculative_over_plain" not in row]
    return Table(
        "Plain decoding, by the format of the weights, and other programs on the same prompts.",
        [
            Column("weights"),
            Column("decoded by"),
            Column("tokens/s", numeric=True),
            Column("ms a token", numeric=True),
            Column("MB a token", numeric=True),
            Column("of the floor", numeric=True),
            Column("over transformers", numeric=True),
            Column("over llama.cpp", numeric=True),
            Column("KL, nats", numeric=True),
        ],
        [
            [
                row["format"],
                "specfit" if row["proposer"] == "none" else row["proposer"],
                estimate(row, "tokens_per_second", 1),
                number(row["ms_per_token"], 2),
                number(_of(one, row, "bytes_moved", 1e-6), 1),
                share(_of(one, row, "bandwidth_share")),
                estimate(row, "plain_over_transformers"),
                estimate(row, "plain_over_llama_cpp"),
                number(row.get("kl_mean_nats"), 4),
            ]
            for row in rows
        ],
    )


def _of(passes: dict[str, Record], row: Record, key: str, factor: float = 1.0) -> float | None:
    if row["proposer"] != "none":
        return None
    value: float = passes[row["format"]][key]
    return factor * value


def _drafts(record: Record) -> Table:
    components = list(dict.fromkeys(r["component"] for r in record["rows"] if "component" in r))
    rows = [
        row
        for component in components
        for row in _decoded(record, component)
        if "speculative_over_plain" in row
    ]
    return Table(
        f"Speculation over plain decoding, with weights in {rows[0]['format']}.",
        [
            Column("traffic"),
            Column("drafts"),
            Column("acceptance length", numeric=True),
            Column("tokens/s", numeric=True),
            Column("over plain", numeric=True),
            Column("predicted", numeric=True),
            Column("equal to plain"),
        ],
        [
            [
                row["component"],
                _name(row),
                number(row["acceptance_length"], 2),
                estimate(row, "tokens_per_second", 1),
                estimate(row, "speculative_over_plain"),
                number(row.get("predicted_over_plain"), 2),
                yes_no(row["outputs_equal_plain"]),
            ]
            for row in rows
        ],
    )


def _passes(record: Record) -> Table:
    rows = [row for row in record["rows"] if row["kind"] == "pass"]
    widths = list(dict.fromkeys(row["num_tokens"] for row in rows))
    formats = list(dict.fromkeys(row["format"] for row in rows))
    found = {(row["format"], row["num_tokens"]): row for row in rows}
    return Table(
        f"A pass after {rows[0]['context']} tokens: ms, and how many times those of one token.",
        [
            Column("weights"),
            *(
                column
                for width in widths
                for column in (
                    Column("ms", numeric=True, group=count(width, "token")),
                    Column("of one", numeric=True, group=count(width, "token")),
                )
            ),
        ],
        [
            [
                form,
                *(
                    number(found[form, width][key], 2)
                    for width in widths
                    for key in ("ms", "over_one_token")
                ),
            ]
            for form in formats
        ],
    )


def _plot(folder: Path, record: Record) -> Image:
    rows = sorted(_decoded(record), key=lambda row: float(row["tokens_per_second"]))
    with matplotlib.rc_context(plots.STYLE):
        figure = Figure(figsize=(plots.WIDTH, 0.8 + 0.26 * len(rows)), layout="constrained")
        axes = figure.subplots()
        for y, row in enumerate(rows):
            axes.barh(y, row["tokens_per_second"], color=_color(row), height=0.7)
            plots.interval_plot(axes, y, estimate(row, "tokens_per_second", 1), plots.INK, "|")
        labels = [f"{row['format']}: {_name(row)}" for row in rows]
        axes.set_yticks(range(len(rows)), labels)
        axes.set_xlabel("tokens/s, one request at a time")
        axes.grid(axis="x")
    plots.save(folder / "latency.png", figure)
    return Image(
        "latency.png",
        "Bar chart of tokens a second by weight format, other programs and speculation.",
        "Tokens/s of all prompts together: plain decoding grey, with drafts blue, other programs "
        "orange; lines from the least to the largest of the repetitions.",
    )


def _color(row: Record) -> str:
    if "speculative_over_plain" in row:
        return plots.BLUE
    return plots.GREY if row["proposer"] == "none" else plots.ORANGE
