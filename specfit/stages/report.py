"""report: one page, its Markdown twin, plots and a record, from what the other stages made."""

import json
import logging
from collections.abc import Sequence
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


def run(
    folder: Path,
    *,
    prompts: Path,
    quantize: Path | None,
    generate: Path,
    fit: Path,
    extract: Path | None,
    train: Path,
    measure: Path,
    predict: Path,
    export: Path,
    bench: Path | None,
    provenance: dict[str, Any],
    matrix: Sequence[Found],
    report: ReportConfig,
) -> None:
    """Writes report.html, report.md, report.json and their plots into `folder`.

    Args:
        folder: where to.
        prompts: a finished artifact, as are `generate`, `fit`, `train`, `measure`,
            `predict` and `export`.
        quantize: see `prompts`; None where the target is served as it came.
        generate: see `prompts`.
        fit: see `prompts`.
        extract: the hidden-state store; None where states were computed while training.
        train: see `prompts`.
        measure: see `prompts`.
        predict: see `prompts`.
        export: see `prompts`.
        bench: its figures; None where latency was not measured.
        provenance: keys, versions, git, seed, command, target, profile and config.
        matrix: what was measured of several heads on several profiles; beside the page, too.
        report: what else to show; a sweep is written beside the page.

    Raises:
        FileNotFoundError: an artifact lacks its record, or `report.sweep` holds no job.
        ValueError: no draft model was measured.
    """
    record: dict[str, Any] = {
        "provenance": provenance,
        "prompts": _read(prompts / "prompts.json"),
        "recipe": None if quantize is None else _read(quantize / "recipe.json"),
        "fidelity": None if quantize is None else _read(quantize / "fidelity.json"),
        "generate": _read(generate / "generate.json"),
        "fit": _read(fit / "fit.json"),
        "extract": None if extract is None else _read(extract / "store.json"),
        "train": _read(train / "train.json"),
        "train_log": _read_lines(train / "train_log.jsonl"),
        "evals": _read_lines(train / "evals.jsonl"),
        "acceptance": _read(measure / "acceptance.json"),
        "latency": _read(predict / "latency.json"),
        "parity": _read(export / "parity.json"),
        "manifest": _read(export / "manifest.json"),
        "bench": None if bench is None else _read(bench),
    }
    found = Acceptance.of(record["acceptance"])
    record["verdict"] = opening.verdict(found)
    document = _compose(folder, record, found)
    pages.write(folder, "report", document)
    text = json.dumps(record, indent=2, ensure_ascii=False)
    (folder / "report.json").write_text(text + "\n", encoding="utf-8")
    if report.sweep is not None:
        write_sweep(folder, Path(report.sweep))
    if matrix:
        matrix_page.write(folder, matrix_rows(matrix), MATRIX_CONFIDENCE)
    log.info("report verdict=%r page=%s", record["verdict"], folder / "report.html")


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
