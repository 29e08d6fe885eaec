"""Queries and keys turned by their positions; keys and values into the cache.

first, second = halves of a head; turned = first * cos - second * sin, second * cos + first * sin

A program has one head of one token: a warp that adds the splits of its `head_dim` sums, and a bias
where there is one, takes the RMSNorm of a query or a key where the model does, turns it, and stores
float32 for a query, or bfloat16 in the cache.

Cost: a launch. Its bytes are few, 4 * splits a sum, and programs enough to read them side by side.

`pdl`: see `skinny_w4a4`.
"""

from typing import no_type_check

import triton
import triton.language as tl
from jaxtyping import Float32
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specfit_kernels import support
from specfit_kernels.kv_pages import PAGE, KVPages, Places
from specfit_kernels.layer_twins import HeadNorms, Rope
from specfit_kernels.triton_bf16 import round_to_bf16
from specfit_kernels.triton_numbers import sum_of_splits


@no_type_check
@triton.jit
def _normed(first, second, weight, half, at, exists, eps):
    mean = tl.div_rn(tl.sum(first * first + second * second, 0), half * 2.0)
    inverse = tl.div_rn(1.0, tl.sqrt_rn(mean + eps))
    first *= inverse
    second *= inverse
    first *= tl.load(weight + at, mask=exists, other=0.0)
    second *= tl.load(weight + half + at, mask=exists, other=0.0)
    return first, second


@no_type_check
@triton.jit
def _turned(first, second, cosines, sines, position, half, at, exists):
    cosine = tl.load(cosines + position * half + at, mask=exists, other=0.0)
    sine = tl.load(sines + position * half + at, mask=exists, other=0.0)
    return first * cosine - second * sine, second * cosine + first * sine


@no_type_check
@triton.jit(do_not_specialize=["num_tokens", "table_stride"])
def _rope_append(
    partials,
    bias,
    query_norm,
    key_norm,
    eps,
    positions,
    sequences,
    block_table,
    cosines,
    sines,
    queries,
    keys,
    values,
    num_tokens,
    table_stride,
    num_heads,
    num_kv_heads,
    half,
    SPLITS: tl.constexpr,
    HALF: tl.constexpr,
    PAGE: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0)
    head = tl.program_id(1)
    at = tl.arange(0, HALF)
    exists = at < half
    width = (num_heads + 2 * num_kv_heads) * (2 * half)
    partials += token * width + head * (2 * half)
    first = sum_of_splits(partials, at, exists, num_tokens * width, SPLITS)
    second = sum_of_splits(partials + half, at, exists, num_tokens * width, SPLITS)
    if bias is not None:
        bias += head * (2 * half)
        first += tl.load(bias + at, mask=exists, other=0.0)
        second += tl.load(bias + half + at, mask=exists, other=0.0)

    position = tl.load(positions + token).to(tl.int64)
    if head < num_heads + num_kv_heads:
        if query_norm is not None:
            weight = query_norm if head < num_heads else key_norm
            first, second = _normed(first, second, weight, half, at, exists, eps)
        first, second = _turned(first, second, cosines, sines, position, half, at, exists)
    if head < num_heads:
        to = queries + (token * num_heads + head) * (2 * half) + at
        tl.store(to, first, mask=exists)
        tl.store(to + half, second, mask=exists)
    else:
        table = block_table + tl.load(sequences + token).to(tl.int64) * table_stride
        page = tl.load(table + position // PAGE).to(tl.int64)
        kv_head = (head - num_heads) % num_kv_heads
        place = ((page * num_kv_heads + kv_head) * PAGE + position % PAGE) * (2 * half) + at
        cache = keys if head < num_heads + num_kv_heads else values
        tl.store(cache + place, round_to_bf16(first), mask=exists)
        tl.store(cache + half + place, round_to_bf16(second), mask=exists)


def rope_append(
    partials: Float32[Tensor, "splits tokens width"],
    places: Places,
    kv: KVPages,
    rope: Rope,
    queries: Float32[Tensor, "tokens query_width"],
    *,
    bias: Float32[Tensor, " width"] | None = None,
    head_norms: HeadNorms | None = None,
    pdl: bool = False,
) -> None:
    """Writes turned queries, and puts keys and values to the tokens' places in the cache.

    A token's sums are its query heads, then its keys, then its values. Places are not checked.

    Raises:
        ValueError: The device cannot run it.
    """
    support.require(support.Kernel.rope_append, partials.device)
    num_splits, num_tokens, width = partials.shape
    num_kv_heads, head_dim = kv.num_kv_heads, kv.head_dim
    num_heads = queries.shape[1] // head_dim
    assert (num_heads + 2 * num_kv_heads) * head_dim == width
    assert all(one.is_contiguous() for one in (partials, queries, kv.keys, kv.values))
    assert rope.cosines.shape[1] == head_dim // 2
    _rope_append[num_tokens, num_heads + 2 * num_kv_heads](
        partials,
        bias,
        head_norms.queries if head_norms else None,
        head_norms.keys if head_norms else None,
        head_norms.eps if head_norms else 0.0,
        places.positions,
        places.sequences,
        places.block_table,
        rope.cosines,
        rope.sines,
        queries,
        kv.keys,
        kv.values,
        num_tokens,
        places.block_table.stride(0),
        num_heads,
        num_kv_heads,
        head_dim // 2,
        SPLITS=num_splits,
        HALF=triton.next_power_of_2(head_dim // 2),
        PAGE=PAGE,
        PDL=pdl,
        num_warps=1,
        launch_pdl=pdl,
        enable_fp_fusion=False,
    )
