"""The section on predicted latency: by k and load, where a round's time goes, and the stack."""

import json
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from specfit.report import pages, plots, simulated
from specfit.report.checked import checked
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
from specfit.report.figures import DASH, Estimate, count, estimate, number, share

Record = dict[str, Any]
PARTS = {  # of a round, with the colours of Okabe and Ito
    "weights": plots.BLUE,
    "kv": "#56b4e9",
    "compute": plots.ORANGE,
    "layers": plots.GREY,
    "communication": "#cc79a7",
    "drafting": plots.GREEN,
}
MAX_LINES = 5  # loads in the plot
TERMS = {
    "at once": "Requests in flight, each followed by the next.",
    "ms a token": "Of one user: a round's time over the acceptance length, stretched by the share "
    "of the time in which the same devices read prompts.",
    "interval": "That of the acceptance length, carried through the model; for a mix, what each "
    "component's ends change, added in squares. The model's own error is not in it.",
    "weights, kv": "Reading them from memory.",
    "compute": "What a pass computes beyond what reading hides: all that fits into the time of it "
    "on a GPU, the share `overlap` of that on a CPU.",
    "layers": "What each layer takes whatever it reads: launches, synchronisation.",
    "communication": "What several devices add to each layer.",
    "drafting": "The drafted tokens of a round.",
    "best k": "The number of drafted tokens of the least ms a token.",
}


def write_page(folder: Path) -> None:
    """predict.html, predict.md and predict.png, from latency.json in the folder."""
    record = json.loads((folder / "latency.json").read_text(encoding="utf-8"))
    document = Document(
        f"Predicted latency of {record['target']}",
        lead(record),
        [],
        [
            section(folder, record),
            Section("Constants", [_constants(record)]),
            Section("What the words mean", [Definitions(TERMS)]),
        ],
    )
    pages.write(folder, "predict", document)


def lead(record: Record) -> str:
    """The outcome in a sentence."""
    name = _main(record)
    [row] = [r for r in _rows(record, "best", name) if r["concurrency"] == _loads(record)[0]]
    return (
        f"{_name(name)} on {_machine(record)}, {row['concurrency']} at once: "
        f"{number(row['ms_per_token'], 2)} ms a token at k = {row['best_k']}, "
        f"{number(row['over_plain'], 2)} times plain decoding."
    )


def section(folder: Path, record: Record) -> Section:
    """The plot goes to `folder`."""
    blocks: list[Block] = [Text(_what(record)), _plot(folder, record), _best(record)]
    blocks.append(_rounds(record))
    blocks += simulated.blocks(folder, record["rows"])
    if _rows(record, "mix_change"):
        blocks.append(_mix(record))
    if _rows(record, "factor"):
        blocks += [_stack(record), Text(_totals(record))]
    if _rows(record, "pass"):
        blocks.append(_passes(record))
    if _rows(record, "check"):
        blocks.append(checked(_rows(record, "check")))
    return Section("Predicted latency", blocks)


def _rows(record: Record, kind: str, component: str | None = None) -> list[Record]:
    rows = (row for row in record["rows"] if row["kind"] == kind)
    return [row for row in rows if component is None or row["component"] == component]


def _components(record: Record) -> list[str]:
    return list(dict.fromkeys(row["component"] for row in _rows(record, "latency")))


def _main(record: Record) -> str:
    """The mix, or the only component: what comes last."""
    return _components(record)[-1]


def _name(component: str) -> str:
    return "the mix" if component == "all" else component


def _loads(record: Record) -> list[int]:
    return sorted({row["concurrency"] for row in _rows(record, "latency")})


def _machine(record: Record) -> str:
    devices = record["num_devices"]
    return record["hardware"] if devices == 1 else f"{devices} x {record['hardware']}"


def _what(record: Record) -> str:
    constants = "timed on the machine at hand" if record["measured"] else "given, see below"
    lengths = "; ".join(record["acceptance_sources"]) or f"measured with {record['proposer']}"
    prompts = "on other devices" if record["disaggregated"] else "on the same devices"
    return (
        f"{record['target']} (sizes: {record['target_source']}) on {_machine(record)}; its "
        f"constants are {constants}. Acceptance: {lengths}. Prompts are read {prompts}, "
        f"{share(record['hit_rate'])} of them from a cache."
    )


def _best(record: Record) -> Table:
    loads = _loads(record)
    rows = {(r["component"], r["concurrency"]): r for r in _rows(record, "best")}
    return Table(
        "The best k by traffic and load, and ms a token with it.",
        [
            Column("traffic"),
            *(
                Column(title, numeric=True, group=f"{load} at once")
                for load in loads
                for title in ("k", "ms")
            ),
        ],
        [
            [
                _name(component),
                *(
                    cell
                    for load in loads
                    for cell in (
                        str(rows[component, load]["best_k"]),
                        number(rows[component, load]["ms_per_token"], 2),
                    )
                ),
            ]
            for component in _components(record)
        ],
    )


def _rounds(record: Record) -> Table:
    """Of the first load and the last, of the mix."""
    loads = _loads(record)
    shown = [
        row
        for row in _rows(record, "latency", _main(record))
        if row["concurrency"] in (loads[0], loads[-1])
    ]
    shown.sort(key=lambda row: (row["concurrency"], row["num_draft_tokens"]))
    titles = [Column(f"{part}, ms", numeric=True, group="of a round") for part in PARTS]
    return Table(
        f"Where a round's time goes, of {_name(_main(record))}.",
        [
            Column("at once, k"),
            Column("acceptance length", numeric=True),
            Column("ms a token", numeric=True),
            Column("tokens/s, all", numeric=True),
            *titles,
            Column("reading prompts", numeric=True),
        ],
        [
            [
                f"{row['concurrency']}, k = {row['num_draft_tokens']}",
                _estimate(row, "acceptance_length"),
                _estimate(row, "ms_per_token"),
                number(row["tokens_per_second"], 1),
                *(number(row[f"{part}_ms"], 2) for part in PARTS),
                share(row["prefill_share"]),
            ]
            for row in shown
        ],
    )


def _estimate(row: Record, key: str) -> Estimate | str:
    """Without `(no interval)` where acceptance was given without one."""
    return estimate(row, key) if f"{key}_low" in row else number(row[key], 2)


def _mix(record: Record) -> Table:
    loads = _loads(record)
    best = {row["concurrency"]: row["best_k"] for row in _rows(record, "best", "all")}
    found = {
        (row["component"], row["concurrency"]): row
        for row in _rows(record, "mix_change")
        if row["num_draft_tokens"] == best[row["concurrency"]]
    }
    components = list(dict.fromkeys(component for component, _ in found))
    points = max(row["share_change"] for row in found.values())
    return Table(
        f"What {100 * points:.0f} points more of the requests, taken from the others in "
        "proportion, change in ms a token of the mix, at its best k.",
        [
            Column("traffic"),
            Column("of the requests", numeric=True),
            *(Column(f"{load} at once", numeric=True) for load in loads),
        ],
        [
            [
                name,
                share(found[name, loads[0]]["share"]),
                *(f"{found[name, load]['ms_per_token_change']:+.3f}" for load in loads),
            ]
            for name in components
        ],
    )


def _stack(record: Record) -> Table:
    start, *factors = _rows(record, "factor")
    first = [start["name"], DASH, DASH, number(start["tokens_per_second_per_user"], 0), DASH, DASH]
    return Table(
        f"The stack, {count(record['stack_concurrency'], 'request')} at once: what each change "
        f"multiplies, in order. Expected: {record['expected_source']}.",
        [
            Column("change"),
            Column("factor", numeric=True),
            Column("expected", numeric=True),
            Column("tokens/s a user", numeric=True),
            Column("where it cannot hold"),
            Column("factor there", numeric=True),
        ],
        [
            first,
            *(
                [
                    row["name"],
                    f"{row['factor']:.2f}",
                    f"{_range(row)}, {_side(row)}",
                    number(row["tokens_per_second_per_user"], 0),
                    f"{row['limit']} {_where(record, row)}",
                    f"{row['limit_factor']:.2f}",
                ]
                for row in factors
            ),
        ],
    )


def _where(record: Record, row: Record) -> str:
    changed = []
    if row["limit_concurrency"] != record["stack_concurrency"]:
        changed.append(f"{row['limit_concurrency']} at once")
    if row["limit_hit_rate"] != record["hit_rate"]:
        changed.append(f"{share(row['limit_hit_rate'])} cached")
    return f"({', '.join(changed)})" if changed else ""


def _side(row: Record) -> str:
    return "as found" if row["side"] == "within" else f"found {row['side']}"


def _range(row: Record) -> str:
    low, high = (f"{row[f'expected_{end}']:.3g}" for end in ("low", "high"))
    return low if low == high else f"{low}{DASH}{high}"


def _totals(record: Record) -> str:
    rates = {row["name"]: row for row in _rows(record, "stack_rate")}
    parts = [
        f"{name} at {rates[name]['tokens_per_second_per_user']:.0f} tokens/s a user (expected "
        f"{_range(rates[name])}, {_side(rates[name])})"
        for name in ("start", "end")
    ]
    parts += [
        f"{row['name']}: {row['factor']:.1f} times (expected {_range(row)}, {_side(row)})"
        for row in _rows(record, "stack_total")
    ]
    return f"In sum: {'; '.join(parts)}."


def _passes(record: Record) -> Table:
    return Table(
        "Passes that the constants were fitted to.",
        [
            Column("sequences, tokens each"),
            Column("context", numeric=True),
            Column("measured, ms", numeric=True),
            Column("by the model, ms", numeric=True),
            Column("off by", numeric=True),
        ],
        [
            [
                f"{row['batch']}, {row['tokens_per_sequence']}",
                number(row["context_tokens"], 1),
                number(row["measured_ms"], 2),
                number(row["modelled_ms"], 2),
                f"{100 * row['relative_error']:+.0f} %",
            ]
            for row in _rows(record, "pass")
        ],
    )


def _constants(record: Record) -> Table:
    return Table(
        "What the model is made of.",
        [Column("constant"), Column("value", numeric=True), Column("source")],
        [
            [name, f"{constant['value']:.4g}", constant["source"]]
            for name, constant in record["constants"].items()
        ],
    )


def _plot(folder: Path, record: Record) -> Image:
    with matplotlib.rc_context(plots.STYLE):
        figure = Figure(figsize=(plots.WIDTH, 3.4), layout="constrained")
        tokens, rounds = figure.subplots(1, 2)
        _token_lines(tokens, record)
        _round_bars(rounds, record)
    plots.save(folder / "predict.png", figure)
    return Image(
        "predict.png",
        "Left, lines of ms a token over drafted tokens, one a load. Right, stacked bars of where a "
        "round's time goes, one a number of drafted tokens.",
        f"Of {_name(_main(record))}. Left: ms a token by load, with the interval of the acceptance "
        f"length. Right: a round's time, {_loads(record)[0]} at once.",
    )


def _token_lines(axes: Axes, record: Record) -> None:
    loads = _loads(record)
    step = -(-len(loads) // MAX_LINES)
    colors = matplotlib.colormaps["viridis"]
    shown = loads[::step]
    for i, load in enumerate(shown):
        rows = [r for r in _rows(record, "latency", _main(record)) if r["concurrency"] == load]
        ks = [row["num_draft_tokens"] for row in rows]
        color = colors(0.85 * i / max(1, len(shown) - 1))
        axes.plot(
            ks, [r["ms_per_token"] for r in rows], "o-", color=color, markersize=4, label=load
        )
        for row in (row for row in rows if "ms_per_token_low" in row):
            ends = (row["ms_per_token_low"], row["ms_per_token_high"])
            axes.vlines(row["num_draft_tokens"], *ends, color=color, linewidth=1.2)
    axes.set(xlabel="k, drafted tokens", ylabel="ms a token")
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="y")
    axes.legend(title="at once", fontsize=8)


def _round_bars(axes: Axes, record: Record) -> None:
    load = _loads(record)[0]
    rows = [r for r in _rows(record, "latency", _main(record)) if r["concurrency"] == load]
    ks = [row["num_draft_tokens"] for row in rows]
    below = [0.0] * len(rows)
    for part, color in PARTS.items():
        taken = [row[f"{part}_ms"] for row in rows]
        if any(taken):
            axes.bar(ks, taken, bottom=below, color=color, width=0.7, label=part)
        below = [b + t for b, t in zip(below, taken, strict=True)]
    axes.set(xlabel="k, drafted tokens", ylabel="ms a round")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="y")
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
