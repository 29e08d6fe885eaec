"""`sensitivity`: the text that quantizing is measured on, and what units and budgets cost there.

Units alone; budgets by the units that alone cost least.
Nothing here depends on a budget, so a sweep over budgets and selectors makes it once.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from specfit.artifacts import Artifact
from specfit.engine import DecodeEngine
from specfit.files import read_jsonl, write_json
from specfit.quantization.activations import input_amax
from specfit.quantization.comparisons import budget_curve
from specfit.quantization.config import Activations, QuantizeConfig
from specfit.quantization.measured import Text
from specfit.quantization.problem import JsonlJournal, divergence_of, text_settings
from specfit.quantization.refusals import check_disk, units_to_choose_from
from specfit.quantization.selection import measure_alone
from specfit.quantization.texts import passages, read_texts, write_texts
from specfit.targets.target import Target
from specfit.traffic.config import ProfileConfig

VERSION = 3
FIGURES = "sensitivity.json"  # written last
ANSWERS = "answers.jsonl"  # the journal of texts.jsonl
INPUT_CONTEXT = 2048  # tokens of a prompt by which static input scales are set: engines see it all


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
    trust_remote_code: bool  # with code that came with it
    engine: DecodeEngine  # of that


def run(job: SensitivityJob) -> None:
    """Writes texts.jsonl, measured.jsonl and sensitivity.json.

    What an earlier, killed run in the folder has answered or measured is used.

    Raises:
        ValueError: the target cannot be quantized as asked, which is known before anything is
            answered; or its answers are too short.
        DiskFull: less is free than the quantized checkpoint will take.
    """
    if (job.folder / FIGURES).exists():
        (job.folder / ANSWERS).unlink(missing_ok=True)
        return  # an earlier run was killed after its last line
    if job.trust_remote_code and "auto_map" in json.loads((job.source / "config.json").read_text()):
        raise ValueError(
            f"quantize.budget must be null for a target with code of its own, got {job.source}; or "
            "set target.trust_remote_code=false, where transformers knows it"
        )
    units = units_to_choose_from(job.config, job.source, job.target)
    check_disk(job.config, job.source, units, job.folder)
    settings = text_settings(job.config, job.profile, job.seed)
    rows = read_jsonl(job.prompts.file("conversations.jsonl"))
    conversations = [row for row in rows if row["split"] == "train"]
    answers = job.folder / ANSWERS
    texts = read_texts(answers, conversations, job.engine, settings)
    amax = None
    if job.config.activations is not Activations.none:
        text = passages(texts[Text.calibration], settings, INPUT_CONTEXT)
        amax = input_amax(job.target, text.split(job.config.batch_size))
    read = {text: texts[text] for text in (Text.units, Text.selection)}
    divergence = divergence_of(
        job.target, job.config, settings, read, units=units, rest=None, amax=amax
    )
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
