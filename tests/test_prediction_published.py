"""The model against figures that others published, with the constants that `conf/` has."""

import dataclasses
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from specfit.latency.config import Format
from specfit.prediction.config import HardwareConfig, ModelConfig, PartConfig
from specfit.prediction.model import configured

CONF = Path(__file__).parents[1] / "conf" / "hardware"
# TensorRT-LLM's blog 1 ("Pushing Latency Boundaries"), DeepSeek-R1 on 8 B200 at batch 1, table
# "Autoregressive MTP Layers": tokens a round and tokens/s at 0..5 drafted tokens.
LENGTHS = (1.0, 1.92, 2.58, 2.82, 2.99, 3.01)
TOKENS_PER_SECOND = (111.0, 198.0, 250.0, 253.0, 245.0, 239.0)
CONTEXT = 2000.0  # its prompts have 1k tokens, its answers 2k
EXPERT = 3 * 7168 * 2048.0


def machine(name: str, **changes: object) -> HardwareConfig:
    schema = OmegaConf.structured(HardwareConfig)
    merged = OmegaConf.merge(schema, OmegaConf.load(CONF / f"{name}.yaml"), changes)
    found = OmegaConf.to_object(merged)
    assert isinstance(found, HardwareConfig)
    return found


def deepseek_r1() -> ModelConfig:
    """By the public config.json; formats by the blog's "Precision Strategy"."""
    attention = 7168 * 1536 + 1536 * 128 * 192 + 7168 * 576 + 512 * 128 * 256 + 128 * 128 * 7168
    return ModelConfig(
        name="DeepSeek-R1",
        source="deepseek-ai/DeepSeek-R1, config.json",
        num_layers=61,
        attention=PartConfig(61.0 * attention, Format.bf16),
        shared=PartConfig(58 * EXPERT + 3 * 3 * 7168 * 18432, Format.nvfp4),
        head=PartConfig(129280.0 * 7168, Format.bf16),
        experts=PartConfig(58 * 256 * EXPERT, Format.nvfp4),
        num_experts=256,
        num_active_experts=8,
        kv_values_per_token=61.0 * 576,
        context_flops=61.0 * 128 * 2 * (192 + 128),
    )


def test_the_description_has_the_published_parameters():
    model = deepseek_r1()
    layers = model.attention.parameters + model.shared.parameters
    head = model.head.parameters
    assert layers + model.experts.parameters + 2 * head == pytest.approx(671e9, rel=2e-3)
    active = layers + head + model.experts.parameters * 8 / 256
    assert active == pytest.approx(37e9, rel=0.02)


@pytest.mark.parametrize("k", range(6))
def test_drafting_gives_the_tokens_a_second_of_deepseek_r1_on_eight_b200(k):
    # Fitted to k = 0: communication_seconds_per_layer; to all: draft_cost. Nothing else.
    model = configured(deepseek_r1(), machine("b200", num_devices=8))
    found = LENGTHS[k] / model.round_split(1, k, CONTEXT).total
    assert found == pytest.approx(TOKENS_PER_SECOND[k], rel=0.05)


def test_three_drafted_tokens_are_best_there():
    model = configured(deepseek_r1(), machine("b200", num_devices=8))
    rates = [LENGTHS[k] / model.round_split(1, k, CONTEXT).total for k in range(6)]
    assert rates.index(max(rates)) in (2, 3, 4)  # 250, 253 and 245 are 3 % apart
    split = model.round_split(1, 0, CONTEXT)
    assert 1e3 * split.total == pytest.approx(9.0, rel=0.01)
    assert 1e3 * split.weights == pytest.approx(1.1, rel=0.1)  # our notes; the rest is layers


def test_a_b200_gives_the_latency_that_its_layers_were_fitted_to():
    # vLLM, Llama-3.3-70B in NVFP4 at concurrency 1, by our notes on kernels: 11.91 ms a token.
    width, kv, inner, layers = 8192, 1024, 28672, 80
    model = ModelConfig(
        name="Llama-3.3-70B",
        source="meta-llama/Llama-3.3-70B-Instruct, config.json",
        num_layers=layers,
        attention=PartConfig(layers * 2.0 * width * (width + kv), Format.nvfp4),
        shared=PartConfig(layers * 3.0 * width * inner, Format.nvfp4),
        head=PartConfig(128256.0 * width, Format.bf16),
        kv_values_per_token=2.0 * layers * kv,
        context_flops=4.0 * layers * width,
    )
    found = configured(model, machine("b200")).step_seconds(1, 1, 1024.0)
    assert 1e3 * found == pytest.approx(11.91, rel=0.01)


@pytest.mark.parametrize(
    ("name", "changes", "attention", "experts", "num_gpus", "tokens_per_second"),
    [
        # SGLang, 2025-09-25, GB200: FP8 attention and NVFP4 experts, 26156 tokens/s a GPU.
        (
            "b200",
            {"flops": {f: {"value": v} for f, v in (("fp8", 5e15), ("nvfp4", 1e16))}},
            Format.fp8,
            Format.nvfp4,
            8,
            8 * 26156,
        ),
        # SGLang, 2025-05-05, H100: FP8, 52.3k tokens/s a node of eight, of several.
        ("h100", {}, Format.fp8, Format.fp8, 16, 2 * 52300),
    ],
)
def test_prompts_are_read_as_quickly_as_the_compute_was_fitted_to(
    name, changes, attention, experts, num_gpus, tokens_per_second
):
    model = deepseek_r1()
    parts = {"attention": attention, "shared": experts, "experts": experts}
    parts = {n: dataclasses.replace(getattr(model, n), format=f) for n, f in parts.items()}
    hardware = machine(name, num_devices=num_gpus, **changes)
    found = configured(dataclasses.replace(model, **parts), hardware)
    # Many prompts of 2000 tokens at once: what layers take is shared by all.
    per_token = found.token_compute_seconds + 1000 * found.context_compute_seconds
    assert num_gpus / per_token == pytest.approx(tokens_per_second, rel=0.05)


@pytest.mark.parametrize("name", sorted(path.stem for path in CONF.glob("*.yaml")))
def test_every_constant_of_every_machine_says_where_it_is_from(name):
    hardware = machine(name)
    assert len(hardware.constants()) == 10
    assert all(len(constant.source) > 5 for constant in hardware.constants().values())
    assert hardware.measured == (name == "cpu")
