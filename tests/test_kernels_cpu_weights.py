"""Packed weights of the CPU kernels: the same values, in as many bits."""

import pytest
import torch
from cpu_kernels import EPSILON, FORMATS, normal, packed, quantized
from torch import Tensor

from specfit_kernels import fp8, int8
from specfit_kernels.cpu_weights import pack

pytest_plugins = ["cpu_fixtures"]


def dequantized(matrix) -> Tensor:
    if isinstance(matrix, fp8.FP8Tensor):
        return matrix.dequantized(torch.float32)
    return matrix.float() if isinstance(matrix, Tensor) else matrix.dequantize()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("rows", "columns"), [(1, 16), (15, 48), (33, 144), (160, 320)])
def test_packing_loses_nothing(generator, name, rows, columns):
    matrix = quantized(name, normal(generator, rows, columns))
    values = pack([matrix]).values
    # Two products by scales instead of one with their quotient.
    torch.testing.assert_close(values, dequantized(matrix), rtol=4 * EPSILON, atol=0)


@pytest.mark.parametrize(("name", "bits"), [("nvfp4", 4.5), ("int8", 8.5), ("fp8", 8.25)])
def test_a_weight_takes_the_bits_of_its_format(generator, name, bits):
    weight = packed(name, normal(generator, 64, 256))
    assert weight.tiles.nbytes * 8 == bits * 64 * 256
    assert weight.channel_scales.nbytes == 4 * 64


@pytest.mark.parametrize("columns", [1, 31, 32, 33, 576])
@pytest.mark.parametrize("size", [1e-6, 1e-3, 1.0, 1e6])
def test_int8_misses_a_value_by_half_a_step_at_most(generator, columns, size):
    weight = size * normal(generator, 7, columns)
    matrix = int8.quantize(weight)
    steps = matrix.scales.float().repeat_interleave(int8.BLOCK, 1)[:, :columns]
    error = (matrix.dequantize() - weight).abs()
    assert bool((error <= steps / 2 + 4 * EPSILON * weight.abs()).all())
    # A step is amax / 127, up to the rounding of its scale: 2^-10, or 2^-24 where it is denormal.
    blocks = torch.nn.functional.pad(weight.abs(), (0, -columns % 32)).view(7, -1, 32)
    amax = blocks.amax(2).repeat_interleave(32, 1)[:, :columns]
    assert bool((steps <= amax / 127 * (1 + 2.0**-10) + 2.0**-24).all())


def test_int8_of_zeros_and_of_what_no_scale_reaches():
    assert torch.equal(int8.quantize(torch.zeros(2, 40)).dequantize(), torch.zeros(2, 40))
    with pytest.raises(ValueError, match=r"lm_head must be at most 8.31901e\+06 in size"):
        int8.quantize(torch.full((1, 32), 1e7), name="lm_head")
