"""Between the products of a feed-forward layer: SiLU of the gate, times up, quantized.

y[column] = gate / (1 + exp(-gate)) * up; out = quantized y

A token's scale needs the largest size of all its columns. A program has 2048 of them and computes
all for the largest, each the same: one launch and no scratch memory, where two launches would
compute every value once.

Cost: a launch. Each program reads 8 * splits bytes a column of its token, from the L2 cache, and
takes 23 instructions: 14336 columns are 1.4 µs, 28672 2.8 µs. Other tokens and columns run beside
it, as long as the L2 cache has the bandwidth: 14 programs each of 16 such tokens read 50 MB.

Compiled, an exponential is off by (2 + |gate|) * 2^-23 of itself.

`pdl`: see `skinny_w4a4`.
"""

from typing import no_type_check

import triton
import triton.language as tl
from jaxtyping import Float32
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specfit_kernels import support
from specfit_kernels.linear_twins import Halves, Terms
from specfit_kernels.norm_quant import of_quantized, store_quantized, token_scale
from specfit_kernels.triton_numbers import size_bits, sum_of_splits

_CHUNK = 2048  # columns


@no_type_check
@triton.jit
def silu_mul(partials, columns, num_columns, split_stride, SPLITS: tl.constexpr):
    """Values of some columns of the token at whose gate `partials` points; beyond its last, 0."""
    exists = columns < num_columns
    gate = sum_of_splits(partials, columns, exists, split_stride, SPLITS)
    up = sum_of_splits(partials + num_columns, columns, exists, split_stride, SPLITS)
    return gate / (1.0 + tl.exp(-gate)) * up


@no_type_check
@triton.jit(do_not_specialize=["num_tokens"])
def _silu_mul_quant(
    partials,
    values,
    scales,
    token_scales,
    num_tokens,
    num_columns,
    num_blocks,
    SPLITS: tl.constexpr,
    TERMS: tl.constexpr,
    CHUNK: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    partials += token * (2 * num_columns)
    split_stride = num_tokens * (2 * num_columns)
    largest = tl.zeros((CHUNK,), tl.int32)
    for start in tl.range(0, num_columns, CHUNK, num_stages=STAGES):
        columns = start + tl.arange(0, CHUNK)
        y = silu_mul(partials, columns, num_columns, split_stride, SPLITS)
        largest = tl.maximum(largest, size_bits(y))
    scale = token_scale(tl.max(largest, 0), TERMS)
    if chunk == 0:
        tl.store(token_scales + token, scale)
    first = chunk * CHUNK
    y = silu_mul(partials, first + tl.arange(0, CHUNK), num_columns, split_stride, SPLITS)
    store_quantized(y, scale, token, first, values, scales, num_blocks, TERMS, CHUNK)


def silu_mul_quant(
    partials: Float32[Tensor, "splits tokens twice_inner"],
    out: Terms | Halves,
    *,
    pdl: bool = False,
) -> None:
    """Adds the partial sums of gate and up, and writes the quantized products.

    Raises:
        ValueError: The device cannot run it.
    """
    support.require(support.Kernel.silu_mul, partials.device)
    assert partials.is_contiguous()
    num_splits, num_tokens, width = partials.shape
    values, scales, num_terms, num_blocks = of_quantized(out)
    _silu_mul_quant[num_tokens, triton.cdiv(num_blocks * 16, _CHUNK)](
        partials,
        values,
        scales,
        out.token_scales,
        num_tokens,
        width // 2,
        num_blocks,
        SPLITS=num_splits,
        TERMS=num_terms,
        CHUNK=_CHUNK,
        # Of three splits and more what is loaded ahead would not fit, and such tokens are short.
        STAGES=3 if num_splits <= 2 else 1,
        PDL=pdl,
        num_warps=8,
        launch_pdl=pdl,
        enable_fp_fusion=False,
    )
