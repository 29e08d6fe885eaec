"""The kernels between the products in Triton's interpreter: test_kernels_triton_interpreter.py.

What has an oracle in float64 is asked of the kernels and of their twins alike.
"""

from types import ModuleType

import pytest
import torch
import triton
import triton.language as tl
from triton_harness import INTERPRETING, SEED

from specfit_kernels import layer_twins, norm_quant, rope_append, silu_mul, skinny_bf16, triton_bf16
from specfit_kernels import linear_twins as linears
from specfit_kernels.kv_pages import PAGE, KVPages, Places
from specfit_kernels.layer_twins import HeadNorms, Rope

assert INTERPRETING, "run this file with TRITON_INTERPRET=1"
CPU = torch.device("cpu")
EPS = 0.1  # so large that it shows
KINDS = pytest.mark.parametrize("num_terms", [0, 2, 3])  # Halves, or so many terms
FEW_KINDS = pytest.mark.parametrize("num_terms", [0, 1])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


@pytest.fixture(params=[SEED], ids=lambda seed: f"SEED={seed}")
def generator(request: pytest.FixtureRequest) -> torch.Generator:
    return torch.Generator().manual_seed(request.param)


def by(kernel: ModuleType) -> pytest.MarkDecorator:
    """Once by the kernel and once by its twin."""
    return pytest.mark.parametrize("module", [kernel, layer_twins], ids=["kernel", "twin"])


@triton.jit
def _convert(x, rounded, high, low, num_values, CHUNK: tl.constexpr):
    at = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    mask = at < num_values
    values = tl.load(x + at, mask=mask, other=0.0)
    triton_bf16.store_rounded(rounded + at, values, mask)
    some_high, some_low = skinny_bf16.split_to_tf32(values)
    tl.store(high + at, some_high, mask=mask)
    tl.store(low + at, some_low, mask=mask)


@triton.jit
def _silu(partials, out, num_columns, SPLITS: tl.constexpr, COLUMNS: tl.constexpr):
    columns = tl.arange(0, COLUMNS)
    line = tl.program_id(0) * num_columns
    stride = tl.num_programs(0) * 2 * num_columns
    y = silu_mul.silu_mul(partials + 2 * line, columns, num_columns, stride, SPLITS)
    tl.store(out + line + columns, y, mask=columns < num_columns)


def poisoned(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(shape, torch.nan, dtype=dtype)


def normal(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=generator)


def splits(generator: torch.Generator, *shape: int) -> torch.Tensor:
    """Partial sums of very different sizes, so that another order of addition shows."""
    sizes = 10.0 ** torch.randint(-3, 3, shape, generator=generator)
    return normal(generator, *shape) * sizes


def poisoned_tokens(num_tokens: int, columns: int, num_terms: int):
    if num_terms == 0:
        halves = linears.Halves.empty(num_tokens, columns, CPU)
        halves.values.fill_(torch.nan)
        halves.token_scales.fill_(-1)
        return halves
    terms = linears.Terms.empty(num_tokens, columns, num_terms, CPU)
    terms.codes.fill_(0xAA)
    terms.scales.view(torch.uint8).fill_(0xAA)
    terms.token_scales.fill_(-1)
    return terms


def bits(tokens, only=slice(None)) -> list[torch.Tensor]:
    """What is stored of tokens, as integers."""
    if isinstance(tokens, linears.Halves):
        stored = [tokens.values.view(torch.int16)]
    else:
        stored = [tokens.codes, tokens.scales.view(torch.uint8)]
    return [one[only] for one in (*stored, tokens.token_scales.view(torch.int32))]


def assert_quantized(got, y: torch.Tensor) -> None:
    """That tokens are these values, quantized as the linears' twin does."""
    num_terms = 0 if isinstance(got, linears.Halves) else got.codes.shape[1]
    expected = poisoned_tokens(*y.shape, num_terms)
    quantize = linears.quantize_tokens if num_terms else linears.halve_tokens
    quantize(y, expected)
    assert_same(bits(got), bits(expected))


def assert_same(got: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))


def assert_near(
    got: torch.Tensor, exact: torch.Tensor, relative: float, least: float | torch.Tensor = 0
):
    assert bool(((got.double() - exact).abs() <= relative * exact.abs() + least).all())


def test_values_are_rounded_to_bfloat16_and_split_into_tf32(generator):
    any_bits = torch.randint(-(1 << 31), 1 << 31, (1 << 15,), generator=generator)
    every_bf16 = torch.arange(1 << 16).to(torch.int16).view(torch.bfloat16).float()
    ties = (every_bf16.view(torch.int32) | 0x8000).view(torch.float32)
    beside = [(ties.view(torch.int32) + one).view(torch.float32) for one in (-1, 1)]
    x = torch.cat([any_bits.to(torch.int32).view(torch.float32), every_bf16, ties, *beside])
    rounded = torch.full((len(x),), 3.0, dtype=torch.bfloat16)
    high, low = poisoned(len(x)), poisoned(len(x))
    _convert[(triton.cdiv(len(x), 1 << 16),)](x, rounded, high, low, len(x), CHUNK=1 << 16)
    numbers = ~x.isnan()
    assert torch.equal(rounded[numbers].view(torch.int16), x[numbers].bfloat16().view(torch.int16))
    assert bool(rounded[~numbers].isnan().all())

    assert not bool(((high.view(torch.int32) | low.view(torch.int32)) & 0x1FFF).any())
    middling = (x.abs() > 1e-30) & (x.abs() < 1e38)
    x, high, low = (one[middling].double() for one in (x, high, low))
    assert_near(high + low, x, 2.0**-22)
    assert_near(high, x, 2.0**-11)


def norm_inputs(generator: torch.Generator, num_splits: int, num_tokens: int, hidden: int):
    stream = normal(generator, num_tokens, hidden) * torch.exp(2 * normal(generator, num_tokens, 1))
    weight = 1 + 0.3 * normal(generator, hidden)
    partials = splits(generator, num_splits, num_tokens, hidden) if num_splits else None
    return stream, weight, partials


@KINDS
@by(norm_quant)
@pytest.mark.parametrize(
    ("num_splits", "num_tokens", "hidden"), [(0, 1, 255), (1, 5, 257), (3, 16, 576), (8, 2, 16)]
)
def test_a_stream_grows_by_its_sums_and_its_norm_is_quantized(
    generator, module, num_terms, num_splits, num_tokens, hidden
):
    stream, weight, partials = norm_inputs(generator, num_splits, num_tokens, hidden)
    expected = stream.clone()
    if partials is not None:
        total = torch.empty_like(stream)
        linears.sum_splits(partials, total)
        expected += total
    out, normed = poisoned_tokens(num_tokens, hidden, num_terms), poisoned(num_tokens, hidden)
    captured = poisoned(num_tokens, hidden, dtype=torch.bfloat16)
    given = {"partials": partials, "normed": normed, "captured": captured}
    module.rmsnorm_quant(stream, weight, EPS, out, **given)
    assert torch.equal(stream, expected)
    assert torch.equal(captured, expected.bfloat16())
    exact = expected.double()
    exact = exact / (exact.square().mean(1, keepdim=True) + EPS).sqrt() * weight.double()
    # n squares are added, in whatever order, to what has a root; a few factors follow.
    assert_near(normed, exact, (hidden / 2 + 8) * 2.0**-24)
    assert_quantized(out, normed)


@FEW_KINDS
def test_what_is_not_asked_for_changes_nothing_that_is(generator, num_terms):
    stream, weight, partials = norm_inputs(generator, 2, 3, 300)
    outs = [poisoned_tokens(3, 300, num_terms) for _ in range(3)]
    normed, captured = poisoned(3, 300), poisoned(3, 300)
    added, again = stream.clone(), stream.clone()
    norm_quant.rmsnorm_quant(added, weight, EPS, outs[0], partials=partials)
    given = {"partials": partials, "normed": normed, "captured": captured}
    norm_quant.rmsnorm_quant(again, weight, EPS, outs[1], **given)
    assert torch.equal(again, added)
    assert torch.equal(captured, added)
    assert_quantized(outs[0], normed)
    # Without sums the stream is read only.
    norm_quant.rmsnorm_quant(added, weight.bfloat16(), EPS, outs[2], normed=normed)
    assert torch.equal(again, added)
    assert_quantized(outs[2], normed)


@FEW_KINDS
def test_a_normed_token_has_the_same_bits_alone_and_among_others(generator, num_terms):
    stream, weight, partials = norm_inputs(generator, 3, 16, 300)
    stream[3] *= 1e15  # neighbours that would show
    stream[5, 7] = torch.nan
    together = poisoned_tokens(16, 300, num_terms)
    norm_quant.rmsnorm_quant(stream.clone(), weight, EPS, together, partials=partials)
    for some in (slice(4, 5), slice(2, 7), slice(15, 16)):
        apart = poisoned_tokens(some.stop - some.start, 300, num_terms)
        few = partials[:, some].contiguous()
        norm_quant.rmsnorm_quant(stream[some].clone(), weight, EPS, apart, partials=few)
        tokens = torch.arange(some.start, some.stop) != 5
        assert_same(bits(apart, tokens), [one[tokens] for one in bits(together, some)])


def test_a_stream_that_fits_no_processor_is_refused():
    stream, out = torch.zeros(1, 8200), poisoned_tokens(1, 8200, 1)
    with pytest.raises(ValueError, match=r"^hidden must be at most 8192, got 8200$"):
        norm_quant.rmsnorm_quant(stream, torch.ones(8200), EPS, out)


@KINDS
@pytest.mark.parametrize(
    ("num_splits", "num_tokens", "inner"), [(1, 1, 2049), (2, 5, 255), (5, 2, 16), (3, 1, 4100)]
)
def test_the_product_of_gate_and_up_is_quantized(
    generator, num_terms, num_splits, num_tokens, inner
):
    partials = splits(generator, num_splits, num_tokens, 2 * inner)
    largest = 0 if num_terms == 3 else inner - 1
    partials[..., [largest, inner + largest]] = 3e3
    y, out = poisoned(num_tokens, inner), poisoned_tokens(num_tokens, inner, num_terms)
    width = triton.next_power_of_2(inner)
    _silu[(num_tokens,)](partials, y, inner, SPLITS=num_splits, COLUMNS=width)
    silu_mul.silu_mul_quant(partials, out)
    assert_quantized(out, y)

    total = poisoned(num_tokens, 2 * inner)
    linears.sum_splits(partials, total)
    gate, up = total.double().chunk(2, dim=1)
    exact = gate * torch.sigmoid(gate) * up
    # An exponential that is infinite in float32 stands for products below 2^-120 of up.
    assert_near(y, exact, 16 * 2.0**-24, least=2.0**-120 * float(up.abs().max()))
    twin = poisoned_tokens(num_tokens, inner, num_terms)
    layer_twins.silu_mul_quant(partials, twin)
    assert torch.equal(twin.token_scales, out.token_scales)
    got, expected = (values_of(one).view(-1, 16) for one in (out, twin))
    # Where y differs in its last bit, a code of a block may be the next.
    assert bool(((got - expected).norm(dim=1) <= 0.02 * expected.norm(dim=1)).all())


def values_of(tokens) -> torch.Tensor:
    if isinstance(tokens, linears.Halves):
        return tokens.values.double() * tokens.token_scales.double()[:, None]
    return tokens.values().double().sum(0) * tokens.token_scales.double()[:, None]


@FEW_KINDS
def test_gated_tokens_have_the_same_bits_alone_and_among_others(generator, num_terms):
    partials = splits(generator, 2, 16, 2 * 300)
    partials[:, 3] *= 1e15
    partials[1, 5, 7] = torch.nan
    together = poisoned_tokens(16, 300, num_terms)
    silu_mul.silu_mul_quant(partials, together)
    for token in (0, 4, 15):
        alone = poisoned_tokens(1, 300, num_terms)
        silu_mul.silu_mul_quant(partials[:, token, None].contiguous(), alone)
        assert_same(bits(alone), bits(together, [token]))


def caches(num_pages: int, num_kv_heads: int, head_dim: int, count: int) -> list[KVPages]:
    shape = (num_pages, num_kv_heads, PAGE, head_dim)
    made = [poisoned(2, *shape, dtype=torch.bfloat16) for _ in range(count)]
    return [KVPages(*both) for both in made]


def places_of(generator: torch.Generator, positions: list[list[int]]) -> Places:
    """Some positions of each sequence, whose pages lie anywhere."""
    pages = torch.randperm(len(positions) * 3, generator=generator, dtype=torch.int32)
    tokens = [(one, i) for i, some in enumerate(positions) for one in some]
    return Places(*torch.tensor(tokens, dtype=torch.int32).T.contiguous(), pages.view(-1, 3))


def rope_of(head_dim: int) -> Rope:
    powers = torch.arange(head_dim // 2) / (head_dim // 2)
    angles = torch.arange(3 * PAGE)[:, None] * 1e4**-powers
    return Rope(angles.cos(), angles.sin())


def head_norms(generator: torch.Generator, head_dim: int) -> HeadNorms:
    queries, keys = (1 + 0.3 * normal(generator, head_dim) for _ in range(2))
    return HeadNorms(queries, keys, EPS)


POSITIONS = [[0, 1], [63], [64, 65], [190]]
HEADS = pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"), [(1, 1, 64), (4, 2, 16), (3, 1, 96)]
)


@HEADS
@pytest.mark.parametrize(("num_splits", "biased"), [(1, False), (3, True)])
def test_heads_are_turned_and_put_in_their_places_as_torch_does(
    generator, num_heads, num_kv_heads, head_dim, num_splits, biased
):
    places = places_of(generator, POSITIONS)
    width = (num_heads + 2 * num_kv_heads) * head_dim
    partials = splits(generator, num_splits, 6, width)
    bias = normal(generator, width) if biased else None
    expected, got = caches(12, num_kv_heads, head_dim, 2)
    outs = [poisoned(6, num_heads * head_dim) for _ in range(2)]
    rope = rope_of(head_dim)
    layer_twins.rope_append(partials, places, expected, rope, outs[0], bias=bias)
    rope_append.rope_append(partials, places, got, rope, outs[1], bias=bias)
    assert torch.equal(outs[0], outs[1])
    # The rest of the cache, which is NaN, included.
    assert torch.equal(got.keys.view(torch.int16), expected.keys.view(torch.int16))
    assert torch.equal(got.values.view(torch.int16), expected.values.view(torch.int16))
    assert int(got.values.isfinite().sum()) == 6 * num_kv_heads * head_dim


@HEADS
@by(rope_append)
@pytest.mark.parametrize("normed", [False, True])
def test_turned_heads_are_what_float64_says(
    generator, module, num_heads, num_kv_heads, head_dim, normed
):
    places = places_of(generator, POSITIONS)
    width = (num_heads + 2 * num_kv_heads) * head_dim
    partials = normal(generator, 1, 6, width)
    norms = head_norms(generator, head_dim) if normed else None
    [kv] = caches(12, num_kv_heads, head_dim, 1)
    queries, rope = poisoned(6, num_heads * head_dim), rope_of(head_dim)
    module.rope_append(partials, places, kv, rope, queries, head_norms=norms)

    first, second = partials[0].double().view(6, -1, 2, head_dim // 2).unbind(2)
    if norms is not None:
        mean = (first.square() + second.square()).sum(2, keepdim=True) / head_dim
        weights = [norms.queries] * num_heads + [norms.keys] * num_kv_heads
        weights += [torch.ones(head_dim)] * num_kv_heads
        of_first, of_second = torch.stack(weights).double().chunk(2, dim=1)
        first = first / (mean + EPS).sqrt() * of_first
        second = second / (mean + EPS).sqrt() * of_second
    angles = torch.complex(rope.cosines.double(), rope.sines.double())[places.positions]
    turned = torch.complex(first, second) * angles[:, None]
    turned = torch.cat([turned.real, turned.imag], 2)
    # Of a difference of two products each is off by some 2^-24 of itself, and by the mean's sum.
    sizes = float(torch.cat([first, second]).abs().max())
    least = (head_dim / 2 + 12) * 2.0**-24 * sizes
    assert_near(queries.view(6, num_heads, -1), turned[:, :num_heads], 0, least)
    pages = places.block_table[places.sequences, places.positions // PAGE]
    keys = kv.keys[pages, :, places.positions % PAGE]
    assert_near(keys, turned[:, num_heads:-num_kv_heads], 2.0**-8, least)
    values = kv.values[pages, :, places.positions % PAGE]
    expected = partials[0, :, -num_kv_heads * head_dim :]
    assert torch.equal(values, expected.bfloat16().view_as(values))


def test_turned_heads_have_the_same_bits_alone_and_among_others(generator):
    places = places_of(generator, [[3, 4, 5, 6, 7], list(range(60, 71))])
    partials = splits(generator, 2, 16, 3 * 32)
    norms, rope = head_norms(generator, 32), rope_of(32)
    partials[:, 2] *= 1e15
    together, apart = caches(6, 1, 32, 2)
    all_queries = poisoned(16, 32)
    rope_append.rope_append(partials, places, together, rope, all_queries, head_norms=norms)
    for some in (slice(0, 5), slice(5, 6)):
        few = Places(places.positions[some], places.sequences[some], places.block_table)
        queries = poisoned(some.stop - some.start, 32)
        part = partials[:, some].contiguous()
        rope_append.rope_append(part, few, apart, rope, queries, head_norms=norms)
        assert torch.equal(queries, all_queries[some])
    pages = places.block_table[places.sequences, places.positions // PAGE]
    at = pages[:6], slice(None), places.positions[:6] % PAGE
    assert torch.equal(apart.keys[at], together.keys[at])
    assert torch.equal(apart.values[at], together.values[at])


def product(weight: torch.Tensor, x: torch.Tensor, by=skinny_bf16) -> torch.Tensor:
    out = poisoned(len(x), len(weight))
    by.skinny_bf16(weight, x, out)
    return out


@DTYPES
@by(skinny_bf16)
@pytest.mark.parametrize(
    ("rows", "columns", "num_tokens"),
    [(1, 2, 1), (127, 62, 5), (128, 64, 16), (129, 66, 17), (300, 576, 3)],
)
def test_skinny_bf16_is_the_product(generator, module, dtype, rows, columns, num_tokens):
    weight = (normal(generator, rows, columns) * 0.02).bfloat16()
    x = (normal(generator, num_tokens, columns) * 3).to(dtype)
    exact = x.double() @ weight.double().T
    sizes = x.double().abs() @ weight.double().abs().T
    # A product is off by 2^-22 when x is cut in two, and n additions by 2^-24 of the sum of sizes.
    limit = (columns + 4) * 2.0**-24 * sizes
    assert_near(product(weight, x, module), exact, 0, limit)


@DTYPES
def test_a_product_has_the_same_bits_alone_and_among_others(generator, dtype):
    weight = normal(generator, 130, 200).bfloat16()
    x = normal(generator, 18, 200).to(dtype)
    x[3] *= 1e20  # a neighbour that would show
    x[5, 7] = torch.nan
    together = product(weight, x)
    assert bool(together[5].isnan().all())
    for token in (0, 4, 15, 17):
        assert torch.equal(product(weight, x[token, None])[0], together[token])
    assert torch.equal(product(weight, x[2:7])[2], together[4])


def test_words_need_an_even_number_of_columns():
    weight = torch.zeros(3, 5, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"^the columns of weight must be even in number, got 5$"):
        product(weight, torch.zeros(1, 5))
