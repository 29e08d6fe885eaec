"""What is quantized together, by name, in the layouts of models and of checkpoints."""

from copy import deepcopy

import pytest
from tiny_architectures import tiny
from torch import nn

from specfit.quantization.units import Unit, fused, unit_of, units_of, units_of_target
from specfit.targets.target import Target


@pytest.mark.parametrize(
    ("tensor", "unit"),
    [
        ("model.layers.0.self_attn.q_proj.weight", "layers.0.qkv"),
        ("model.layers.11.self_attn.v_proj.weight", "layers.11.qkv"),
        ("model.layers.3.self_attn.qkv_proj.weight", "layers.3.qkv"),
        ("model.layers.3.self_attn.o_proj.weight", "layers.3.o"),
        ("model.layers.3.mlp.gate_proj.weight", "layers.3.gate_up"),
        ("model.layers.3.mlp.gate_up_proj.weight", "layers.3.gate_up"),
        ("model.layers.3.mlp.down_proj.weight", "layers.3.down"),
        ("model.layers.3.mlp.experts.17.up_proj.weight", "layers.3.experts"),
        ("model.layers.3.mlp.experts.gate_up_proj", "layers.3.experts"),
        ("model.layers.3.mlp.experts.down_proj", "layers.3.experts"),
        ("model.layers.3.block_sparse_moe.experts.2.w2.weight", "layers.3.experts"),
        ("model.layers.3.block_sparse_moe.experts.2.w3.weight", "layers.3.experts"),
        ("model.layers.3.mlp.shared_experts.down_proj.weight", "layers.3.shared.down"),
        ("model.layers.3.mlp.shared_expert.up_proj.weight", "layers.3.shared.gate_up"),
        ("model.layers.3.self_attn.q_a_proj.weight", "layers.3.qkv_a"),
        ("model.language_model.layers.3.mlp.down_proj.weight", "layers.3.down"),
    ],
)
def test_a_matrix_belongs_to_the_unit_that_engines_fuse(tensor, unit):
    assert str(unit_of(tensor)) == unit


@pytest.mark.parametrize(
    "tensor",
    [
        "model.embed_tokens.weight",
        "lm_head.weight",
        "model.norm.weight",
        "model.layers.3.input_layernorm.weight",
        "model.layers.3.self_attn.q_norm.weight",
        "model.layers.3.self_attn.q_proj.bias",
        "model.layers.3.self_attn.sinks",
        "model.layers.3.mlp.gate.weight",
        "model.layers.3.mlp.router.weight",
        "model.layers.3.mlp.shared_expert_gate.weight",
        "model.layers.3.mlp.gate.e_score_correction_bias",
        "model.layers.3.mlp.experts.gate_up_proj_bias",
        "model.visual.blocks.3.attn.qkv_proj.weight",
        "vision_tower.encoder.layers.3.self_attn.q_proj.weight",
        "model.sound_tower.layers.3.self_attn.q_proj.weight",
        "sound_tower.model.layers.3.self_attn.q_proj.weight",
        "talker.model.layers.3.self_attn.q_proj.weight",
        "mtp.layers.0.self_attn.q_proj.weight",
    ],
)
def test_embeddings_heads_norms_routers_and_vision_are_never_quantized(tensor):
    assert unit_of(tensor) is None


@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe", "gemma2"])
def test_the_units_of_a_model_come_in_order_of_its_layers(architecture):
    target = tiny(architecture)
    found = units_of(name for name, _ in target.model.named_parameters())
    mlp = ["experts"] if architecture == "qwen3_moe" else ["down", "gate_up"]
    assert [(u.layer, u.name) for u in found] == [
        (layer, name) for layer in range(6) for name in sorted(["qkv", "o", *mlp])
    ]
    weights = dict(target.model.named_parameters())
    assert all(weights[name].dim() >= 2 for names in found.values() for name in names)


def test_a_tower_that_nobody_knows_has_no_units():
    """Its layers are called as those of the text model: of a model the decoder decides."""
    target = tiny("llama")
    expected = units_of_target(target)
    tower = deepcopy(target.decoder.layers)
    for parent in ("sound_tower", "thinker"):
        model = deepcopy(target.model)
        model.add_module(parent, nn.ModuleDict({"layers": tower}))
        assert units_of_target(Target(model, target.tokenizer, target.info)) == expected
    names = [name for name, _ in model.named_parameters()]
    with pytest.raises(ValueError, match=r"must hold one text model, got model\., thinker\."):
        units_of(names)


def test_tenth_layers_come_after_the_second():
    names = [f"layers.{i}.self_attn.o_proj.weight" for i in (10, 2, 0)]
    assert list(units_of(names)) == [Unit(0, "o"), Unit(2, "o"), Unit(10, "o")]


def test_experts_share_a_global_scale_within_themselves_only():
    experts = "model.layers.0.mlp.experts"
    leaves = ("gate", "up", "down")
    tensors = [f"{experts}.{i}.{leaf}_proj.weight" for i in (0, 1) for leaf in leaves]
    assert fused(tensors) == [tensors[:2], tensors[2:3], tensors[3:5], tensors[5:]]
    stacked = [f"{experts}.down_proj", f"{experts}.gate_up_proj"]
    assert fused(stacked) == [stacked[:1], stacked[1:]]
    attention = [f"model.layers.0.self_attn.{leaf}_proj.weight" for leaf in "qkv"]
    assert fused(attention) == [attention]
