import pytest
import torch

from specfit_kernels import weights
from specfit_kernels.fp8 import FP8Tensor, quantize_blocks, quantize_tensor, to_e4m3

EPSILON = 2.0**-23
QUANTIZERS = [quantize_tensor, quantize_blocks]


def sizes() -> torch.Tensor:
    """All of E4M3 from 0 to 448, ascending."""
    return torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()


def matrix(rows: int, columns: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows + columns)
    return torch.randn(rows, columns, generator=generator) * torch.logspace(-3, 3, columns)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.uint8)


def test_every_e4m3_number_round_trips():
    assert bits(to_e4m3(sizes())).tolist() == list(range(127))
    assert bits(to_e4m3(-sizes())).tolist() == list(range(128, 255))


def test_ties_go_to_the_even_code():
    ties = (sizes()[:-1] + sizes()[1:]) / 2
    assert bits(to_e4m3(ties)).tolist() == [code + code % 2 for code in range(126)]


def test_what_is_beyond_448_becomes_448_and_nan_stays():
    x = torch.tensor([448.1, 463.9, 464.1, 1e30, torch.inf, -500.0, -torch.inf, torch.nan])
    expected = [448.0] * 5 + [-448.0] * 2
    assert to_e4m3(x).float()[:-1].tolist() == expected
    assert bool(to_e4m3(x).float()[-1].isnan())


def test_one_scale_makes_the_largest_size_448():
    weight = torch.tensor([[-896.0, 2.0, 34.0], [0.0, 896.0 / 2**16, -0.5]])
    quantized = quantize_tensor(weight)
    assert quantized.scales.tolist() == [2.0]
    # Two ties: 17 lies between 16 and 18; 3.5 / 2^9, below 2^-6, between 3 and 4 steps of 2^-9.
    assert quantized.values.float().tolist() == [[-448, 1, 16], [0, 2**-7, -0.25]]


@pytest.mark.parametrize("quantize", QUANTIZERS)
def test_the_error_is_half_a_unit_of_three_mantissa_bits(quantize):
    weight = matrix(200, 300)
    quantized = quantize(weight)
    error = (quantized.dequantized(torch.float32).double() - weight.double()).abs()
    # The absolute bound is that of numbers below 2^-6; the float32 quotient and product add three
    # roundings of 2^-24.
    largest = weight.abs().amax().double()
    bound = torch.maximum(weight.double().abs() * 2.0**-4, largest / 448 * 2.0**-10)
    assert bool((error <= bound * (1 + 2.0**-18)).all())


@pytest.mark.parametrize(
    ("rows", "columns"), [(1, 1), (127, 129), (128, 128), (129, 257), (300, 5), (5, 300)]
)
def test_each_block_of_128_is_quantized_as_if_alone(rows, columns):
    weight = matrix(rows, columns)
    whole = quantize_blocks(weight)
    assert whole.scales.shape == (-(-rows // 128), -(-columns // 128))
    restored = whole.dequantized(torch.float32)
    for i, j in torch.cartesian_prod(*map(torch.arange, whole.scales.shape)).view(-1, 2).tolist():
        block = slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128)
        alone = quantize_tensor(weight[block])
        assert whole.scales[i, j] == alone.scales
        assert torch.equal(bits(whole.values[block]), bits(alone.values))
        assert torch.equal(restored[block], alone.dequantized(torch.float32))


@pytest.mark.parametrize("quantize", QUANTIZERS)
def test_the_size_of_chunks_changes_nothing(monkeypatch, quantize):
    weight = matrix(400, 70)
    whole = quantize(weight)
    monkeypatch.setattr(weights, "CHUNK_VALUES", 130 * 70)
    chunked = quantize(weight)
    assert torch.equal(bits(chunked.values), bits(whole.values))
    assert torch.equal(chunked.scales, whole.scales)
    assert torch.equal(chunked.dequantized(torch.float32), whole.dequantized(torch.float32))


@pytest.mark.parametrize("quantize", QUANTIZERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_weights_are_quantized_as_their_float32_values(quantize, dtype):
    weight = matrix(130, 130).to(dtype)
    half, single = quantize(weight), quantize(weight.float())
    assert torch.equal(bits(half.values), bits(single.values))
    assert torch.equal(half.scales, single.scales)


@pytest.mark.parametrize("quantize", QUANTIZERS)
def test_zeros_stay_zeros_under_a_scale_of_epsilon(quantize):
    quantized = quantize(torch.zeros(130, 3))
    assert quantized.scales.unique().tolist() == [EPSILON]
    assert torch.equal(quantized.dequantized(torch.float32), torch.zeros(130, 3))


@pytest.mark.parametrize("quantize", QUANTIZERS)
def test_nan_and_infinity_are_refused_by_name(quantize):
    weight = matrix(3, 4)
    weight[1, 2] = torch.inf
    with pytest.raises(ValueError, match=r"o_proj\.weight must be finite, got inf at \[1, 2\]"):
        quantize(weight, name="o_proj.weight")


def test_values_are_multiplied_with_scales_before_they_are_rounded_to_a_type():
    quantized = FP8Tensor(to_e4m3(torch.tensor([[1.125, -448.0]])), torch.tensor([1.0 + 2**-9]))
    exact = torch.tensor([[1.125, -448.0]]) * (1 + 2**-9)
    assert torch.equal(quantized.dequantized(torch.bfloat16), exact.to(torch.bfloat16))
