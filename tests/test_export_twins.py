"""Every engine's folder under its own rules, and under others', whose damage is known."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_exports import NAMES, TOKENS, Exported
from tiny_heads import FLAGS

from specfit.export import llama_cpp
from specfit.export.config import EngineName
from specfit.export.engines import ENGINES
from specfit.export.parity import compare
from specfit.speculators.batches import pack

KNOWN = {  # the flags that each engine expresses
    EngineName.vllm: FLAGS,
    EngineName.speculators: FLAGS,
    EngineName.sglang: ("norm_before_fc", "fc_norm", "norm_output"),
    EngineName.tensorrt_llm: ("norm_before_fc", "fc_norm", "norm_output"),
    EngineName.llama_cpp: ("norm_before_residual", "norm_before_fc"),
    EngineName.openvino: (),
}


def is_another_head(row):
    assert not row["is_equal"]
    assert row["drafted_tokens_equal"] < 0.9 or row["max_logit_difference"] > 0.05
    return True


def change_config(folder, **changes):
    path = folder / "config.json"
    values = json.loads(path.read_text())
    for key, value in changes.items():
        values.pop(key, None)
        if value is not None:
            values[key] = value
    path.write_text(json.dumps(values))


def change_tensors(folder, change):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


@pytest.mark.parametrize("engine", NAMES, ids=lambda e: e.name)
@pytest.mark.parametrize("architecture", ["llama", "llama3_rope", "qwen3_moe"])
def test_the_portable_head_is_itself_under_every_engines_rules(tmp_path, engine, architecture):
    exported = Exported(tmp_path, architecture)
    row = exported.parity(exported.write(engine), engine)
    assert row["num_drafted_tokens"] == 3 * 23
    assert row["drafted_tokens_equal"] == 1.0
    assert row["max_logit_difference"] < 1e-4
    assert row["is_equal"]


@pytest.mark.parametrize(
    ("engine", "flag"), [(e, f) for e, flags in KNOWN.items() for f in flags], ids=str
)
def test_each_flag_that_an_engine_knows_is_carried_to_it(tmp_path, engine, flag):
    exported = Exported(tmp_path, **{flag: True})
    head = exported.trained[0].config
    assert ENGINES[engine].refusal(head, exported.served) is None
    assert exported.parity(exported.write(engine), engine)["is_equal"]


@pytest.mark.parametrize(
    ("engine", "flag"),
    [(e, f) for e, flags in KNOWN.items() for f in FLAGS if f not in flags],
    ids=str,
)
def test_a_flag_that_an_engine_does_not_know_is_refused_and_would_be_lost(tmp_path, engine, flag):
    exported = Exported(tmp_path, **{flag: True})
    reason = ENGINES[engine].refusal(exported.trained[0].config, exported.served)
    assert reason == (
        f"speculator.{flag} must be false for {engine.name}, which does not know it, got true; "
        "speculator=portable is served everywhere"
    )
    is_another_head(exported.parity(exported.write(engine), engine))


@pytest.mark.parametrize("architecture", ["yarn_rope"])
@pytest.mark.parametrize("engine", [e for e in NAMES if e is not EngineName.llama_cpp], ids=str)
def test_scaled_rope_is_kept(tmp_path, engine, architecture):
    exported = Exported(tmp_path, architecture)
    assert exported.parity(exported.write(engine), engine)["is_equal"]


@pytest.mark.parametrize("layers", [[1, 3, 5], [2, 3, 4], [1, 2], [1, 2, 3, 5]], ids=str)
def test_other_aux_layers_are_carried(tmp_path, layers):
    exported = Exported(tmp_path, aux_layers=layers)
    for engine in NAMES:
        refused = ENGINES[engine].refusal(exported.trained[0].config, exported.served)
        three_only = engine in (EngineName.llama_cpp, EngineName.openvino)
        assert (refused is not None) == (three_only and len(layers) != 3)
        if refused is None:
            assert exported.parity(exported.write(engine), engine)["is_equal"]
        else:
            assert refused.startswith("speculator.aux_layers must be three")


@pytest.mark.parametrize("layers", [[0, 3, 5], [2, 3, 6], [4]], ids=str)
def test_layers_that_an_engine_cannot_read_are_refused(tmp_path, layers):
    exported = Exported(tmp_path, aux_layers=layers)
    refused = {
        engine.name
        for engine in NAMES
        if ENGINES[engine].refusal(exported.trained[0].config, exported.served) is not None
    }
    first_is_embeddings = {"sglang", "tensorrt_llm", "openvino"}
    expected = {0: first_is_embeddings, 2: {"sglang"}, 4: {"sglang", "llama_cpp", "openvino"}}
    assert refused == expected[layers[0]]


def test_a_twin_goes_where_the_states_are(tmp_path):
    exported = Exported(tmp_path)
    twin = ENGINES[EngineName.vllm].twin(exported.write(EngineName.vllm), exported.served)
    moved = twin.to(torch.device("meta"))
    held = [*moved.tensors.values(), moved.target_ids, moved.frequencies.inverse]
    assert {tensor.device.type for tensor in held} == {"meta"}


def test_ids_that_nothing_drafted_must_mean_the_same_too(tmp_path):
    exported = Exported(tmp_path)
    twin = ENGINES[EngineName.vllm].twin(exported.write(EngineName.vllm), exported.served)
    states = pack([exported.speculator.document(TOKENS, [(2, len(TOKENS))])])
    tokens, _ = twin.draft(states.tokens, states.aux, exported.speculator.embeddings, 3)
    ids, drafted = twin.target_ids.clone(), set(tokens.flatten().tolist())
    unused = next(i for i, token in enumerate(ids.tolist()) if token not in drafted)
    ids[unused] = ids[unused - 1]
    row = compare(
        exported.trained,
        states,
        replace(twin, target_ids=ids),
        states.aux,
        exported.speculator.embeddings,
        3,
    )
    assert row["drafted_tokens_equal"] == 1.0
    assert not row["is_equal"]


# What follows is known damage: folders of one engine under another's rules.


def test_vllms_folder_under_sglangs_rules_reads_default_layers(tmp_path):
    exported = Exported(tmp_path, aux_layers=[1, 2, 5])
    folder = exported.write(EngineName.vllm)
    assert ENGINES[EngineName.sglang].twin(folder, exported.served).aux_layers == (2, 3, 3)
    is_another_head(exported.parity(folder, EngineName.sglang))


def test_sglangs_folder_under_vllms_rules_reads_default_layers(tmp_path):
    exported = Exported(tmp_path, aux_layers=[1, 2, 5])
    folder = exported.write(EngineName.sglang)
    assert ENGINES[EngineName.vllm].twin(folder, exported.served).aux_layers == (2, 3, 3)
    is_another_head(exported.parity(folder, EngineName.vllm))


def test_ids_as_vllm_counts_them_are_off_by_one_where_outputs_are_counted(tmp_path):
    exported = Exported(tmp_path)
    folder = exported.write(EngineName.sglang)
    change_config(folder, eagle_config={"eagle_aux_hidden_state_layer_ids": [2, 3, 5]})
    for engine in (EngineName.sglang, EngineName.tensorrt_llm):
        assert ENGINES[engine].twin(folder, exported.served).aux_layers == (3, 4, 6)
        is_another_head(exported.parity(folder, engine))


def test_a_speculators_config_without_the_residuals_flag_means_that_it_is_set(tmp_path):
    exported = Exported(tmp_path)
    folder = exported.write(EngineName.speculators)
    change_config(folder, norm_before_residual=None)
    is_another_head(exported.parity(folder, EngineName.speculators))
    of_vllm = exported.write(EngineName.vllm)
    change_config(of_vllm, norm_before_residual=None)
    assert exported.parity(of_vllm, EngineName.vllm)["is_equal"]


def test_without_d2t_draft_ids_are_taken_for_the_first_of_the_target(tmp_path):
    exported = Exported(tmp_path)
    folder = exported.write(EngineName.vllm)
    change_tensors(folder, lambda tensors: tensors.pop("d2t"))
    assert exported.parity(folder, EngineName.vllm)["drafted_tokens_equal"] < 0.2


def test_tied_embeddings_in_a_config_replace_the_heads_rows_under_sglangs_rules(tmp_path):
    exported = Exported(tmp_path)
    folder = exported.write(EngineName.sglang)
    change_config(folder, tie_word_embeddings=True)
    is_another_head(exported.parity(folder, EngineName.sglang))
    assert exported.parity(exported.write(EngineName.vllm), EngineName.vllm)["is_equal"]


def test_gguf_with_offsets_or_with_unpermuted_rows_is_another_head(tmp_path, monkeypatch):
    exported = Exported(tmp_path)
    head, vocab = exported.trained
    offsets = replace(vocab, d2t=vocab.d2t - torch.arange(len(vocab.d2t)))
    llama_cpp.write(exported.write(EngineName.llama_cpp), head, offsets, exported.served)
    row = exported.parity(tmp_path / "llama_cpp", EngineName.llama_cpp)
    assert row["drafted_tokens_equal"] < 0.2
    monkeypatch.setattr(llama_cpp, "_neighbours_first", lambda weight, _: weight.contiguous())
    is_another_head(exported.parity(exported.write(EngineName.llama_cpp), EngineName.llama_cpp))


def test_rope_factors_that_are_lost_make_another_head_in_gguf(tmp_path, monkeypatch):
    exported = Exported(tmp_path, "llama3_rope")
    plain = llama_cpp.frequencies
    monkeypatch.setattr(
        llama_cpp,
        "frequencies",
        lambda rope, *rest: plain(rope | {"rope_type": "default"}, *rest),
    )
    row = exported.parity(exported.write(EngineName.llama_cpp), EngineName.llama_cpp)
    assert row["max_logit_difference"] > 1e-3
    assert not row["is_equal"]


def test_rope_that_is_scaled_is_lost_where_an_engine_looks_for_another_key(tmp_path):
    exported = Exported(tmp_path, "llama3_rope")
    folder = exported.write(EngineName.tensorrt_llm)
    change_config(folder, rope_scaling=None)
    assert not exported.parity(folder, EngineName.tensorrt_llm)["is_equal"]
    assert exported.parity(folder, EngineName.sglang)["is_equal"]  # it reads rope_parameters


def test_openvino_without_a_list_takes_the_default_ids_for_outputs(tmp_path):
    exported = Exported(tmp_path, aux_layers=[2, 3, 5])
    folder = exported.write(EngineName.openvino)
    change_config(folder, eagle_aux_hidden_state_layer_ids=None)
    assert ENGINES[EngineName.openvino].twin(folder, exported.served).aux_layers == (3, 4, 4)


@pytest.mark.parametrize(
    ("model_type", "layers", "written"),
    [
        ("llama", [2, 3, 5], [1, 2, 4]),
        ("gpt_oss", [2, 3, 5], [2, 3, 5]),
        ("deepseek_v3", [2, 3, 5], [1, 2, 4]),
        ("deepseek_v3", [3, 4, 5], [3, 4, 5]),
    ],
)
def test_sglang_gets_ids_that_it_takes_for_the_heads_layers(tmp_path, model_type, layers, written):
    exported = Exported(tmp_path, aux_layers=layers)
    info = replace(exported.served.info, model_type=model_type)
    served = replace(exported.served, info=info)
    sglang = ENGINES[EngineName.sglang]
    assert sglang.refusal(exported.trained[0].config, served) is None
    sglang.write(tmp_path, *exported.trained, served)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == written
    assert sglang.twin(tmp_path, served).aux_layers == tuple(layers)


def test_an_id_that_deepseek_would_count_otherwise_is_refused(tmp_path):
    exported = Exported(tmp_path, aux_layers=[1, 3, 5])
    served = replace(exported.served, info=replace(exported.served.info, model_type="deepseek_v3"))
    reason = ENGINES[EngineName.sglang].refusal(exported.trained[0].config, served)
    assert "speculator.aux_layers must be layers whose inputs sglang captures" in str(reason)
