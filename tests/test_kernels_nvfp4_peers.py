"""Our bytes against those of the libraries that write such checkpoints, by their own functions.

compressed-tensors computes statistics in a weight's own type; here it is given float32 ones, so
that bf16 weights are compared under the same scales.
"""

import pytest
import torch

from specfit_kernels import e2m1, fp8
from specfit_kernels.nvfp4 import fake_quantize_activations, quantize
from specfit_kernels.rules import ScaleRule


@pytest.fixture(scope="module")
def peer():
    """compressed-tensors' functions by their names."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.naive_quantized.base import FloatQuantizationCompressor
    from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
    from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8
    from compressed_tensors.quantization import QuantizationScheme, fake_quantize
    from compressed_tensors.quantization.quant_scheme import FP8, FP8_BLOCK, NVFP4
    from compressed_tensors.quantization.utils import (
        calculate_qparams,
        compute_dynamic_scales_and_zp,
        generate_gparam,
    )
    from compressed_tensors.quantization.utils.fp4_utils import cast_to_fp4

    class Peer:
        nvfp4 = QuantizationScheme(**NVFP4, targets=["Linear"])
        per_tensor = QuantizationScheme(**FP8, targets=["Linear"])
        per_block = QuantizationScheme(**FP8_BLOCK, targets=["Linear"])

        @staticmethod
        def cast(x: torch.Tensor) -> torch.Tensor:
            return pack_fp4_to_uint8(cast_to_fp4(x.clamp(-6, 6)))

        @staticmethod
        def global_scale(weight: torch.Tensor) -> torch.Tensor:
            return generate_gparam(*torch.aminmax(weight.float()))

        def compressed(self, weight: torch.Tensor, global_scale: torch.Tensor) -> dict:
            blocks = weight.float().unflatten(-1, (-1, 16))
            scales, _ = calculate_qparams(
                blocks.amin(-1), blocks.amax(-1), self.nvfp4.weights, global_scale=global_scale
            )
            state = {
                "weight": weight,
                "weight_scale": scales,
                "weight_global_scale": global_scale,
            }
            return NVFP4PackedCompressor.compress(state, self.nvfp4)

        def decompressed(self, state: dict) -> torch.Tensor:
            return NVFP4PackedCompressor.decompress(state, self.nvfp4)["weight"]

        def activations(self, x: torch.Tensor, global_scale: torch.Tensor) -> torch.Tensor:
            args = self.nvfp4.input_activations
            scales, zeros = compute_dynamic_scales_and_zp(x, args, None, global_scale)
            return fake_quantize(x, scales, zeros, args, global_scale)

        @staticmethod
        def fp8(weight: torch.Tensor, scheme: QuantizationScheme, lows, highs) -> dict:
            scales, _ = calculate_qparams(lows, highs, scheme.weights)
            state = {"weight": weight, "weight_scale": scales}
            return FloatQuantizationCompressor.compress(state, scheme)

        @staticmethod
        def fp8_restored(state: dict, scheme: QuantizationScheme) -> torch.Tensor:
            return FloatQuantizationCompressor.decompress(state, scheme)["weight"]

    return Peer()


@pytest.fixture(scope="module")
def modelopt():
    """ModelOpt's NVFP4 tensor."""
    module = "modelopt.torch.quantization.qtensor.nvfp4_tensor"
    pytest.importorskip("modelopt")
    return pytest.importorskip(module).NVFP4QTensor


def matrices() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(48, 320, generator=generator)
    sizes = torch.exp(2 * torch.randn(48, 320, generator=generator))
    # With 6 in every block all scales are one, and each value is a tie, a code or -0.0.
    ties = [6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 0.0]
    grid = torch.tensor(ties + [-tie for tie in ties]).repeat(4 * 16).view(-1, 16)
    grid[:, 0] = 6.0
    # Ties under scales that are no powers of two: a global scale inverted twice breaks them.
    steps = torch.arange(8.0, 16.0).repeat_interleave(72)[:, None] / 16
    fp8_sizes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    fp8_ties = torch.nn.functional.pad((fp8_sizes[1:] + fp8_sizes[:-1]) / 2, (1, 1), value=448.0)
    zeros = x.clone()
    zeros[:3], zeros[5, 32:64], zeros[6, 48:63] = 0, 0, -0.0
    denormal = x.clone()
    denormal[1], denormal[2, :40], denormal[3] = 1e-40 * x[1], 1e-45, 1e-20 * x[3]
    outlier = x.clone()
    outlier[7, 7] = -3e5
    return {
        "gaussian": x,
        "heavy_tailed": x * sizes,
        "ties": grid.view(-1, 288),
        "scaled_ties": (grid.repeat(8, 1)[:576] * steps).view(-1, 288) * 0.0123,
        "fp8_ties": 0.7 * torch.stack([fp8_ties, -fp8_ties]),
        "zeros": zeros,
        "denormal": denormal,
        "outlier": outlier,
        "tiny": 1e-30 * x,
        "huge": 1e34 * x,
    }


MATRICES = matrices()
WEIGHTS = pytest.mark.parametrize("weight", MATRICES.values(), ids=MATRICES)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.float8_e4m3fn).view(torch.uint8)


@WEIGHTS
@DTYPES
def test_amax_that_divides_is_compressed_tensors_byte_for_byte(peer, weight, dtype):
    weight = weight.to(dtype)
    ours = quantize(weight, ScaleRule.amax)
    theirs = peer.compressed(weight, peer.global_scale(weight))
    assert torch.equal(ours.global_scale[None], theirs["weight_global_scale"])
    assert torch.equal(bits(ours.block_scales), bits(theirs["weight_scale"]))
    assert torch.equal(ours.codes, theirs["weight_packed"])


@WEIGHTS
@DTYPES
def test_amax_that_multiplies_is_modelopt_byte_for_byte(modelopt, weight, dtype):
    weight = weight.to(dtype)
    ours = quantize(weight, ScaleRule.amax, divides=False)
    theirs, scales, global_scale = modelopt.quantize(weight.clone(), 16)
    assert torch.equal(ours.global_scale, global_scale)
    assert torch.equal(bits(ours.block_scales), bits(scales))
    assert torch.equal(ours.codes, theirs._quantized_data)
    restored = theirs.dequantize(
        torch.float32, scale=scales, double_scale=global_scale, block_sizes={-1: 16}
    )
    assert torch.equal(ours.dequantize(), restored)


@pytest.mark.parametrize("columns", [1, 17, 40])
def test_a_ragged_width_is_padded_as_modelopt_pads_it(modelopt, columns):
    weight = MATRICES["gaussian"][:, :columns].contiguous()
    ours = quantize(weight, ScaleRule.amax, divides=False)
    theirs, scales, _ = modelopt.quantize(weight.clone(), 16)
    assert torch.equal(ours.codes, theirs._quantized_data)
    assert torch.equal(bits(ours.block_scales), bits(scales))


@WEIGHTS
def test_a_shared_global_scale_gives_the_bytes_of_both(peer, modelopt, weight):
    amax = 3 * weight.abs().max()
    divisor, multiplier = (2688 / amax).float(), (amax / 2688).float()
    ours = quantize(weight, ScaleRule.amax, global_scale=divisor)
    theirs = peer.compressed(weight, divisor[None])
    assert torch.equal(ours.codes, theirs["weight_packed"])
    assert torch.equal(bits(ours.block_scales), bits(theirs["weight_scale"]))
    ours = quantize(weight, ScaleRule.amax, divides=False, global_scale=multiplier)
    theirs, scales, _ = modelopt.quantize(weight.clone(), 16, weights_scaling_factor_2=multiplier)
    assert torch.equal(ours.codes, theirs._quantized_data)
    assert torch.equal(bits(ours.block_scales), bits(scales))


@pytest.mark.parametrize("weight", [torch.zeros(2, 32), torch.full((2, 32), 1e-36)])
def test_nothing_and_almost_nothing_are_compressed_tensors_too(peer, weight):
    ours = quantize(weight, ScaleRule.amax)
    theirs = peer.compressed(weight, peer.global_scale(weight))
    assert torch.equal(ours.global_scale[None], theirs["weight_global_scale"])
    assert torch.equal(bits(ours.block_scales), bits(theirs["weight_scale"]))
    assert torch.equal(ours.codes, theirs["weight_packed"])


@pytest.mark.parametrize("rule", ScaleRule)
def test_compressed_tensors_reads_what_every_rule_writes(peer, rule):
    weight = MATRICES["heavy_tailed"]
    ours = quantize(weight, rule)
    state = {
        "weight_packed": ours.codes,
        "weight_scale": ours.block_scales,
        "weight_global_scale": ours.global_scale[None],
    }
    # It restores in bf16.
    assert torch.equal(peer.decompressed(state), ours.dequantize(torch.bfloat16))


@WEIGHTS
def test_activations_are_compressed_tensors_under_its_global_scale(peer, weight):
    scale = peer.global_scale(weight)
    ours = fake_quantize_activations(weight, scale[0])
    assert torch.equal(ours, peer.activations(weight, scale))


def test_every_bf16_value_has_the_code_that_both_give_it(peer, modelopt):
    values = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(torch.bfloat16)
    values = values[values.isfinite()].float()
    codes = e2m1.encode(values)
    assert torch.equal(modelopt._cast_fp4(values.clone()), codes)
    assert torch.equal(peer.cast(values[None]), e2m1.pack(codes[None]))


@WEIGHTS
def test_fp8_with_one_scale_is_compressed_tensors_byte_for_byte(peer, weight):
    ours = fp8.quantize_tensor(weight)
    theirs = peer.fp8(weight, peer.per_tensor, *torch.aminmax(weight))
    assert torch.equal(ours.scales, theirs["weight_scale"])
    assert torch.equal(bits(ours.values), bits(theirs["weight"]))
    restored = peer.fp8_restored(theirs, peer.per_tensor)
    assert torch.equal(ours.dequantized(torch.float32), restored)


@WEIGHTS
@pytest.mark.parametrize(("rows", "columns"), [(1, 3), (48, 256), (300, 257)])
def test_fp8_blocks_are_compressed_tensors_byte_for_byte(peer, weight, rows, columns):
    weight = weight.repeat(150, 3)[:rows, :columns]
    ours = fp8.quantize_blocks(weight)
    blocks = torch.nn.functional.pad(weight, (0, -columns % 128, 0, -rows % 128))
    blocks = blocks.view(-(-rows // 128), 128, -(-columns // 128), 128)
    theirs = peer.fp8(weight, peer.per_block, blocks.amin((1, 3)), blocks.amax((1, 3)))
    assert torch.equal(ours.scales, theirs["weight_scale"])
    assert torch.equal(bits(ours.values), bits(theirs["weight"]))
    restored = peer.fp8_restored(theirs, peer.per_block)
    assert torch.equal(ours.dequantized(torch.float32), restored)
