"""The residual stream: partial sums are added to it, and its RMSNorm is quantized for a product.

stream += Σ_splits partials; y = stream / sqrt(mean(stream^2) + eps) * weight; out = quantized y

A program has a token and all its columns at once, in registers: nobody else reads a stream that
changes, and nothing is read twice. The mean is of as many columns whatever the number of tokens, so
that a token's bits are the same alone and among others.

Cost: a launch, in which one of the device's processors does all of a token: it reads and writes
4 * (splits + 3) bytes a column, at some 64 bytes a clock, and takes 46 instructions a column and 28
for each term, at 128 a clock. 4096 columns, 8 splits and two terms are 1.5 µs and 1.8 µs, in which
the next product can fetch its weights.

`pdl`: see `skinny_w4a4`. The norm's weight is read before the wait.
"""

from typing import no_type_check

import triton
import triton.language as tl
from jaxtyping import BFloat16, Float, Float32
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specfit_kernels import support
from specfit_kernels.linear_tokens import store_halves, store_terms
from specfit_kernels.linear_twins import Halves, Terms
from specfit_kernels.triton_bf16 import store_rounded
from specfit_kernels.triton_numbers import half_scale, size_bits, sum_of_splits, term_scale

MOST_COLUMNS = 8192  # a thread's share of them, and of what is computed, stays in its registers


@no_type_check
@triton.jit
def token_scale(amax_bits, TERMS: tl.constexpr):
    """A token's scale for so many terms; for float16 when there are none."""
    return term_scale(amax_bits) if TERMS > 0 else half_scale(amax_bits)


@no_type_check
@triton.jit
def store_quantized(
    y,
    scale,
    token,
    first_column,
    values,
    scales,
    num_blocks,
    TERMS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Quantizes y[COLUMNS], a token's columns from `first_column` on, a multiple of 16.

    `values` and `scales` are the codes and scales of `Terms`, or without terms the values of
    `Halves` and None. Columns beyond the token's `num_blocks` of 16 are left out.
    """
    if TERMS > 0:
        first_block = token * TERMS * num_blocks
        blocks = y.reshape(COLUMNS // 16, 16)
        values += first_block * 8
        scales += first_block
        block = first_column // 16
        store_terms(blocks, scale, values, scales, block, num_blocks, TERMS, COLUMNS // 16)
    else:
        columns = first_column + tl.arange(0, COLUMNS)
        padded = num_blocks * 16
        store_halves(y, scale, values + token * padded + columns, columns < padded)


def of_quantized(out: Terms | Halves) -> tuple[Tensor, Tensor | None, int, int]:
    """The values, the scales, how many terms, and how many blocks of 16 a token has."""
    if isinstance(out, Terms):
        return out.codes, out.scales, out.codes.shape[1], out.scales.shape[2]
    return out.values, None, 0, out.values.shape[1] // 16


@no_type_check
@triton.jit(do_not_specialize=["num_tokens"])
def _rmsnorm_quant(
    stream,
    weight,
    eps,
    partials,
    normed,
    captured,
    values,
    scales,
    token_scales,
    num_tokens,
    num_columns,
    num_blocks,
    SPLITS: tl.constexpr,
    TERMS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, COLUMNS)
    exists = columns < num_columns
    if PDL:
        gdc_launch_dependents()
    w = tl.load(weight + columns, mask=exists, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()

    line = token * num_columns
    x = tl.load(stream + line + columns, mask=exists, other=0.0)
    if SPLITS > 0:
        x += sum_of_splits(partials + line, columns, exists, num_tokens * num_columns, SPLITS)
        tl.store(stream + line + columns, x, mask=exists)
    if captured is not None:
        store_rounded(captured + line + columns, x, exists)

    mean = tl.div_rn(tl.sum(x * x, 0), num_columns * 1.0)
    y = x * tl.div_rn(1.0, tl.sqrt_rn(mean + eps)) * w
    if normed is not None:
        tl.store(normed + line + columns, y, mask=exists)
    scale = token_scale(tl.max(size_bits(y), 0), TERMS)
    tl.store(token_scales + token, scale)
    store_quantized(y, scale, token, 0, values, scales, num_blocks, TERMS, COLUMNS)


def rmsnorm_quant(
    stream: Float32[Tensor, "tokens hidden"],
    weight: Float[Tensor, " hidden"],
    eps: float,
    out: Terms | Halves,
    *,
    partials: Float32[Tensor, "splits tokens hidden"] | None = None,
    normed: Float32[Tensor, "tokens hidden"] | None = None,
    captured: Float32[Tensor, "tokens hidden"] | BFloat16[Tensor, "tokens hidden"] | None = None,
    pdl: bool = False,
) -> None:
    """Adds the partial sums, if there are any, to the stream, and quantizes its norm.

    `normed` gets the values that are quantized, for who needs them in float32, and `captured` the
    stream behind the addition.

    Raises:
        ValueError: The device cannot run it, or tokens have more than MOST_COLUMNS.
    """
    support.require(support.Kernel.norm_quant, stream.device)
    num_tokens, num_columns = stream.shape
    if num_columns > MOST_COLUMNS:
        raise ValueError(f"hidden must be at most {MOST_COLUMNS}, got {num_columns}")
    given = [one for one in (stream, partials, normed, captured) if one is not None]
    assert all(one.is_contiguous() for one in given)
    values, scales, num_terms, num_blocks = of_quantized(out)
    width = triton.next_power_of_2(num_blocks * 16)
    _rmsnorm_quant[(num_tokens,)](
        stream,
        weight,
        eps,
        partials,
        normed,
        captured,
        values,
        scales,
        out.token_scales,
        num_tokens,
        num_columns,
        num_blocks,
        SPLITS=0 if partials is None else len(partials),
        TERMS=num_terms,
        COLUMNS=width,
        PDL=pdl,
        num_warps=min(max(width // 512, 4), 16),
        launch_pdl=pdl,
        enable_fp_fusion=False,
    )
