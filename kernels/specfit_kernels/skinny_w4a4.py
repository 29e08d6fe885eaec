"""A few tokens times NVFP4 weights, on tensor cores that multiply NVFP4 with NVFP4: sm_100 and on.

partials[split, token, row] = token scale * row scale * Σ_terms Σ_{k in split} x * w

The weights are the 128-row operand and the tokens its columns. Tensor cores take 16 columns at
least while decoding has one token or five, so each of a token's terms (see `linear_twins`) has a
column: accuracy that costs no memory traffic. A program has 128 rows, one split of K and 16
tokens, of which those that do not exist are zeros: one shape and one order of addition whatever
the number of tokens. Beyond 16 the weights are read again for each 16, from the L2 cache.

Cost: 4.5 bits of memory a weight. On sm_100 TMA brings codes to where tensor cores read them, and
only scales pass through registers: .6 instructions a weight, with one term or three, of the 2.5
that a B200 has time for at full memory speed. A partial sum is 4 bytes a split, token and row. The
kernel that reads them adds them (`sum_of_splits`), since a launch for that alone costs as much as
the weights of a small layer.

`pdl`: the launch overlaps the end of the one before, fetches its weights into the L2 cache and then
waits. The launch before it must be one of ours, too, which say when others may start.
"""

from typing import no_type_check

import triton
import triton.language as tl
from jaxtyping import Float32
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from specfit_kernels import support
from specfit_kernels.linear_twins import STEP, TILED_ROWS, Terms, TiledWeight

TOKEN_TILE = 16


@no_type_check
@triton.jit
def prefetch_l2(pointers):
    """Asks for the 128 bytes at each pointer; not in the interpreter."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [pointers],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@no_type_check
@triton.jit
def scale_tile(scales, row_tile, step, num_steps, STEP: tl.constexpr):
    """Scales [128, STEP / 16] of a `TiledWeight`, read as they lie: 512 bytes in a row."""
    k_tiles: tl.constexpr = STEP // 64
    tiles = (row_tile * num_steps + step) * k_tiles + tl.arange(0, k_tiles)
    scales = tl.load(scales + tiles[:, None] * 512 + tl.arange(0, 512)[None, :])
    scales = scales.reshape(k_tiles, 32, 4, 4).trans(2, 1, 0, 3)
    return scales.reshape(128, STEP // 16)


@no_type_check
@triton.jit(do_not_specialize=["num_tokens"])
def _skinny_w4a4(
    blocks,  # descriptor of the codes, [128, STEP / 2] at a time
    weight_codes,
    weight_scales,
    row_scales,
    codes,
    scales,
    token_scales,
    partials,
    num_tokens,
    num_rows,
    weight_stride,
    num_steps,
    steps_per_split,
    TERMS: tl.constexpr,
    STEP: tl.constexpr,
    TOKENS: tl.constexpr,
    PDL: tl.constexpr,
):
    row_tile = tl.program_id(1)
    split = tl.program_id(2)
    first = split * steps_per_split
    last = tl.minimum(first + steps_per_split, num_steps)
    rows = row_tile * 128 + tl.arange(0, 128)
    if PDL:
        gdc_launch_dependents()
        lines = weight_codes + tl.minimum(rows, num_rows - 1) * weight_stride
        for step in range(first, last):
            prefetch_l2(lines + tl.minimum(step * (STEP // 2), weight_stride - 1))
        gdc_wait()

    # A token's columns stand together, 2 or 4. Were there one for one term, a thread would load two
    # bytes of scales, and what is less than four is not loaded ahead.
    columns_of_token: tl.constexpr = 4 if TERMS == 3 else 2
    columns = tl.arange(0, TOKENS * columns_of_token)
    column_tokens = tl.program_id(0) * TOKENS + columns // columns_of_token
    terms = columns % columns_of_token
    exists = ((column_tokens < num_tokens) & (terms < TERMS))[:, None]
    lines = (column_tokens * TERMS + terms)[:, None]
    codes += lines * (num_steps * (STEP // 2)) + tl.arange(0, STEP // 2)[None, :]
    scales += lines * (num_steps * (STEP // 16)) + tl.arange(0, STEP // 16)[None, :]
    sums = tl.zeros((128, TOKENS * columns_of_token), tl.float32)
    for step in tl.range(first, last, num_stages=3):
        w = blocks.load([row_tile * 128, step * (STEP // 2)])
        w_scales = scale_tile(weight_scales, row_tile, step, num_steps, STEP)
        x = tl.load(codes + step * (STEP // 2), mask=exists, other=0)
        x_scales = tl.load(scales + step * (STEP // 16), mask=exists, other=0.0)
        sums = tl.dot_scaled(w, w_scales, "e2m1", x.T, x_scales, "e2m1", sums)

    y = tl.sum(sums.reshape(128, TOKENS, columns_of_token), 2)
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    y *= tl.load(row_scales + rows, mask=rows < num_rows, other=0.0)[:, None]
    y *= tl.load(token_scales + tokens, mask=tokens < num_tokens, other=0.0)[None, :]
    partials += (split * num_tokens + tokens)[None, :] * num_rows + rows[:, None]
    tl.store(partials, y, mask=(tokens < num_tokens)[None, :] & (rows < num_rows)[:, None])


def skinny_w4a4(
    weight: TiledWeight,
    tokens: Terms,
    partials: Float32[Tensor, "splits tokens rows"],
    *,
    pdl: bool = False,
) -> None:
    """Writes the partial sums of a few tokens.

    Raises:
        ValueError: The device cannot run it.
    """
    support.require(support.Kernel.skinny_w4a4, partials.device)
    num_splits, num_tokens, num_rows = partials.shape
    num_terms = tokens.codes.shape[1]
    assert num_splits == weight.splits.num
    grid = (triton.cdiv(num_tokens, TOKEN_TILE), triton.cdiv(num_rows, TILED_ROWS), num_splits)
    _skinny_w4a4[grid](
        TensorDescriptor.from_tensor(weight.codes, [TILED_ROWS, STEP // 2]),
        weight.codes,
        weight.scales,
        weight.row_scales,
        tokens.codes,
        tokens.scales,
        tokens.token_scales,
        partials,
        num_tokens,
        num_rows,
        weight.codes.stride(0),
        weight.num_steps,
        weight.splits.steps,
        TERMS=num_terms,
        STEP=STEP,
        TOKENS=TOKEN_TILE,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
        enable_fp_fusion=False,
    )
