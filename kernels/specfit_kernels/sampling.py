"""The argmax of logits, and what a greedy target keeps of a draft, without reading back to a host.

`sampling_twins` says what is decided. `argmax_partials` reads the logits, 4 bytes each, with a
program for 2048 of a token; `argmax` and `accept` read what it leaves, 8 bytes a program. Whoever
reads logits for more can leave the same on the way (`ranked`), as `rejection` does.
"""

from typing import no_type_check

import triton
import triton.language as tl
from jaxtyping import Float32, Int64
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specfit_kernels import support
from specfit_kernels.sampling_twins import CHUNK, Acceptance

LAST_ID = tl.constexpr(0x7FFFFFFF)
NOTHING = tl.constexpr(-(1 << 63))  # less than any logit with its id


@no_type_check
@triton.jit
def ranked(x, ids):
    """Logits with their ids as `best` has them, int64."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    keys = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    keys = tl.where(x != x, 0x7FFFFFFF, keys)
    return (keys.to(tl.int64) << 32) | (ids ^ LAST_ID).to(tl.int64)


@no_type_check
@triton.jit
def logit_of(ranked):
    """The logit; of NOTHING, NaN."""
    keys = (ranked >> 32).to(tl.int32)
    return tl.where(keys < 0, keys ^ 0x7FFFFFFF, keys).to(tl.float32, bitcast=True)


@no_type_check
@triton.jit
def id_of(ranked):
    """The id."""
    return (ranked & LAST_ID) ^ LAST_ID


@no_type_check
@triton.jit
def of_tokens(partials, first, num_tokens, num_chunks, other, SEQ: tl.constexpr, CHUNKS):
    """What the chunks of a row's tokens left, [SEQ, CHUNKS]."""
    tokens = tl.arange(0, SEQ)[:, None]
    chunks = tl.arange(0, CHUNKS)[None, :]
    at = (first + tokens) * num_chunks + chunks
    return tl.load(partials + at, mask=(tokens < num_tokens) & (chunks < num_chunks), other=other)


@no_type_check
@triton.jit
def _argmax_partials(
    logits,
    best,
    vocab_size,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(1).to(tl.int64)
    ids = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    exists = ids < vocab_size
    x = tl.load(logits + token * vocab_size + ids, mask=exists, other=float("-inf"))
    largest = tl.max(tl.where(exists, ranked(x, ids), NOTHING), 0)
    tl.store(best + token * tl.num_programs(0) + tl.program_id(0), largest)


@no_type_check
@triton.jit(do_not_specialize=["tokens_each"])
def _accept(
    best,
    draft_tokens,
    draft_lengths,
    num_kept,
    own_tokens,
    emitted,
    tokens_each,
    num_chunks,
    SEQ: tl.constexpr,
    CHUNKS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    some = of_tokens(best, row * tokens_each, tokens_each, num_chunks, NOTHING, SEQ, CHUNKS)
    choices = id_of(tl.max(some, 1))
    places = tl.arange(0, SEQ)
    inside = places < tl.load(draft_lengths + row)
    drafted = tl.load(draft_tokens + row * (tokens_each - 1) + places, mask=inside, other=-1)
    kept = tl.min(tl.where(drafted == choices, SEQ, places), 0)
    own = tl.sum(tl.where(places == kept, choices, 0), 0)
    tl.store(num_kept + row, kept)
    emit(row, kept, own, drafted, own_tokens, emitted, tokens_each, SEQ)


@no_type_check
@triton.jit
def emit(row, kept, own, drafted, own_tokens, emitted, tokens_each, SEQ: tl.constexpr):
    """Stores what a row emits."""
    places = tl.arange(0, SEQ)
    tl.store(own_tokens + row, own)
    tokens = tl.where(places < kept, drafted, tl.where(places == kept, own, -1))
    tl.store(emitted + row * tokens_each + places, tokens, mask=places < tokens_each)


@no_type_check
@triton.jit
def _argmax(best, out, num_chunks, CHUNKS: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0)
    some = of_tokens(best, token, 1, num_chunks, NOTHING, 1, CHUNKS)
    tl.store(out + token, tl.max(id_of(tl.max(some, 1)), 0))


def argmax_partials(
    logits: Float32[Tensor, "tokens vocab"],
    best: Int64[Tensor, "tokens chunks"],
    *,
    pdl: bool = False,
) -> None:
    """Writes each chunk's largest logit with its id; a NaN is larger than all.

    Raises:
        ValueError: The device cannot run it.
    """
    support.require(support.Kernel.sampling, logits.device)
    assert logits.is_contiguous()
    num_tokens, num_chunks = best.shape
    _argmax_partials[num_chunks, num_tokens](
        logits, best, logits.shape[1], CHUNK=CHUNK, PDL=pdl, launch_pdl=pdl, enable_fp_fusion=False
    )


def argmax(
    best: Int64[Tensor, "tokens chunks"], out: Int64[Tensor, " tokens"], *, pdl: bool = False
) -> None:
    """Writes the first of the largest logits' ids.

    Raises:
        ValueError: The device cannot run it.
    """
    support.require(support.Kernel.sampling, out.device)
    num_tokens, num_chunks = best.shape
    padded = triton.next_power_of_2(num_chunks)
    _argmax[(num_tokens,)](
        best, out, num_chunks, CHUNKS=padded, PDL=pdl, launch_pdl=pdl, enable_fp_fusion=False
    )


def accept(
    draft_tokens: Int64[Tensor, "rows k"],
    draft_lengths: Int64[Tensor, " rows"],
    out: Acceptance,
    *,
    pdl: bool = False,
) -> None:
    """Keeps the drafted tokens that are the argmax of `out.best`, up to the first other.

    Raises:
        ValueError: The device cannot run it.
    """
    support.require(support.Kernel.sampling, draft_tokens.device)
    num_rows, tokens_each = out.emitted.shape
    num_chunks = out.best.shape[1]
    assert draft_tokens.is_contiguous()
    assert draft_tokens.shape == (num_rows, tokens_each - 1)
    _accept[(num_rows,)](
        out.best,
        draft_tokens,
        draft_lengths,
        out.num_kept,
        out.own_tokens,
        out.emitted,
        tokens_each,
        num_chunks,
        SEQ=triton.next_power_of_2(tokens_each),
        CHUNKS=triton.next_power_of_2(num_chunks),
        PDL=pdl,
        launch_pdl=pdl,
        enable_fp_fusion=False,
    )
