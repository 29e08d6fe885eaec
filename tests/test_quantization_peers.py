"""Our checkpoints in compressed-tensors and transformers; ModelOpt's in our loader."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from sharded_targets import (
    mixed,
    plan_of,
    same,
    tensors,
    units,
    w4a4,
    write_sharded,
    written,
)
from transformers import AutoModelForCausalLM

from specfit.quantization.config import Precision
from specfit.quantization.loading import load_quantized
from specfit.quantization.plan import QuantizationPlan
from specfit.quantization.reading import input_global_scales, read_quantized, scheme_of
from specfit_kernels.fp8 import FP8Tensor
from specfit_kernels.nvfp4 import FP4Tensor, fake_quantize_activations
from specfit_kernels.rules import ScaleRule

PRESETS = {
    "w4a16": ("NVFP4A16", "nvfp4-pack-quantized"),
    "w4a4": ("NVFP4", "nvfp4-pack-quantized"),
    "fp8": ("FP8", "naive-quantized"),
    "fp8_block": ("FP8_BLOCK", "naive-quantized"),
}
INPUT_IDS = torch.randint(300, (3, 40), generator=torch.Generator().manual_seed(0))


def plan(source: Path, kind: str) -> QuantizationPlan:
    match kind:
        case "w4a16":
            return plan_of(source)
        case "w4a4":
            return w4a4(source, plan_of(source))
        case "mixed":
            return mixed(source)
        case "partial":
            return QuantizationPlan(dict.fromkeys(units(source)[::2], Precision.nvfp4))
        case _:
            return plan_of(source, Precision[kind])


def scheme(kind: str) -> Any:
    """compressed-tensors' own; FP8 without the inputs that it would quantize too."""
    quantization = pytest.importorskip("compressed_tensors.quantization")
    preset, file_format = PRESETS[kind]
    parts = deepcopy(quantization.quant_scheme.PRESET_SCHEMES[preset])
    if kind.startswith("fp8"):
        del parts["input_activations"]
    return quantization.QuantizationScheme(targets=["Linear"], format=file_format, **parts)


def theirs(folder: Path) -> Any:
    """The model by transformers and compressed-tensors, in float32.

    compressed-tensors makes bfloat16 of NVFP4 weights whatever the model has, so that a model in
    float32 stops at its first product: here it is dequantized before, and made float32 after.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.hf_quantizer.compressor.decompress_model(model)
    return torch.nn.Module.float(model).eval()


def by_hand(model: Any, folder: Path) -> Any:
    """The model with the dequantized weights, and inputs that are quantized where W4A4 does."""
    with torch.no_grad():
        for name, weight in read_quantized(folder):
            match weight:
                case FP4Tensor():
                    values = weight.dequantize(torch.bfloat16).float()
                case FP8Tensor():
                    values = weight.dequantized(torch.float32)
                case _:
                    values = weight
            model.get_parameter(name).copy_(values)
    for name, scale in input_global_scales(folder).items():
        model.get_submodule(name).register_forward_pre_hook(
            lambda _module, args, scale=scale: fake_quantize_activations(args[0], scale)
        )
    return model


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(INPUT_IDS).logits


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
@pytest.mark.parametrize("kind", [*PRESETS, "mixed", "partial"])
def test_transformers_computes_with_the_written_checkpoint_what_we_do(tmp_path, architecture, kind):
    pytest.importorskip("compressed_tensors")
    model = write_sharded(tmp_path / "source", architecture, hidden_size=160)
    folder = written(tmp_path / "source", tmp_path / "a", plan(tmp_path / "source", kind))
    before = logits(model)
    found, expected = logits(theirs(folder)), logits(by_hand(model, folder))
    assert torch.equal(found, expected)
    assert not torch.equal(found, before)


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
@pytest.mark.parametrize("kind", ["w4a16", "w4a4"])
def test_our_loader_makes_of_a_checkpoint_what_transformers_does(tmp_path, architecture, kind):
    pytest.importorskip("compressed_tensors")
    source = tmp_path / "source"
    before = logits(write_sharded(source, architecture, dtype=torch.bfloat16, hidden_size=160))
    folder = written(source, tmp_path / "a", plan(source, kind))
    expected = logits(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval())
    loaded = load_quantized(folder, torch.bfloat16)
    found = logits(loaded)
    if kind == "w4a16":
        assert torch.equal(found, expected)
    else:
        # Block scales of inputs in bfloat16 compressed-tensors divides in bfloat16, where we do it
        # in float32, as engines: now and then another scale, from which all that follows differs.
        assert (found - expected).norm() < 0.3 * (found - before).norm()
    assert torch.equal(logits(torch.nn.Module.float(loaded)), logits(theirs(folder)))


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "qwen3_moe"])
@pytest.mark.parametrize("kind", ["mixed", "partial", "w4a16"])
def test_compressed_tensors_quantizes_exactly_the_modules_of_the_plan(tmp_path, architecture, kind):
    """Experts by their names, as engines ask for them: transformers has no modules for them."""
    match_name = pytest.importorskip("compressed_tensors.utils.match").match_name
    model = write_sharded(tmp_path / "source", architecture)
    names = {name.removesuffix(".weight") for name in tensors(tmp_path / "source")}
    names |= {name for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    linear = {name for name in names if name.endswith(("_proj", ".gate", "lm_head"))}
    folder = written(tmp_path / "source", tmp_path / "a", plan(tmp_path / "source", kind))
    config = json.loads((folder / "config.json").read_text())["quantization_config"]

    def weights(module: str) -> Any:
        if any(match_name(module, pattern) for pattern in config["ignore"]):
            return None
        groups = config["config_groups"].values()
        found = [
            group["weights"]
            for group in groups
            if any(target == "Linear" or match_name(module, target) for target in group["targets"])
        ]
        assert len(found) == 1, module
        return found[0]

    for name, weight in read_quantized(folder):
        module = name.removesuffix(".weight")
        if module in linear:
            linear.remove(module)
            bits = {FP4Tensor: 4, FP8Tensor: 8}.get(type(weight))
            assert (weights(module) or {}).get("num_bits") == bits, module
            if isinstance(weight, FP8Tensor):
                per_block = weights(module)["strategy"] == "block"
                assert weight.scales.ndim == (2 if per_block else 1)
    assert linear == ({"lm_head"} if architecture == "llama" else set())
    assert all(weights(module) is None for module in linear)


@pytest.mark.parametrize("kind", ["w4a16", "fp8", "fp8_block"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_are_those_of_compressed_tensors_under_the_same_scales(tmp_path, kind, dtype):
    compressors = pytest.importorskip("compressed_tensors.compressors")
    write_sharded(tmp_path / "source", dtype=dtype, hidden_size=160, intermediate_size=272)
    before = tensors(tmp_path / "source")
    after = tensors(written(tmp_path / "source", tmp_path / "a", plan(tmp_path / "source", kind)))
    compressor = compressors.BaseCompressor.get_value_from_registry(PRESETS[kind][1])
    modules = [name.removesuffix(".weight") for name in before if name.endswith("_proj.weight")]
    assert len(modules) == 14
    for module in modules:
        state = {"weight": before[f"{module}.weight"].float()}
        for name in ("weight_scale", "weight_global_scale"):
            if f"{module}.{name}" in after:
                state[name] = after[f"{module}.{name}"].float()
        for name, value in compressor.compress(state, scheme(kind)).items():
            assert same(value, after[f"{module}.{name}"]), name


def test_scales_are_those_of_compressed_tensors(tmp_path):
    helpers = pytest.importorskip("compressed_tensors.quantization.utils.helpers")
    write_sharded(tmp_path / "source")
    before = tensors(tmp_path / "source")
    amax = plan_of(tmp_path / "source", rule=ScaleRule.amax)
    after = tensors(written(tmp_path / "source", tmp_path / "a", amax))
    modules = [f"model.layers.1.self_attn.{name}_proj" for name in "qkv"]
    values = torch.cat([before[f"{module}.weight"].flatten() for module in modules])
    global_scale = helpers.generate_gparam(values.min(), values.max())
    for module in modules:
        assert same(after[f"{module}.weight_global_scale"], global_scale)
        blocks = before[f"{module}.weight"].unflatten(1, (-1, 16))
        scale, _ = helpers.calculate_qparams(
            blocks.amin(-1), blocks.amax(-1), scheme("w4a16").weights, global_scale=global_scale
        )
        assert torch.equal(after[f"{module}.weight_scale"].float(), scale.float())


@pytest.mark.parametrize("kind", PRESETS)
def test_the_configuration_is_the_one_that_compressed_tensors_writes(tmp_path, kind):
    quantization = pytest.importorskip("compressed_tensors.quantization")
    write_sharded(tmp_path / "source")
    folder = written(tmp_path / "source", tmp_path / "a", plan(tmp_path / "source", kind))
    found = json.loads((folder / "config.json").read_text())["quantization_config"]
    config = quantization.QuantizationConfig(
        config_groups={"group_0": scheme(kind)},
        format=PRESETS[kind][1],
        quantization_status="compressed",
        ignore=["lm_head", "model.embed_tokens"],
    )
    expected = config.model_dump(mode="json", exclude={"moe_sparsity_config"})
    assert found == expected


def test_each_precision_of_a_mixed_checkpoint_has_a_group(tmp_path):
    quantization = pytest.importorskip("compressed_tensors.quantization")
    write_sharded(tmp_path / "source")
    folder = written(tmp_path / "source", tmp_path / "a", mixed(tmp_path / "source"))
    found = json.loads((folder / "config.json").read_text())["quantization_config"]
    config = quantization.QuantizationConfig.model_validate(found)
    assert config.format == "mixed-precision"
    strategies = [group.weights.strategy for group in config.config_groups.values()]
    assert strategies == ["tensor_group", "tensor", "block"]


def export_by_modelopt(source: Path, folder: Path, config: str) -> dict[str, torch.Tensor]:
    """ModelOpt's checkpoint, and its weights as ModelOpt dequantizes them."""
    mtq = pytest.importorskip("modelopt.torch.quantization")
    export = pytest.importorskip("modelopt.torch.export").export_hf_checkpoint
    nvfp4 = pytest.importorskip("modelopt.torch.quantization.qtensor").NVFP4QTensor
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    quantizers = deepcopy(getattr(mtq, config))
    export(mtq.quantize(model, quantizers, lambda m: m(INPUT_IDS)), export_dir=folder)
    found = {}
    stored = tensors(folder)
    weights = {name: tensor for name, tensor in stored.items() if name.endswith(".weight")}
    for name, weight in weights.items():
        module = name.removesuffix(".weight")
        scale, scale_2 = (stored.get(f"{module}.weight_{x}") for x in ("scale", "scale_2"))
        if weight.dtype is torch.uint8:
            shape = torch.Size([len(weight), 2 * weight.shape[1]])
            packed = nvfp4(shape, torch.float32, weight)
            found[name] = packed.dequantize(scale=scale, double_scale=scale_2, block_sizes={-1: 16})
        elif weight.dtype is torch.float8_e4m3fn:
            found[name] = weight.float() * scale
        else:
            found[name] = weight
    return found


@pytest.mark.parametrize(
    ("architecture", "config"),
    [
        ("llama", "NVFP4_DEFAULT_CFG"),
        ("qwen3_moe", "NVFP4_DEFAULT_CFG"),
        ("llama", "W4A16_NVFP4_CFG"),
        ("llama", "FP8_DEFAULT_CFG"),
    ],
    ids=str,
)
def test_what_modelopt_exports_is_read_as_modelopt_dequantizes_it(tmp_path, architecture, config):
    write_sharded(tmp_path / "source", architecture, dtype=torch.bfloat16)
    expected = export_by_modelopt(tmp_path / "source", tmp_path / "a", config)
    assert scheme_of(tmp_path / "a").startswith("modelopt:")
    found = dict(read_quantized(tmp_path / "a"))
    assert found.keys() == expected.keys()
    for name, weight in found.items():
        match weight:
            case FP4Tensor():
                values = weight.dequantize()
            case FP8Tensor():
                values = weight.dequantized(torch.float32)
            case _:
                values = weight
        assert torch.equal(values, expected[name]), name
    inputs = input_global_scales(tmp_path / "a")
    assert bool(inputs) == (config == "NVFP4_DEFAULT_CFG")
    for module, scale in inputs.items():
        assert scale == 1 / tensors(tmp_path / "a")[f"{module}.input_scale"]


def test_a_checkpoint_of_modelopt_loads_as_a_target_with_quantized_inputs(tmp_path):
    write_sharded(tmp_path / "source", dtype=torch.bfloat16)
    weights = export_by_modelopt(tmp_path / "source", tmp_path / "a", "NVFP4_DEFAULT_CFG")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "source", dtype=torch.float32)
    with torch.no_grad():
        for name, weight in weights.items():
            model.get_parameter(name).copy_(weight)
    without = logits(model)
    for name, scale in tensors(tmp_path / "a").items():
        if name.endswith(".input_scale"):
            model.get_submodule(name.removesuffix(".input_scale")).register_forward_pre_hook(
                lambda _module, args, scale=scale: fake_quantize_activations(args[0], 1 / scale)
            )
    found = logits(load_quantized(tmp_path / "a", torch.float32))
    assert torch.equal(found, logits(model))
    assert not torch.equal(found, without)
