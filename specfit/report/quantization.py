"""The sections on a quantized target: what was chosen, by what, and what it lost."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.patches import Patch

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
    Text,
)
from specfit.report.figures import NOT_MEASURED, Estimate, estimate, number, percent_change, share

Record = dict[str, Any]
ENDS = ("", "_low", "_high")

NOT_FINITE = "not finite"
TERMS = {
    "KL": "Kullback-Leibler divergence of the quantized target's next-token distribution from that "
    "of the target as it came, in nats a token: 0 where they agree.",
    "same top token": "Share of tokens at which both have the same most likely next token.",
    "perplexity": "Its change on the text that the target as it came had written.",
    "noise": "The target as it came against itself in batches of another shape.",
    "acceptance length": "Mean tokens emitted per round of drafting and verifying, the target's "
    "own included.",
}


def write_page(folder: Path, target: str, recipe: Record, fidelity: Record) -> None:
    """quantization.html, quantization.md and quantization.png."""
    document = Document(
        f"{target} in NVFP4",
        lead(recipe, fidelity),
        [Text(sentence) for sentence in verdicts(fidelity)],
        sections(folder, recipe, fidelity),
    )
    pages.write(folder, "quantization", document)


def sections(folder: Path, recipe: Record, fidelity: Record) -> list[Section]:
    """Fidelity with its gates, and the choice of units; plots go to `folder`."""
    return [
        Section("Fidelity of the quantized target", _fidelity(recipe, fidelity)),
        Section("What was quantized", _choice(folder, recipe, fidelity)),
        Section("What other budgets cost", _budgets(folder, recipe)),
    ]


def lead(recipe: Record, fidelity: Record) -> str:
    """What was done and what it cost, in a sentence."""
    report = _report_row(fidelity)
    rest = {p for p in recipe["plan"]["precision"].values() if p != "nvfp4"}
    others = f", the rest in {', '.join(sorted(rest)).upper()}" if rest else ""
    return (
        f"{share(recipe['share'])} of the weights that may be quantized are in NVFP4{others}: "
        f"{number(recipe['bits_per_weight'], 2)} bits each on average. Mean KL on "
        f"{number(report['num_tokens'])} tokens of text that nothing was chosen by: "
        f"{measured(report, 'kl_mean_nats', 4)} nats."
    )


def verdicts(fidelity: Record) -> list[str]:
    """A sentence for a ceiling of KL, where there is one, and one for each gate."""
    found = []
    ceiling = fidelity["max_kl_nats"]
    if ceiling is not None:
        found.append(
            f"Budget: a mean KL of at most {ceiling:g} nats, kept at the upper end of its interval "
            "on the selection text; on the report text it is "
            f"{measured(_report_row(fidelity), 'kl_mean_nats', 4)}."
        )
    return found + [
        f"Gate {gate}: {'rejected, as ' + '; '.join(broken) if broken else 'passed'}."
        for gate, broken in fidelity["broken_limits"].items()
    ]


def measured(row: Record, key: str, digits: int) -> Estimate | str:
    """Of a checkpoint, which may be so broken that there is no number."""
    return NOT_FINITE if row[key] is None else estimate(row, key, digits)


def _terms(recipe: Record) -> dict[str, str]:
    context, counted = (recipe["text"][f"{name}_tokens"] for name in ("context", "counted"))
    text = (
        "Answers of the target as it came, to prompts of the profile's training split. Figures "
        f"are over the first {number(counted)} tokens of each, read after up to {number(context)} "
        "tokens of the prompt's end; answers that end earlier, or repeat themselves, are left out, "
        "so that short answers are not represented. "
        "What units do alone and in pairs is measured on a text of its own, predictions of sets "
        "are fitted to the calibration text, sets chosen on the selection text, and the "
        "report text is used for nothing else. No two share a conversation."
    )
    return TERMS | {"text": text}


def _report_row(fidelity: Record) -> Record:
    row: Record = next(row for row in fidelity["rows"] if row["text"] == "report")
    return row


def _fidelity(recipe: Record, fidelity: Record) -> list[Block]:
    rows = [*fidelity["rows"], {"text": "noise"} | fidelity["noise_floor"]]
    cells: list[list[Cell]] = [
        [
            row["text"],
            number(row["num_tokens"]),
            *(measured(row, f"kl_{name}_nats", 4) for name in ("mean", "median")),
            *(measured(row, f"kl_{name}_nats", 3) for name in ("p95", "p99")),
            measured(row, "top1_agreement", 3),
            measured(row, "perplexity_change", 4),
        ]
        for row in rows
    ]
    titles = ["tokens", "KL, mean", "median", "95 %", "99 %", "same top token", "perplexity change"]
    rollouts = fidelity["rollouts"]
    blocks: list[Block] = [
        Text(" ".join([lead(recipe, fidelity), *verdicts(fidelity)])),
        Table(
            "Figures of the written checkpoint, read back. KL in nats a token; in parentheses 95 % "
            "intervals, over conversations.",
            [Column("text"), *(Column(title, numeric=True) for title in titles)],
            cells,
        ),
    ]
    if rollouts["num_rollouts"]:
        median = rollouts["first_differing_token_median"]
        differs = "does not differ" if median is None else f"first differs at token {median}"
        blocks.append(
            Text(
                f"Of {number(rollouts['num_rollouts'])} greedy answers of "
                f"{number(rollouts['num_tokens'])} tokens, {number(rollouts['num_equal'])} are the "
                f"same as before quantizing; the median answer {differs}."
            )
        )
    if fidelity["acceptance"]:
        blocks.append(_acceptance(fidelity["acceptance"]))
    return [*blocks, Definitions(_terms(recipe))]


def _acceptance(changes: Sequence[Record]) -> Table:
    return Table(
        "Acceptance length of the given speculator on held-out conversations, drafted for the "
        "target as it came and for the quantized one; the change with its 95 % interval over "
        "prompts, which are the same on both sides.",
        [
            Column("component"),
            *(Column(title, numeric=True) for title in ("k", "prompts", "before", "after")),
            Column("change, %", numeric=True),
        ],
        [
            [
                row["component"],
                number(row["num_draft_tokens"]),
                number(row["num_prompts"]),
                number(row["acceptance_length_before"], 3),
                number(row["acceptance_length_after"], 3),
                percent_change(row, "acceptance_length_change"),
            ]
            for row in changes
        ],
    )


def _choice(folder: Path, recipe: Record, fidelity: Record) -> list[Block]:
    rows: list[list[Cell]] = [
        [
            row["proposer"],
            number(len(row["chosen"])),
            share(row["share"]),
            NOT_MEASURED
            if row["predicted_kl_nats"] is None
            else number(row["predicted_kl_nats"], 4),
            estimate(row, "measured_kl_nats", 4),
        ]
        for row in recipe["rows"]
    ]
    fits = ", ".join(f"{name} {value:.3f}" for name, value in recipe["cv_r2"].items())
    moves = recipe["moves"]
    kept = sum(move["kept"] for move in moves)
    reliability = recipe["rho_reliability"]
    return [
        _plot(folder, recipe),
        Table(
            "Sets of units that were measured on the selection text, by who proposed them; the "
            f"last is what was quantized. {_how_judged(recipe)}",
            [
                Column("proposer"),
                Column("units", numeric=True),
                Column("weights in NVFP4", numeric=True),
                Column("KL predicted", numeric=True),
                Column("KL measured", numeric=True),
            ],
            rows,
        ),
        Text(
            "Share of variance explained on random sets and half the text held out: "
            f"{fits or NOT_MEASURED}. "
            "Reliability of the correlations between units, by halves of the text: "
            f"{NOT_MEASURED if reliability is None else number(reliability, 2)}. Small moves "
            f"tried from the best proposal: {len(moves)}, kept: {kept}."
        ),
        *_comparisons(fidelity["comparisons"]),
    ]


def _how_judged(recipe: Record) -> str:
    """Why the set of the lowest KL in the table need not be the one that was chosen."""
    words = "Predictions are from other text"
    rest = {p for p in recipe["plan"]["precision"].values() if p != "nvfp4"}
    if rest:
        words += " and, but for additive and coverage, without what the rest loses in FP8"
    return (
        f"{words}. Under a ceiling of KL more weights win. Else the first set is kept until "
        "another is better by more standard errors of the difference than the luckiest of so many "
        "would be, and at least by one, or three where predictions disagree: less KL may be luck."
    )


def _comparisons(comparisons: Sequence[Record]) -> list[Block]:
    if not comparisons:
        return []
    return [
        Table(
            "What was chosen against what else could have been, on the report text, all before any "
            "co-tuning: KL of those sets (a mean over them) and of the chosen set over it, below 1 "
            "where it loses less; 95 % intervals over conversations, the same on both sides. amax: "
            "the same units, with the scales that other engines compute.",
            [
                Column("against"),
                *(Column(title, numeric=True) for title in ("sets", "KL of those", "KL over it")),
            ],
            [
                [
                    row["against"],
                    number(row["num_sets"]),
                    number(row["kl_mean_nats"], 4),
                    estimate(row, "kl_ratio", 3),
                ]
                for row in comparisons
            ],
        )
    ]


def _budgets(folder: Path, recipe: Record) -> list[Block]:
    """The curve, and where the sets that were measured lie beside it."""
    curve = recipe["curve"]
    if not curve:
        return [Text(f"Other budgets: {NOT_MEASURED}.")]
    with matplotlib.rc_context(plots.STYLE):
        figure = Figure(figsize=(plots.WIDTH, 3.2), layout="constrained")
        axes = figure.subplots()
        shares = [100 * point["share"] for point in curve]
        kl, low, high = ([p[f"kl_mean_nats{end}"] for p in curve] for end in ENDS)
        axes.plot(shares, kl, "^-", color=plots.ORANGE, label="by KL of units alone")
        axes.vlines(shares, low, high, color=plots.ORANGE, linewidth=1)
        *others, last = recipe["rows"]
        for rows, marker, color, label in (
            (others, "x", plots.GREY, "other sets measured"),
            ([last], "o", plots.BLUE, "what was chosen"),
        ):
            if rows:
                at = [100 * row["share"] for row in rows]
                kl = [row["measured_kl_nats"] for row in rows]
                axes.scatter(at, kl, marker=marker, color=color, label=label)
        axes.set(xlabel="weights in NVFP4, %", ylabel="KL, nats a token", ylim=(0, None))
        axes.grid(axis="y")
        axes.legend()
    plots.save(folder / "budgets.png", figure)
    rows_: list[list[Cell]] = [
        [share(p["share"]), number(p["num_units"]), estimate(p, "kl_mean_nats", 4)] for p in curve
    ]
    return [
        Image(
            "budgets.png",
            "Line plot of mean KL over the share of weights in NVFP4.",
            "Mean KL on the selection text as the budget grows, units of least KL a byte alone "
            "first, the rest as it came; beside it the sets that were measured for this budget.",
        ),
        Table(
            "The same in numbers.",
            [Column(title, numeric=True) for title in ("weights in NVFP4", "units", "KL, mean")],
            rows_,
        ),
    ]


def _plot(folder: Path, recipe: Record) -> Image:
    """KL of each unit alone, in bars by layer, a panel a kind of unit."""
    panels: dict[str, list[tuple[int, float, bool]]] = {}
    chosen = set(recipe["chosen"])
    for i, (name, kl) in enumerate(zip(recipe["units"], recipe["isolated_kl_nats"], strict=True)):
        _, layer, kind = name.split(" ")[0].split(".", 2)
        kind = kind if " " not in name else "layer"
        panels.setdefault(kind, []).append((int(layer), kl, i in chosen))
    with matplotlib.rc_context(plots.STYLE):
        height = 0.7 + 1.25 * len(panels)
        figure = Figure(figsize=(plots.WIDTH, height), layout="constrained")
        axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
        for panel, (kind, bars) in zip(axes, panels.items(), strict=True):
            _bars(panel, bars)
            panel.set_title(kind)
        axes[len(axes) // 2].set_ylabel("KL alone, nats a token")
        axes[-1].set_xlabel("layer")
        handles = [Patch(color=plots.BLUE, label="NVFP4"), Patch(color=plots.GREY, label="not")]
        figure.legend(handles=handles, ncols=2, loc="outside upper right")
    plots.save(folder / "quantization.png", figure)
    return Image(
        "quantization.png",
        "Bar charts of KL by layer when one unit alone is quantized, a panel a kind of unit.",
        "KL on a text of its own when one unit alone is in NVFP4; those that were chosen are blue.",
    )


def _bars(axes: Any, bars: Sequence[tuple[int, float, bool]]) -> None:
    colors = [plots.BLUE if chosen else plots.GREY for _, _, chosen in bars]
    axes.bar([layer for layer, _, _ in bars], [kl for _, kl, _ in bars], color=colors)
    axes.grid(axis="y")
