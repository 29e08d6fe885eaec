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
from specfit.config import Engine
from specfit.engine import DecodeEngine, decode_engine
from specfit.files import read_jsonl, write_json
from specfit.measure_config import MeasureConfig
from specfit.quantization.acceptance_change import acceptance_changes
from specfit.quantization.checkpoint import is_complete, write_checkpoint
from specfit.quantization.comparisons import compare
from specfit.quantization.config import BudgetIn, Gate, QuantizeConfig, Rest
from specfit.quantization.cotune import cotune
from specfit.quantization.digests import digests
from specfit.quantization.divergence import ModelDivergence
from specfit.quantization.fidelity import GATES, beyond_budget, broken_limits, other_than_measured
from specfit.quantization.in_context import NUM_FOLDS
from specfit.quantization.layout import unit_sizes
from specfit.quantization.loading import load_quantized
from specfit.quantization.measured import Text
from specfit.quantization.plan import QuantizationPlan, rest_of
from specfit.quantization.problem import JsonlJournal, divergence_of, text_settings
from specfit.quantization.reading import scheme_of
from specfit.quantization.refusals import min_share, units_to_choose_from
from specfit.quantization.rollouts import first_differences
from specfit.quantization.selection import Budget, Selection, select
from specfit.quantization.texts import Answered, TextSettings, texts_of
from specfit.report import quantization
from specfit.targets.info import read_info_file
from specfit.targets.load import prepare
from specfit.targets.target import Target
from specfit.traffic.config import ProfileConfig

VERSION = 4
FIDELITY = "fidelity.json"  # written last
MODEL = "model"
REPORTED = ("num_tokens", "kl_mean_nats", "kl_mean_nats_low", "kl_mean_nats_high", "top1_agreement")
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
    units = units_to_choose_from(config, job.source, target)
    texts = texts_of(job.sensitivity.file("texts.jsonl"))
    del texts[Text.units]  # what they did there is known
    alone = json.loads(job.sensitivity.file("sensitivity.json").read_text())
    amax = alone["input_amax"]
    rest = rest_of(config)
    divergence = divergence_of(target, config, settings, texts, units=units, rest=rest, amax=amax)
    journal = JsonlJournal(job.folder / "measured.jsonl", _known(job))
    selection = _select(job, divergence, journal, min_share(config, job.source, units, amax))
    _require_kept(config, selection)
    chosen = torch.zeros(len(divergence.groups), dtype=torch.bool)
    chosen[list(selection.chosen)] = True
    compared = compare(divergence, selection, journal, job.seed)
    factors = _factors(job, divergence, chosen)
    nvfp4 = divergence.units(chosen)
    plan = QuantizationPlan.of(config, units, nvfp4, input_amax=amax, scale_factors=factors)
    measured = divergence.switch.digests(nvfp4)
    # From here on the target is as it came: what it was in NVFP4 and what was written are not in
    # memory together.
    divergence.switch.close()
    divergence.forget()
    _write(job, plan)
    quantized = Target(
        load_quantized(job.folder / MODEL, target.model.dtype).to(target.device),
        target.tokenizer,
        replace(target.info, quantization=scheme_of(job.folder / MODEL)),
    )
    wrong = other_than_measured(measured, digests(quantized.model))
    write_json(job.folder / "info.json", quantized.info.to_json())
    recipe = _recipe(job, divergence, selection, chosen, plan) | {"curve": alone["curve"]}
    engine = decode_engine(job.engine, quantized, job.folder / MODEL)
    fidelity = _fidelity(job, divergence, engine, texts, settings, wrong)
    fidelity["comparisons"] = [asdict(comparison) for comparison in compared]
    fidelity["acceptance"] = _acceptance(job, engine)
    write_json(job.folder / "recipe.json", recipe)
    quantization.write_page(job.folder, target.info.name, recipe, fidelity)
    write_json(job.folder / FIDELITY, fidelity)


def check_gate(artifact: Artifact, gate: Gate) -> None:
    """Refuses a quantized target that lost too much, or is not the one that was measured.

    Raises:
        GateRejected: a figure does not keep what the gate asks for; under every gate, the
            checkpoint is not what was measured.
    """
    fidelity = json.loads(artifact.file(FIDELITY).read_text())
    wrong = "; ".join(fidelity["not_as_measured"])
    if wrong:
        raise GateRejected(
            f"no quantize.gate lets {artifact.path} pass: {wrong}; delete it to make it again"
        )
    broken = [] if gate is Gate.report else fidelity["broken_limits"][gate.name]
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


def _known(job: QuantizeJob) -> dict[str, list[float]]:
    """What was measured without a budget, the rest as it came."""
    rows = read_jsonl(job.sensitivity.file("measured.jsonl"))
    sets_too = job.config.rest is Rest.none
    return {key: values for key, values in rows if sets_too or key.startswith("alone")}


def _select(
    job: QuantizeJob, divergence: ModelDivergence, journal: JsonlJournal, share: float | None
) -> Selection:
    config = job.config
    return select(
        divergence,
        Budget(min_share=share, max_kl_nats=_ceiling(config)),
        config.selector,
        num_sets=max(NUM_FOLDS, config.sets_per_unit * len(divergence.groups)),
        num_random=config.num_random,
        seed=job.seed,
        journal=journal,
    )


def _ceiling(config: QuantizeConfig) -> float | None:
    return config.budget if config.budget_in is BudgetIn.kl_nats else None


def _require_kept(config: QuantizeConfig, selection: Selection) -> None:
    """Refuses a ceiling of KL that no set was found for."""
    ceiling, row = _ceiling(config), selection.rows[-1]
    if ceiling is None:
        return
    if config.rest is Rest.none and not row.chosen:
        raise ValueError(
            f"quantize.budget must be a KL that some unit keeps, got {ceiling:g} nats; alone the "
            f"best one costs {min(selection.isolated_kl_nats):.2g} on average"
        )
    if row.measured_kl_nats_high > ceiling:
        raise ValueError(
            f"quantize.budget must be a KL that quantize.rest={config.rest.name} keeps, got "
            f"{ceiling:g} nats; what loses least costs {row.measured_kl_nats:.2g} on average"
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


def _write(job: QuantizeJob, plan: QuantizationPlan) -> None:
    if is_complete(job.folder / MODEL):
        return  # an earlier run was killed later
    with tqdm(unit="B", unit_scale=True, desc="quantize: write") as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        write_checkpoint(job.source, job.folder / MODEL, plan, on_progress=progress)


def _recipe(
    job: QuantizeJob,
    divergence: ModelDivergence,
    selection: Selection,
    chosen: Bool[Tensor, "units"],
    plan: QuantizationPlan,
) -> dict[str, Any]:
    sizes = unit_sizes(job.source, plan)
    own = [sizes[unit] for unit in divergence.switch.units]
    num_weights = sum(size.num_weights for size in own)
    found = asdict(selection)
    return found | {
        "units": divergence.names,
        "num_weights": [int(cost) for cost in divergence.costs.tolist()],
        # Of the weights that may be quantized, as are the bits.
        "share": float(divergence.costs[chosen].sum() / divergence.costs.sum()),
        "bits_per_weight": 8 * sum(size.num_bytes for size in own) / num_weights,
        "plan": plan.to_json(),
        "text": {
            "context_tokens": job.config.context_tokens,
            "counted_tokens": job.config.counted_tokens,
        },
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
    quantized: DecodeEngine,
    texts: dict[Text, list[Answered]],
    settings: TextSettings,
    wrong: list[str],
) -> dict[str, Any]:
    """Figures of the checkpoint as it was written, read back, on each text."""
    rows = []
    for text in texts:
        figures = divergence.tokens_of(quantized.target, text)
        rows.append({"text": text.name} | figures.row(job.seed))
    report = rows[-1]
    ceiling = _ceiling(job.config)
    broken = wrong if ceiling is None else wrong + beyond_budget(ceiling, report)
    floor = divergence.tokens_of(divergence.target, Text.report, one_by_one=True).row(job.seed)
    log.info(
        "quantize: on the report text %s",
        ", ".join(f"{name} {report[name]}" for name in REPORTED),
    )
    return {
        "rows": rows,
        # The target as it is against itself, in batches of another shape.
        "noise_floor": floor,
        "rollouts": first_differences(quantized, texts[Text.report], settings),
        "max_kl_nats": ceiling,
        "not_as_measured": wrong,
        "broken_limits": {gate: broken + broken_limits(gate, report) for gate in GATES},
    }
