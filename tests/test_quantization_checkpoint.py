"""Quantized checkpoints by themselves; test_quantization_peers has others read them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from sharded_targets import (
    contents,
    mixed,
    plan_of,
    same,
    tensors,
    units,
    w4a4,
    write_sharded,
    written,
)

from specfit.quantization.checkpoint import quantized_size
from specfit.quantization.config import Precision
from specfit.quantization.layout import unit_sizes
from specfit.quantization.loading import load_quantized
from specfit.quantization.plan import QuantizationPlan
from specfit.quantization.reading import read_quantized
from specfit.quantization.units import Unit, unit_of
from specfit_kernels import fp8
from specfit_kernels.nvfp4 import (
    FP4Tensor,
    fake_quantize_activations,
    quantize,
    shared_global_scale,
)
from specfit_kernels.rules import ScaleRule

PLANS: dict[str, Callable[[Path], QuantizationPlan]] = {
    "w4a16": plan_of,
    "w4a4": lambda source: w4a4(source, plan_of(source)),
    "fp8": lambda source: plan_of(source, Precision.fp8),
    "fp8_block": lambda source: plan_of(source, Precision.fp8_block),
    "mixed": mixed,
    "nothing": lambda _source: QuantizationPlan({}),
}
EVERY_PLAN = pytest.mark.parametrize("make_plan", PLANS.values(), ids=PLANS)
Q, K, V = (f"model.layers.0.self_attn.{name}_proj" for name in "qkv")
GATE, UP = (f"model.layers.1.mlp.{name}_proj" for name in ("gate", "up"))
DOWN = "model.layers.0.mlp.down_proj"


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    write_sharded(folder)
    return folder


def read(folder: Path) -> dict[str, torch.Tensor]:
    """What the checkpoint's weights stand for, in float32."""
    found = {}
    for name, weight in read_quantized(folder):
        if isinstance(weight, FP4Tensor):
            found[name] = weight.dequantize()
        elif isinstance(weight, fp8.FP8Tensor):
            found[name] = weight.dequantized(torch.float32)
        else:
            found[name] = weight.float()
    return found


@pytest.mark.parametrize("rule", ScaleRule)
@pytest.mark.parametrize("fused", [(Q, K, V), (GATE, UP), (DOWN,)], ids=["qkv", "gate_up", "down"])
def test_matrices_that_engines_fuse_share_a_global_scale_across_shards(
    source, tmp_path, rule, fused
):
    weights = tensors(source)
    index = json.loads((source / "model.safetensors.index.json").read_text())["weight_map"]
    assert len({index[f"{module}.weight"] for module in fused}) > 1 or len(fused) == 1
    found = tensors(written(source, tmp_path, plan_of(source, rule=rule)))
    scale = shared_global_scale([weights[f"{module}.weight"] for module in fused], rule)
    for module in fused:
        expected = quantize(weights[f"{module}.weight"], rule, global_scale=scale)
        assert same(found[f"{module}.weight_packed"], expected.codes)
        assert same(found[f"{module}.weight_scale"], expected.block_scales)
        assert same(found[f"{module}.weight_global_scale"], scale.view(1))
        assert f"{module}.weight" not in found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fp8_weights_have_one_scale_or_one_for_each_block(tmp_path, dtype):
    write_sharded(tmp_path / "source", dtype=dtype, intermediate_size=272)
    weight = tensors(tmp_path / "source")[f"{DOWN}.weight"]
    plan = plan_of(tmp_path / "source", Precision.fp8)
    found = tensors(written(tmp_path / "source", tmp_path / "a", plan))
    assert same(found[f"{DOWN}.weight"], fp8.quantize_tensor(weight).values)
    assert same(found[f"{DOWN}.weight_scale"], fp8.quantize_tensor(weight).scales)
    plan = plan_of(tmp_path / "source", Precision.fp8_block)
    found = tensors(written(tmp_path / "source", tmp_path / "b", plan))
    assert same(found[f"{DOWN}.weight"], fp8.quantize_blocks(weight).values)
    assert same(found[f"{DOWN}.weight_scale"], fp8.quantize_blocks(weight).scales)
    assert found[f"{DOWN}.weight_scale"].shape == (1, 3)


@EVERY_PLAN
def test_what_no_unit_asks_for_is_copied_byte_for_byte(source, tmp_path, make_plan):
    plan = make_plan(source)
    before, after = tensors(source), tensors(written(source, tmp_path, plan))
    others = {name for name in before if unit_of(name) not in plan.precision}
    assert [name for name in others if not same(before[name], after[name])] == []
    chosen = {name.removesuffix(".weight") for name in before.keys() - others}
    assert {name.rpartition(".")[0] for name in after.keys() - others} == chosen


@EVERY_PLAN
def test_the_size_is_known_without_writing(source, tmp_path, make_plan):
    size = quantized_size(source, make_plan(source))
    found = contents(written(source, tmp_path, make_plan(source)))
    assert size == sum(map(len, found.values()))


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "qwen3_moe"])
def test_weights_read_back_have_their_old_names_and_nearly_their_old_values(tmp_path, architecture):
    write_sharded(tmp_path / "source", architecture)
    before = tensors(tmp_path / "source")
    after = read(written(tmp_path / "source", tmp_path / "a", mixed(tmp_path / "source")))
    assert after.keys() == before.keys()
    for name, weight in before.items():
        assert float((after[name] - weight).norm() / weight.norm()) < 0.1, name


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
@pytest.mark.parametrize("make_plan", [PLANS["mixed"], PLANS["w4a4"]], ids=["mixed", "w4a4"])
def test_the_loaded_target_computes_with_the_dequantized_weights(tmp_path, architecture, make_plan):
    model = write_sharded(tmp_path / "source", architecture)
    folder = written(tmp_path / "source", tmp_path / "a", make_plan(tmp_path / "source"))
    with torch.no_grad():
        for name, weight in read(folder).items():
            model.get_parameter(name).copy_(weight)
    for name, scale in tensors(folder).items():
        if name.endswith(".input_global_scale"):
            model.get_submodule(name.removesuffix(".input_global_scale")).register_forward_pre_hook(
                lambda _module, args, scale=scale: fake_quantize_activations(
                    args[0], scale.view(())
                )
            )
    input_ids = torch.arange(60).view(2, 30)
    with torch.no_grad():
        expected = model(input_ids).logits
        found = load_quantized(folder, torch.float32)(input_ids).logits
    assert torch.equal(found, expected)


def test_experts_are_loaded_where_transformers_fuses_them(tmp_path):
    model = write_sharded(tmp_path / "source", "qwen3_moe")
    folder = written(tmp_path / "source", tmp_path / "a", plan_of(tmp_path / "source"))
    weights, loaded = read(folder), load_quantized(folder, torch.float32)
    for i in range(4):
        parts = [weights[f"model.layers.1.mlp.experts.{i}.{x}_proj.weight"] for x in ("gate", "up")]
        experts = loaded.model.layers[1].mlp.experts
        assert torch.equal(experts.gate_up_proj[i], torch.cat(parts))
        assert torch.equal(
            experts.down_proj[i], weights[f"model.layers.1.mlp.experts.{i}.down_proj.weight"]
        )
    assert torch.equal(
        loaded.model.layers[1].mlp.gate.weight, model.model.layers[1].mlp.gate.weight
    )


def test_each_expert_has_a_global_scale_of_its_own(tmp_path):
    write_sharded(tmp_path / "source", "qwen3_moe")
    before = tensors(tmp_path / "source")
    after = tensors(written(tmp_path / "source", tmp_path / "a", plan_of(tmp_path / "source")))
    for i in range(4):
        modules = [f"model.layers.0.mlp.experts.{i}.{name}_proj" for name in ("gate", "up")]
        expected = shared_global_scale([before[f"{module}.weight"] for module in modules])
        for module in modules:
            assert same(after[f"{module}.weight_global_scale"], expected.view(1))


def fused_experts(source: Path, folder: Path) -> Path:
    """A checkpoint that holds its experts in one tensor, as those of Qwen3.5 do."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    found = tensors(source)
    for layer in range(2):
        prefix = f"model.layers.{layer}.mlp.experts"
        parts = {
            name: torch.stack([found.pop(f"{prefix}.{i}.{name}_proj.weight") for i in range(4)])
            for name in ("gate", "up", "down")
        }
        found[f"{prefix}.gate_up_proj"] = torch.cat([parts["gate"], parts["up"]], dim=1)
        found[f"{prefix}.down_proj"] = parts["down"]
    save_file(found, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("precision", [Precision.nvfp4, Precision.fp8])
def test_fused_experts_become_the_matrices_that_engines_load(tmp_path, precision):
    write_sharded(tmp_path / "apart", "qwen3_moe")
    fused_experts(tmp_path / "apart", tmp_path / "fused")
    assert units(tmp_path / "apart") == units(tmp_path / "fused")
    plan = QuantizationPlan({Unit(1, "experts"): precision})
    apart = written(tmp_path / "apart", tmp_path / "a", plan)
    fused = written(tmp_path / "fused", tmp_path / "b", plan)
    expected, found = tensors(apart), tensors(fused)
    # What no unit asks for stays fused.
    experts = "model.layers.0.mlp.experts"
    gate_up, down = (found.pop(f"{experts}.{name}_proj") for name in ("gate_up", "down"))
    for i in range(4):
        names = [f"{experts}.{i}.{name}_proj.weight" for name in ("gate", "up")]
        assert torch.equal(gate_up[i], torch.cat([expected.pop(name) for name in names]))
        assert torch.equal(down[i], expected.pop(f"{experts}.{i}.down_proj.weight"))
    assert found.keys() == expected.keys()
    assert [name for name in expected if not same(found[name], expected[name])] == []
    configs = [json.loads((folder / "config.json").read_text()) for folder in (apart, fused)]
    assert configs[0]["quantization_config"] == configs[1]["quantization_config"]


def test_transposed_experts_are_refused(tmp_path):
    write_sharded(tmp_path / "apart", "qwen3_moe")
    folder = fused_experts(tmp_path / "apart", tmp_path / "fused")
    found = tensors(folder)
    for name in [name for name in found if found[name].ndim == 3]:
        found[name] = found[name].mT.contiguous()
    save_file(found, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"down_proj must be .* experts as \[experts, out, in\]"):
        quantized_size(folder, plan_of(folder))


def test_fused_inputs_share_the_largest_size_that_was_measured(source, tmp_path):
    plan = w4a4(source, plan_of(source))
    found = tensors(written(source, tmp_path, plan))
    for group in ((Q, K, V), (GATE, UP), (DOWN,)):
        amax = max(plan.input_amax[module] for module in group)
        for module in group:
            assert found[f"{module}.input_global_scale"].tolist() == [
                pytest.approx(2688 / amax, rel=1e-7)
            ]
            assert found[f"{module}.input_global_scale"].dtype is torch.float32


@pytest.mark.parametrize("precision", Precision)
def test_a_scale_factor_multiplies_what_a_matrix_stands_for(source, tmp_path, precision):
    plain = read(written(source, tmp_path / "a", plan_of(source, precision)))
    # Powers of two, so that no product is rounded.
    factors = {f"{GATE}.weight": 2.0, f"{UP}.weight": 2.0, f"{DOWN}.weight": 0.5}
    plan = plan_of(source, precision, scale_factors=factors)
    scaled = read(written(source, tmp_path / "b", plan))
    for name, weight in plain.items():
        assert torch.equal(scaled[name], weight * factors.get(name, 1.0)), name


def test_a_scale_factor_leaves_the_codes(source, tmp_path):
    plain = tensors(written(source, tmp_path / "a", plan_of(source)))
    plan = plan_of(source, scale_factors={f"{DOWN}.weight": 1.01})
    scaled = tensors(written(source, tmp_path / "b", plan))
    changed = [name for name in plain if not same(plain[name], scaled[name])]
    assert changed == [f"{DOWN}.weight_global_scale"]


def test_tied_embeddings_stay_tied(source, tmp_path):
    folder = written(source, tmp_path, plan_of(source))
    assert "lm_head.weight" not in tensors(folder)
    config = json.loads((folder / "config.json").read_text())
    assert "lm_head" in config.pop("quantization_config")["ignore"]
    assert config == json.loads((source / "config.json").read_text())
    loaded = load_quantized(folder, torch.float32)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


def test_code_that_is_not_carried_is_not_named(source, tmp_path):
    folder = tmp_path / "source"
    shutil.copytree(source, folder)
    before = json.loads((source / "config.json").read_text())
    named = before | {"auto_map": {"AutoConfig": "configuration_x.X"}}
    (folder / "config.json").write_text(json.dumps(named))
    for plan in (plan_of(folder), QuantizationPlan({})):
        after = json.loads((written(folder, tmp_path / "a", plan) / "config.json").read_text())
        after.pop("quantization_config", None)
        assert after == before


def test_a_unit_takes_what_its_tensors_take(source, tmp_path):
    plan = mixed(source)
    stored = tensors(written(source, tmp_path, plan))
    before = tensors(source)
    for unit, size in unit_sizes(source, plan).items():
        names = [name for name in before if unit_of(name) == unit]
        modules = {name.removesuffix(".weight") for name in names}
        parts = [t.nbytes for name, t in stored.items() if name.rpartition(".")[0] in modules]
        assert size.num_bytes == sum(parts)
        assert size.num_weights == sum(before[name].numel() for name in names)


def test_nothing_to_quantize_leaves_the_checkpoint_as_it_was(source, tmp_path):
    folder = written(source, tmp_path, QuantizationPlan({}))
    before, after = tensors(source), tensors(folder)
    assert before.keys() == after.keys()
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())


def test_all_but_weights_and_code_is_carried_along(source, tmp_path):
    folder = tmp_path / "source"
    shutil.copytree(source, folder)
    for name in ("vocab.txt", "spiece.model", "modeling_x.py", "tokenizer.py", "README.md"):
        (folder / name).write_text(name)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("{{ messages }}")
    (folder / "consolidated.safetensors").write_bytes(b"weights of another layout")
    (folder / "pytorch_model.bin.index.json").write_text("{}")
    before, after = contents(folder), contents(written(folder, tmp_path / "a", plan_of(folder)))
    after = {name: data for name, data in after.items() if not name.endswith(".safetensors")}
    carried = {name for name in after if name in before and after[name] == before[name]}
    assert carried == {
        "additional_chat_templates/rag.jinja",
        "chat_template.jinja",
        "generation_config.json",
        "spiece.model",
        "tokenizer.json",
        "tokenizer_config.json",
        "vocab.txt",
    }
    assert after.keys() - carried == {"config.json", "model.safetensors.index.json"}


def test_the_index_says_where_each_tensor_is_and_how_large_all_are(source, tmp_path):
    folder = written(source, tmp_path, plan_of(source))
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = {name: path.name for path in folder.glob("*.safetensors") for name in load_file(path)}
    assert index["weight_map"] == files
    sizes = [tensor.numel() * tensor.itemsize for tensor in tensors(folder).values()]
    assert index["metadata"]["total_size"] == sum(sizes)
    before = {path.name for path in source.glob("*.safetensors")}
    assert {path.name for path in folder.glob("*.safetensors")} == before
