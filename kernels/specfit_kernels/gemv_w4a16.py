"""A few tokens times NVFP4 weights, which are decoded to float16: for Hopper, and wherever.

partials[split, token, row] = token scale * row scale * Σ_{k in split} x * w

A program has 64 rows, one split of K and 16 tokens, those that do not exist being zeros: one shape
and one order of addition whatever the number of tokens. A `WordWeight` is ordered so that a thread
decodes its words into the very registers from which tensor cores read them; on sm_90 nothing goes
back to shared memory.

Cost: 4.5 bits of memory a weight and, on sm_90, 3.65 instructions, of the 3.5 that an H200 has time
for at full memory speed. Of these 1.4 decode a weight and .5 multiply it with its scale. A code's
bits where float16 has them are its value times 2^-14, and a scale is stored times 2^7, so that each
product is exact: 6 bits, and 2^-17 or more. Partial sums and `pdl` are as in `skinny_w4a4`.

Triton decodes, too, when `dot_scaled` is given activations of 16 bits. That takes 7.5 instructions
a weight on sm_90, and 4.0 on sm_120, where this takes 4.4 and there is time for 18.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float32
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specfit_kernels import support
from specfit_kernels.linear_twins import STEP, WORD_ROWS, Halves, WordWeight
from specfit_kernels.skinny_w4a4 import TOKEN_TILE, prefetch_l2


@no_type_check
@triton.jit
def _codes(words, size_shift: tl.constexpr, sign_shift: tl.constexpr):
    """A code of each half of a word as float16, times 2^-14, in the same half."""
    return ((words << size_shift) & 0x0E000E00) | ((words << sign_shift) & 0x80008000)


@no_type_check
@triton.jit
def _low_half(words):
    return words.to(tl.uint16).to(tl.float16, bitcast=True)


@no_type_check
@triton.jit
def decode_words(words, scales, ROWS: tl.constexpr, STEP: tl.constexpr):
    """float16[ROWS, STEP] of a `WordWeight`, times 2^-7.

    `words` are uint32[ROWS, STEP / 8], `scales` uint32[ROWS, STEP / 64], four in each.
    """
    low, high = (scales << 7) & 0x7F807F80, (scales >> 1) & 0x7F807F80
    scales = tl.join(low, high)
    scales = tl.join(_low_half(scales), _low_half(scales >> 16))  # [..., group % 2, group // 2]
    scales = scales.trans(0, 1, 3, 2).reshape(ROWS, STEP // 32, 2)[:, :, :, None, None]
    first, second = _codes(words, 9, 2), _codes(words, 6, 1)
    third, fourth = _codes(words, 3, 3), _codes(words, 0, 0)
    codes = tl.join(tl.join(first, third), tl.join(second, fourth))  # [..., word, s, h]
    codes = codes.reshape(ROWS, STEP // 32, 4, 2, 2).trans(0, 1, 3, 4, 2)
    # The high halves first: ptxas multiplies both at once, and in the other order it also swaps
    # them before and after.
    odd = _low_half(codes >> 16) * scales
    even = _low_half(codes) * scales
    return tl.join(even, odd).reshape(ROWS, STEP)


@no_type_check
@triton.jit(do_not_specialize=["num_tokens"])
def _gemv_w4a16(
    words,
    scales,
    row_scales,
    x,
    token_scales,
    partials,
    num_tokens,
    num_rows,
    num_steps,
    steps_per_split,
    STEP: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    PDL: tl.constexpr,
):
    split = tl.program_id(2)
    first = split * steps_per_split
    last = tl.minimum(first + steps_per_split, num_steps)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    inside = tl.minimum(rows, num_rows - 1)
    if PDL:
        gdc_launch_dependents()
        for step in range(first, last):
            prefetch_l2(words + inside * (num_steps * (STEP // 8)) + step * (STEP // 8))
        gdc_wait()

    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    words += inside[:, None] * (num_steps * (STEP // 8)) + tl.arange(0, STEP // 8)[None, :]
    scales += inside[:, None] * (num_steps * (STEP // 64)) + tl.arange(0, STEP // 64)[None, :]
    x += tokens[:, None] * (num_steps * STEP) + tl.arange(0, STEP)[None, :]
    exists = tokens < num_tokens
    sums = tl.zeros((ROWS, TOKENS), tl.float32)
    for step in tl.range(first, last, num_stages=3):
        some_words = tl.load(words + step * (STEP // 8))
        some_scales = tl.load(scales + step * (STEP // 64))
        some_x = tl.load(x + step * STEP, mask=exists[:, None], other=0.0)
        w = decode_words(some_words, some_scales, ROWS, STEP)
        sums = tl.dot(w, some_x.T, sums)

    y = sums * (tl.load(row_scales + inside) * 128.0)[:, None]
    y *= tl.load(token_scales + tokens, mask=exists, other=0.0)[None, :]
    partials += (split * num_tokens + tokens)[None, :] * num_rows + rows[:, None]
    tl.store(partials, y, mask=exists[None, :] & (rows < num_rows)[:, None])


def gemv_w4a16(
    weight: WordWeight,
    tokens: Halves,
    partials: Float32[Tensor, "splits tokens rows"],
    *,
    pdl: bool = False,
) -> None:
    """Writes the partial sums of a few tokens.

    Raises:
        ValueError: The device cannot run it.
    """
    support.require(support.Kernel.gemv_w4a16, partials.device)
    num_splits, num_tokens, num_rows = partials.shape
    assert num_splits == weight.splits.num
    grid = (triton.cdiv(num_tokens, TOKEN_TILE), triton.cdiv(num_rows, WORD_ROWS), num_splits)
    _gemv_w4a16[grid](
        weight.words.view(torch.uint32),
        weight.scales.view(torch.uint32),
        weight.row_scales,
        tokens.values,
        tokens.token_scales,
        partials,
        num_tokens,
        num_rows,
        weight.num_steps,
        weight.splits.steps,
        STEP=STEP,
        ROWS=WORD_ROWS,
        TOKENS=TOKEN_TILE,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
        enable_fp_fusion=False,
    )
