"""What cannot be quantized is refused by name, before anything is written where it can be known."""

import json
import os
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from sharded_targets import (
    copy_with,
    mixed,
    plan_of,
    tensors,
    w4a4,
    write_sharded,
    written,
)

from specfit.quantization.checkpoint import quantized_size
from specfit.quantization.config import Activations, Precision
from specfit.quantization.layout import unfit_units
from specfit.quantization.loading import load_quantized
from specfit.quantization.plan import QuantizationPlan
from specfit.quantization.reading import read_quantized
from specfit.quantization.safetensors_stream import INDEX
from specfit.quantization.units import Unit

Q = "model.layers.0.self_attn.q_proj"
UP = "model.layers.1.mlp.up_proj"
DOWN = "model.layers.0.mlp.down_proj"


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    write_sharded(folder)
    return folder


def test_a_missing_shard_is_named(source, tmp_path):
    folder = copy_with(source, tmp_path / "source")
    shard = sorted(folder.glob("*.safetensors"))[3]
    shard.unlink()
    with pytest.raises(ValueError, match=f"{re.escape(str(shard))} must be there"):
        quantized_size(folder, QuantizationPlan({}))


def test_a_truncated_shard_is_named(source, tmp_path):
    folder = copy_with(source, tmp_path / "source")
    shard = sorted(folder.glob("*.safetensors"))[3]
    os.truncate(shard, shard.stat().st_size - 1)
    with pytest.raises(ValueError, match=f"{re.escape(str(shard))} must be a whole"):
        quantized_size(folder, QuantizationPlan({}))


def test_a_quantized_checkpoint_is_not_quantized_again(source, tmp_path):
    folder = written(source, tmp_path, mixed(source))
    with pytest.raises(
        ValueError,
        match=r"target\.path must name unquantized weights, got compressed-tensors:mixed-precision;"
        r" to use .* as it is",
    ):
        quantized_size(folder, QuantizationPlan({}))


def test_a_checkpoint_of_modelopt_is_not_quantized_again(source, tmp_path):
    folder = copy_with(source, tmp_path / "source")
    (folder / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "NVFP4"}}')
    with pytest.raises(ValueError, match="got modelopt:NVFP4;"):
        quantized_size(folder, QuantizationPlan({}))


def test_a_width_that_nvfp4_cannot_have_is_refused(tmp_path):
    write_sharded(tmp_path, "qwen3_moe", moe_intermediate_size=24)
    with pytest.raises(
        ValueError,
        match=r"model\.layers\.0\.mlp\.experts\.\d\.down_proj\.weight must have a multiple of 16 "
        r"columns to be served in NVFP4, got 24; leave layers\.0\.experts out",
    ):
        quantized_size(tmp_path, plan_of(tmp_path))
    assert quantized_size(tmp_path, plan_of(tmp_path, Precision.fp8)) > 0
    assert set(unfit_units(tmp_path)) == {Unit(0, "experts"), Unit(1, "experts")}


def test_a_unit_that_is_not_there_is_refused(source):
    plan = QuantizationPlan({Unit(7, "qkv"): Precision.nvfp4})
    with pytest.raises(ValueError, match=r"got layers\.7\.qkv; it has layers\.0\.down, layers\.0"):
        quantized_size(source, plan)


@pytest.mark.parametrize("precision", Precision)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_is_named(source, tmp_path, precision, value):
    weight = tensors(source)[f"{UP}.weight"].clone()
    weight[2, 3] = value
    folder = copy_with(source, tmp_path / "source", **{UP: weight})
    with pytest.raises(ValueError, match=rf"{UP}\.weight must be finite, got .* at \[2, 3\]"):
        written(folder, tmp_path / "a", plan_of(folder, precision))


def test_weights_that_are_no_floats_are_refused(source, tmp_path):
    codes = torch.zeros(32, 48, dtype=torch.int8)
    folder = copy_with(source, tmp_path / "source", **{DOWN: codes})
    with pytest.raises(ValueError, match=rf"{DOWN}\.weight must hold floats .* got torch\.int8"):
        quantized_size(folder, plan_of(folder))


def test_w4a4_without_the_size_of_an_input_is_refused(source):
    plan = plan_of(source, activations=Activations.nvfp4, input_amax={Q: 1.0})
    with pytest.raises(ValueError, match=r"input_amax must have the input of model\.layers\.0"):
        quantized_size(source, plan)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("field", ["input_amax", "scale_factors"])
def test_a_size_or_factor_that_cannot_be_is_refused(source, field, value):
    with pytest.raises(ValueError, match=rf"{field}\[{UP}\] must be positive and finite"):
        plan_of(source, **{field: {UP: value}})


def test_fused_matrices_with_different_factors_are_refused(source):
    plan = plan_of(source, scale_factors={f"{UP}.weight": 1.01})
    with pytest.raises(ValueError, match=r"scale_factors must be equal .*up_proj\.weight': 1\.01"):
        quantized_size(source, plan)


def test_a_factor_of_a_matrix_that_stays_as_it_is_is_refused(source):
    plan = QuantizationPlan({}, scale_factors={f"{UP}.weight": 1.01})
    with pytest.raises(ValueError, match=rf"must name quantized matrices, got {UP}\.weight"):
        quantized_size(source, plan)


@pytest.mark.parametrize("scheme", ["modelopt:NVFP4_AWQ", "modelopt:W4A8_NVFP4_FP8", "gptq:4"])
def test_other_schemes_are_not_read(source, tmp_path, scheme):
    folder = written(source, tmp_path, plan_of(source))
    method, algorithm = scheme.split(":")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method, "quant_algo": algorithm}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=f"got {scheme}"):
        load_quantized(folder, torch.float32)


@pytest.mark.parametrize(
    ("changed", "got"),
    [
        ({"weight_scale": None}, r"weight_scale must be torch\.float8_e4m3fn .* no such tensor"),
        ({"weight_scale": torch.zeros(32, 3, dtype=torch.uint8)}, r"got torch\.uint8 \[32, 3\]"),
        ({"weight_global_scale": torch.ones(32, 1)}, r"of shape \[\] or \[1\], got .* \[32, 1\]"),
        (
            {"weight_packed": None, "weight": torch.zeros(32, 48).to(torch.float8_e4m3fn)},
            r"weight_scale must be floats of shape \[\] or \[1\] or \[1, 1\], got .* \[32, 3\]",
        ),
        ({"pre_quant_scale": torch.ones(48)}, r"pre_quant_scale must be of NVFP4 or FP8 weights"),
        ({"qzeros": torch.zeros(8, dtype=torch.uint8)}, r"qzeros must be of NVFP4 or FP8 weights"),
    ],
)
def test_a_tensor_of_another_format_is_named(source, tmp_path, changed, got):
    folder = written(source, tmp_path, plan_of(source))
    path = next(p for p in folder.glob("*.safetensors") if f"{DOWN}.weight_packed" in load_file(p))
    found = load_file(path) | {f"{DOWN}.{name}": value for name, value in changed.items()}
    save_file({name: value for name, value in found.items() if value is not None}, path)
    files = {name: p.name for p in folder.glob("*.safetensors") for name in load_file(p)}
    (folder / INDEX).write_text(json.dumps({"weight_map": files}))
    with pytest.raises(ValueError, match=rf"^{DOWN}\..*{got}"):
        list(read_quantized(folder))


def test_a_target_that_lacks_a_tensor_is_refused(source, tmp_path):
    folder = written(source, tmp_path, plan_of(source))
    for path in folder.glob("*.safetensors"):
        found = load_file(path)
        found.pop("model.norm.weight", None)
        save_file(found, path)
    index = json.loads((folder / INDEX).read_text())
    del index["weight_map"]["model.norm.weight"]
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"none for 1, such as model\.norm\.weight"):
        load_quantized(folder, torch.float32)


def test_inputs_of_experts_that_stay_as_they_are_are_counted(tmp_path, caplog):
    write_sharded(tmp_path / "source", "qwen3_moe")
    plan = w4a4(tmp_path / "source", plan_of(tmp_path / "source"))
    load_quantized(written(tmp_path / "source", tmp_path / "a", plan), torch.float32)
    assert "inputs of 24 matrices stay as they are, such as model.layers.0.mlp.ex" in caplog.text


def test_inputs_of_fp8_matrices_that_stay_as_they_are_are_told(source, tmp_path, caplog):
    folder = written(source, tmp_path, plan_of(source, Precision.fp8))
    load_quantized(folder, torch.float32)
    assert caplog.text == ""
    config = json.loads((folder / "config.json").read_text())
    group = config["quantization_config"]["config_groups"]["group_0"]
    group["input_activations"] = {"num_bits": 8, "type": "float", "dynamic": True}
    (folder / "config.json").write_text(json.dumps(config))
    load_quantized(folder, torch.float32)
    assert "inputs of FP8 matrices stay as they are" in caplog.text
