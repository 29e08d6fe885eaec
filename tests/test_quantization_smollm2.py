"""The gates on a real target: what they let pass, what they refuse, and faults that are planted."""

import copy

import pytest
import tiny_runs
import torch

from specfit.files import read_jsonl
from specfit.pipeline import _Path
from specfit.quantization.activations import input_amax, input_scales
from specfit.quantization.checkpoint import write_checkpoint
from specfit.quantization.config import Precision
from specfit.quantization.digests import digests
from specfit.quantization.divergence import ModelDivergence
from specfit.quantization.fidelity import GATES, broken_limits, other_than_measured
from specfit.quantization.loading import load_quantized
from specfit.quantization.measured import Text
from specfit.quantization.plan import QuantizationPlan
from specfit.quantization.problem import text_settings
from specfit.quantization.switch import UnitSwitch
from specfit.quantization.texts import passages, read_texts
from specfit.targets.load import checkpoint_folder
from specfit.targets.target import Target
from specfit_kernels.nvfp4 import quantize
from specfit_kernels.rules import ScaleRule

pytestmark = pytest.mark.slow
SETTINGS = (
    "quantize.budget=1",
    "quantize.num_passages=22",
    "quantize.context_tokens=32",
    "quantize.counted_tokens=96",
    "quantize.batch_size=8",
)
LAYERS = range(8, 20)  # quantized in the checkpoint that faults are planted in


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return _Path(tiny_runs.composed([f"runtime.root={tmp_path_factory.mktemp('root')}", *SETTINGS]))


@pytest.fixture(scope="module")
def texts(path, tmp_path_factory):
    cfg = path.cfg
    settings = text_settings(cfg.quantize, cfg.profile, cfg.seed)
    rows = read_jsonl(path.prompts.file("conversations.jsonl"))
    answers = tmp_path_factory.mktemp("texts") / "answers.jsonl"
    train = [row for row in rows if row["split"] == "train"]
    found = read_texts(answers, train, path.plain_engine, settings)
    return {text: passages(answered, settings) for text, answered in found.items()}


@pytest.fixture(scope="module")
def divergence(path, texts):
    """Without quantized units; on the report text, of more than 2,000 tokens."""
    switch = UnitSwitch(path.plain, rule=ScaleRule.search)
    return ModelDivergence(
        path.plain,
        switch,
        {Text.report: texts[Text.report]},
        groups=[[unit] for unit in switch.units],
        batch_size=8,
    )


@pytest.fixture(scope="module")
def checkpoint(path, divergence, tmp_path_factory):
    """Some layers in NVFP4, and the digests and KL of the same in memory."""
    units = [unit for unit in divergence.switch.units if unit.layer in LAYERS]
    folder = tmp_path_factory.mktemp("checkpoint")
    source = checkpoint_folder(path.target, path.location)
    plan = QuantizationPlan(dict.fromkeys(units, Precision.nvfp4))
    write_checkpoint(source, folder, plan, on_progress=lambda _done, _total: None)
    chosen = torch.tensor([group[0].layer in LAYERS for group in divergence.groups])
    measured = divergence.switch.digests(divergence.units(chosen))
    return folder, measured, float(divergence.kl(chosen, Text.report).mean())


def row_of(divergence, model):
    plain = divergence.target
    figures = divergence.tokens_of(Target(model, plain.tokenizer, plain.info), Text.report)
    row = figures.row(seed=0)
    assert row["num_tokens"] > 2000
    return row


def test_identity_passes_the_strict_gate(divergence):
    assert broken_limits("strict", row_of(divergence, divergence.target.model)) == []


def test_a_cast_to_bf16_passes_the_strict_gate(divergence):
    cast = copy.deepcopy(divergence.target.model).bfloat16().float()
    row = row_of(divergence, cast)
    assert row["kl_mean_nats"] > 0
    assert broken_limits("strict", row) == []


def test_all_layers_in_w4a4_are_refused_by_production(path, texts, divergence):
    amax = input_amax(path.plain, texts[Text.calibration].split(8))
    switch = UnitSwitch(path.plain, rule=ScaleRule.search, input_scales=input_scales(amax))
    switch.choose(switch.units)
    row = row_of(divergence, path.plain.model)
    switch.close()
    broken = broken_limits("production", row)
    assert len(broken) == len(GATES["production"]) == 3, row


def test_what_was_written_is_what_was_measured(divergence, checkpoint):
    folder, measured, kl = checkpoint
    model = load_quantized(folder, torch.float32)
    assert other_than_measured(measured, digests(model)) == []
    assert row_of(divergence, model)["kl_mean_nats"] == pytest.approx(kl, rel=1e-3)
    assert kl > 0.005


def scaled(weights):
    for name, weight in weights.items():
        if name.startswith("model.layers.10.") and name.endswith("_proj.weight"):
            weight.data *= 1.05


def swapped(weights):
    gate, up = (weights[f"model.layers.10.mlp.{name}_proj.weight"] for name in ("gate", "up"))
    gate.data, up.data = up.data, gate.data


def head_quantized(weights):
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    head.data = quantize(head.data).dequantize()


@pytest.mark.parametrize("fault", [scaled, swapped, head_quantized])
def test_planted_faults_are_caught(checkpoint, fault):
    folder, measured, _ = checkpoint
    model = load_quantized(folder, torch.float32)
    with torch.no_grad():
        fault(dict(model.named_parameters()))
    assert other_than_measured(measured, digests(model))
