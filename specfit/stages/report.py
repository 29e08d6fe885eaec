"""report: one page, its Markdown twin, plots and a record, from what the other stages made."""

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specfit.config import ReportConfig
from specfit.matrix import CONFIDENCE as MATRIX_CONFIDENCE
from specfit.matrix import Found
from specfit.matrix import matrix as matrix_rows
from specfit.report import (
    fitted,
    latency,
    making,
    matched,
    measured,
    opening,
    pages,
    plots,
    predicted,
    quantization,
)
from specfit.report import matrix as matrix_page
from specfit.report.acceptance import Acceptance
from specfit.report.definitions import definitions
from specfit.report.document import Document
from specfit.report.sweep import write_sweep

VERSION = 6

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ReportJob:
    """What the page is of: folders of finished artifacts, and what no stage knows."""

    folder: Path
    prompts: Path
    generate: Path
    fit: Path
    train: Path
    measure: Path
    predict: Path
    export: Path
    quantize: Path | None  # None where the target is served as it came
    extract: Path | None  # the hidden-state store; None where states were made while training
    bench: Path | None  # its figures; None where latency was not measured
    provenance: dict[str, Any]  # keys, versions, git, seed, command, target, profile and config
    matrix: Sequence[Found]  # what was measured of several heads on several profiles
    report: ReportConfig


def run(job: ReportJob) -> None:
    """Writes report.html, report.md, report.json and their plots.

    A matrix and a sweep are written beside the page.

    Raises:
        FileNotFoundError: an artifact lacks its record, or `report.sweep` holds no job.
        ValueError: no draft model was measured.
    """
    folder, record = job.folder, _record(job)
    found = Acceptance.of(record["acceptance"])
    record["verdict"] = opening.verdict(found)
    document = _compose(folder, record, found)
    pages.write(folder, "report", document)
    text = json.dumps(record, indent=2, ensure_ascii=False)
    (folder / "report.json").write_text(text + "\n", encoding="utf-8")
    if job.report.sweep is not None:
        write_sweep(folder, Path(job.report.sweep))
    if job.matrix:
        matrix_page.write(folder, matrix_rows(job.matrix), MATRIX_CONFIDENCE)
    log.info("report verdict=%r page=%s", record["verdict"], folder / "report.html")


def _record(job: ReportJob) -> dict[str, Any]:
    """Everything that report.json holds, but the verdict."""
    quantize, extract = job.quantize, job.extract
    return {
        "provenance": job.provenance,
        "prompts": _read(job.prompts / "prompts.json"),
        "recipe": None if quantize is None else _read(quantize / "recipe.json"),
        "fidelity": None if quantize is None else _read(quantize / "fidelity.json"),
        "generate": _read(job.generate / "generate.json"),
        "fit": _read(job.fit / "fit.json"),
        "extract": None if extract is None else _read(extract / "store.json"),
        "train": _read(job.train / "train.json"),
        "train_log": _read_lines(job.train / "train_log.jsonl"),
        "evals": _read_lines(job.train / "evals.jsonl"),
        "acceptance": _read(job.measure / "acceptance.json"),
        "latency": _read(job.predict / "latency.json"),
        "parity": _read(job.export / "parity.json"),
        "manifest": _read(job.export / "manifest.json"),
        "bench": None if job.bench is None else _read(job.bench),
    }


def _compose(folder: Path, record: dict[str, Any], found: Acceptance) -> Document:
    train, provenance, parity = record["train"], record["provenance"], record["parity"]["rows"]
    images = plots.measured_plots(folder, found)
    images |= plots.training_plot(
        folder, record["train_log"], record["evals"], train.get("kept_step")
    )
    quantized = []
    if record["recipe"]:
        quantized = quantization.sections(folder, record["recipe"], record["fidelity"])
    timed = [latency.section(folder, record["bench"])] if record["bench"] else []
    return Document(
        opening.title(found, provenance),
        opening.lead(found, provenance),
        opening.opening(found, provenance, parity),
        [
            matched.section(record, found),
            *measured.sections(found, images),
            *timed,
            predicted.section(folder, record["latency"]),
            *quantized,
            making.training(train, record["train_log"], record["evals"], images),
            making.data(record["prompts"], record["generate"]),
            fitted.mixture(record["fit"]),
            fitted.coverage(record["fit"]),
            making.throughput({name: record[name] for name in ("generate", "extract", "train")}),
            making.export(parity, record["manifest"]),
            making.provenance(provenance),
            definitions(found.confidence),
        ],
    )


def _read(path: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return record


def _read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
