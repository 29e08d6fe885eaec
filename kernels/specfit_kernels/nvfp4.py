"""NVFP4: E2M1 codes, an E4M3 scale for each 16 of them in a row, one float32 scale for the matrix.

value = code * (block scale / global scale)   compressed-tensors: the stored global scale divides
value = code * (block scale * global scale)   ModelOpt: it multiplies

4.5 bits a value. The global scale brings the block scales into E4M3's range, which ends at 448. It
is computed with as it is stored: dividing by 1/g is not multiplying by g, and where a value lies in
the middle between two codes it makes another code.

Whichever rule chose the block scales, the format and an engine's work are the same. Relative RMSE
on Gaussian values: amax .095, four_over_six .087, search .081.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Float8e4m3fn, Float32, UInt8
from torch import Tensor

from specfit_kernels import e2m1, fp8
from specfit_kernels.rules import ScaleRule
from specfit_kernels.weights import finite_amax, row_chunks

BLOCK = 16
_LARGEST_CODE = 126  # of E4M3: 448


@dataclass(frozen=True)
class FP4Tensor:
    """A matrix in NVFP4. Rows whose width is no multiple of 16 end with zeros."""

    codes: UInt8[Tensor, "rows bytes"]  # two a byte, the even column in the low nibble
    block_scales: Float8e4m3fn[Tensor, "rows blocks"]
    global_scale: Float32[Tensor, ""]
    divides: bool  # whether the global scale divides, or multiplies
    columns: int

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Float[Tensor, "rows columns"]:
        """The values, computed in float32."""
        shape = (len(self.codes), self.columns)
        out = torch.empty(shape, dtype=dtype, device=self.codes.device)
        for rows in row_chunks(*shape):
            steps = _steps(self.block_scales[rows].float(), self.global_scale, self.divides)
            values = e2m1.decode(e2m1.unpack(self.codes[rows])).view(*steps.shape, BLOCK)
            out[rows] = (values * steps[..., None]).flatten(1)[:, : self.columns]
        return out


def shared_global_scale(
    weights: Sequence[Float[Tensor, "_ _"]],
    rule: ScaleRule = ScaleRule.search,
    *,
    divides: bool = True,
) -> Float32[Tensor, ""]:
    """For matrices that an engine fuses, which must have one: q, k and v, or gate and up.

    Raises:
        ValueError: A weight holds a NaN or an infinity.
    """
    amaxes = [finite_amax(weight, f"weights[{i}]") for i, weight in enumerate(weights)]
    return _global_scale(torch.stack(amaxes).amax(), rule, divides)


@torch.no_grad()
def quantize(
    weight: Float[Tensor, "rows columns"],
    rule: ScaleRule = ScaleRule.search,
    *,
    divides: bool = True,
    global_scale: Float32[Tensor, ""] | None = None,
    name: str = "weight",
) -> FP4Tensor:
    """Each value becomes the nearest code under its block's scale.

    With `amax` the bytes are those of compressed-tensors (`divides`) or ModelOpt, of the weight in
    float32. `global_scale` is one that other matrices share.

    Raises:
        ValueError: The weight holds a NaN or an infinity, or `global_scale` is not positive.
    """
    amax = finite_amax(weight, name)
    if global_scale is None:
        global_scale = _global_scale(amax, rule, divides)
    elif not 0 < float(global_scale) < torch.inf:
        raise ValueError(f"global_scale must be positive and finite, got {float(global_scale)}")
    (num_rows, columns), device = weight.shape, weight.device
    global_scale = global_scale.to(device, copy=True)
    num_blocks = -(-columns // BLOCK)
    codes = torch.empty(num_rows, num_blocks * BLOCK // 2, dtype=torch.uint8, device=device)
    block_scales = torch.empty(num_rows, num_blocks, dtype=torch.float8_e4m3fn, device=device)
    for rows in row_chunks(num_rows, columns):
        blocks = _blocks(weight[rows])
        scales = _chosen_scales(blocks, rule, global_scale, divides)
        chosen = e2m1.encode(blocks / _steps(scales, global_scale, divides))
        codes[rows] = e2m1.pack(chosen.T).reshape(-1, codes.shape[1])
        block_scales[rows] = fp8.to_e4m3(scales).view(-1, num_blocks)
    return FP4Tensor(codes, block_scales, global_scale, divides, columns)


@torch.no_grad()
def fake_quantize_activations(
    x: Float[Tensor, "*n columns"], global_scale: Float32[Tensor, ""] | None = None
) -> Float[Tensor, "*n columns"]:
    """What is left of activations that an engine multiplies in NVFP4; block scales follow `amax`.

    `global_scale` is a static one, which divides: compressed-tensors' `input_global_scale`. Without
    it each token has its own, amax / 2688, which multiplies. NaN stays. Engines multiply with an
    approximate reciprocal where this divides, so that they may take the other code of a near tie.
    """
    tokens = x.reshape(-1, x.shape[-1])
    out = torch.empty_like(tokens)
    for rows in row_chunks(*tokens.shape):
        some = tokens[rows]
        blocks = _blocks(some)
        amax = blocks.abs().amax(0)
        if global_scale is not None:
            scale, divides = global_scale.to(x.device), True
        else:
            per_token = amax.view(len(some), -1)
            scale, divides = _global_scale(per_token.amax(1), ScaleRule.amax, False), False
            scale = scale.repeat_interleave(per_token.shape[1])
        steps = _steps(_scales(amax, e2m1.LARGEST, scale, divides), scale, divides)
        values = e2m1.nearest(blocks / steps) * steps
        out[rows] = values.T.reshape(len(some), -1)[:, : x.shape[-1]].to(x.dtype)
    return out.view(x.shape)


def _blocks(rows: Float[Tensor, "rows columns"]) -> Float32[Tensor, "16 blocks"]:
    """The blocks, in order, as columns: what is done for each block is done along the last axis."""
    values = rows.float()
    if values.shape[1] % BLOCK:
        values = torch.nn.functional.pad(values, (0, -values.shape[1] % BLOCK))
    return values.reshape(-1, BLOCK).T.contiguous()


def _global_scale(
    amax: Float32[Tensor, "*n"], rule: ScaleRule, divides: bool
) -> Float32[Tensor, "*n"]:
    """1 where amax is zero, or so small that float32 cannot hold the quotient."""
    # Up to 448 for the largest block where it may only become 6. The other rules may want a larger
    # scale for it; 256 leaves them that (and 4 costs 384). Measured on uniform values, where all
    # blocks are large: .0786 against .0885 by search, .0873 against .1001 by four_over_six.
    range_end = e2m1.LARGEST * (fp8.LARGEST if rule is ScaleRule.amax else 256.0)
    if divides:
        scale = range_end / amax
        return torch.where(scale.isfinite(), scale, 1.0)
    scale = amax / range_end
    # The least block scale is 2^-9, and times what is below 2^-140 it is 0.
    return torch.where(scale >= 2.0**-140, scale, 1.0)


def _steps(
    scales: Float32[Tensor, "*blocks"], global_scale: Float32[Tensor, "*n"], divides: bool
) -> Float32[Tensor, "*blocks"]:
    """What codes are multiplied with."""
    return scales / global_scale if divides else scales * global_scale


def _scales(
    amax: Float32[Tensor, " blocks"],
    top: float,
    global_scale: Float32[Tensor, "*n"],
    divides: bool,
) -> Float32[Tensor, " blocks"]:
    """The E4M3 scales under which a block's largest size becomes about `top`."""
    if divides:
        # A tensor, since by a Python number torch divides on a GPU as product with its reciprocal.
        scales = fp8.to_e4m3(global_scale * (amax / amax.new_tensor(top))).float()
        return torch.where(scales == 0, 0.125, scales)
    scales = amax / (top * global_scale)
    # A block of zeros has 1, and what would be rounded to zero the least there is.
    return fp8.to_e4m3(torch.where(scales == 0, 1.0, scales).clamp(min=2.0**-9)).float()


def _chosen_scales(
    blocks: Float32[Tensor, "16 blocks"],
    rule: ScaleRule,
    global_scale: Float32[Tensor, ""],
    divides: bool,
) -> Float32[Tensor, " blocks"]:
    sizes = blocks.abs()
    amax = sizes.amax(0)
    six = _scales(amax, e2m1.LARGEST, global_scale, divides)
    match rule:
        case ScaleRule.amax:
            return six
        case ScaleRule.four_over_six:
            candidates = iter([six, _scales(amax, 4.0, global_scale, divides)])
        case ScaleRule.search:
            candidates = _window(amax, global_scale, divides)
    best, least = six, torch.full_like(six, torch.inf)
    for scales in candidates:
        steps = _steps(scales, global_scale, divides)
        scaled = sizes / steps
        errors = e2m1.nearest_sizes(scaled).sub_(scaled).square_()
        # sum() adds in an order that depends on how many blocks there are, and equal errors are
        # not rare: a chunk's size would show in the choice.
        while len(errors) > 1:
            errors = errors[0::2] + errors[1::2]
        errors = errors[0] * scales.square()
        best = torch.where(errors < least, scales, best)
        least = torch.minimum(errors, least)
    return torch.where(amax == 0, six, best)


def _window(
    amax: Float32[Tensor, " blocks"], global_scale: Float32[Tensor, ""], divides: bool
) -> Iterator[Float32[Tensor, " blocks"]]:
    """E4M3 scales, ascending, among which is one of least squared error for each block.

    Let s be a scale and m the block's largest size in its steps. The values of s and of 2s differ
    in .5 and 1.5, which only s has, and in 8 and 12, which only 2s has.
    m >= 8: 2s is as good. It loses at most .25 steps² at each of 15 values, 3.75 in all, and gains
    at the largest (m - 6)² - (8 - m)² >= 4.
    m <= 3.5: s/2 is as good, since up to 7 of its steps it has all values of s.
    From m = 8 (included) to m = 3.5 there are at most 11 scales. The second argument needs s/2 to
    be an E4M3 number, which it is not for odd codes below 16; so low windows reach to code 15.
    """
    least = amax / 8 * global_scale if divides else amax / 8 / global_scale
    nearest = fp8.to_e4m3(least)
    first = nearest.view(torch.uint8) + (nearest.float() < least).to(torch.uint8)
    first = first.clamp(1, _LARGEST_CODE - 10)
    low = bool(((first < 5) & (amax > 0)).any())
    for offset in range(15 if low else 11):
        codes = (first + offset).clamp(max=_LARGEST_CODE)
        yield codes.view(torch.float8_e4m3fn).float()
