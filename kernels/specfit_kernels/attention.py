"""Attention of a few tokens of each sequence over its cached columns: a draft, or one token.

attended[token, head] = Σ_c softmax_c(query * key_c / sqrt(dim)) * value_c

over the columns c that the token sees (`attention_twins` says which). A program has one sequence,
one head of keys and values with all the queries that share it, of all the tokens of the draft, and
one split of 256 columns, 64 or 32 at a time: keys and values are read once for all of them. It has
16 rows of queries, or 32 where a head has four queries or more; if a draft has more, another
program reads the split again, from the L2 cache. What `attn_verify` leaves of each split,
`attn_combine` adds, 16 splits at a time from the first on.

Keys and values go to tensor cores as the bfloat16 that they are. A query, and a power of two of the
softmax, is two bfloat16 terms, so that it loses 2^-18 of its size; all else is float32.

Cost: 2 bytes of memory an element of keys and values, and on sm_90 3.4 instructions with 16 rows at
dim 128 and 4.6 at 64, 7.6 and 7.2 with 32 rows, of the 12 that an H200 has time for at full memory
speed; on sm_100 not more, of 8.7. A tree takes 1 or 2 more, in the draft's pages alone. Partials
are 4 bytes a split, token, head and dim, written and read once.

`attn_combine` has a program for each token and head. For `Terms` and `Halves` the last one of a
token to finish quantizes all of it, as only then is the largest size known. That takes no launch of
its own, and the order in which programs finish changes no bits.

What is not finite in a value of the draft reaches all tokens of its sequence, through a weight of
zero. `pdl` is as in `skinny_w4a4`.
"""

import math
from typing import no_type_check

import triton
import triton.language as tl
from jaxtyping import Float32, Int64
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specfit_kernels import support
from specfit_kernels.attention_twins import MAX_TREE, SPLIT, AttentionPartials
from specfit_kernels.kv_pages import PAGE, KVPages, Places
from specfit_kernels.linear_tokens import store_halves, store_terms
from specfit_kernels.linear_twins import Halves, Terms
from specfit_kernels.triton_bf16 import round_to_bf16
from specfit_kernels.triton_numbers import half_scale, size_bits, term_scale

_COMBINED = 16  # splits at a time
_CHUNK = 1024  # columns quantized at a time
_LOG2_E = tl.constexpr(math.log2(math.e))
_PAGE = tl.constexpr(PAGE)
_SPLIT = tl.constexpr(SPLIT)


@no_type_check
@triton.jit
def _product(high, low, y, sums, DOT: tl.constexpr):
    """Sums + (high + low) @ y, multiplied in DOT."""
    y = y.to(DOT)
    sums = tl.dot(low.to(DOT), y, sums, input_precision="ieee")
    return tl.dot(high.to(DOT), y, sums, input_precision="ieee")


@no_type_check
@triton.jit
def _terms_of_power(x):
    """What x, 0..1, is to the nearest bfloat16, in float32, and the rest of it."""
    # Of some NaNs it makes zeros; they remain in the sum of the powers, by which all is divided.
    bits = (x.to(tl.uint32, bitcast=True) + 0x8000) & 0xFFFF0000
    high = bits.to(tl.float32, bitcast=True)
    return high, x - high


@no_type_check
@triton.jit
def _sees(columns, base, own, bits, TREE: tl.constexpr):
    """Booleans [rows, columns]."""
    columns = columns[None, :]
    sees = columns <= own[:, None]
    if TREE:
        places = columns - base
        ancestor = (bits[:, None] >> tl.minimum(tl.maximum(places, 0), 63).to(tl.int64)) & 1
        sees &= (places < 0) | (columns == own[:, None]) | (ancestor != 0)
    return sees


@no_type_check
@triton.jit
def _query_terms(queries, heads, exists, DIM: tl.constexpr):
    """Queries whose products with keys are logits to the base of 2: high + low, bfloat16."""
    at = heads[:, None] * DIM + tl.arange(0, DIM)[None, :]
    q = tl.load(queries + at, mask=exists[:, None], other=0.0) * (_LOG2_E * DIM**-0.5)
    high = round_to_bf16(q)
    return high, round_to_bf16(q - high.to(tl.float32))


@no_type_check
@triton.jit
def _first_value(block_table, column, kv_head, num_kv_heads, DIM: tl.constexpr):
    """Where a column lies in the cache."""
    in_table = column // _PAGE
    page = tl.load(block_table + in_table).to(tl.int64)
    return ((page * num_kv_heads + kv_head) * _PAGE + (column - in_table * _PAGE)) * DIM


@no_type_check
@triton.jit
def _add_columns(logits, v, top, weight, total, DOT: tl.constexpr):
    """The softmax so far, with some columns more."""
    new_top = tl.maximum(top, tl.max(logits, 1))
    shift = tl.where(new_top == float("-inf"), 0.0, new_top)
    powers = tl.exp2(logits - shift[:, None])
    rescale = tl.exp2(top - shift)
    high, low = _terms_of_power(powers)
    total = _product(high, low, v, total * rescale[:, None], DOT)
    return new_top, weight * rescale[:, None] + powers, total


@no_type_check
@triton.jit(do_not_specialize=["num_tokens", "tokens_each"])
def _attn_verify(
    queries,
    keys,
    values,
    positions,
    sequences,
    block_table,
    tree,
    sums,
    tops,
    weights,
    num_tokens,
    tokens_each,
    num_kv_heads,
    num_pages,
    GROUP: tl.constexpr,  # queries that share keys and values
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    STEP: tl.constexpr,
    TREE: tl.constexpr,
    DOT: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    first = tl.program_id(1) // num_kv_heads * tokens_each
    kv_head = tl.program_id(1) % num_kv_heads
    split = tl.program_id(2)
    base = tl.load(positions + first)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    drafted = rows // GROUP
    exists = drafted < tokens_each
    own = tl.where(exists & (base >= 0), base + drafted, -1)
    end = tl.minimum((split + 1) * _SPLIT, tl.max(own, 0) + 1)
    if split * _SPLIT >= end:
        return

    heads = (first + drafted) * (num_kv_heads * GROUP) + kv_head * GROUP + rows % GROUP
    high, low = _query_terms(queries, heads, exists, DIM)
    bits = tl.load(tree + first + drafted, mask=exists, other=0) if TREE else None
    block_table += tl.load(sequences + first) * num_pages
    inside = tl.arange(0, STEP)[:, None] * DIM + tl.arange(0, DIM)[None, :]
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    weight = tl.zeros((ROWS, STEP), tl.float32)
    total = tl.zeros((ROWS, DIM), tl.float32)
    for step in tl.range(split * (_SPLIT // STEP), tl.cdiv(end, STEP), num_stages=3):
        line = _first_value(block_table, step * STEP, kv_head, num_kv_heads, DIM)
        k = tl.load(keys + line + inside)
        logits = _product(high, low, k.T, tl.zeros((ROWS, STEP), tl.float32), DOT)
        columns = step * STEP + tl.arange(0, STEP)
        if (step + 1) * STEP > base:  # before the draft all see all
            logits = tl.where(_sees(columns, base, own, bits, TREE), logits, float("-inf"))
        v = tl.load(values + line + inside, mask=(columns < end)[:, None], other=0.0)
        top, weight, total = _add_columns(logits, v, top, weight, total, DOT)

    heads = split.to(tl.int64) * (num_tokens * num_kv_heads * GROUP) + heads
    tl.store(tops + heads, top, mask=exists)
    tl.store(weights + heads, tl.sum(weight, 1), mask=exists)
    tl.store(sums + heads[:, None] * DIM + tl.arange(0, DIM)[None, :], total, mask=exists[:, None])


def attn_verify(
    queries: Float32[Tensor, "tokens heads_dim"],
    places: Places,
    kv: KVPages,
    partials: AttentionPartials,
    tokens_per_sequence: int,
    *,
    tree: Int64[Tensor, " tokens"] | None = None,
    pdl: bool = False,
) -> None:
    """Writes the partials of tokens that stand by sequence, as many of each.

    Raises:
        ValueError: The device cannot run it, the heads are of another size than 64 or 128, or a
            tree has more than 64 tokens.
    """
    support.require(support.Kernel.attention, queries.device)
    num_tokens, dim = len(queries), kv.head_dim
    if dim not in (64, 128):
        raise ValueError(f"kv.head_dim must be 64 or 128, got {dim}")
    if tree is not None and tokens_per_sequence > MAX_TREE:
        raise ValueError(f"a tree must have at most {MAX_TREE} tokens, got {tokens_per_sequence}")
    assert num_tokens % tokens_per_sequence == 0
    num_splits, _, num_heads = partials.tops.shape
    group = num_heads // kv.num_kv_heads
    # By the model alone: what depended on the draft could change a token's bits.
    rows = 16 if group < 4 else 32
    num_sequences = num_tokens // tokens_per_sequence
    grid = (
        triton.cdiv(tokens_per_sequence * group, rows),
        num_sequences * kv.num_kv_heads,
        num_splits,
    )
    _attn_verify[grid](
        queries,
        kv.keys,
        kv.values,
        places.positions,
        places.sequences,
        places.block_table,
        tree,
        partials.sums,
        partials.tops,
        partials.weights,
        num_tokens,
        tokens_per_sequence,
        kv.num_kv_heads,
        places.block_table.shape[1],
        GROUP=group,
        ROWS=rows,
        DIM=dim,
        STEP=32 if rows * dim == 4096 else 64,  # 64 take too many registers there
        TREE=tree is not None,
        DOT=tl.float32 if queries.device.type == "cpu" else tl.bfloat16,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
        enable_fp_fusion=False,
    )


@no_type_check
@triton.jit
def _merged(sums, tops, weights, head, num_splits, split_stride, SPLITS: tl.constexpr, DIM):
    """What a head has attended to in all its splits, float32[DIM]; zeros without any."""
    lanes = tl.arange(0, DIM)
    top = float("-inf")
    weight = 0.0
    total = tl.zeros((DIM,), tl.float32)
    for first in range(0, num_splits, SPLITS):
        splits = first + tl.arange(0, SPLITS)
        exists = splits < num_splits
        at = splits.to(tl.int64) * split_stride + head
        some_tops = tl.load(tops + at, mask=exists, other=float("-inf"))
        some_weights = tl.load(weights + at, mask=exists, other=0.0)
        some = tl.load(sums + at[:, None] * DIM + lanes[None, :], mask=exists[:, None], other=0.0)
        new_top = tl.maximum(top, tl.max(some_tops, 0))
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        factors = tl.exp2(some_tops - shift)
        rescale = tl.exp2(top - shift)
        top = new_top
        weight = weight * rescale + tl.sum(some_weights * factors, 0)
        total = total * rescale + tl.sum(some * factors[:, None], 0)
    return tl.div_rn(total, tl.where(num_splits > 0, weight, 1.0))


@no_type_check
@triton.jit
def _quantize(
    attended,
    codes,
    scales,
    token_scale,
    largest,
    num_columns,
    padded,
    TERMS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """All of a token, as terms, or without any as float16."""
    scale = term_scale(largest) if TERMS > 0 else half_scale(largest)
    tl.store(token_scale, scale)
    for start in range(0, padded, CHUNK):
        columns = start + tl.arange(0, CHUNK)
        # Other programs wrote them, so not from this processor's own cache.
        mask = columns < num_columns
        values = tl.load(attended + columns, mask=mask, other=0.0, cache_modifier=".cg")
        if TERMS > 0:
            blocks = values.reshape(CHUNK // 16, 16)
            first = start // 16
            store_terms(blocks, scale, codes, scales, first, padded // 16, TERMS, CHUNK // 16)
        else:
            store_halves(values, scale, codes + columns, columns < padded)


@no_type_check
@triton.jit(do_not_specialize=["num_tokens", "tokens_each"])
def _attn_combine(
    sums,
    tops,
    weights,
    positions,
    attended,
    largest,
    arrived,
    codes,
    scales,
    token_scales,
    num_tokens,
    tokens_each,
    num_heads,
    padded,
    QUANTIZES: tl.constexpr,
    TERMS: tl.constexpr,
    DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    head = tl.program_id(0)
    token = tl.program_id(1).to(tl.int64)
    drafted = token % tokens_each
    base = tl.load(positions + token - drafted)
    num_splits = tl.where(base < 0, 0, (base + drafted.to(tl.int32)) // _SPLIT + 1)
    at = token * num_heads + head
    values = _merged(sums, tops, weights, at, num_splits, num_tokens * num_heads, SPLITS, DIM)
    tl.store(attended + at * DIM + tl.arange(0, DIM), values)
    if QUANTIZES:
        tl.atomic_max(largest + token, tl.max(size_bits(values), 0))
        # Before this program is counted, all of its threads have written.
        tl.debug_barrier()
        if tl.atomic_add(arrived + token, 1) == num_heads - 1:
            size = tl.atomic_xchg(largest + token, 0)
            tl.store(arrived + token, 0)
            num_columns = num_heads * DIM
            attended += token * num_columns
            if TERMS > 0:
                codes += token * TERMS * (padded // 2)
                scales += token * TERMS * (padded // 16)
            else:
                codes += token * padded
            token_scales += token
            _quantize(
                attended, codes, scales, token_scales, size, num_columns, padded, TERMS, CHUNK
            )


def attn_combine(
    partials: AttentionPartials,
    places: Places,
    out: Terms | Halves | Float32[Tensor, "tokens heads_dim"],
    tokens_per_sequence: int,
    *,
    pdl: bool = False,
) -> None:
    """Writes what the tokens have attended to; zeros where a place is negative.

    Raises:
        ValueError: The device cannot run it.
    """
    support.require(support.Kernel.attention, partials.sums.device)
    _, num_tokens, num_heads, dim = partials.sums.shape
    codes, scales, token_scales, padded, num_terms = None, None, None, 0, 0
    attended = partials.attended
    match out:
        case Terms():
            codes, scales, token_scales = out.codes, out.scales, out.token_scales
            padded, num_terms = 2 * codes.shape[2], codes.shape[1]
        case Halves():
            codes, token_scales, padded = out.values, out.token_scales, out.values.shape[1]
        case _:
            assert out.is_contiguous()
            attended = out
    _attn_combine[num_heads, num_tokens](
        partials.sums,
        partials.tops,
        partials.weights,
        places.positions,
        attended,
        partials.largest,
        partials.arrived,
        codes,
        scales,
        token_scales,
        num_tokens,
        tokens_per_sequence,
        num_heads,
        padded,
        QUANTIZES=codes is not None,
        TERMS=num_terms,
        DIM=dim,
        SPLITS=_COMBINED,
        CHUNK=_CHUNK,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
        enable_fp_fusion=False,
    )
