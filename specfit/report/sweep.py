"""Compares the jobs of a Hydra multirun: which settings gained, and whether that can be told."""

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from specfit.report import markdown, pages, plots, quantize_sweep
from specfit.report.acceptance import MIX, Acceptance
from specfit.report.document import Block, Cell, Column, Document, Image, Section, Table, Text
from specfit.report.figures import DASH, NOT_MEASURED, Estimate, Number, compare, duration

UNMEASURED = Estimate(None)
DEFAULT = "default"  # of a job that leaves alone what another overrides
READING = (
    "Acceptance length is the mean number of tokens emitted per round, the target's own included, "
    "with its interval in parentheses. Jobs are sorted by that of the mix. A job is called best "
    "only where its interval is apart from every other's. Within the interval of another job: the "
    "two meet, and what else matters should decide between them."
)


@dataclass(frozen=True)
class SweepRow:
    """One job, at the k that its own report would open with."""

    job: str  # its folder's name
    overrides: dict[str, str] = field(default_factory=dict)
    failed: bool = False  # or still running: it left no job.json
    num_draft_tokens: int | None = None
    acceptance_length: dict[str, Estimate] = field(default_factory=dict)  # by component
    tokens_per_second: Estimate = UNMEASURED
    train_seconds: Number | None = None
    verdict: str = ""

    @property
    def length(self) -> Estimate:
        """Acceptance length of the mix, or of the only component."""
        first = next(iter(self.acceptance_length.values()), UNMEASURED)
        return self.acceptance_length.get(MIX, first)


def write_sweep(folder: Path, sweep: Path) -> None:
    """Writes sweep.html, sweep.md, sweep.json and their plots.

    Args:
        folder: where to.
        sweep: a multirun folder, one job folder below it a job.

    Raises:
        FileNotFoundError: `sweep` holds no job folder.
    """
    rows = read_sweep(sweep)
    blocks: list[Block] = [Text(_summary(rows))]
    if any(row.length.value is not None for row in rows):
        blocks.append(_plot(folder, rows))
    blocks.append(_table(rows))
    quantized = quantize_sweep.read_quantized([sweep / row.job for row in rows])
    compared = [quantize_sweep.section(folder, quantized)] if quantized else []
    document = Document(
        f"Sweep {sweep.name}",
        f"{len(rows)} jobs, each at the k with most tokens/s of those it measured.",
        blocks,
        [*compared, Section("Reading the table", [Text(READING)])],
    )
    pages.write(folder, "sweep", document)
    records = {
        "rows": [_record(row) for row in rows],
        "quantized": [asdict(job) for job in quantized],
    }
    text = json.dumps(records, indent=2, allow_nan=False)
    (folder / "sweep.json").write_text(text + "\n", encoding="utf-8")


def read_sweep(sweep: Path) -> list[SweepRow]:
    """The jobs of a multirun folder, the longest acceptance of the mix first, failed ones last.

    Raises:
        FileNotFoundError: `sweep` holds no job folder.
    """
    folders = [f for f in sorted(sweep.glob("*/")) if f.is_dir() and not f.name.startswith(".")]
    if not folders:
        raise FileNotFoundError(f"report.sweep must be a multirun folder with jobs, got {sweep}")
    return _judge([_read_job(job) for job in folders])


def sweep_table(rows: list[SweepRow]) -> str:
    """The comparison as a Markdown table, for a log."""
    table = _table(rows)
    return markdown.table(table.columns, [[str(cell) for cell in row] for row in table.rows])


def _read_job(folder: Path) -> SweepRow:
    record = folder / "job.json"
    if not record.exists():
        return SweepRow(folder.name, failed=True)
    job = json.loads(record.read_text(encoding="utf-8"))
    overrides = dict(override.partition("=")[::2] for override in job["overrides"])
    acceptance = _artifact(job, "measure", "acceptance.json")
    train_seconds = (_artifact(job, "train", "train.json") or {}).get("seconds")
    if acceptance is None:
        return SweepRow(folder.name, overrides, train_seconds=train_seconds)
    measured = Acceptance.of(acceptance)
    names = dict.fromkeys(t.component for t in measured.traffic)
    coldest = {name: next(t for t in measured.traffic if t.component == name) for name in names}
    return SweepRow(
        folder.name,
        overrides,
        num_draft_tokens=measured.num_draft_tokens,
        acceptance_length={n: measured.length(measured.head, t) for n, t in coldest.items()},
        tokens_per_second=measured.speed(measured.head, measured.traffic[0]),
        train_seconds=train_seconds,
    )


def _artifact(job: dict[str, Any], stage: str, name: str) -> dict[str, Any] | None:
    # A job that stops at an earlier stage knows the key of what it did not make.
    key = job["keys"].get(stage)
    path = Path(job["root"]) / stage / str(key) / name
    if key is None or not path.exists():
        return None
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return record


def _judge(rows: list[SweepRow]) -> list[SweepRow]:
    measured = [row for row in rows if row.length.value is not None]
    measured.sort(key=lambda row: -(row.length.value or 0.0))
    rest = sorted((row for row in rows if row.length.value is None), key=lambda row: row.failed)
    if not measured:
        return rest
    best, *others = measured
    judged = [replace(row, verdict=_against(best, row)) for row in others]
    meets = next((row.job for row in judged if row.verdict), None)
    verdict = "best" if meets is None else f"within the interval of job {meets}"
    return [replace(best, verdict=verdict), *judged, *rest]


def _against(best: SweepRow, row: SweepRow) -> str:
    return "" if compare(best.length, row.length) == 1 else f"within the interval of job {best.job}"


def _differing(rows: list[SweepRow]) -> list[str]:
    done = [row for row in rows if not row.failed]
    keys = dict.fromkeys(key for row in done for key in row.overrides)
    return [k for k in keys if len({row.overrides.get(k, DEFAULT) for row in done}) > 1]


def _table(rows: list[SweepRow]) -> Table:
    differing = _differing(rows)
    components = list(dict.fromkeys(name for row in rows for name in row.acceptance_length))
    cells: list[list[Cell]] = []
    for row in rows:
        if row.failed:
            blanks = [DASH] * (len(differing) + len(components) + 3)
            cells.append([row.job, *blanks, "failed, or not done"])
            continue
        cells.append(
            [
                row.job,
                *(row.overrides.get(key, DEFAULT) for key in differing),
                NOT_MEASURED if row.num_draft_tokens is None else str(row.num_draft_tokens),
                *(row.acceptance_length.get(name, UNMEASURED) for name in components),
                row.tokens_per_second,
                duration(row.train_seconds),
                row.verdict,
            ]
        )
    return Table(
        "Only overrides that differ between jobs are shown; all: the mix that the profile "
        "describes.",
        [
            Column("job"),
            *(Column(key, numeric=True) for key in differing),
            Column("k", numeric=True),
            *(Column(name, numeric=True, group="acceptance length") for name in components),
            Column("tokens/s", numeric=True),
            Column("training", numeric=True),
            Column("verdict"),
        ],
        cells,
    )


def _summary(rows: list[SweepRow]) -> str:
    first = rows[0]
    if first.length.value is None:
        return "No job was measured."
    settings = ", ".join(f"{k}={first.overrides.get(k, DEFAULT)}" for k in _differing(rows))
    rivals = [row.job for row in rows[1:] if row.verdict]
    claim = f"not told apart from job {', '.join(rivals)}" if rivals else "apart from all others"
    return (
        f"Job {first.job} ({settings or 'no override differs'}) has the longest acceptance, "
        f"{first.length} tokens a round; it is {claim}."
    )


def _record(row: SweepRow) -> dict[str, Any]:
    record = asdict(row)
    for estimate in (*record["acceptance_length"].values(), record["tokens_per_second"]):
        del estimate["digits"]
    return record


def _plot(folder: Path, rows: list[SweepRow]) -> Image:
    measured = [row for row in rows if row.length.value is not None]
    differing = _differing(rows)
    labels = [
        "\n".join([f"job {row.job}", *(f"{k}={row.overrides.get(k, DEFAULT)}" for k in differing)])
        for row in measured
    ]
    line = 0.17 * (1 + len(differing)) + 0.12  # inches a job
    with matplotlib.rc_context(plots.STYLE):
        figure = Figure(figsize=(plots.WIDTH, 0.8 + line * len(measured)), layout="constrained")
        axes = figure.subplots()
        for y, row in enumerate(measured):
            plots.interval_plot(axes, y, row.length, *plots.DRAFT_MODEL_LOOK)
        axes.set_yticks(range(len(measured)), labels)
        axes.set_ylim(len(measured) - 0.5, -0.5)
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="x")
        axes.set_xlabel("acceptance length of the mix, tokens a round")
    plots.save(folder / "sweep.png", figure)
    return Image(
        "sweep.png",
        "Dot plot of the acceptance length of the mix by job.",
        "Acceptance length of the mix, with intervals; the longest on top.",
    )
