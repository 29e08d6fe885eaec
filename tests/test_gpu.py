"""What needs a GPU: each kernel against its twin at the sizes of real models.

test_gpu_target.py has the target that they make; `make test-gpu` runs both. Tolerances are those of
the tests in the interpreter, which say why, or of sums: n additions in float32 are off by n * 2^-24
of the sum of sizes at most, and by twice that where they are rounded down, as on tensor cores.
"""

from typing import Any

import pytest
import torch
from gpu_device import DEVICE, IN_HALVES, IN_TERMS, MARKS

from bench.synthetic import LLAMA_8B, SMOLLM2, random_bf16, random_matrix
from specfit_kernels import attention_twins, layer_twins, linear_twins, sampling_twins
from specfit_kernels.kv_pages import PAGE, KVPages, Places
from specfit_kernels.layer_twins import Rope
from specfit_kernels.linear_twins import Halves, Terms
from specfit_kernels.sampling_twins import Acceptance

pytest.importorskip("triton", reason="Triton is made for Linux only")
pytestmark = MARKS
GEOMETRIES = pytest.mark.parametrize("geometry", [SMOLLM2, LLAMA_8B], ids=lambda one: one.name)
KINDS = pytest.mark.parametrize("num_terms", [IN_HALVES, *IN_TERMS])
NUM_TOKENS = (1, 5, 16, 17)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE)


def poisoned(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(shape, torch.nan, dtype=dtype, device=DEVICE)


def empty_tokens(num_tokens: int, columns: int, num_terms: int) -> Terms | Halves:
    if num_terms == 0:
        return Halves.empty(num_tokens, columns, DEVICE)
    return Terms.empty(num_tokens, columns, num_terms, DEVICE)


def quantized(x: torch.Tensor, num_terms: int, by: Any = linear_twins) -> Terms | Halves:
    out = empty_tokens(*x.shape, num_terms)
    (by.quantize_tokens if num_terms else by.halve_tokens)(x, out)
    return out


def stored(tokens: Terms | Halves) -> list[torch.Tensor]:
    """As integers."""
    if isinstance(tokens, Halves):
        return [tokens.values.view(torch.int16), tokens.token_scales.view(torch.int32)]
    scales = tokens.scales.view(torch.uint8)
    return [tokens.codes, scales, tokens.token_scales.view(torch.int32)]


def values_of(tokens: Terms | Halves) -> torch.Tensor:
    """float64."""
    if isinstance(tokens, Halves):
        return tokens.values.double() * tokens.token_scales.double()[:, None]
    return tokens.values().double().sum(0) * tokens.token_scales.double()[:, None]


def assert_same(got: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))


def distance(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


def summed(weight: Any, tokens: Terms | Halves, num_tokens: int) -> torch.Tensor:
    """By the kernel for few tokens."""
    from specfit_kernels import gemv_w4a16, linear_tokens, skinny_w4a4

    rows = len(weight.row_scales)
    partials, out = poisoned(weight.splits.num, num_tokens, rows), poisoned(num_tokens, rows)
    if isinstance(tokens, Terms):
        skinny_w4a4.skinny_w4a4(weight, tokens, partials)
    else:
        gemv_w4a16.gemv_w4a16(weight, tokens, partials)
    linear_tokens.sum_splits(partials, out)
    return out


def products(geometry: Any, name: str, num_terms: int, x: torch.Tensor) -> tuple[Any, Any, Any]:
    """The weight, and x @ weight in float64 with the limit of its rounding."""
    weight = random_matrix(geometry.shapes[name], num_terms, DEVICE)
    columns = weight.columns
    values = values_of(quantized(x, num_terms))[:, :columns]
    w = weight.values()[:, :columns] * weight.row_scales[:, None]
    exact = torch.cat([values @ part.double().T for part in w.split(2048)], 1)
    sizes = values.float().abs() @ w.abs().T
    return weight, exact, (columns + 16) * 2.0**-23 * sizes.double()


@GEOMETRIES
@pytest.mark.parametrize("name", ["qkv", "o", "gate_up", "down"])
@KINDS
def test_products_are_exact_but_for_sums_and_alone_what_they_are_among_others(
    geometry, name, num_terms
):
    from specfit_kernels import gemm

    x = normal(130, geometry.shapes[name][1])
    weight, exact, limit = products(geometry, name, num_terms, x)
    for num_tokens in NUM_TOKENS:
        found = summed(weight, quantized(x[:num_tokens], num_terms), num_tokens)
        assert bool(((found.double() - exact[:num_tokens]).abs() <= limit[:num_tokens]).all())
        for token in {0, num_tokens - 1}:
            alone = summed(weight, quantized(x[token, None], num_terms), 1)
            assert torch.equal(alone[0], found[token])
    many = gemm.gemm_w4a4 if num_terms else gemm.gemm_w4a16
    out, again = poisoned(130, len(exact[0])), poisoned(20, len(exact[0]))
    many(weight, quantized(x, num_terms), out)
    assert bool(((out.double() - exact).abs() <= limit).all())
    many(weight, quantized(x[110:], num_terms), again)
    assert torch.equal(again, out[110:])


@GEOMETRIES
@KINDS
def test_tokens_are_quantized_as_their_twin_does(geometry, num_terms):
    from specfit_kernels import linear_tokens, norm_quant, silu_mul

    hidden, inner = geometry.hidden, geometry.inner
    x = normal(17, inner) * torch.exp(2 * normal(17, 1))
    assert_same(stored(quantized(x, num_terms, linear_tokens)), stored(quantized(x, num_terms)))

    stream, partials, weight = normal(17, hidden), normal(3, 17, hidden), 1 + normal(hidden) / 3
    out, normed, captured = (
        empty_tokens(17, hidden, num_terms),
        poisoned(17, hidden),
        poisoned(17, hidden),
    )
    of_twin = stream.clone()
    normed_of_twin = poisoned(17, hidden)
    given = {"partials": partials, "captured": captured}
    norm_quant.rmsnorm_quant(stream, weight, 1e-5, out, **given, normed=normed)
    spare = empty_tokens(17, hidden, num_terms)
    layer_twins.rmsnorm_quant(
        of_twin, weight, 1e-5, spare, partials=partials, normed=normed_of_twin
    )
    assert torch.equal(stream, of_twin)
    assert torch.equal(captured, of_twin)
    assert distance(normed, normed_of_twin) < 1e-6
    assert_same(stored(out), stored(quantized(normed, num_terms)))

    gated = [empty_tokens(17, inner, num_terms) for _ in range(2)]
    sums = normal(2, 17, 2 * inner)
    silu_mul.silu_mul_quant(sums, gated[0])
    layer_twins.silu_mul_quant(sums, gated[1])
    # Where an exponential differs in its last bit, a code may be the next.
    assert distance(values_of(gated[0]), values_of(gated[1])) < 1e-3


def places_of(starts: list[int], each: int, max_length: int) -> tuple[Places, int]:
    """Tokens from starts on, of sequences whose pages lie anywhere; and the number of pages."""
    num_pages = -(-max_length // PAGE)
    table = torch.randperm(len(starts) * num_pages, device=DEVICE).int().view(len(starts), -1)
    positions = torch.tensor(starts, device=DEVICE)[:, None] + torch.arange(each, device=DEVICE)
    sequences = torch.arange(len(starts), device=DEVICE).repeat_interleave(each)
    places = Places(positions.flatten().int(), sequences.int(), table)
    return places, table.numel()


def cache_of(geometry: Any, num_pages: int) -> KVPages:
    kv = KVPages.empty(num_pages, geometry.num_kv_heads, geometry.head_dim, DEVICE)
    kv.keys.normal_()
    kv.values.normal_()
    return kv


@GEOMETRIES
def test_heads_are_turned_and_cached_as_their_twin_does(geometry):
    from specfit_kernels import rope_append

    places, num_pages = places_of([0, 63, 700], 5, 1024)
    caches = [cache_of(geometry, num_pages)]
    caches.append(KVPages(caches[0].keys.clone(), caches[0].values.clone()))
    angles = normal(1024, geometry.head_dim // 2)
    rope, width = Rope(angles.cos(), angles.sin()), geometry.shapes["qkv"][0]
    sums, bias = normal(3, 15, width), normal(width)
    queries = [poisoned(15, geometry.shapes["o"][1]) for _ in range(2)]
    for by, kv, out in zip((rope_append, layer_twins), caches, queries, strict=True):
        by.rope_append(sums, places, kv, rope, out, bias=bias)
    assert torch.equal(*queries)
    assert torch.equal(caches[0].keys, caches[1].keys)
    assert torch.equal(caches[0].values, caches[1].values)


def attended(by: Any, geometry: Any, queries: Any, places: Places, kv: KVPages, each: int, out):
    heads = geometry.num_heads, geometry.head_dim
    partials = attention_twins.AttentionPartials.empty(len(queries), *heads, 2048, DEVICE)
    for tensor in (partials.sums, partials.tops, partials.weights, partials.attended):
        tensor.fill_(torch.nan)
    by.attn_verify(queries, places, kv, partials, each)
    by.attn_combine(partials, places, out, each)
    return out


@GEOMETRIES
def test_attention_is_that_of_its_twin_and_alone_what_it_is_among_others(geometry):
    from specfit_kernels import attention

    starts = [0, 62, 254, 1500]
    places, num_pages = places_of(starts, 5, 2048)
    kv, columns = cache_of(geometry, num_pages), geometry.shapes["o"][1]
    queries = normal(20, columns)
    found, expected = (
        attended(by, geometry, queries, places, kv, 5, poisoned(20, columns))
        for by in (attention, attention_twins)
    )
    assert distance(found, expected) < 1e-4
    for num_terms in (0, 3):
        out = empty_tokens(20, columns, num_terms)
        attended(attention, geometry, queries, places, kv, 5, out)
        assert_same(stored(out), stored(quantized(found, num_terms)))
    for token in (0, 3, 9, 14, 17):
        one = slice(token, token + 1)
        place = Places(places.positions[one], places.sequences[one], places.block_table)
        alone = attended(attention, geometry, queries[one], place, kv, 1, poisoned(1, columns))
        assert torch.equal(alone[0], found[token])


@GEOMETRIES
def test_a_head_gives_the_logits_and_the_choices_of_its_twin(geometry):
    from specfit_kernels import rejection, sampling, skinny_bf16

    weight = random_bf16((geometry.vocab_size, geometry.hidden), DEVICE)
    x = normal(15, geometry.hidden)
    logits, expected, one = (poisoned(n, geometry.vocab_size) for n in (15, 15, 1))
    skinny_bf16.skinny_bf16(weight, x, logits)
    layer_twins.skinny_bf16(weight, x, expected)
    assert distance(logits, expected) < 1e-5
    for token in (0, 7, 14):
        skinny_bf16.skinny_bf16(weight, x[token, None], one)
        assert torch.equal(one[0], logits[token])

    tokens = logits.view(3, 5, -1)[:, :4].argmax(-1)
    tokens[1, 2] += 1
    lengths = torch.tensor([4, 4, 2], device=DEVICE)
    uniforms = torch.rand(3, 5, dtype=torch.float64, device=DEVICE)
    temperatures = torch.tensor([0.0, 1.0, 0.5], device=DEVICE)
    sizes = (3, 4, geometry.vocab_size, DEVICE)
    outcomes = [Acceptance.empty(*sizes) for _ in range(4)]
    for by, out in zip((sampling, sampling_twins), outcomes[:2], strict=True):
        by.argmax_partials(logits, out.best)
        by.accept(tokens, lengths, out)
    draws = (temperatures, uniforms)
    for by, out in zip((rejection, sampling_twins), outcomes[2:], strict=True):
        by.accept_sampled(logits, tokens, lengths, None, *draws, out)
    for i in (0, 2):
        for name in ("num_kept", "own_tokens", "emitted"):
            assert torch.equal(getattr(outcomes[i], name), getattr(outcomes[i + 1], name))
