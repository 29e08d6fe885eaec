"""What encoding costs: nothing where the type can hold the value, a bounded error elsewhere."""

import pytest
import torch

from specfit.config import StateDtype
from specfit.states.codec import EncodedStates, decode, encode

EIGHT_BITS = [StateDtype.int8, StateDtype.fp8]
LARGEST = {StateDtype.int8: 127.0, StateDtype.fp8: 448.0}


def states(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Tokens and layers of very different sizes, with outliers as real targets have them."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(7, 3, 64, generator=generator)
    values *= torch.logspace(-6, 4, 21).reshape(7, 3, 1)
    values[:, 1, 5] *= 300
    return values.to(dtype)


@pytest.mark.parametrize(
    ("kept", "computed"),
    [
        (StateDtype.fp32, torch.float32),
        (StateDtype.fp32, torch.bfloat16),
        (StateDtype.fp32, torch.float16),
        (StateDtype.bf16, torch.bfloat16),
    ],
)
def test_what_the_type_can_hold_comes_back_exactly(kept, computed):
    values = states().clamp(-60000, 60000).to(computed)
    assert torch.equal(decode(encode(values, kept)), values.float())


def test_bf16_of_float32_states_is_off_by_half_a_unit_in_the_last_place():
    error = (decode(encode(states(), StateDtype.bf16)) - states()).abs()
    assert bool((error <= states().abs() * 2.0**-8).all())
    assert float(error.max()) > 0


def test_int8_is_off_by_half_a_scale_of_its_token_and_layer():
    error = (decode(encode(states(), StateDtype.int8)).double() - states().double()).abs()
    scale = states().double().abs().amax(-1, keepdim=True) / 127
    # The scale, the quotient and the product are rounded to float32: three ulps of the largest.
    assert bool((error <= scale * (0.5 + 3 * 127 * 2.0**-23)).all())


def test_fp8_is_off_by_half_a_unit_of_three_mantissa_bits():
    error = (decode(encode(states(), StateDtype.fp8)).double() - states().double()).abs()
    values = states().double().abs()
    scale = values.amax(-1, keepdim=True) / 448
    # E4M3: normal numbers have a relative error of 2^-4, those below 2^-6 an absolute of 2^-10.
    bound = torch.maximum(values * 2.0**-4, scale * 2.0**-10)
    assert bool((error <= bound * (1 + 1e-5)).all())


@pytest.mark.parametrize("dtype", EIGHT_BITS)
def test_the_largest_value_of_a_token_and_layer_uses_the_whole_range(dtype):
    values = encode(states(), dtype).values.float()
    assert torch.equal(values.abs().amax(-1), torch.full((7, 3), LARGEST[dtype]))


@pytest.mark.parametrize("dtype", EIGHT_BITS)
def test_a_token_and_layer_do_not_change_with_their_neighbours(dtype):
    together, alone = encode(states(), dtype), encode(states()[2:3, 1:2], dtype)
    assert torch.equal(together.values[2:3, 1:2].float(), alone.values.float())
    assert torch.equal(together.scales[2:3, 1:2], alone.scales)


@pytest.mark.parametrize("dtype", StateDtype)
def test_zeros_stay_zeros(dtype):
    zeros = torch.zeros(2, 3, 8)
    assert torch.equal(decode(encode(zeros, dtype)), zeros)


@pytest.mark.parametrize("dtype", EIGHT_BITS)
def test_encoding_what_was_decoded_changes_no_code(dtype):
    first = encode(states(), dtype)
    assert torch.equal(encode(decode(first), dtype).values.float(), first.values.float())


def test_a_scale_is_what_a_value_is_multiplied_with():
    encoded = EncodedStates(
        torch.tensor([[[1, -2], [3, 4]]], dtype=torch.int8), torch.tensor([[0.5, 10.0]])
    )
    assert decode(encoded).tolist() == [[[0.5, -1.0], [30.0, 40.0]]]
