import pytest
import torch

from specfit_kernels import e2m1

SIZES = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
MIDPOINTS = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]


def all_of(dtype: torch.dtype) -> torch.Tensor:
    """Every finite number of a type of 16 bits."""
    values = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(dtype)
    return values[values.isfinite()]


def test_codes_count_up_through_the_sizes_and_then_through_the_negative_ones():
    codes = torch.arange(16, dtype=torch.uint8)
    assert e2m1.decode(codes).tolist() == SIZES + [-size for size in SIZES]


def test_every_code_round_trips_but_that_of_negative_zero():
    codes = torch.arange(16, dtype=torch.uint8)
    again = e2m1.encode(e2m1.decode(codes))
    assert again.tolist() == [*range(8), 0, *range(9, 16)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_no_value_is_nearer_than_the_encoded_one(dtype):
    x = all_of(dtype)
    taken = (e2m1.decode(e2m1.encode(x)).double() - x.double()).abs()
    least = (torch.tensor(SIZES + [-s for s in SIZES]).double() - x.double()[:, None]).abs()
    assert torch.equal(taken, least.amin(1))


def test_ties_go_to_the_even_code():
    ties = torch.tensor(MIDPOINTS)
    assert e2m1.encode(ties).tolist() == [0, 2, 2, 4, 4, 6, 6]
    assert e2m1.encode(-ties).tolist() == [8, 10, 10, 12, 12, 14, 14]


def test_the_next_float_beside_a_tie_goes_to_its_own_side():
    ties = torch.tensor(MIDPOINTS)
    assert e2m1.encode(torch.nextafter(ties, torch.zeros(7))).tolist() == list(range(7))
    assert e2m1.encode(torch.nextafter(ties, ties + 1)).tolist() == list(range(1, 8))


def test_what_is_beyond_6_becomes_6():
    beyond = torch.tensor([6.0, 6.001, 7.0, 8.0, 1e30, torch.inf])
    assert e2m1.encode(beyond).tolist() == [7] * 6
    assert e2m1.encode(-beyond).tolist() == [15] * 6


def test_a_negative_value_keeps_its_sign_at_zero_and_negative_zero_does_not():
    x = torch.tensor([-0.25, -1e-3, -1e-45, -0.0, 0.0, 1e-45])
    assert e2m1.encode(x).tolist() == [8, 8, 8, 0, 0, 0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_nearest_is_what_is_encoded(dtype):
    x = all_of(dtype)
    assert torch.equal(e2m1.nearest(x.float()), e2m1.decode(e2m1.encode(x)))


def test_nearest_keeps_nan():
    assert e2m1.nearest(torch.tensor([torch.nan, 1.2])).isnan().tolist() == [True, False]


def test_the_even_column_is_the_low_nibble():
    codes = torch.tensor([[1, 2, 15, 0]], dtype=torch.uint8)
    assert e2m1.pack(codes).tolist() == [[0x21, 0x0F]]


def test_every_byte_unpacks_to_what_packs_to_it():
    packed = torch.arange(256, dtype=torch.uint8).view(4, 2, 32)
    assert e2m1.unpack(packed).shape == (4, 2, 64)
    assert torch.equal(e2m1.pack(e2m1.unpack(packed)), packed)
