"""The exported head, read back from its folder alone."""

import json
from dataclasses import replace

import pytest
import tiny_heads
import torch
from safetensors.torch import load_file, save_file
from tiny_heads import FLAGS

from specfit.export import vllm
from specfit.export.parity import compare
from specfit.speculators.batches import pack
from specfit.training.checkpoints import load_head, rounded, save_head


def exported(folder, architecture="llama", **config):
    speculator = tiny_heads.make_speculator(tiny_heads.make_target(architecture), **config)
    vllm.write(folder, speculator.head, speculator.vocab, speculator.target.info)
    return speculator


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("flags", [(), FLAGS], ids=["portable", "all flags"])
@pytest.mark.parametrize("architecture", ["llama", "llama3_rope", "yarn_rope", "qwen3_moe"])
def test_what_is_read_back_drafts_exactly_as_the_trained_head(tmp_path, architecture, flags):
    speculator = tiny_heads.make_speculator(
        tiny_heads.make_target(architecture), **dict.fromkeys(flags, True)
    )
    save_head(tmp_path, speculator.head, speculator.vocab)
    trained = load_head(
        tmp_path / "config.json", tmp_path / "model.safetensors", torch.device("cpu")
    )
    vllm.write(tmp_path / "vllm", *trained, speculator.target.info)
    found = vllm.read(tmp_path / "vllm")
    batch = pack([speculator.document(tiny_heads.random_tokens(16, seed=0), [(2, 16)])])
    row = compare(trained, found, batch, speculator.embeddings, 3)
    assert row["num_drafted_tokens"] == 3 * 14
    assert (row["drafted_tokens_equal"], row["max_logit_difference"]) == (1.0, 0.0)
    assert found[0].config == speculator.head.config


def test_parity_sees_a_head_that_is_another(tmp_path):
    speculator = exported(tmp_path)
    other, vocab = vllm.read(tmp_path)
    with torch.no_grad():
        other.layer.self_attn.k_proj.weight *= 1.5
    batch = pack([speculator.document(tiny_heads.random_tokens(16, seed=0), [(2, 16)])])
    trained = (rounded(speculator.head), speculator.vocab)
    row = compare(trained, (other, vocab), batch, speculator.embeddings, 3)
    assert row["drafted_tokens_equal"] < 1
    assert row["max_logit_difference"] > 1e-2


def test_the_config_has_every_key_where_vllm_looks_for_it(tmp_path):
    exported(tmp_path, norm_before_residual=True)
    found = config_of(tmp_path)
    expected = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "hidden_size": 32,
        "target_hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 320,
        "draft_vocab_size": 200,
        "eagle_aux_hidden_state_layer_ids": tiny_heads.make_target().info.default_aux_layers,
        "norm_before_residual": True,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "eos_token_id": [1],
    }
    assert {key: found[key] for key in expected} == expected


def test_a_head_for_a_tied_target_is_not_tied_itself(tmp_path):
    speculator = exported(tmp_path)
    assert speculator.target.info.tied_embeddings
    assert config_of(tmp_path)["tie_word_embeddings"] is False


@pytest.mark.parametrize(
    ("architecture", "theta", "rope_type"),
    [("llama3_rope", 500000.0, "llama3"), ("yarn_rope", 10000.0, "yarn")],
)
def test_the_targets_rope_is_kept(tmp_path, architecture, theta, rope_type):
    speculator = exported(tmp_path, architecture)
    found = config_of(tmp_path)
    assert found["rope_theta"] == found["rope_parameters"]["rope_theta"] == theta
    assert found["rope_parameters"]["rope_type"] == rope_type
    expected = speculator.target.model.config.rope_parameters
    assert found["rope_parameters"] == expected


def test_weights_are_bf16_under_vllms_names_and_without_embeddings(tmp_path):
    exported(tmp_path, **dict.fromkeys(FLAGS, True))
    tensors = load_file(tmp_path / "model.safetensors")
    layer = [
        *(f"self_attn.{n}_proj" for n in "qkvo"),
        *(f"mlp.{n}_proj" for n in ("gate", "up", "down")),
        *("input_layernorm", "hidden_norm", "post_attention_layernorm"),
    ]
    expected = {f"midlayer.{name}.weight" for name in layer}
    expected |= {f"{name}.weight" for name in ("fc", "norm", "lm_head", "input_norm")}
    expected |= {f"fc_norm.{i}.weight" for i in range(3)}
    assert set(tensors) == expected | {"d2t", "t2d"}
    assert {tensors[name].dtype for name in expected} == {torch.bfloat16}
    assert tensors["midlayer.self_attn.q_proj.weight"].shape == (4 * 16, 2 * 32)


def test_d2t_holds_offsets_and_t2d_the_same_tokens(tmp_path):
    speculator = exported(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    drafted = [i + offset for i, offset in enumerate(tensors["d2t"].tolist())]
    assert drafted == tensors["t2d"].nonzero().flatten().tolist()
    assert drafted == speculator.vocab.target_ids.tolist()
    assert drafted != list(range(200))


def spoil(folder, change):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda t: t.pop("d2t"), "d2t missing"),
        (lambda t: t.pop("t2d"), "t2d missing"),
        (lambda t: t.update(d2t=t["d2t"][:-1]), r"d2t must have shape \[200\], got \[199\]"),
        (lambda t: t.update(t2d=t["t2d"][:-1]), r"t2d must have shape \[320\], got \[319\]"),
        (lambda t: t.pop("fc.weight"), r"fc\.weight"),
        (lambda t: t.update({"fc.weight": t["fc.weight"][:-1]}), r"fc\.weight"),
    ],
)
def test_a_missing_or_misshapen_tensor_is_named_with_its_file(tmp_path, change, named):
    exported(tmp_path)
    spoil(tmp_path, change)
    with pytest.raises(ValueError, match=named) as error:
        vllm.read(tmp_path)
    assert str(error.value).startswith(f"{tmp_path}/model.safetensors: ")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("key", ["head_dim", "draft_vocab_size", "norm_output", "architectures"])
def test_a_missing_key_is_named_with_its_file(tmp_path, key):
    exported(tmp_path)
    values = config_of(tmp_path)
    del values[key]
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match=f"config.json: {key} "):
        vllm.read(tmp_path)


def test_several_tokens_that_end_an_answer_are_all_exported(tmp_path):
    speculator = exported(tmp_path)
    info = replace(speculator.target.info, eos_ids=[1, 5])
    vllm.write(tmp_path, speculator.head, speculator.vocab, info)
    assert config_of(tmp_path)["eos_token_id"] == [1, 5]
