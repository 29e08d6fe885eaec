"""Heads that were made elsewhere become ours, and bad ones are named."""

import json
import re
from dataclasses import replace

import pytest
import torch
from gguf import GGUFWriter
from safetensors.torch import load_file, save_file
from test_export_twins import change_config, change_tensors
from tiny_exports import NAMES, Exported
from tiny_heads import FLAGS

from specfit.config import SpeculatorConfig
from specfit.export.config import EngineName
from specfit.export.engines import ENGINES
from specfit.export.imports import adopted, files_of, read_config, read_head


def imported(exported, folder):
    return read_head(folder, exported.speculator.target)


def is_the_same(exported, found):
    head, vocab = found
    expected, of_vocab = exported.trained
    assert head.config == expected.config
    assert torch.equal(vocab.d2t, of_vocab.d2t)
    assert torch.equal(vocab.t2d, of_vocab.t2d)
    for name, tensor in expected.state_dict().items():
        assert torch.equal(head.state_dict()[name], tensor), name
    return True


@pytest.mark.parametrize("engine", NAMES, ids=lambda e: e.name)
@pytest.mark.parametrize("architecture", ["llama", "llama3_rope", "qwen3_moe"])
def test_what_was_exported_comes_back_as_the_same_head(tmp_path, engine, architecture):
    exported = Exported(tmp_path, architecture)
    assert is_the_same(exported, imported(exported, exported.write(engine)))


@pytest.mark.parametrize("model_type", ["llama", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize("engine", NAMES, ids=lambda e: e.name)
def test_layers_come_back_whatever_the_target_is(tmp_path, engine, model_type):
    exported = Exported(tmp_path, aux_layers=[3, 4, 5])
    info = replace(exported.served.info, model_type=model_type)
    ENGINES[engine].write(tmp_path, *exported.trained, replace(exported.served, info=info))
    path = tmp_path / "head.gguf" if engine is EngineName.llama_cpp else tmp_path
    assert read_config(path, info).aux_layers == (3, 4, 5)


@pytest.mark.parametrize("flag", FLAGS)
def test_flags_come_back(tmp_path, flag):
    exported = Exported(tmp_path, **{flag: True})
    for engine in NAMES:
        if ENGINES[engine].refusal(exported.trained[0].config, exported.served) is None:
            assert is_the_same(exported, imported(exported, exported.write(engine)))


def test_a_head_by_other_hands_is_read(tmp_path):
    """SpecForge's names and types, an odd head_dim (16 of 32 / 4), no embeddings, no t2d."""
    exported = Exported(tmp_path)
    head, vocab = exported.trained
    folder = tmp_path / "theirs"
    folder.mkdir()
    tensors = {
        name.replace("layers.0.", "midlayer."): t.float().clone()
        for name, t in head.state_dict().items()
    }
    save_file(tensors | {"d2t": vocab.d2t.clone()}, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 320,
        "draft_vocab_size": 200,
        "max_position_embeddings": 256,
        "rms_norm_eps": head.config.rms_norm_eps,
        "rope_theta": head.config.rope_parameters["rope_theta"],
        "rope_scaling": None,
        "torch_dtype": "float32",
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 4]},
    }
    (folder / "config.json").write_text(json.dumps(config))
    found, found_vocab = imported(exported, folder)
    assert found.config.aux_layers == (2, 3, 5)
    assert found.config.head_dim == 16
    assert torch.equal(found_vocab.target_ids, vocab.target_ids)
    assert torch.equal(found.fc.weight, head.fc.weight)


def test_ids_that_are_not_said_are_the_default(tmp_path):
    exported = Exported(tmp_path)
    folder = exported.write(EngineName.vllm)
    change_config(folder, eagle_aux_hidden_state_layer_ids=None)
    with pytest.raises(ValueError, match=r"must ascend, without repeats.*got \[2, 3, 3\]"):
        imported(exported, folder)


def test_a_copy_of_the_targets_embeddings_is_left_out_and_others_are_refused(tmp_path):
    exported = Exported(tmp_path)
    folder = exported.write(EngineName.vllm)
    copy = exported.speculator.embeddings.bfloat16()
    change_tensors(folder, lambda tensors: tensors.update({"embed_tokens.weight": copy}))
    assert is_the_same(exported, imported(exported, folder))
    change_tensors(folder, lambda tensors: tensors.update({"embed_tokens.weight": 1.5 * copy}))
    with pytest.raises(ValueError, match=r"embed_tokens\.weight must be the target's"):
        imported(exported, folder)


def test_a_head_over_all_tokens_takes_the_targets_rows_if_it_has_none(tmp_path):
    exported = Exported(tmp_path, draft_vocab_size=320)
    folder = exported.write(EngineName.vllm)
    change_tensors(folder, lambda tensors: [tensors.pop(n) for n in ("lm_head.weight", "d2t")])
    head, vocab = imported(exported, folder)
    assert torch.equal(head.lm_head.weight, exported.speculator.target.head_weight)
    assert vocab.target_ids.tolist() == list(range(320))


def first_to(value):
    def change(tensors):
        tensors["fc.weight"][0, 0] = value

    return change


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda t: t.pop("d2t"), r"d2t must map the 200 draft ids to the target's 320, got none"),
        (lambda t: t.update(d2t=t["d2t"][:-1]), r"d2t must have shape \[200\], got \[199\]"),
        (lambda t: t.update(d2t=t["d2t"] + 200), "d2t must hold offsets to distinct ids below 320"),
        (lambda t: t["d2t"].copy_(-torch.arange(200)), "1 of 200 distinct"),
        (lambda t: t.pop("fc.weight"), r"fc\.weight must have shape \[32, 96\], got none"),
        (lambda t: t.update({"fc.weight": t["fc.weight"][:-1]}), r"\[32, 96\], got \(31, 96\)"),
        (first_to(float("nan")), r"fc\.weight must be finite"),
        (first_to(float("inf")), r"fc\.weight must be finite"),
        (
            lambda t: t.update({"layers.1.x": torch.ones(1)}),
            r"one EAGLE-3 layer only, got layers\.1",
        ),
    ],
)
def test_a_bad_tensor_is_named_with_its_file(tmp_path, change, named):
    exported = Exported(tmp_path)
    folder = exported.write(EngineName.vllm)
    change_tensors(folder, change)
    with pytest.raises(ValueError, match=named) as error:
        imported(exported, folder)
    assert str(error.value).startswith(f"{folder}/model.safetensors")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_size": 64}, "hidden_size must be the target's 32, got 64"),
        ({"vocab_size": 500}, "vocab_size must be the target's 320, got 500"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 3, 9]}, r"within 0\.\.6 .*got \[2, 3, 9\]"),
        ({"num_hidden_layers": 2}, "num_hidden_layers must be 1, got 2"),
        ({"attention_bias": True}, "attention_bias must be false, got True"),
        ({"layer_types": ["sliding_attention"]}, "layer_types must be full_attention"),
        ({"architectures": ["GPT2LMHeadModel"]}, "architectures must have one of"),
        ({"rms_norm_eps": None}, "rms_norm_eps must be there, got none"),
        ({"hidden_act": "gelu"}, "hidden_act must be silu, got gelu"),
        ({"rope_theta": None, "rope_parameters": None}, "must say the rope_theta"),
    ],
    ids=str,
)
def test_a_bad_config_is_named_with_its_file(tmp_path, changes, named):
    exported = Exported(tmp_path)
    folder = exported.write(EngineName.vllm)
    change_config(folder, **changes)
    with pytest.raises(ValueError, match=named) as error:
        imported(exported, folder)
    assert str(folder) in str(error.value)


def test_files_that_are_missing_cut_off_or_pickled_are_named(tmp_path):
    exported = Exported(tmp_path)
    folder = exported.write(EngineName.vllm)
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-8])
    with pytest.raises(ValueError, match=r"model\.safetensors must be a whole safetensors file"):
        imported(exported, folder)
    weights.rename(folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"got pytorch_model\.bin; pickles are not read"):
        imported(exported, folder)
    with pytest.raises(ValueError, match=r"got pytorch_model\.bin; pickles are not read"):
        files_of(folder)
    with pytest.raises(ValueError, match=r"speculator\.from_checkpoint must be a folder or a GGUF"):
        files_of(tmp_path / "missing.gguf")
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json must be JSON"):
        files_of(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match=r"must hold config\.json, got none"):
        files_of(folder)
    with pytest.raises(ValueError, match=r"speculator\.from_checkpoint must be a folder or a GGUF"):
        files_of(tmp_path / "nowhere")


def test_gguf_files_that_are_no_heads_are_named(tmp_path):
    exported = Exported(tmp_path)
    file = exported.write(EngineName.llama_cpp) / "head.gguf"
    assert is_the_same(exported, imported(exported, file))
    with pytest.raises(ValueError, match=r"general\.architecture must be eagle3, got llama"):
        imported(exported, tmp_path / "target.gguf")
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"head\.gguf must be a whole GGUF file"):
        imported(exported, file)
    file.write_bytes(b"GGUFfff")
    with pytest.raises(ValueError, match=r"head\.gguf must be a whole GGUF file"):
        imported(exported, file)
    writer = GGUFWriter(file, "eagle3")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match=re.escape("eagle3.rope.freq_base must be there")):
        imported(exported, file)


def test_a_head_decides_the_configuration_that_it_is_trained_under(tmp_path):
    exported = Exported(tmp_path, norm_output=True, aux_layers=[1, 3, 4])
    folder = exported.write(EngineName.vllm)
    config = SpeculatorConfig(from_checkpoint=str(folder), draft_vocab_size=17)
    found = adopted(config, exported.speculator.target.info)
    assert (found.draft_vocab_size, found.aux_layers) == (200, [1, 3, 4])
    assert [getattr(found, flag) for flag in FLAGS] == [False, False, False, True]
    assert adopted(SpeculatorConfig(), exported.speculator.target.info) == SpeculatorConfig()


def test_weights_are_bf16_under_each_engines_names(tmp_path):
    exported = Exported(tmp_path)
    for engine, layer, d2t in (
        (EngineName.vllm, "midlayer.", torch.int64),
        (EngineName.speculators, "layers.0.", torch.int64),
        (EngineName.sglang, "midlayer.", torch.int64),
        (EngineName.tensorrt_llm, "midlayer.", torch.int32),
    ):
        tensors = load_file(exported.write(engine) / "model.safetensors")
        assert tensors["d2t"].dtype == d2t
        assert f"{layer}self_attn.q_proj.weight" in tensors
        assert tensors["fc.weight"].dtype == torch.bfloat16
        assert not any("embed" in name for name in tensors)
