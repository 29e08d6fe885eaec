"""What a target that samples keeps of a draft, and the token it adds: no reading back to a host.

`sampling_twins` says what is decided. Three launches: one reads all logits, 4 bytes each, for the
softmax of every token; one those of the tokens at which rows end, and the draft's probabilities
there; the last draws from one chunk of 2048. Each program of the second decides on its row's draft
anew, from what the first has left: 12 bytes a chunk. Sums of probabilities are float64, as in
`verify`: no token of probability 0 is drawn, and equal random numbers draw equal tokens, unless
they fall on a rounding of the probabilities.

Where a row ends at logits with a NaN, the id of the first NaN is chosen.
"""

from typing import no_type_check

import triton
import triton.language as tl
from jaxtyping import Float, Float32, Int64
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specfit_kernels import support
from specfit_kernels.sampling import LAST_ID, NOTHING, emit, id_of, logit_of, of_tokens, ranked
from specfit_kernels.sampling_twins import CHUNK, Acceptance

_CHUNK = tl.constexpr(CHUNK)


@no_type_check
@triton.jit(do_not_specialize=["tokens_each"])
def _softmax_partials(
    logits,
    temperatures,
    best,
    powers,
    tokens_each,
    vocab_size,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(1).to(tl.int64)
    temperature = tl.load(temperatures + token // tokens_each)
    ids = tl.program_id(0) * _CHUNK + tl.arange(0, _CHUNK)
    exists = ids < vocab_size
    x = tl.load(logits + token * vocab_size + ids, mask=exists, other=float("-inf"))
    largest = tl.max(tl.where(exists, ranked(x, ids), NOTHING), 0)
    at = token * tl.num_programs(0) + tl.program_id(0)
    tl.store(best + at, largest)
    tl.store(powers + at, tl.sum(_powers(x, logit_of(largest), temperature), 0))


@no_type_check
@triton.jit
def _powers(x, top, temperature):
    """e^((x - top) / temperature); the division as softmax of logits / temperature has it."""
    scale = tl.where(temperature == 0.0, 1.0, temperature)
    shift = tl.where(top == float("-inf"), 0.0, tl.div_rn(top, scale))
    return tl.exp(tl.div_rn(x, scale) - shift)


@no_type_check
@triton.jit
def _probabilities(x, ids, top, total, choice, temperature):
    """The target's, of some logits."""
    sampled = tl.div_rn(_powers(x, top, temperature), total)
    return tl.where(temperature == 0.0, (ids == choice).to(tl.float32), sampled)


@no_type_check
@triton.jit
def _decide(
    logits,
    best,
    powers,
    draft_tokens,
    draft_lengths,
    draft_probs,
    uniforms,
    row,
    temperature,
    tokens_each,
    num_chunks,
    vocab_size,
    SEQ: tl.constexpr,
    CHUNKS: tl.constexpr,
    DRAFT: tl.constexpr,
):
    """How much is kept, and what `_distribution` asks for of the token behind it."""
    first = row * tokens_each
    some = of_tokens(best, first, tokens_each, num_chunks, NOTHING, SEQ, CHUNKS)
    sums = of_tokens(powers, first, tokens_each, num_chunks, 0.0, SEQ, CHUNKS)
    largest = tl.max(some, 1)
    choices, tops = id_of(largest), logit_of(largest)
    factors = _powers(logit_of(some), tops[:, None], temperature)
    totals = tl.sum(tl.where(some == NOTHING, 0.0, factors * sums), 1)

    places = tl.arange(0, SEQ)
    inside = places < tl.load(draft_lengths + row)
    at = row * (tokens_each - 1) + places
    drafted = tl.load(draft_tokens + at, mask=inside, other=0)
    x = tl.load(logits + (first + places) * vocab_size + drafted, mask=inside, other=0.0)
    target = _probabilities(x, drafted, tops, totals, choices, temperature)
    limits = tl.load(uniforms + first + 1 + places, mask=inside, other=1.0).to(tl.float64)
    if DRAFT:
        limits *= tl.load(draft_probs + at * vocab_size + drafted, mask=inside, other=1.0)
    kept = tl.min(tl.where(inside & (limits < target.to(tl.float64)), SEQ, places), 0)
    here = places == kept
    top = tl.sum(tl.where(here, tops, 0.0), 0)
    total = tl.sum(tl.where(here, totals, 0.0), 0)
    choice = tl.sum(tl.where(here, choices, 0), 0)
    rejected = tl.sum(tl.where(here & inside, drafted + 1, 0), 0) - 1
    return kept, top, total, choice, rejected


@no_type_check
@triton.jit
def _distribution(
    logits,
    draft_probs,
    row,
    chunk,
    end,
    temperature,
    tokens_each,
    vocab_size,
    DRAFT: tl.constexpr,
):
    """Ids of a chunk, what the target gives them, and what that leaves when `rejected` is not -1.

    Neither is normalized, float64.
    """
    kept, top, total, choice, rejected = end
    ids = chunk * _CHUNK + tl.arange(0, _CHUNK)
    exists = ids < vocab_size
    logits += (row * tokens_each + kept) * vocab_size
    x = tl.load(logits + ids, mask=exists, other=float("-inf"))
    target = _probabilities(x, ids, top, total, choice, temperature)
    if DRAFT:
        draft_probs += (row * (tokens_each - 1) + kept) * vocab_size
        num_ids = tl.where(rejected >= 0, vocab_size, 0)
        draft = tl.load(draft_probs + ids, mask=ids < num_ids, other=0.0)
        rest = tl.maximum(target - draft, 0.0)
    else:
        rest = tl.where(ids == rejected, 0.0, target)
    return ids, target.to(tl.float64), rest.to(tl.float64)


@no_type_check
@triton.jit(do_not_specialize=["tokens_each"])
def _masses(
    logits,
    best,
    powers,
    draft_tokens,
    draft_lengths,
    draft_probs,
    temperatures,
    uniforms,
    masses,
    tops,
    totals,
    choices,
    num_kept,
    tokens_each,
    num_chunks,
    vocab_size,
    SEQ: tl.constexpr,
    CHUNKS: tl.constexpr,
    DRAFT: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    temperature = tl.load(temperatures + row)
    end = _decide(
        logits,
        best,
        powers,
        draft_tokens,
        draft_lengths,
        draft_probs,
        uniforms,
        row,
        temperature,
        tokens_each,
        num_chunks,
        vocab_size,
        SEQ,
        CHUNKS,
        DRAFT,
    )
    if chunk == 0:
        kept, top, total, choice, rejected = end
        tl.store(num_kept + row, kept)
        tl.store(tops + row, top)
        tl.store(totals + row, total)
        tl.store(choices + row * 2, choice)
        tl.store(choices + row * 2 + 1, rejected)
    _ids, target, rest = _distribution(
        logits, draft_probs, row, chunk, end, temperature, tokens_each, vocab_size, DRAFT
    )
    masses += row * 2 * num_chunks + chunk
    tl.store(masses, tl.sum(rest, 0))
    tl.store(masses + num_chunks, tl.sum(target, 0))


@no_type_check
@triton.jit(do_not_specialize=["tokens_each"])
def _draw(
    logits,
    draft_tokens,
    draft_probs,
    temperatures,
    uniforms,
    masses,
    tops,
    totals,
    choices,
    num_kept,
    own_tokens,
    emitted,
    tokens_each,
    num_chunks,
    vocab_size,
    SEQ: tl.constexpr,
    CHUNKS: tl.constexpr,
    DRAFT: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    kept = tl.load(num_kept + row)
    choice = tl.load(choices + row * 2)
    chunks = tl.arange(0, CHUNKS)
    masses += row * 2 * num_chunks + chunks
    rests = tl.load(masses, mask=chunks < num_chunks, other=0.0)
    targets = tl.load(masses + num_chunks, mask=chunks < num_chunks, other=0.0)
    # Where rounding leaves nothing, target and draft are equal and either will do.
    is_rest = tl.sum(rests, 0) > 0
    some = tl.where(is_rest, rests, targets)
    ends = tl.cumsum(some, 0)
    point = tl.load(uniforms + row * tokens_each).to(tl.float64) * tl.max(ends, 0)
    chunk = _drawn(ends, some, chunks, point, 0)
    begin = tl.sum(tl.where(chunks == chunk - 1, ends, 0.0), 0)
    end = (kept, tl.load(tops + row), tl.load(totals + row), choice, tl.load(choices + row * 2 + 1))
    temperature = tl.load(temperatures + row)
    ids, target, rest = _distribution(
        logits, draft_probs, row, chunk, end, temperature, tokens_each, vocab_size, DRAFT
    )
    some = tl.where(is_rest, rest, target)
    own = _drawn(begin + tl.cumsum(some, 0), some, ids, point, choice)
    places = tl.arange(0, SEQ)
    drafted = draft_tokens + row * (tokens_each - 1) + places
    emit(
        row, kept, own, tl.load(drafted, mask=places < kept), own_tokens, emitted, tokens_each, SEQ
    )


@no_type_check
@triton.jit
def _drawn(ends, masses, ids, point, nothing):
    """The first that ends beyond a point, or the last, or `nothing`; none that has no mass."""
    has_mass = masses > 0
    beyond = tl.min(tl.where(has_mass & (ends > point), ids, LAST_ID), 0)
    last = tl.max(tl.where(has_mass, ids, -1), 0)  # where a rounding keeps all before the point
    return tl.where(beyond != LAST_ID, beyond, tl.where(last >= 0, last, nothing))


def accept_sampled(
    logits: Float32[Tensor, "tokens vocab"],
    draft_tokens: Int64[Tensor, "rows k"],
    draft_lengths: Int64[Tensor, " rows"],
    draft_probs: Float32[Tensor, "rows k vocab"] | None,
    temperatures: Float32[Tensor, " rows"],
    uniforms: Float[Tensor, "rows seq"],
    out: Acceptance,
    *,
    pdl: bool = False,
) -> None:
    """Keeps a prefix of the draft, so that what is emitted is distributed as the target's samples.

    Raises:
        ValueError: The device cannot run it.
    """
    support.require(support.Kernel.sampling, logits.device)
    num_rows, tokens_each = out.emitted.shape
    num_chunks = out.best.shape[1]
    assert draft_tokens.shape == (num_rows, tokens_each - 1)
    for tensor in (logits, draft_tokens, uniforms):
        assert tensor.is_contiguous()
    assert draft_probs is None or draft_probs.is_contiguous()
    numbers = (tokens_each, num_chunks, logits.shape[1])
    options = {"PDL": pdl, "launch_pdl": pdl, "enable_fp_fusion": False}
    _softmax_partials[num_chunks, len(logits)](
        logits, temperatures, out.best, out.powers, *numbers[::2], **options
    )
    options["SEQ"] = triton.next_power_of_2(tokens_each)
    options["CHUNKS"] = triton.next_power_of_2(num_chunks)
    options["DRAFT"] = draft_probs is not None
    handed_on = (out.masses, out.tops, out.totals, out.choices, out.num_kept)
    _masses[num_chunks, num_rows](
        logits,
        out.best,
        out.powers,
        draft_tokens,
        draft_lengths,
        draft_probs,
        temperatures,
        uniforms,
        *handed_on,
        *numbers,
        **options,
    )
    _draw[(num_rows,)](
        logits,
        draft_tokens,
        draft_probs,
        temperatures,
        uniforms,
        *handed_on,
        out.own_tokens,
        out.emitted,
        *numbers,
        **options,
    )
