"""A few tokens times bfloat16 weights: the head of a target, and that of a draft model.

out[token, row] = Σ_k x[token, k] * w[row, k]

A program has 128 rows, all of K, and 16 tokens, those that do not exist being zeros: one shape and
one order of addition whatever the number of tokens. Beyond 16 the weights are read again for each
16, from the L2 cache.

Tensor cores multiply in TF32, float32 without its last 13 bits, and every bfloat16 is one. A value
of x in float32 is two, in columns of their own that are added at the end: its first 11 bits, and 11
of what those leave. A product is off by 2^-22 of itself at most, and exact when x is bfloat16, too.
Sums are as tensor cores add float32. To multiply the weights as bfloat16, where they lie, would
take half the instructions, for which nobody waits; but two values of x would have 8 bits each, and
Triton's interpreter, where this is tested, multiplies bfloat16 wrongly.

The order of a sum is free. A word holds two neighbours of a row: the lower halves of words are
multiplied with the even columns of x, the upper ones with the odd. So a weight becomes a float32 by
one instruction and without leaving its thread.

Cost: 16 bits of memory a weight, and 3.3 instructions on sm_90 of the 12 for which an H200 has time
at full memory speed, 3.7 of a B200's 8.7 on sm_100, 4.8 on sm_120.

`pdl`: see `skinny_w4a4`. A head is larger than the L2 cache, so that a program fetches only what it
multiplies first.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import BFloat16, Float32
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specfit_kernels import support
from specfit_kernels.skinny_w4a4 import TOKEN_TILE, prefetch_l2

ROWS = 128
STEP = 64  # columns that a program takes at a time
_FETCHED_STEPS = 4  # before the wait


@no_type_check
@triton.jit
def split_to_tf32(x):
    """Two TF32 values of float32; their sum is off by 2^-22 of x at most."""
    bits = x.to(tl.uint32, bitcast=True)
    high = ((bits + 0x1000) & 0xFFFFE000).to(tl.float32, bitcast=True)
    low = (x - high).to(tl.uint32, bitcast=True) & 0xFFFFE000
    return high, low.to(tl.float32, bitcast=True)


@no_type_check
@triton.jit
def _terms(x, TERMS: tl.constexpr, TOKENS: tl.constexpr, WORDS: tl.constexpr):
    """x[TOKENS, WORDS] as tensor cores take it, [WORDS, TERMS * TOKENS]."""
    if TERMS == 1:
        terms = x.to(tl.float32)
    else:
        high, low = split_to_tf32(x)
        terms = tl.join(high, low).permute(2, 0, 1).reshape(TERMS * TOKENS, WORDS)
    return terms.T


@no_type_check
@triton.jit(do_not_specialize=["num_tokens"])
def _skinny_bf16(
    words,
    x,
    out,
    num_tokens,
    num_rows,
    num_words,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
    TOKENS: tl.constexpr,
    TERMS: tl.constexpr,
    FETCHED: tl.constexpr,
    PDL: tl.constexpr,
):
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    lines = words + tl.minimum(rows, num_rows - 1).to(tl.int64) * num_words
    if PDL:
        gdc_launch_dependents()
        for start in tl.static_range(0, FETCHED * WORDS, 32):
            prefetch_l2(lines + tl.minimum(start, num_words - 1))
        gdc_wait()

    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    exists = tokens < num_tokens
    at = tl.arange(0, WORDS)
    columns = tl.arange(0, 2 * WORDS)
    lines = lines[:, None] + at[None, :]
    x += tokens[:, None] * (2 * num_words) + columns[None, :]
    sums = tl.zeros((ROWS, TERMS * TOKENS), tl.float32)
    for start in tl.range(0, num_words, WORDS, num_stages=3):
        left = num_words - start
        some_words = tl.load(lines + start, mask=(at < left)[None, :], other=0)
        some_x = tl.load(
            x + 2 * start, mask=exists[:, None] & (columns < 2 * left)[None, :], other=0.0
        )
        even_x, odd_x = tl.split(some_x.reshape(TOKENS, WORDS, 2))
        even = (some_words << 16).to(tl.float32, bitcast=True)
        odd = (some_words & 0xFFFF0000).to(tl.float32, bitcast=True)
        even_x, odd_x = _terms(even_x, TERMS, TOKENS, WORDS), _terms(odd_x, TERMS, TOKENS, WORDS)
        sums = tl.dot(even, even_x, sums, input_precision="tf32")
        sums = tl.dot(odd, odd_x, sums, input_precision="tf32")

    y = tl.sum(sums.reshape(ROWS, TERMS, TOKENS), 1)
    out += tokens[None, :].to(tl.int64) * num_rows + rows[:, None]
    tl.store(out, y, mask=exists[None, :] & (rows < num_rows)[:, None])


def skinny_bf16(
    weight: BFloat16[Tensor, "rows columns"],
    x: Float32[Tensor, "tokens columns"] | BFloat16[Tensor, "tokens columns"],
    out: Float32[Tensor, "tokens rows"],
    *,
    pdl: bool = False,
) -> None:
    """Writes the products of a few tokens.

    Raises:
        ValueError: The device cannot run it, or the number of columns is odd.
    """
    support.require(support.Kernel.skinny_bf16, out.device)
    num_tokens, num_rows = out.shape
    num_columns = weight.shape[1]
    if num_columns % 2:
        raise ValueError(f"the columns of weight must be even in number, got {num_columns}")
    assert weight.is_contiguous()
    assert x.is_contiguous()
    assert out.is_contiguous()
    _skinny_bf16[triton.cdiv(num_tokens, TOKEN_TILE), triton.cdiv(num_rows, ROWS)](
        weight.view(torch.uint32),
        x,
        out,
        num_tokens,
        num_rows,
        num_columns // 2,
        ROWS=ROWS,
        WORDS=STEP // 2,
        TOKENS=TOKEN_TILE,
        TERMS=1 if x.dtype == torch.bfloat16 else 2,
        FETCHED=_FETCHED_STEPS,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
        enable_fp_fusion=False,
    )
