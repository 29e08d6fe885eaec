"""NVFP4 by itself; test_kernels_nvfp4_peers holds it against the libraries of others."""

import math
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from specfit_kernels import e2m1, weights
from specfit_kernels.nvfp4 import (
    FP4Tensor,
    fake_quantize_activations,
    quantize,
    shared_global_scale,
)
from specfit_kernels.rules import ScaleRule

RULES = pytest.mark.parametrize("rule", ScaleRule)
CONVENTIONS = pytest.mark.parametrize("divides", [True, False], ids=["divides", "multiplies"])


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def matrices() -> dict[str, torch.Tensor]:
    """Weights of 40 rows and 320 columns that differ in how the values of a block lie."""
    x = normal(40, 320)
    uniform = torch.rand(40, 320, generator=torch.Generator().manual_seed(1))
    alone = torch.zeros(40, 320)  # one value a block, of every size that there is
    alone[:, ::16] = torch.logspace(-6, 0, 800).view(40, 20)
    # 1536 makes the global scale 1; the other blocks' scales are then the lowest that E4M3 has.
    lowest = torch.where(uniform < 0.1, (normal(40, 320, seed=3) * 20).round() * 2.0**-10, 0.0)
    lowest[0, 0] = 1536
    two_sizes = torch.where(
        uniform < 0.07, 1.0, 0.77 + 0.1 * normal(40, 20).repeat_interleave(16, 1)
    )
    return {
        "gaussian": x,
        "heavy_tailed": x * torch.exp(2 * normal(40, 320, seed=2)),
        "uniform": 2 * uniform - 1,
        "rows_of_all_sizes": x * torch.logspace(-7, 0, 40)[:, None],
        "one_outlier": torch.where(torch.arange(320) == 7, 3e4 * x[:, :1], x),
        "alone": alone,
        "lowest_scales": lowest,
        "two_sizes": two_sizes,
        "sparse": torch.where(uniform < 0.8, 0.0, x),
        "a_grid_of_ties": (uniform * 48).round() / 4,
    }


MATRICES = matrices()


def same(a: FP4Tensor, b: FP4Tensor) -> bool:
    return (
        torch.equal(a.codes, b.codes)
        and torch.equal(a.block_scales.float(), b.block_scales.float())
        and torch.equal(a.global_scale, b.global_scale)
        and (a.divides, a.columns) == (b.divides, b.columns)
    )


def block_errors(weight: torch.Tensor, restored: torch.Tensor) -> torch.Tensor:
    """Squared error of each block."""
    return (weight.double() - restored.double()).square().view(-1, 16).sum(1)


def no_worse(weight: torch.Tensor, errors: torch.Tensor, than: torch.Tensor) -> bool:
    """Block by block, up to what float32 quotients and products take from each value: 2^-24."""
    rounding = weight.double().view(-1, 16).norm(dim=1) * 2.0**-22
    return bool((errors.sqrt() <= than.sqrt() + rounding).all())


def relative_rmse(weight: torch.Tensor, restored: torch.Tensor) -> float:
    return float((weight - restored).norm() / weight.norm())


def test_a_block_by_hand():
    weight = torch.zeros(1, 32)
    # In steps of 448: 6, -1.5, .2 and .25; in steps of 2: -6, 3.5, 2.5, .75 and -.05.
    weight[0, :4] = torch.tensor([2688.0, -672.0, 90.0, 112.0])
    weight[0, 16:21] = torch.tensor([-12.0, 7.0, 5.0, 1.5, -0.1])
    quantized = quantize(weight, ScaleRule.amax)
    assert quantized.global_scale == 1.0
    assert quantized.block_scales.float().tolist() == [[448, 2]]
    codes = [0xB7, *[0] * 7, 0x6F, 0x24, 0x08, *[0] * 5]
    assert quantized.codes.tolist() == [codes]
    expected = [2688, -672, 0, 0, *[0] * 12, -12, 8, 4, 2, 0, *[0] * 11]
    assert quantized.dequantize().tolist() == [expected]


@pytest.mark.parametrize(
    ("rule", "most"),
    [(ScaleRule.amax, 0.0955), (ScaleRule.four_over_six, 0.0875), (ScaleRule.search, 0.082)],
)
@CONVENTIONS
def test_what_each_rule_leaves_of_gaussian_weights(rule, most, divides):
    weight = normal(512, 1024)
    error = relative_rmse(weight, quantize(weight, rule, divides=divides).dequantize())
    assert most - 0.002 < error <= most


@pytest.mark.parametrize(
    ("rule", "most"), [(ScaleRule.four_over_six, 0.089), (ScaleRule.search, 0.081)]
)
def test_the_largest_block_of_a_matrix_may_have_a_larger_scale(rule, most):
    # All blocks of uniform values are among the largest; without headroom: .100 and .089.
    weight = 2 * torch.rand(256, 256, generator=torch.Generator().manual_seed(0)) - 1
    assert relative_rmse(weight, quantize(weight, rule).dequantize()) < most


@pytest.mark.parametrize("weight", MATRICES.values(), ids=MATRICES)
@CONVENTIONS
def test_no_e4m3_scale_has_less_error_than_the_one_that_search_finds(weight, divides):
    found = quantize(weight, divides=divides)
    scale = found.global_scale
    least = torch.full((weight.numel() // 16,), torch.inf, dtype=torch.float64)
    for block_scale in torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float():
        step = block_scale / scale if divides else block_scale * scale
        least = torch.minimum(least, block_errors(weight, e2m1.nearest(weight / step) * step))
    assert no_worse(weight, block_errors(weight, found.dequantize()), least)


@pytest.mark.parametrize("global_scale", [1e-4, 1.0, 37.0, 1e5])
@CONVENTIONS
def test_search_is_best_under_a_global_scale_that_does_not_fit(global_scale, divides):
    weight, scale = MATRICES["heavy_tailed"], torch.tensor(global_scale)
    errors = [
        block_errors(weight, quantize(weight, r, divides=divides, global_scale=scale).dequantize())
        for r in (ScaleRule.search, ScaleRule.four_over_six, ScaleRule.amax)
    ]
    assert no_worse(weight, errors[0], errors[1])
    assert no_worse(weight, errors[1], errors[2])


def test_four_over_six_maps_the_largest_size_to_whichever_is_better():
    weight = torch.zeros(2, 16)
    weight[0, :2] = torch.tensor([6.0, 4.0])  # 6 and 4 steps of 1, or 4 and 2.67 steps of 1.5
    weight[1, :2] = torch.tensor([6.0, 4.5])  # 6 and 4.5 steps of 1, or 4 and 3 steps of 1.5
    scale = torch.tensor(1.0)
    quantized = quantize(weight, ScaleRule.four_over_six, global_scale=scale)
    assert quantized.block_scales.float().tolist() == [[1.0], [1.5]]
    assert torch.equal(quantized.dequantize(), weight)


@RULES
@CONVENTIONS
@pytest.mark.parametrize("exponent", [-90, -20, 1, 60])
def test_a_power_of_two_changes_the_global_scale_only(rule, divides, exponent):
    weight, factor = normal(8, 64), 2.0**exponent
    once, scaled = (quantize(w, rule, divides=divides) for w in (weight, weight * factor))
    assert scaled.global_scale == once.global_scale * (1 / factor if divides else factor)
    assert torch.equal(scaled.codes, once.codes)
    assert torch.equal(scaled.block_scales.float(), once.block_scales.float())


@RULES
@CONVENTIONS
def test_the_negative_matrix_has_the_negative_values(rule, divides):
    weight = MATRICES["heavy_tailed"]
    positive, negative = (quantize(w, rule, divides=divides) for w in (weight, -weight))
    assert torch.equal(negative.dequantize(), -positive.dequantize())


@RULES
@pytest.mark.parametrize(("divides", "scale"), [(True, 0.125), (False, 1.0)])
def test_a_block_of_zeros_has_the_scale_that_the_libraries_give_it(rule, divides, scale):
    weight = normal(3, 48)
    weight[1, 16:32] = 0
    weight[1, 20] = -0.0
    quantized = quantize(weight, rule, divides=divides)
    assert quantized.block_scales[1, 1].float() == scale
    assert quantized.codes[1, 8:16].tolist() == [0] * 8


@RULES
@CONVENTIONS
# 3e-39 is a denormal number in float32, and 2688 / 1e-36 is beyond its range.
@pytest.mark.parametrize("size", [0.0, 1e-45, 3e-39, 1e-36])
def test_a_matrix_of_almost_nothing_stays_finite(rule, divides, size):
    weight = size * torch.sign(normal(2, 32))
    quantized = quantize(weight, rule, divides=divides)
    assert 0 < float(quantized.global_scale) < math.inf
    assert bool(quantized.block_scales.float().isfinite().all())
    assert bool((quantized.dequantize().abs() <= 1.25 * size).all())


@RULES
@CONVENTIONS
@pytest.mark.parametrize("outlier", [1e4, -1e30, 3.4e38])
def test_an_outlier_is_kept_whatever_its_size(rule, divides, outlier):
    weight = normal(4, 64)
    weight[2, 5] = outlier
    restored = quantize(weight, rule, divides=divides).dequantize()
    assert float(restored[2, 5]) == pytest.approx(outlier, rel=2.0**-20)


@RULES
@CONVENTIONS
def test_an_outlier_that_block_scales_can_span_spoils_its_own_block_only(rule, divides):
    weight = normal(4, 64)
    weight[2, 5] = 300
    restored = quantize(weight, rule, divides=divides).dequantize()
    others = torch.ones(4, 64, dtype=torch.bool)
    others[2, :16] = False
    assert relative_rmse(weight[others], restored[others]) < 0.1
    assert bool((restored[~others].view(16)[:5] == 0).all())


@RULES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_weights_are_quantized_as_their_float32_values(rule, dtype):
    weight = normal(9, 48).to(dtype)
    assert same(quantize(weight, rule), quantize(weight.float(), rule))


@RULES
@CONVENTIONS
@pytest.mark.parametrize("columns", [1, 2, 15, 16, 17, 31, 33])
def test_a_ragged_width_is_that_of_zeros_after_it(rule, divides, columns):
    weight = normal(5, columns)
    padded = torch.nn.functional.pad(weight, (0, -columns % 16))
    ragged, even = (quantize(w, rule, divides=divides) for w in (weight, padded))
    assert torch.equal(ragged.codes, even.codes)
    assert torch.equal(ragged.block_scales.float(), even.block_scales.float())
    assert torch.equal(ragged.dequantize(), even.dequantize()[:, :columns])


@RULES
@pytest.mark.parametrize("columns", [64, 50])
def test_the_size_of_chunks_and_the_layout_in_memory_change_nothing(monkeypatch, rule, columns):
    weight = MATRICES["heavy_tailed"][:, :columns]
    whole = quantize(weight, rule)
    assert same(quantize(weight.T.contiguous().T, rule), whole)
    monkeypatch.setattr(weights, "CHUNK_VALUES", 3 * columns)
    assert same(quantize(weight, rule), whole)
    chunked = whole.dequantize()
    monkeypatch.undo()
    assert torch.equal(chunked, whole.dequantize())


class PeakBytes(TorchDispatchMode):
    """Of the tensors that live at one time beside a given one, as operations return them."""

    def __init__(self, given: torch.Tensor) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.seen = {given.untyped_storage().data_ptr()}

    def _free(self, address: int, size: int) -> None:
        self.seen.discard(address)
        self.now -= size

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if not isinstance(tensor, torch.Tensor):
                continue
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self.seen:
                self.seen.add(storage.data_ptr())
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._free, storage.data_ptr(), storage.nbytes())
        return result


@RULES
def test_memory_beyond_the_result_is_a_few_chunks_however_many_rows(monkeypatch, rule):
    monkeypatch.setattr(weights, "CHUNK_VALUES", 1 << 12)
    weight = normal(1024, 256)
    with PeakBytes(weight) as memory:
        quantized = quantize(weight, rule)
    result = quantized.codes.numel() + quantized.block_scales.numel()
    chunk = 4 * weights.CHUNK_VALUES
    assert result + chunk < memory.peak < result + 16 * chunk


@pytest.mark.parametrize("bad", [torch.nan, -torch.inf])
def test_nan_and_infinity_are_refused_by_name(bad):
    weight = normal(3, 16)
    weight[2, 9] = bad
    with pytest.raises(ValueError, match=rf"^up_proj must be finite, got {bad} at \[2, 9\]"):
        quantize(weight, name="up_proj")
    with pytest.raises(ValueError, match=rf"^weights\[1\] must be finite, got {bad} at \[2, 9\]"):
        shared_global_scale([normal(1, 16), weight])


@pytest.mark.parametrize("bad", [0.0, -1.0, torch.inf, torch.nan])
def test_a_global_scale_that_is_no_scale_is_refused(bad):
    with pytest.raises(ValueError, match=r"^global_scale must be positive and finite, got"):
        quantize(normal(1, 16), global_scale=torch.tensor(bad))


@RULES
@CONVENTIONS
def test_parts_with_a_shared_scale_are_the_parts_of_the_fused_matrix(rule, divides):
    parts = [normal(4, 32), 3 * normal(2, 32, seed=1), normal(1, 32, seed=2)]
    scale = shared_global_scale(parts, rule, divides=divides)
    fused = quantize(torch.cat(parts), rule, divides=divides)
    assert fused.global_scale == scale
    split = [quantize(part, rule, divides=divides, global_scale=scale) for part in parts]
    assert torch.equal(torch.cat([part.codes for part in split]), fused.codes)
    restored = torch.cat([part.dequantize() for part in split])
    assert torch.equal(restored, fused.dequantize())


def test_parts_with_a_shared_scale_do_not_share_its_memory():
    # Safetensors refuses to write tensors that do.
    scale = torch.tensor(100.0)
    parts = [quantize(normal(1, 16), global_scale=scale).global_scale for _ in range(2)]
    assert len({scale.data_ptr(), *(part.data_ptr() for part in parts)}) == 3


def test_a_parameter_is_quantized_outside_the_graph():
    parameter = torch.nn.Parameter(normal(2, 32))
    scale = shared_global_scale([parameter])
    quantized = quantize(parameter, global_scale=scale)
    assert not quantized.dequantize().requires_grad
    assert same(quantized, quantize(parameter.detach()))


def test_dequantized_values_are_rounded_to_a_type_once():
    quantized = quantize(normal(4, 32))
    half = quantized.dequantize(torch.bfloat16)
    assert torch.equal(half, quantized.dequantize().to(torch.bfloat16))


def test_activations_under_a_static_scale_are_quantized_like_weights_that_share_it():
    x, scale = MATRICES["heavy_tailed"], torch.tensor(2688 / 30.0)
    expected = quantize(x, ScaleRule.amax, global_scale=scale).dequantize()
    assert torch.equal(fake_quantize_activations(x, scale), expected)


@pytest.mark.parametrize("columns", [320, 45])
def test_each_token_has_a_global_scale_of_its_own(columns):
    x = MATRICES["rows_of_all_sizes"][:, :columns]
    quantized = fake_quantize_activations(x)
    for token, got in zip(x, quantized, strict=True):
        alone = quantize(token[None], ScaleRule.amax, divides=False)
        assert torch.equal(got, alone.dequantize()[0])


@pytest.mark.parametrize("scale", [None, torch.tensor(100.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations_keep_their_shape_and_type(monkeypatch, scale, dtype):
    x = normal(3, 5, 40).to(dtype)
    whole = fake_quantize_activations(x, scale)
    assert whole.dtype == dtype
    expected = fake_quantize_activations(x.float().view(15, 40), scale).to(dtype)
    assert torch.equal(whole, expected.view(3, 5, 40))
    assert torch.equal(fake_quantize_activations(x[1, 2], scale), whole[1, 2])
    monkeypatch.setattr(weights, "CHUNK_VALUES", 80)
    assert torch.equal(fake_quantize_activations(x, scale), whole)
    assert fake_quantize_activations(x[:0], scale).shape == (0, 5, 40)


def test_a_token_of_zeros_stays_one_and_nan_stays_in_its_token():
    x = normal(3, 32)
    x[0], x[1, 3] = 0, torch.nan
    quantized = fake_quantize_activations(x)
    assert quantized[0].tolist() == [0] * 32
    assert bool(quantized[1, 3].isnan())
    assert torch.equal(quantized[2], fake_quantize_activations(x[2]))
