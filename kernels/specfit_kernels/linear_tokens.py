"""What stands before and behind a linear kernel: tokens quantized, and partial sums added.

Each costs a launch and a few kilobytes of memory traffic. A kernel that makes the tokens, or reads
the sums, can do it on the way with `store_terms`, `store_halves` and `sum_of_splits`; these are for
where there is none. A program of the first two has one token and 2048 of its columns; it reads the
whole token for the largest size.
"""

from typing import no_type_check

import triton
import triton.language as tl
from jaxtyping import Float, Float32
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specfit_kernels import support
from specfit_kernels.linear_twins import Halves, Terms
from specfit_kernels.triton_numbers import (
    encode_term,
    half_scale,
    inverse_power,
    size_bits,
    sum_of_splits,
    term_scale,
)

_CHUNK = 2048  # columns
_SUMS = 512


@no_type_check
@triton.jit
def _amax_bits(x, num_columns, CHUNK: tl.constexpr):
    largest = tl.zeros((CHUNK,), tl.int32)
    for start in range(0, num_columns, CHUNK):
        columns = start + tl.arange(0, CHUNK)
        values = tl.load(x + columns, mask=columns < num_columns, other=0.0)
        largest = tl.maximum(largest, size_bits(values.to(tl.float32)))
    return tl.max(largest, 0)


@no_type_check
@triton.jit
def store_terms(
    x, scale, codes, scales, block, num_blocks, TERMS: tl.constexpr, BLOCKS: tl.constexpr
):
    """Quantizes x[BLOCKS, 16], a token's blocks from `block` on, and stores the terms.

    `codes` and `scales` point to the token's first term. It has `num_blocks`; those of x beyond
    them are left out.
    """
    blocks = block + tl.arange(0, BLOCKS)
    exists = blocks < num_blocks
    rest = x * inverse_power(scale)
    for term in tl.static_range(TERMS):
        packed, scale_codes, rest = encode_term(rest, BLOCKS)
        places = term * num_blocks + blocks
        to = codes + places[:, None] * 8 + tl.arange(0, 8)[None, :]
        tl.store(to, packed, mask=exists[:, None])
        tl.store(scales + places, scale_codes.to(tl.float8e4nv, bitcast=True), mask=exists)


@no_type_check
@triton.jit
def _quantize_tokens(
    x,
    codes,
    scales,
    token_scales,
    num_columns,
    num_blocks,
    TERMS: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    scale = term_scale(_amax_bits(x + token * num_columns, num_columns, CHUNK))
    chunk = tl.program_id(1)
    if chunk == 0:
        tl.store(token_scales + token, scale)
    columns = chunk * CHUNK + tl.arange(0, CHUNK)
    values = tl.load(x + token * num_columns + columns, mask=columns < num_columns, other=0.0)
    blocks = values.to(tl.float32).reshape(CHUNK // 16, 16)
    codes += token * TERMS * num_blocks * 8
    scales += token * TERMS * num_blocks
    first = chunk * (CHUNK // 16)
    store_terms(blocks, scale, codes, scales, first, num_blocks, TERMS, CHUNK // 16)


def quantize_tokens(x: Float[Tensor, "tokens columns"], out: Terms, *, pdl: bool = False) -> None:
    """Writes the terms of tokens; `linear_twins` says what they are.

    Raises:
        ValueError: The device cannot run it.
    """
    support.require(support.Kernel.linear_tokens, x.device)
    assert x.is_contiguous()
    num_blocks = out.scales.shape[2]
    _quantize_tokens[len(x), triton.cdiv(num_blocks * 16, _CHUNK)](
        x,
        out.codes,
        out.scales,
        out.token_scales,
        x.shape[1],
        num_blocks,
        TERMS=out.codes.shape[1],
        CHUNK=_CHUNK,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
        enable_fp_fusion=False,
    )


@no_type_check
@triton.jit
def store_halves(x, scale, to, mask):
    """Stores float16 of x in units of the token's scale."""
    tl.store(to, (x * inverse_power(scale)).to(tl.float16), mask=mask)


@no_type_check
@triton.jit
def _halve_tokens(
    x, halves, token_scales, num_columns, padded, CHUNK: tl.constexpr, PDL: tl.constexpr
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    scale = half_scale(_amax_bits(x + token * num_columns, num_columns, CHUNK))
    chunk = tl.program_id(1)
    if chunk == 0:
        tl.store(token_scales + token, scale)
    columns = chunk * CHUNK + tl.arange(0, CHUNK)
    values = tl.load(x + token * num_columns + columns, mask=columns < num_columns, other=0.0)
    to = halves + token * padded + columns
    store_halves(values.to(tl.float32), scale, to, columns < padded)


def halve_tokens(x: Float[Tensor, "tokens columns"], out: Halves, *, pdl: bool = False) -> None:
    """Writes tokens in float16; `linear_twins` says under which scale.

    Raises:
        ValueError: The device cannot run it.
    """
    support.require(support.Kernel.linear_tokens, x.device)
    assert x.is_contiguous()
    padded = out.values.shape[1]
    _halve_tokens[len(x), triton.cdiv(padded, _CHUNK)](
        x,
        out.values,
        out.token_scales,
        x.shape[1],
        padded,
        CHUNK=_CHUNK,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
        enable_fp_fusion=False,
    )


@no_type_check
@triton.jit
def _sum_splits(
    partials, out, num_values, SPLITS: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    offsets = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    mask = offsets < num_values
    total = sum_of_splits(partials, offsets, mask, num_values, SPLITS)
    tl.store(out + offsets, total.to(out.dtype.element_ty), mask=mask)


def sum_splits(
    partials: Float32[Tensor, "splits tokens rows"],
    out: Float[Tensor, "tokens rows"],
    *,
    pdl: bool = False,
) -> None:
    """Adds partial sums, for want of a kernel that does it on the way.

    Raises:
        ValueError: The device cannot run it.
    """
    support.require(support.Kernel.linear_tokens, out.device)
    assert out.is_contiguous()
    _sum_splits[(triton.cdiv(out.numel(), _SUMS),)](
        partials,
        out,
        out.numel(),
        SPLITS=len(partials),
        CHUNK=_SUMS,
        PDL=pdl,
        launch_pdl=pdl,
        enable_fp_fusion=False,
    )
