"""Decoding in slots of one KV cache gives what the model gives on each whole sequence alone."""

import pytest
import torch
from tiny_architectures import random_tokens, tiny

from specfit.targets.slots import SlotTarget

MAX_LENGTH = 40
PROMPTS = [17, 5, 11]  # one slot each; two are longer than a sliding window
GARBAGE = 7
ARCHITECTURES = ["llama", "yarn_rope", "qwen3_moe", "mistral_window", "gemma2", "gemma3", "gpt_oss"]
every_architecture = pytest.mark.parametrize("architecture", ARCHITECTURES)


def slots(architecture: str, aux_layers: list[int] | None = None) -> SlotTarget:
    return SlotTarget(tiny(architecture), num_slots=4, max_length=MAX_LENGTH, aux_layers=aux_layers)


def sequences() -> list[torch.Tensor]:
    return [random_tokens(MAX_LENGTH, seed=row) for row in range(len(PROMPTS))]


def alone(architecture: str, tokens: torch.Tensor) -> torch.Tensor:
    """The model's logits of one whole sequence, without a cache."""
    with torch.inference_mode():
        return tiny(architecture).model(tokens[None], use_cache=False).logits[0]


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    # Sums in another order: some float32 ulps of the largest value, through six layers.
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5 * float(expected.abs().max()))


def prefill(target: SlotTarget, slot: int, tokens: torch.Tensor) -> torch.Tensor:
    return target.forward(tokens[None], torch.tensor([0]), slot).logits[0]


def filled(architecture: str) -> SlotTarget:
    """Slots 0.. hold the prompts of `sequences`."""
    target = slots(architecture)
    for slot, (tokens, length) in enumerate(zip(sequences(), PROMPTS, strict=True)):
        prefill(target, slot, tokens[:length])
    return target


def step(target: SlotTarget, starts: list[int], rows: list[torch.Tensor], seq: int) -> torch.Tensor:
    """One pass over slots 0.. with the next `seq` tokens of each of `rows`."""
    tokens = torch.stack(
        [row[start : start + seq] for row, start in zip(rows, starts, strict=True)]
    )
    return target.forward(tokens, torch.tensor(starts), 0).logits


@every_architecture
def test_a_prefill_gives_the_logits_of_the_whole_prompt(architecture):
    target = slots(architecture)
    for slot, (tokens, length) in enumerate(zip(sequences(), PROMPTS, strict=True)):
        assert_close(prefill(target, slot, tokens[:length]), alone(architecture, tokens[:length]))


@every_architecture
@pytest.mark.parametrize("seq", [1, 4])
def test_passes_from_ragged_starts_give_the_logits_of_each_sequence_alone(architecture, seq):
    target, rows = filled(architecture), sequences()
    for done in range(0, 3 * seq, seq):
        starts = [length + done for length in PROMPTS]
        logits = step(target, starts, rows, seq)
        for row, start in enumerate(starts):
            expected = alone(architecture, rows[row][: start + seq])[start:]
            assert_close(logits[row], expected)


@every_architecture
def test_stale_columns_are_never_seen(architecture):
    target, rows = filled(architecture), sequences()
    target.forward(torch.full((3, 6), GARBAGE), torch.tensor(PROMPTS), 0)
    logits = step(target, PROMPTS, rows, 2)
    for row, start in enumerate(PROMPTS):
        assert_close(logits[row], alone(architecture, rows[row][: start + 2])[start:])


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_a_refilled_slot_has_forgotten_the_longer_sequence_before(architecture):
    target, rows = filled(architecture), sequences()
    fresh = random_tokens(MAX_LENGTH, seed=50)
    assert_close(prefill(target, 0, fresh[:3]), alone(architecture, fresh[:3]))
    logits = step(target, [3, *PROMPTS[1:]], [fresh, *rows[1:]], 2)
    assert_close(logits[0], alone(architecture, fresh[:5])[3:])
    assert_close(logits[1], alone(architecture, rows[1][: PROMPTS[1] + 2])[PROMPTS[1] :])


@every_architecture
def test_a_moved_sequence_goes_on_in_its_new_slot(architecture):
    target, rows = filled(architecture), sequences()
    target.move(2, 0)
    target.forward(torch.full((1, 9), GARBAGE), torch.tensor([0]), 2)  # its old slot is used again
    start = PROMPTS[2]
    logits = step(target, [start], [rows[2]], 3)
    assert_close(logits[0], alone(architecture, rows[2][: start + 3])[start:])


def test_a_move_before_the_first_pass_is_nothing():
    target, tokens = slots("llama"), sequences()[0][:8]
    target.move(1, 0)
    assert_close(prefill(target, 0, tokens), alone("llama", tokens))


def test_a_pass_over_later_slots_leaves_the_first_alone():
    target, rows = filled("llama"), sequences()
    target.forward(torch.full((2, 6), GARBAGE), torch.tensor([0, 0]), 1)
    logits = step(target, PROMPTS[:1], rows[:1], 2)
    start = PROMPTS[0]
    assert_close(logits[0], alone("llama", rows[0][: start + 2])[start:])


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_last_only_gives_the_last_positions_logits_and_all_features(architecture):
    tokens = sequences()[0][None, :9]
    target = slots(architecture, [2, 5])
    output = target.forward(tokens, torch.tensor([0]), 0, last_only=True)
    assert output.logits.shape == (1, 1, target.vocab_size)
    assert_close(output.logits[0, 0], alone(architecture, tokens[0])[-1])
    assert output.features is not None
    assert output.features.shape == (1, 9, 2 * 32)


def test_features_are_the_aux_layers_in_the_order_given():
    tokens = sequences()[0][None, :9]
    with torch.inference_mode():
        states = tiny("llama").model(tokens, output_hidden_states=True).hidden_states
    output = slots("llama", [4, 1]).forward(tokens, torch.tensor([0]), 0)
    assert output.features is not None
    assert_close(output.features[0], torch.cat([states[4][0], states[1][0]], dim=-1))


def test_features_of_a_decoding_pass_are_those_of_the_whole_sequence():
    tokens = sequences()[0]
    with torch.inference_mode():
        states = tiny("llama").model(tokens[None, :12], output_hidden_states=True).hidden_states
    target = slots("llama", [3])
    prefill(target, 0, tokens[:9])
    output = target.forward(tokens[None, 9:12], torch.tensor([9]), 0)
    assert output.features is not None
    assert_close(output.features[0], states[3][0, 9:])


def test_no_aux_layers_give_no_features():
    output = slots("llama").forward(sequences()[0][None, :9], torch.tensor([0]), 0)
    assert output.features is None


def test_logits_are_float32_whatever_the_model_computes_in():
    target = SlotTarget(tiny("llama", torch.bfloat16), num_slots=1, max_length=8, aux_layers=None)
    assert (
        target.forward(torch.tensor([[1, 2]]), torch.tensor([0]), 0).logits.dtype == torch.float32
    )


def test_the_last_column_of_a_slot_can_be_filled():
    tokens = sequences()[0]
    assert_close(prefill(slots("llama"), 3, tokens), alone("llama", tokens))


def test_a_slot_longer_than_the_targets_context_is_refused():
    limit = tiny("llama").info.max_position_embeddings
    SlotTarget(tiny("llama"), num_slots=1, max_length=limit, aux_layers=None)
    with pytest.raises(ValueError, match=f"{limit + 1} tokens.*context of {limit}"):
        SlotTarget(tiny("llama"), num_slots=1, max_length=limit + 1, aux_layers=None)
