"""The states that are read are those that transformers itself computes."""

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_architectures import ARCHITECTURES, random_tokens, tiny
from transformers import AutoModelForCausalLM, GPT2Config, Llama4TextConfig, Qwen3NextConfig

from specfit.targets.info import read_info
from specfit.targets.masks import attention_masks
from specfit.targets.target import Target

NUM_LAYERS = 6
LENGTHS = [5, 21, 9]  # two of them longer than a sliding window
every_architecture = pytest.mark.parametrize("architecture", ARCHITECTURES)


@functools.cache
def plain(architecture: str) -> Any:
    """What transformers returns for two sequences, its own mask included."""
    with torch.inference_mode():
        return tiny(architecture).model(random_tokens(2, 21), output_hidden_states=True)


@functools.cache
def read(architecture: str) -> tuple[torch.Tensor, torch.Tensor]:
    """What we read of the same sequences, every layer."""
    valid = torch.ones(2, 21, dtype=torch.bool)
    return tiny(architecture).states(random_tokens(2, 21), valid, list(range(NUM_LAYERS + 1)))


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    # Sums in another order: some float32 ulps of the largest value, through six layers.
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5 * float(expected.abs().max()))


@every_architecture
def test_aux_layer_i_is_the_stream_that_enters_layer_i(architecture):
    aux, _ = read(architecture)
    for i in range(NUM_LAYERS):
        assert_close(aux[:, :, i], plain(architecture).hidden_states[i])


@every_architecture
def test_the_last_state_is_the_one_before_the_final_norm(architecture):
    _, last = read(architecture)
    after = plain(architecture).hidden_states[NUM_LAYERS]
    assert_close(tiny(architecture).final_norm(last), after)
    assert not torch.allclose(last, after, rtol=1e-2)


@every_architecture
def test_the_aux_layer_past_the_last_layer_is_the_last_state(architecture):
    aux, last = read(architecture)
    assert torch.equal(aux[:, :, NUM_LAYERS], last)


@every_architecture
def test_the_head_makes_the_models_logits_of_the_last_state(architecture):
    _, last = read(architecture)
    assert_close(tiny(architecture).logits(last), plain(architecture).logits)


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "granite", "cohere2"])
def test_rows_of_the_head_make_those_tokens_logits(architecture):
    rows = torch.tensor([0, 7, 8, 300])
    _, last = read(architecture)
    target = tiny(architecture)
    logits = target.logits(last, weight=target.head_weight[rows])
    assert_close(logits, plain(architecture).logits[..., rows])


def test_aux_layers_come_in_the_order_asked_for():
    ids, valid = random_tokens(2, 21), torch.ones(2, 21, dtype=torch.bool)
    aux, _ = tiny("llama").states(ids, valid, [1, 4])
    assert_close(aux[:, :, 0], plain("llama").hidden_states[1])
    assert_close(aux[:, :, 1], plain("llama").hidden_states[4])


def test_no_aux_layers_leave_the_last_state_alone():
    ids, valid = random_tokens(2, 21), torch.ones(2, 21, dtype=torch.bool)
    aux, last = tiny("llama").states(ids, valid, [])
    assert aux.shape == (2, 21, 0, 32)
    assert torch.equal(last, read("llama")[1])


def test_nothing_stays_hooked_onto_the_model():
    target = tiny("llama")
    with pytest.raises(RuntimeError), target.captured([0, NUM_LAYERS]):
        raise RuntimeError
    assert not any(module._forward_pre_hooks for module in target.model.modules())


@functools.cache
def alone(architecture: str, row: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The states of sequence `row`, by itself and without padding."""
    length = LENGTHS[row]
    ids = random_tokens(1, length, seed=row)
    aux, last = tiny(architecture).states(ids, torch.ones(1, length, dtype=torch.bool), [0, 2, 5])
    return aux[0], last[0]


@every_architecture
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_does_not_change_a_rows_states(architecture, side):
    width = max(LENGTHS) + 2
    ids = random_tokens(len(LENGTHS), width, seed=99)  # what is padded with must not matter
    valid = torch.zeros_like(ids, dtype=torch.bool)
    spans = []
    for row, length in enumerate(LENGTHS):
        start = width - length if side == "left" else 0
        spans.append(slice(start, start + length))
        ids[row, spans[row]] = random_tokens(1, length, seed=row)[0]
        valid[row, spans[row]] = True
    aux, last = tiny(architecture).states(ids, valid, [0, 2, 5])
    for row, span in enumerate(spans):
        expected_aux, expected_last = alone(architecture, row)
        assert_close(aux[row, span], expected_aux)
        assert_close(last[row, span], expected_last)


@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe", "gemma3"])
@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_the_batch_size_does_not_change_a_rows_states(architecture, batch_size):
    ids = random_tokens(5, 16)
    valid = torch.ones_like(ids, dtype=torch.bool)
    together = tiny(architecture).states(ids, valid, [3])[0]
    batches = [
        tiny(architecture).states(*rows, [3])[0]
        for rows in zip(ids.split(batch_size), valid.split(batch_size), strict=True)
    ]
    assert_close(torch.cat(batches), together)


def test_positions_count_the_valid_tokens():
    ids, gap = random_tokens(1, 12), slice(4, 7)
    valid = torch.ones_like(ids, dtype=torch.bool)
    valid[0, gap] = False
    aux, last = tiny("llama").states(ids, valid, [2])
    short = ids[valid][None]
    expected_aux, expected_last = tiny("llama").states(short, torch.ones_like(short).bool(), [2])
    assert_close(aux[valid], expected_aux[0])
    assert_close(last[valid], expected_last[0])


@pytest.mark.parametrize("architecture", ["gemma2", "gpt_oss", "llama"])
def test_states_are_of_the_type_that_the_target_computes_in(architecture):
    ids = random_tokens(2, 12)
    valid = torch.ones_like(ids, dtype=torch.bool)
    valid[0, :9] = False
    aux, last = tiny(architecture, torch.bfloat16).states(ids, valid, [0, 3, 5])
    assert aux.dtype == last.dtype == torch.bfloat16
    assert bool(aux[valid].isfinite().all() and last[valid].isfinite().all())


def mask(**config: Any) -> Any:
    """Of 6 tokens of one row, for a model of these settings."""
    text = SimpleNamespace(_attn_implementation="sdpa", dtype=torch.float32, **config)
    positions = torch.arange(6)[None]
    valid = torch.ones(1, 6, dtype=torch.bool)
    config = SimpleNamespace(get_text_config=lambda: text)
    return attention_masks(config, positions, positions, valid)


def test_a_sliding_layer_sees_the_window_and_a_full_layer_all_before():
    masks = mask(layer_types=["sliding_attention", "full_attention"], sliding_window=3)
    full = [[key <= query for key in range(6)] for query in range(6)]
    sliding = [[query - 3 < key <= query for key in range(6)] for query in range(6)]
    assert masks["full_attention"][0, 0].tolist() == full
    assert masks["sliding_attention"][0, 0].tolist() == sliding


def test_a_window_that_is_switched_off_is_none():
    assert int(mask(sliding_window=3, use_sliding_window=False).sum()) == 21


def test_eager_attention_is_given_zeros_where_one_looks_and_never_ones():
    target = tiny("gemma2")
    positions = torch.arange(3)[None]
    masks = attention_masks(
        target.model.config, positions, positions, torch.ones(1, 3, dtype=torch.bool)
    )
    low = torch.finfo(torch.float32).min
    assert masks["full_attention"][0, 0].tolist() == [[0, low, low], [0, 0, low], [0, 0, 0]]


@pytest.mark.parametrize(
    ("config", "kind"),
    [(Qwen3NextConfig(), "linear_attention"), (Llama4TextConfig(), "chunked_attention")],
)
def test_layer_kinds_without_a_mask_are_refused_by_name(config, kind):
    positions = torch.arange(3)[None]
    with pytest.raises(ValueError, match=rf"target\.path.*{kind}"):
        attention_masks(config, positions, positions, torch.ones(1, 3, dtype=torch.bool))


def test_a_target_without_rotary_positions_is_refused():
    model = AutoModelForCausalLM.from_config(
        GPT2Config(vocab_size=9, n_embd=8, n_layer=1, n_head=1)
    )
    with pytest.raises(ValueError, match=r"target\.path.*rotary.*GPT2LMHeadModel"):
        read_info(model, name="gpt2", tokenizer=None, quantization=None)


def test_a_decoder_laid_out_in_another_way_is_refused():
    target = tiny("llama")
    decoder = SimpleNamespace(layers=target.layers, final_layer_norm=target.final_norm)
    model = SimpleNamespace(get_decoder=lambda: decoder)
    with pytest.raises(ValueError, match=r"target\.path: LlamaForCausalLM is not laid out"):
        Target(model, None, target.info)
