"""What a target is, read from its configuration and its weights."""

from copy import deepcopy
from dataclasses import replace
from types import SimpleNamespace

import pytest
from tiny_architectures import ARCHITECTURES, tiny
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from specfit.files import write_json
from specfit.targets.info import TargetInfo, check_aux_layers, read_info, read_info_file


def info_of(config: object, eos_id: int | None = 1) -> TargetInfo:
    model = AutoModelForCausalLM.from_config(deepcopy(config))
    tokenizer = SimpleNamespace(bos_token_id=4, eos_token_id=eos_id)
    return read_info(model, name="tiny", tokenizer=tokenizer, quantization=None)


def changed(architecture: str, **values: object) -> object:
    config = deepcopy(ARCHITECTURES[architecture])
    for name, value in values.items():
        setattr(config, name, value)
    return config


MOE = Qwen3MoeConfig(
    vocab_size=100,
    hidden_size=8,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=6,
    num_experts=4,
    num_experts_per_tok=3,
    moe_intermediate_size=5,
    tie_word_embeddings=False,
)


def test_the_width_of_a_mixture_of_experts_is_what_a_token_runs_through():
    assert info_of(MOE).intermediate_size == 3 * 5


def test_the_width_of_a_dense_target_is_its_own():
    assert info_of(ARCHITECTURES["llama"]).intermediate_size == 48


def test_parameters_are_counted_all_and_a_token_at_a_time():
    attention = 8 * 12 + 2 * 8 * 6 + 12 * 8 + 2 * 6  # q, k and v, o, norms of q and k
    expert = 3 * 8 * 5
    rest = 2 * (attention + 2 * 8 + 4 * 8) + 2 * 100 * 8 + 8  # norms, router; ends; last norm
    assert info_of(MOE).num_parameters == rest + 2 * 4 * expert
    assert info_of(MOE).num_active_parameters == rest + 2 * 3 * expert


def test_tied_embeddings_are_counted_once():
    tied, untied = info_of(ARCHITECTURES["llama"]), info_of(ARCHITECTURES["llama3_rope"])
    assert untied.num_parameters - tied.num_parameters == 320 * 32
    assert tied.forward_flops(10, 3) == untied.forward_flops(10, 3)


def test_operations_are_two_a_weight_and_token_and_the_head_only_where_asked():
    info = replace(info_of(ARCHITECTURES["llama"]), num_active_parameters=1000 + 320 * 32)
    assert info.forward_flops(7, 2) == 2 * (1000 * 7 + 320 * 32 * 2)


def test_a_head_dim_that_is_not_given_is_hidden_size_by_heads():
    assert info_of(ARCHITECTURES["llama"]).head_dim == 16
    assert info_of(changed("mistral_window", head_dim=None)).head_dim == 32 // 4


def test_ids_that_end_an_answer_are_a_sorted_list_without_repeats():
    assert info_of(changed("llama", eos_token_id=[9, 3]), eos_id=3).eos_ids == [3, 9]
    assert info_of(changed("llama", eos_token_id=None), eos_id=5).eos_ids == [5]
    assert info_of(changed("llama", eos_token_id=None), eos_id=None).eos_ids == []


def test_rope_of_a_target_with_two_kinds_is_that_of_full_attention():
    rope = {
        "full_attention": {"rope_type": "default", "rope_theta": 5e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    info = info_of(changed("gemma3", rope_parameters=rope))
    assert info.rope_parameters == {"rope_type": "default", "rope_theta": 5e5}


def test_an_activation_of_another_name_is_found():
    assert info_of(ARCHITECTURES["gemma2"]).hidden_act == "gelu_pytorch_tanh"


def test_what_is_written_is_read(tmp_path):
    info = info_of(ARCHITECTURES["yarn_rope"])
    write_json(tmp_path / "info.json", info.to_json())
    assert read_info_file(tmp_path / "info.json") == info


@pytest.mark.parametrize(
    ("num_layers", "aux_layers"),
    [
        (32, [2, 16, 29]),
        (30, [2, 15, 27]),
        (7, [2, 3, 4]),
        (6, [1, 3, 5]),
        (5, [1, 2, 4]),
        (4, [1, 2, 3]),
        (3, [0, 1, 2]),
        (2, [0, 1]),
        (1, [0]),
    ],
)
def test_default_aux_layers_are_early_middle_and_late(num_layers, aux_layers):
    assert replace(tiny("llama").info, num_layers=num_layers).default_aux_layers == aux_layers


@pytest.mark.parametrize("aux_layers", [[0], [0, 6], [1, 3, 5], [6]])
def test_aux_layers_up_to_the_state_before_the_final_norm_are_taken(aux_layers):
    check_aux_layers(aux_layers, tiny("llama").info)


@pytest.mark.parametrize("aux_layers", [[7], [-1], [2, 2], [3, 1]])
def test_aux_layers_out_of_range_or_order_are_refused(aux_layers):
    with pytest.raises(ValueError, match=r"speculator\.aux_layers must .*0\.\.6 .*, got \["):
        check_aux_layers(aux_layers, tiny("llama").info)
