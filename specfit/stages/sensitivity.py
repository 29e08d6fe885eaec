"""`sensitivity`: the text that quantizing is measured on, and what units and budgets cost there.

Units alone; budgets by the units that alone cost least.
Nothing here depends on a budget, so a sweep over budgets and selectors makes it once.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from specfit.artifacts import Artifact
from specfit.config import ProfileConfig
from specfit.engine import DecodeEngine
from specfit.files import read_jsonl, write_json
from specfit.quantization.activations import input_amax
from specfit.quantization.checkpoint import quantized_size
from specfit.quantization.comparisons import budget_curve
from specfit.quantization.config import Activations, Precision, QuantizeConfig
from specfit.quantization.measured import Text
from specfit.quantization.plan import QuantizationPlan
from specfit.quantization.problem import JsonlJournal, divergence_of, text_settings
from specfit.quantization.reading import scheme_of
from specfit.quantization.selection import measure_alone
from specfit.quantization.texts import passages, read_texts, write_texts
from specfit.quantization.units import units_of
from specfit.targets.target import Target

VERSION = 2
FIGURES = "sensitivity.json"  # written last
ANSWERS = "answers.jsonl"  # the journal of texts.jsonl


@dataclass(frozen=True)
class SensitivityJob:
    """What the stage works on."""

    folder: Path
    config: QuantizeConfig
    profile: ProfileConfig
    seed: int
    prompts: Artifact
    source: Path  # the checkpoint's folder
    target: Target  # the same, loaded
    engine: DecodeEngine  # of that


def run(job: SensitivityJob) -> None:
    """Writes texts.jsonl, measured.jsonl and sensitivity.json.

    What an earlier, killed run in the folder has answered or measured is used.

    Raises:
        ValueError: the target is quantized already, has no unit or one that NVFP4 cannot hold, or
            its answers are too short.
    """
    if (job.folder / FIGURES).exists():
        (job.folder / ANSWERS).unlink(missing_ok=True)
        return  # an earlier run was killed after its last line
    _check(job)
    settings = text_settings(job.config, job.profile, job.seed)
    rows = read_jsonl(job.prompts.file("conversations.jsonl"))
    conversations = [row for row in rows if row["split"] == "train"]
    answers = job.folder / ANSWERS
    texts = read_texts(answers, conversations, job.engine, settings)
    amax = None
    if job.config.activations is not Activations.none:
        text = passages(texts[Text.calibration], settings)
        amax = input_amax(job.target, text.split(job.config.batch_size))
    read = {text: texts[text] for text in (Text.units, Text.selection)}
    divergence = divergence_of(job.target, job.config, settings, read, amax)
    journal = JsonlJournal(job.folder / "measured.jsonl")
    alone = measure_alone(divergence, journal)
    curve = budget_curve(divergence, alone, journal, job.seed, job.config.curve_points)
    write_texts(job.folder / "texts.jsonl", texts)
    figures = {
        "input_amax": amax,
        "units": divergence.names,
        "num_weights": [int(cost) for cost in divergence.costs.tolist()],
        "isolated_kl_nats": alone,
        "curve": [asdict(point) for point in curve],
    }
    divergence.switch.close()
    write_json(job.folder / FIGURES, figures)
    answers.unlink(missing_ok=True)


def _check(job: SensitivityJob) -> None:
    """Refuses what could not be written in the end."""
    scheme = scheme_of(job.source)
    if scheme is not None:
        raise ValueError(
            f"quantize.budget must be null for a target that is quantized already, got {scheme}; "
            "specfit fits to it as it is"
        )
    if "auto_map" in json.loads((job.source / "config.json").read_text()):
        raise ValueError(
            f"quantize.budget must be null for a target with code of its own, got {job.source}"
        )
    units = units_of(name for name, _ in job.target.model.named_parameters())
    quantized_size(job.source, QuantizationPlan(dict.fromkeys(units, Precision.nvfp4)))
