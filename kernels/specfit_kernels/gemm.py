"""Many tokens times NVFP4 weights: prefill.

out[token, row] = token scale * row scale * Σ_terms Σ_k x * w, rounded once to the type of `out`

A program has 128 rows of weights and 128 tokens, and all of K. `gemm_w4a4` multiplies NVFP4 with
NVFP4 on tensor cores (sm_100 and on); a step of K brings the weights once and multiplies them with
each term. `gemm_w4a16` decodes them to float16, at 6 instructions a weight or .05 a product.

Cost: tensor cores' time from some hundred tokens on, and below that 4.5 bits of memory a weight.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from specfit_kernels import support
from specfit_kernels.gemv_w4a16 import decode_words
from specfit_kernels.linear_twins import (
    STEP,
    TILED_ROWS,
    Halves,
    Terms,
    TiledWeight,
    WordWeight,
)
from specfit_kernels.skinny_w4a4 import scale_tile

TOKEN_TILE = 128
_DECODED_ROWS = 128
_DECODED_STEP = 64  # columns at a time, since 16 bits a value are more than four


@no_type_check
@triton.jit(do_not_specialize=["num_tokens"])
def _gemm_w4a4(
    blocks,  # descriptor of the codes, [128, STEP / 2] at a time
    weight_scales,
    row_scales,
    codes,
    scales,
    token_scales,
    out,
    num_tokens,
    num_rows,
    num_steps,
    TERMS: tl.constexpr,
    STEP: tl.constexpr,
    TOKENS: tl.constexpr,
):
    row_tile = tl.program_id(1)
    rows = row_tile * 128 + tl.arange(0, 128)
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    exists = (tokens < num_tokens)[:, None]
    code_stride = num_steps * (STEP // 2)
    scale_stride = num_steps * (STEP // 16)
    lines = tokens.to(tl.int64)[:, None] * TERMS
    codes += lines * code_stride + tl.arange(0, STEP // 2)[None, :]
    scales += lines * scale_stride + tl.arange(0, STEP // 16)[None, :]
    sums = tl.zeros((128, TOKENS), tl.float32)
    for step in tl.range(0, num_steps, num_stages=3):
        w = blocks.load([row_tile * 128, step * (STEP // 2)])
        w_scales = scale_tile(weight_scales, row_tile, step, num_steps, STEP)
        for term in tl.static_range(TERMS):
            x = tl.load(codes + term * code_stride + step * (STEP // 2), mask=exists, other=0)
            x_scales = scales + term * scale_stride + step * (STEP // 16)
            x_scales = tl.load(x_scales, mask=exists, other=0.0)
            sums = tl.dot_scaled(w, w_scales, "e2m1", x.T, x_scales, "e2m1", sums)

    y = sums * tl.load(row_scales + rows, mask=rows < num_rows, other=0.0)[:, None]
    y *= tl.load(token_scales + tokens, mask=tokens < num_tokens, other=0.0)[None, :]
    out += tokens.to(tl.int64)[None, :] * num_rows + rows[:, None]
    mask = (tokens < num_tokens)[None, :] & (rows < num_rows)[:, None]
    tl.store(out, y.to(out.dtype.element_ty), mask=mask)


def gemm_w4a4(weight: TiledWeight, tokens: Terms, out: Float[Tensor, "tokens rows"]) -> None:
    """Writes y.

    Raises:
        ValueError: The device cannot run it.
    """
    support.require(support.Kernel.gemm_w4a4, out.device)
    num_tokens, num_rows = out.shape
    num_terms = tokens.codes.shape[1]
    assert out.is_contiguous()
    # sm_120 has 99 KiB of shared memory for a program, and the others 227.
    token_tile = 64 if support.architecture(out.device) == 120 else TOKEN_TILE
    _gemm_w4a4[triton.cdiv(num_tokens, token_tile), triton.cdiv(num_rows, TILED_ROWS)](
        TensorDescriptor.from_tensor(weight.codes, [TILED_ROWS, STEP // 2]),
        weight.scales,
        weight.row_scales,
        tokens.codes,
        tokens.scales,
        tokens.token_scales,
        out,
        num_tokens,
        num_rows,
        weight.num_steps,
        TERMS=num_terms,
        STEP=STEP,
        TOKENS=token_tile,
        num_warps=8,
        enable_fp_fusion=False,
    )


@no_type_check
@triton.jit(do_not_specialize=["num_tokens"])
def _gemm_w4a16(
    words,
    scales,
    row_scales,
    x,
    token_scales,
    out,
    num_tokens,
    num_rows,
    num_steps,
    STEP: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    inside = tl.minimum(rows, num_rows - 1)
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    exists = tokens < num_tokens
    words += inside[:, None] * (num_steps * (STEP // 8)) + tl.arange(0, STEP // 8)[None, :]
    scales += inside[:, None] * (num_steps * (STEP // 64)) + tl.arange(0, STEP // 64)[None, :]
    x += tokens.to(tl.int64)[:, None] * (num_steps * STEP) + tl.arange(0, STEP)[None, :]
    sums = tl.zeros((ROWS, TOKENS), tl.float32)
    for step in tl.range(0, num_steps, num_stages=3):
        some_words = tl.load(words + step * (STEP // 8))
        some_scales = tl.load(scales + step * (STEP // 64))
        some_x = tl.load(x + step * STEP, mask=exists[:, None], other=0.0)
        w = decode_words(some_words, some_scales, ROWS, STEP)
        sums = tl.dot(w, some_x.T, sums)

    y = sums * (tl.load(row_scales + inside) * 128.0)[:, None]
    y *= tl.load(token_scales + tokens, mask=exists, other=0.0)[None, :]
    out += tokens.to(tl.int64)[None, :] * num_rows + rows[:, None]
    mask = exists[None, :] & (rows < num_rows)[:, None]
    tl.store(out, y.to(out.dtype.element_ty), mask=mask)


def gemm_w4a16(weight: WordWeight, tokens: Halves, out: Float[Tensor, "tokens rows"]) -> None:
    """Writes y.

    Raises:
        ValueError: The device cannot run it.
    """
    support.require(support.Kernel.gemm_w4a16, out.device)
    num_tokens, num_rows = out.shape
    assert out.is_contiguous()
    _gemm_w4a16[triton.cdiv(num_tokens, TOKEN_TILE), triton.cdiv(num_rows, _DECODED_ROWS)](
        weight.words.view(torch.uint32),
        weight.scales.view(torch.uint32),
        weight.row_scales,
        tokens.values,
        tokens.token_scales,
        out,
        num_tokens,
        num_rows,
        weight.num_steps * (STEP // _DECODED_STEP),
        STEP=_DECODED_STEP,
        ROWS=_DECODED_ROWS,
        TOKENS=TOKEN_TILE,
        num_warps=8,
        enable_fp_fusion=False,
    )
