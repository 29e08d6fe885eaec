"""`quantize`: the target in NVFP4, those layers chosen that lose least, and what was lost."""

import json
import logging
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor
from tqdm import tqdm

from specfit.artifacts import Artifact
from specfit.checks import GateRejected
from specfit.config import Engine, MeasureConfig, ProfileConfig
from specfit.engine import DecodeEngine, decode_engine
from specfit.files import write_json
from specfit.quantization.acceptance_change import acceptance_changes
from specfit.quantization.checkpoint import is_complete, write_checkpoint
from specfit.quantization.comparisons import compare
from specfit.quantization.config import (
    BITS,
    BudgetIn,
    Gate,
    Precision,
    QuantizeConfig,
    Rest,
)
from specfit.quantization.cotune import check_cotune, cotune
from specfit.quantization.divergence import ModelDivergence
from specfit.quantization.fidelity import GATES, beyond_budget, broken_limits, other_than_measured
from specfit.quantization.in_context import NUM_FOLDS
from specfit.quantization.loading import load_quantized
from specfit.quantization.measured import Text
from specfit.quantization.plan import QuantizationPlan
from specfit.quantization.problem import JsonlJournal, divergence_of, text_settings
from specfit.quantization.reading import scheme_of
from specfit.quantization.rollouts import first_differences
from specfit.quantization.selection import Budget, Selection, select
from specfit.quantization.texts import Answered, TextSettings, texts_of
from specfit.quantization.units import Unit
from specfit.report import quantization
from specfit.targets.info import read_info_file
from specfit.targets.load import prepare
from specfit.targets.target import Target

VERSION = 3
FIDELITY = "fidelity.json"  # written last
MODEL = "model"
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class QuantizeJob:
    """What the stage works on."""

    folder: Path
    config: QuantizeConfig
    profile: ProfileConfig
    seed: int
    prompts: Artifact
    sensitivity: Artifact
    speculator: Artifact | None
    measure: MeasureConfig  # of the speculator
    source: Path  # the checkpoint's folder
    target: Target  # the same, loaded
    engine: Engine


def run(job: QuantizeJob) -> None:
    """Writes model/ (a compressed-tensors checkpoint), recipe.json, fidelity.json and a page.

    What an earlier, killed run in the folder has measured or written is used.

    Raises:
        ValueError: the checkpoint's matrices cannot be quantized.
        DiskFull: less is free than the checkpoint takes.
    """
    config, target = job.config, job.target
    settings = text_settings(config, job.profile, job.seed)
    texts = texts_of(job.sensitivity.file("texts.jsonl"))
    del texts[Text.units]  # what they did there is known
    alone = json.loads(job.sensitivity.file("sensitivity.json").read_text())
    amax = alone["input_amax"]
    divergence = divergence_of(target, config, settings, texts, amax)
    if config.cotune:
        check_cotune(divergence.switch)
    journal = JsonlJournal(
        job.folder / "measured.jsonl", known=job.sensitivity.file("measured.jsonl")
    )
    selection = _select(job, divergence, journal)
    if not selection.chosen and config.rest is Rest.none:
        raise ValueError(
            f"quantize.budget must be a KL that some unit keeps, got {config.budget:g} nats; alone "
            f"the best one costs {min(selection.isolated_kl_nats):.2g}"
        )
    chosen = torch.zeros(len(divergence.groups), dtype=torch.bool)
    chosen[list(selection.chosen)] = True
    compared = compare(divergence, selection, journal, job.seed)
    factors = _factors(job, divergence, chosen)
    units = divergence.switch.units
    plan = _plan(config, units, divergence.units(chosen), amax, factors)
    _write(job, plan)
    quantized = Target(
        load_quantized(job.folder / MODEL, target.model.dtype).to(target.device),
        target.tokenizer,
        replace(target.info, quantization=scheme_of(job.folder / MODEL)),
    )
    write_json(job.folder / "info.json", quantized.info.to_json())
    recipe = _recipe(divergence, selection, chosen, plan) | {"curve": alone["curve"]}
    engine = decode_engine(job.engine, quantized, job.folder / MODEL)
    fidelity = _fidelity(job, divergence, chosen, engine, texts, settings)
    fidelity["comparisons"] = [asdict(comparison) for comparison in compared]
    fidelity["acceptance"] = _acceptance(job, engine)
    write_json(job.folder / "recipe.json", recipe)
    quantization.write_page(job.folder, target.info.name, recipe, fidelity)
    write_json(job.folder / FIDELITY, fidelity)
    divergence.switch.close()


def check_gate(artifact: Artifact, gate: Gate) -> None:
    """Refuses a quantized target that lost too much.

    Raises:
        GateRejected: a figure does not keep what the gate asks for.
    """
    if gate is Gate.report:
        return
    broken = json.loads(artifact.file(FIDELITY).read_text())["broken_limits"][gate.name]
    if broken:
        raise GateRejected(
            f"quantize.gate={gate.name} rejects {artifact.path}: {'; '.join(broken)}; quantize "
            "less, or set quantize.gate=report to go on with it"
        )


def open_quantized(artifact: Artifact, device: torch.device) -> Target:
    """The target of a `quantize` artifact, which computes with what its checkpoint holds."""
    from transformers import AutoTokenizer

    info = read_info_file(artifact.file("info.json"))
    folder = artifact.folder() / MODEL
    prepare(device)
    model = load_quantized(folder, getattr(torch, info.dtype)).requires_grad_(False)
    return Target(model.to(device), AutoTokenizer.from_pretrained(folder), info)


def _select(job: QuantizeJob, divergence: ModelDivergence, journal: JsonlJournal) -> Selection:
    config = job.config
    max_kl = config.budget if config.budget_in is BudgetIn.kl_nats else None
    return select(
        divergence,
        Budget(min_share=config.min_share, max_kl_nats=max_kl),
        config.selector,
        num_sets=max(NUM_FOLDS, config.sets_per_unit * len(divergence.groups)),
        num_random=config.num_random,
        seed=job.seed,
        journal=journal,
    )


def _factors(
    job: QuantizeJob, divergence: ModelDivergence, chosen: Bool[Tensor, "units"]
) -> dict[str, float]:
    if not job.config.cotune or not chosen.any():
        return {}
    path = job.folder / "factors.json"
    if not path.exists():
        write_json(path, cotune(divergence, chosen))
    factors: dict[str, float] = json.loads(path.read_text())
    divergence.requantize(job.config.rule, factors)
    return factors


def _plan(
    config: QuantizeConfig,
    units: list[Unit],
    chosen: list[Unit],
    amax: dict[str, float] | None,
    factors: dict[str, float],
) -> QuantizationPlan:
    precision = dict.fromkeys(chosen, Precision.nvfp4)
    if config.rest is not Rest.none:
        rest = Precision[config.rest.name]
        precision |= {unit: rest for unit in units if unit not in precision}
    return QuantizationPlan(
        precision={unit: precision[unit] for unit in sorted(precision)},
        rule=config.rule,
        activations=config.activations,
        input_amax=amax or {},
        scale_factors=factors,
    )


def _write(job: QuantizeJob, plan: QuantizationPlan) -> None:
    if is_complete(job.folder / MODEL):
        return  # an earlier run was killed later
    with tqdm(unit="B", unit_scale=True, desc="quantize: write") as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        write_checkpoint(job.source, job.folder / MODEL, plan, on_progress=progress)


def _recipe(
    divergence: ModelDivergence,
    selection: Selection,
    chosen: Bool[Tensor, "units"],
    plan: QuantizationPlan,
) -> dict[str, Any]:
    share = float(divergence.costs[chosen].sum() / divergence.costs.sum())
    rest = [p for p in plan.precision.values() if p is not Precision.nvfp4]
    rest_bits = BITS[rest[0]] if rest else 16.0
    found = asdict(selection)
    return found | {
        "units": divergence.names,
        "num_weights": [int(cost) for cost in divergence.costs.tolist()],
        "share": share,  # of the weights that may be quantized
        "bits_per_weight": share * BITS[Precision.nvfp4] + (1 - share) * rest_bits,
        "plan": plan.to_json(),
    }


def _acceptance(job: QuantizeJob, quantized: DecodeEngine) -> list[dict[str, Any]]:
    """How the acceptance length of the given speculator changes; empty where none is given."""
    if job.speculator is None:
        return []
    return acceptance_changes(
        job.folder,
        job.speculator,
        before=decode_engine(job.engine, job.target, job.source),
        after=quantized,
        config=job.measure,
        profile=job.profile,
        prompts=job.prompts,
        seed=job.seed,
    )


def _fidelity(
    job: QuantizeJob,
    divergence: ModelDivergence,
    chosen: Bool[Tensor, "units"],
    quantized: DecodeEngine,
    texts: dict[Text, list[Answered]],
    settings: TextSettings,
) -> dict[str, Any]:
    """Figures of the checkpoint as it was written, read back, on each text."""
    rows = []
    for text in texts:
        figures = divergence.tokens_of(quantized.target, text)
        rows.append({"text": text.name} | figures.row(job.seed))
    report = rows[-1]
    selection = rows[list(texts).index(Text.selection)]
    # FP8 is not made in memory: there is nothing to hold it against, and a ceiling may be broken.
    wrong: list[str] = []
    if job.config.rest is Rest.none:
        measured = float(divergence.kl(chosen, Text.selection).mean())
        wrong = other_than_measured(measured, selection)
    if job.config.budget_in is BudgetIn.kl_nats:
        wrong += beyond_budget(job.config.budget or 0.0, selection)
    floor = divergence.tokens_of(divergence.target, Text.report, one_by_one=True).row(job.seed)
    log.info(
        "quantize: KL %.4f nats [%.4f, %.4f], same top token %.3f, perplexity %+.2f %%, %d tokens",
        *(report["kl_mean_nats"], report["kl_mean_nats_low"], report["kl_mean_nats_high"]),
        *(report["top1_agreement"], 100 * report["perplexity_change"], report["num_tokens"]),
    )
    return {
        "rows": rows,
        # The target as it is against itself, in batches of another shape.
        "noise_floor": floor,
        "rollouts": first_differences(quantized, texts[Text.report], settings),
        "broken_limits": {gate: wrong + broken_limits(gate, report) for gate in GATES},
    }
