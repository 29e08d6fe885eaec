"""Compares the quantized targets of a multirun: what each budget costs, by who chose the units."""

import json
from dataclasses import dataclass
from math import nan
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from specfit.report import plots
from specfit.report.document import Block, Cell, Column, Image, Section, Table
from specfit.report.figures import NOT_MEASURED, Estimate, estimate, number, share
from specfit.report.quantization import ENDS, measured

LOOKS = {
    "portfolio": (plots.BLUE, "o"),
    "isolated": (plots.ORANGE, "^"),
    "additive": (plots.GREEN, "s"),
    "coverage": ("#cc79a7", "D"),
    "gram": ("#56b4e9", "v"),
}
AGAINST = ("isolated", "random", "amax")


@dataclass(frozen=True)
class QuantizedJob:
    """One job's target."""

    job: str  # its folder's name
    selector: str
    share: float  # of the weights in NVFP4
    bits_per_weight: float
    report: dict[str, Any]  # the figures on text that nothing was chosen by
    broken: dict[str, list[str]]  # by gate
    comparisons: list[dict[str, Any]]  # on the same text, with other sets and scales

    def over(self, against: str) -> Estimate | str:
        """KL of this target over that of what else could have been chosen."""
        for row in self.comparisons:
            if row["against"] == against:
                return estimate(row, "kl_ratio", 3)
        return NOT_MEASURED


def read_quantized(jobs: list[Path]) -> list[QuantizedJob]:
    """Those of the job folders that quantized a target; the smallest share first."""
    found = [job for folder in jobs if (job := _read(folder)) is not None]
    return sorted(found, key=lambda job: (job.share, job.selector, job.job))


def section(folder: Path, jobs: list[QuantizedJob]) -> Section:
    """A table, and quantize_sweep.png in `folder`."""
    cells: list[list[Cell]] = [
        [
            job.job,
            job.selector,
            share(job.share),
            number(job.bits_per_weight, 2),
            measured(job.report, "kl_mean_nats", 4),
            measured(job.report, "top1_agreement", 3),
            measured(job.report, "perplexity_change", 4),
            *(job.over(against) for against in AGAINST),
            *("rejected" if broken else "passed" for broken in job.broken.values()),
        ]
        for job in jobs
    ]
    gates = list(jobs[0].broken)
    titles = ["weights in NVFP4", "bits a weight", "KL, mean", "same top token", "perplexity"]
    blocks: list[Block] = [
        _plot(folder, jobs),
        Table(
            "Each job's checkpoint on text that nothing was chosen by; KL in nats a token, with "
            "95 % intervals over conversations. KL over that of the sets chosen by the units' KL "
            "alone, of random sets, and of the same units with amax scales, all before any "
            "co-tuning: below 1 is better.",
            [
                Column("job"),
                Column("selector"),
                *(Column(title, numeric=True) for title in titles),
                *(Column(name, numeric=True, group="KL over that of") for name in AGAINST),
                *(Column(f"gate {gate}") for gate in gates),
            ],
            cells,
        ),
    ]
    return Section("Quantized targets", blocks)


def _read(folder: Path) -> QuantizedJob | None:
    record = folder / "job.json"
    if not record.exists():
        return None
    job = json.loads(record.read_text(encoding="utf-8"))
    artifact = Path(job["root"]) / "quantize" / str(job["keys"].get("quantize"))
    if not (artifact / "fidelity.json").exists():
        return None
    recipe = json.loads((artifact / "recipe.json").read_text(encoding="utf-8"))
    fidelity = json.loads((artifact / "fidelity.json").read_text(encoding="utf-8"))
    report = next(row for row in fidelity["rows"] if row["text"] == "report")
    return QuantizedJob(
        folder.name,
        recipe["rows"][-1]["proposer"],
        recipe["share"],
        recipe["bits_per_weight"],
        report,
        fidelity["broken_limits"],
        fidelity["comparisons"],
    )


def _plot(folder: Path, jobs: list[QuantizedJob]) -> Image:
    with matplotlib.rc_context(plots.STYLE):
        figure = Figure(figsize=(plots.WIDTH, 3.2), layout="constrained")
        axes = figure.subplots()
        for selector in dict.fromkeys(job.selector for job in jobs):
            own = [job for job in jobs if job.selector == selector]
            color, marker = LOOKS.get(selector, (plots.GREY, "x"))
            shares = [100 * job.share for job in own]
            value, low, high = (
                [_drawn(job.report[f"kl_mean_nats{end}"]) for job in own] for end in ENDS
            )
            axes.plot(shares, value, f"{marker}-", color=color, label=selector)
            axes.vlines(shares, low, high, color=color, linewidth=1)
        axes.set(xlabel="weights in NVFP4, %", ylabel="KL, nats a token", ylim=(0, None))
        axes.grid(axis="y")
        axes.legend()
    plots.save(folder / "quantize_sweep.png", figure)
    return Image(
        "quantize_sweep.png",
        "Line plot of mean KL over the share of weights in NVFP4, a line a selector.",
        "Mean KL on text that nothing was chosen by, with intervals, by who chose the units.",
    )


def _drawn(value: float | None) -> float:
    """What is not finite is left out."""
    return nan if value is None else value
