"""The CPU kernels on every path that this machine has, torch's twins among them."""

import pytest
import torch
from cpu_kernels import EPSILON, FORMATS, KINDS, normal, packed, quantized
from torch import Tensor

from specfit_kernels import cpu, cpu_twins, fp8, int8, nvfp4
from specfit_kernels.cpu_build import CpuPath
from specfit_kernels.cpu_weights import Activations, CpuWeight, pack

pytest_plugins = ["cpu_fixtures"]
pytestmark = pytest.mark.usefixtures("poison", "path")


def exact(x: Tensor, weight: CpuWeight) -> Tensor:
    if weight.activations is Activations.int8:
        x = cpu_twins.quantized(x)
    return x.double() @ weight.values.double().T


def rounding(x: Tensor, weight: CpuWeight) -> Tensor:
    """The most by which a product may miss float64's.

    A sum of n products in float32 is off by n EPSILON of the sum of their sizes at most. What goes
    through most roundings here is a product in the first block: 8 of its chain, one for both
    chains, one for each block behind it, and 4 by scales; a path without fma rounds twice. torch's
    own order is no worse than n = columns, but by chance never near that.
    """
    columns = weight.columns
    sizes = x.double().abs() @ weight.values.double().abs().T
    return 2 * (13 + columns / 16) * EPSILON * sizes


@pytest.mark.parametrize(("name", "activations"), KINDS)
@pytest.mark.parametrize(
    ("num_rows", "channels", "columns"),
    [(1, 1, 16), (2, 17, 48), (3, 40, 80), (5, 33, 208), (9, 16, 576), (16, 31, 1040), (37, 5, 64)],
)
def test_a_product_misses_float64_by_rounding_only(
    generator, name, activations, num_rows, channels, columns
):
    weight = packed(name, normal(generator, channels, columns), activations)
    x = normal(generator, num_rows, columns) * torch.logspace(-3, 3, num_rows)[:, None]
    y = cpu.linear(x, weight)
    assert bool(((y - exact(x, weight)).abs() <= rounding(x, weight)).all())


@pytest.mark.parametrize("name", FORMATS)
def test_float32_activations_are_exact_to_a_millionth(generator, name):
    weight, x = packed(name, normal(generator, 64, 1536)), normal(generator, 4, 1536)
    expected = exact(x, weight)
    errors = (cpu.linear(x, weight) - expected).norm(dim=1) / expected.norm(dim=1)
    assert float(errors.max()) < 1e-6


@pytest.mark.parametrize("name", ["nvfp4", "int8"])
def test_int8_activations_lose_about_half_a_percent(generator, name):
    weight = packed(name, normal(generator, 64, 576), Activations.int8)
    x = normal(generator, 4, 576)
    expected = x.double() @ weight.values.double().T
    errors = (cpu.linear(x, weight) - expected).norm(dim=1) / expected.norm(dim=1)
    assert 2e-3 < float(errors.mean()) < 8e-3


@pytest.mark.parametrize(("name", "activations"), KINDS)
def test_a_rows_bits_are_the_same_alone_and_among_others(generator, name, activations):
    weight = packed(name, normal(generator, 72, 336), activations)
    x = normal(generator, 16, 336)
    alone = torch.cat([cpu.linear(row[None], weight) for row in x])
    for num_rows in range(1, 17):
        assert torch.equal(cpu.linear(x[:num_rows], weight), alone[:num_rows])
    order = torch.randperm(16, generator=generator)
    assert torch.equal(cpu.linear(x[order], weight), alone[order])
    assert torch.equal(cpu.linear(x.repeat(3, 1), weight), alone.repeat(3, 1))


@pytest.mark.parametrize(("name", "activations"), KINDS)
def test_threads_change_no_bit(path, generator, name, activations, two_threads):
    weight = packed(name, normal(generator, 200, 320), activations)
    x = normal(generator, 5, 320)
    with two_threads():
        threaded = cpu.linear(x, weight)
    if path is not CpuPath.torch:
        assert torch.equal(threaded, cpu.linear(x, weight))


def test_fused_matrices_keep_their_own_scales_and_get_their_bias(path, generator):
    parts = [
        normal(generator, rows, 64) * size for rows, size in ((24, 1.0), (7, 100.0), (9, 0.01))
    ]
    matrices = [quantized("nvfp4", part) for part in parts]
    bias, x = normal(generator, 40), normal(generator, 3, 64)
    fused = cpu.linear(x, pack(matrices, bias=bias))
    alone = torch.cat([cpu.linear(x, pack([matrix])) for matrix in matrices], dim=1)
    # torch's order of addition depends on how many channels there are.
    off = 1e-6 if path is CpuPath.torch else 0
    torch.testing.assert_close(fused, alone + bias, rtol=off, atol=100 * off)


def test_every_code_and_scale_is_what_the_format_says():
    # One code a row, one scale a block: each product with a unit vector is one value.
    scales = torch.arange(0, 127, dtype=torch.uint8)
    matrix = nvfp4.FP4Tensor(
        (17 * torch.arange(16, dtype=torch.uint8))[:, None].expand(16, 127 * 8),
        scales.view(torch.float8_e4m3fn).expand(16, 127),
        torch.tensor(1.0),
        True,
        127 * 16,
    )
    x = torch.zeros(127, 127 * 16)
    x[torch.arange(127), torch.arange(127) * 16 + 5] = 1
    y = cpu.linear(x, pack([matrix]))
    assert torch.equal(y, matrix.dequantize()[:, 5::16].T)


def test_every_fp8_value_is_what_the_format_says():
    codes = torch.tensor([code for code in range(256) if code & 127 != 127], dtype=torch.uint8)
    matrix = fp8.FP8Tensor(codes.view(torch.float8_e4m3fn)[:, None].expand(254, 16), torch.ones(1))
    x = torch.eye(16)[3:4]
    assert torch.equal(cpu.linear(x, pack([matrix]))[0], matrix.values[:, 0].float())


def test_activations_become_the_very_codes_of_their_definition(generator):
    # Halves, and quotients that rounding brings to halves, would show another order of operations.
    identity = int8.Int8Tensor(torch.eye(32, dtype=torch.int8), torch.ones(32, 1).half())
    weight = pack([identity], activations=Activations.int8)
    x = normal(generator, 4000, 32) * torch.exp(3 * normal(generator, 4000, 1))
    assert torch.equal(cpu.linear(x, weight), cpu_twins.quantized(x))


@pytest.mark.parametrize(("name", "activations"), KINDS)
def test_no_rows_give_no_rows(generator, name, activations):
    weight = packed(name, normal(generator, 40, 80), activations)
    assert cpu.linear(torch.zeros(0, 80), weight).shape == (0, 40)


@pytest.mark.parametrize("name", ["nvfp4", "int8"])
def test_what_is_not_finite_stays_so(generator, name):
    weight = packed(name, normal(generator, 16, 64), Activations.int8)
    x = normal(generator, 3, 64)
    x[0, 5], x[1, 40], x[2] = torch.nan, torch.inf, 1e-40
    y = cpu.linear(x, weight)
    assert not y[:2].isfinite().any()
    assert torch.equal(y[2], torch.zeros(16))
