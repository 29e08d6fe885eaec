"""The linear kernels in Triton's interpreter: test_kernels_triton_interpreter.py runs this file."""

import pytest
import torch
import triton
import triton.language as tl
from triton_harness import INTERPRETING, SEED, mended_dot_scaled

from specfit_kernels import e2m1, fp8, gemm, gemv_w4a16, linear_tokens, skinny_w4a4
from specfit_kernels import linear_twins as twins
from specfit_kernels import triton_numbers as numbers
from specfit_kernels.nvfp4 import FP4Tensor, quantize

assert INTERPRETING, "run this file with TRITON_INTERPRET=1"
CPU = torch.device("cpu")
NUM_TERMS = pytest.mark.parametrize("num_terms", [1, 2, 3])


@pytest.fixture(params=[SEED], ids=lambda seed: f"SEED={seed}")
def generator(request: pytest.FixtureRequest) -> torch.Generator:
    return torch.Generator().manual_seed(request.param)


@pytest.fixture(autouse=True)
def _scales_are_e4m3(request: pytest.FixtureRequest):
    if "canary" in request.node.name:
        yield
    else:
        with mended_dot_scaled():
            yield


@triton.jit
def _decode(codes, e2m1_values, e4m3_values, CODES: tl.constexpr):
    at = tl.arange(0, CODES)
    some = tl.load(codes + at)
    tl.store(e2m1_values + at, numbers.decode_e2m1(some & 15))
    tl.store(e4m3_values + at, numbers.decode_e4m3(some))


@triton.jit
def _encode(x, e2m1_codes, e4m3_codes, num_values, CHUNK: tl.constexpr):
    at = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    values = tl.load(x + at, mask=at < num_values, other=0.0)
    tl.store(e2m1_codes + at, numbers.encode_e2m1(values).to(tl.uint8), mask=at < num_values)
    tl.store(e4m3_codes + at, numbers.encode_e4m3(values).to(tl.uint8), mask=at < num_values)


@triton.jit
def _pack(codes, packed, again, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    rows = tl.arange(0, ROWS)[:, None]
    at = rows * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    bytes_ = numbers.pack(tl.load(codes + at), ROWS, COLUMNS)
    tl.store(packed + rows * (COLUMNS // 2) + tl.arange(0, COLUMNS // 2)[None, :], bytes_)
    tl.store(again + at, numbers.unpack(bytes_, ROWS, COLUMNS))


@triton.jit
def _dot_scaled(x, scales, out):
    rows = tl.arange(0, 16)
    some = tl.load(x + rows[:, None] * 32 + tl.arange(0, 32)[None, :])
    some_scales = tl.load(scales + rows[:, None] * 4 + tl.arange(0, 4)[None, :])
    y = tl.dot_scaled(some, some_scales, "e2m1", some.T, some_scales, "e2m1")
    tl.store(out + rows[:, None] * 16 + rows[None, :], y)


def poisoned(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(shape, torch.nan, dtype=dtype)


def encoded(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """E2M1 and E4M3 codes by the kernels' functions."""
    codes = [torch.full((len(x),), 0xAA, dtype=torch.uint8) for _ in range(2)]
    _encode[(triton.cdiv(len(x), 1 << 14),)](x, *codes, len(x), CHUNK=1 << 14)
    return codes[0], codes[1]


def weights(generator: torch.Generator, rows: int, columns: int) -> list[FP4Tensor]:
    """Two matrices of these rows in all, each with a global scale of its own."""
    w = torch.randn(rows, columns, generator=generator)
    parts = [(w[: rows // 3], True), (5 * w[rows // 3 :], False)]
    return [quantize(part, divides=divides) for part, divides in parts if len(part) > 0]


def exact_weight(parts: list[FP4Tensor]) -> torch.Tensor:
    """float64."""
    values = []
    for part in parts:
        codes = e2m1.decode(e2m1.unpack(part.codes)).double().unflatten(1, (-1, 16))
        scale = part.global_scale.double()
        scaled = codes * part.block_scales.double()[..., None]
        values.append((scaled / scale if part.divides else scaled * scale).flatten(1))
    return torch.cat(values)


def terms_of(x: torch.Tensor, num_terms: int) -> tuple[twins.Terms, torch.Tensor]:
    """Tokens as terms, and what those are in float64."""
    terms = twins.Terms.empty(len(x), x.shape[1], num_terms, CPU)
    twins.quantize_tokens(x, terms)
    values = terms.values().double().sum(0) * terms.token_scales.double()[:, None]
    return terms, values[:, : x.shape[1]]


def halves_of(x: torch.Tensor) -> tuple[twins.Halves, torch.Tensor]:
    halves = twins.Halves.empty(len(x), x.shape[1], CPU)
    twins.halve_tokens(x, halves)
    values = halves.values.double() * halves.token_scales.double()[:, None]
    return halves, values[:, : x.shape[1]]


def assert_sums(got: torch.Tensor, x: torch.Tensor, w: torch.Tensor, rounding: float = 0) -> None:
    """Products are exact in float32, so only sums are rounded.

    In whatever order n terms are added, each addition is off by 2^-24 of at most the sum of sizes.
    A few more are for the factors of a whole row and token, and `rounding` for that of the result.
    """
    w = torch.nn.functional.pad(w, (0, x.shape[1] - w.shape[1]))
    limit = (x.shape[1] + 16) * 2.0**-24 * (x.abs() @ w.abs().T)
    exact = x @ w.T
    assert bool(((got.double() - exact).abs() <= limit + rounding * exact.abs()).all())


def test_every_code_is_decoded_as_torch_decodes_it():
    codes = torch.arange(256, dtype=torch.uint8)
    e2m1_values, e4m3_values = poisoned(256), poisoned(256)
    _decode[(1,)](codes, e2m1_values, e4m3_values, CODES=256)
    assert torch.equal(e2m1_values, e2m1.decode(codes & 15))
    expected = codes.view(torch.float8_e4m3fn).float()
    numbers_only = ~expected.isnan()
    assert torch.equal(e4m3_values[numbers_only], expected[numbers_only])


def test_values_are_encoded_as_torch_encodes_them(generator):
    every_bf16 = torch.arange(1 << 16).to(torch.int16).view(torch.bfloat16).float()
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    ties = torch.cat([(codes[1:] + codes[:-1]) / 2, torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 5])])
    beside = [torch.nextafter(ties, torch.tensor(end)) for end in (0.0, 1e9)]
    sizes = torch.exp(torch.randn(4096, generator=generator) * 4)
    x = torch.cat([every_bf16, ties, *beside, sizes])
    x = torch.cat([x, -x])
    e2m1_codes, e4m3_codes = encoded(x)
    assert torch.equal(e4m3_codes, fp8.to_e4m3(x).view(torch.uint8))
    finite = ~x.isnan()
    assert torch.equal(e2m1_codes[finite], e2m1.encode(x[finite]))
    assert set(e2m1_codes[~finite].tolist()) == {7, 15}


def test_codes_are_packed_as_torch_packs_them(generator):
    codes = torch.randint(16, (8, 64), generator=generator, dtype=torch.uint8)
    packed, again = (torch.full((8, n), 0xAA, dtype=torch.uint8) for n in (32, 64))
    _pack[(1,)](codes, packed, again, ROWS=8, COLUMNS=64)
    assert torch.equal(packed, e2m1.pack(codes))
    assert torch.equal(again, codes)


def awkward_tokens(generator: torch.Generator, columns: int) -> torch.Tensor:
    """Of all sizes, of none, of one value, with an infinity and with a NaN."""
    x = torch.randn(9, columns, generator=generator)
    x *= torch.tensor([1, 1e-30, 1e30, 1e-45, 0, 3, 1, 1, 1])[:, None]
    x[5] = torch.exp(3 * x[5])
    x[6, :-1] = 0
    x[7, columns // 2], x[8, -1] = -torch.inf, torch.nan
    return x


@NUM_TERMS
@pytest.mark.parametrize("columns", [1, 16, 255, 257, 2049])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_tokens_are_quantized_as_torch_quantizes_them(generator, num_terms, columns, dtype):
    x = awkward_tokens(generator, columns).to(dtype)
    finite = x.isfinite().all(1)
    expected, got = (twins.Terms.empty(9, columns, num_terms, CPU) for _ in range(2))
    twins.quantize_tokens(x, expected)
    got.codes.fill_(0xAA)
    got.scales.view(torch.uint8).fill_(0xAA)
    got.token_scales.fill_(-1)
    linear_tokens.quantize_tokens(x, got)
    assert torch.equal(got.token_scales[finite], expected.token_scales[finite])
    assert bool(got.token_scales[~finite].isnan().all())
    assert torch.equal(got.codes[finite], expected.codes[finite])
    scales = [terms.scales.view(torch.uint8)[finite] for terms in (got, expected)]
    assert torch.equal(*scales)


@pytest.mark.parametrize("columns", [1, 255, 257, 2049])
def test_tokens_are_halved_as_torch_halves_them(generator, columns):
    x = awkward_tokens(generator, columns)
    expected, got = (twins.Halves.empty(9, columns, CPU) for _ in range(2))
    twins.halve_tokens(x, expected)
    got.values.fill_(-1)
    got.token_scales.fill_(-1)
    linear_tokens.halve_tokens(x, got)
    assert torch.equal(got.token_scales, expected.token_scales)
    assert torch.equal(got.values.nan_to_num(nan=-2), expected.values.nan_to_num(nan=-2))


# Rows and tokens around a tile, columns around a step and a block of 16.
SHAPES = pytest.mark.parametrize(
    ("rows", "columns", "num_tokens"),
    [(1, 16, 1), (63, 255, 5), (64, 256, 15), (65, 257, 16), (129, 600, 17)],
)


@NUM_TERMS
@SHAPES
def test_skinny_w4a4_is_the_product(generator, rows, columns, num_tokens, num_terms):
    parts = weights(generator, rows, columns)
    terms, x = terms_of(torch.randn(num_tokens, columns, generator=generator), num_terms)
    weight = twins.tiled(parts)
    partials = poisoned(weight.splits.num, num_tokens, rows)
    skinny_w4a4.skinny_w4a4(weight, terms, partials)
    assert_sums(partials.double().sum(0), x, exact_weight(parts)[:, :columns])


@SHAPES
def test_gemv_w4a16_is_the_product(generator, rows, columns, num_tokens):
    parts = weights(generator, rows, columns)
    halves, x = halves_of(torch.randn(num_tokens, columns, generator=generator))
    weight = twins.worded(parts)
    partials = poisoned(weight.splits.num, num_tokens, rows)
    gemv_w4a16.gemv_w4a16(weight, halves, partials)
    assert_sums(partials.double().sum(0), x, exact_weight(parts)[:, :columns])


GEMM_SHAPES = pytest.mark.parametrize(
    ("rows", "columns", "num_tokens"),
    [(1, 16, 1), (127, 255, 127), (128, 256, 128), (129, 257, 129)],
)
DTYPES = pytest.mark.parametrize(
    ("dtype", "rounding"), [(torch.float32, 0), (torch.float16, 2.0**-11)]
)


@pytest.mark.parametrize("num_terms", [1, 3])
@GEMM_SHAPES
def test_gemm_w4a4_is_the_product(generator, rows, columns, num_tokens, num_terms):
    parts = weights(generator, rows, columns)
    terms, x = terms_of(torch.randn(num_tokens, columns, generator=generator), num_terms)
    out = poisoned(num_tokens, rows)
    gemm.gemm_w4a4(twins.tiled(parts), terms, out)
    assert_sums(out, x, exact_weight(parts)[:, :columns])


@GEMM_SHAPES
@DTYPES
def test_gemm_w4a16_is_the_product(generator, rows, columns, num_tokens, dtype, rounding):
    parts = weights(generator, rows, columns)
    halves, x = halves_of(torch.randn(num_tokens, columns, generator=generator))
    out = poisoned(num_tokens, rows, dtype=dtype)
    gemm.gemm_w4a16(twins.worded(parts), halves, out)
    assert_sums(out, x, exact_weight(parts)[:, :columns], rounding)


@pytest.mark.parametrize("num_programs", [1, 2, 4])
def test_splits_of_several_steps_and_a_shorter_last_one_are_the_product(
    generator, monkeypatch, num_programs
):
    monkeypatch.setattr(twins, "_PROGRAMS", num_programs)
    parts = weights(generator, 30, 1216)  # five steps
    x = torch.randn(2, 1216, generator=generator)
    for kind in ("skinny_w4a4 2", "gemv_w4a16"):
        partials = partial_sums(kind, parts, x)
        assert len(partials) == {1: 1, 2: 2, 4: 3}[num_programs]
        exact = halves_of(x)[1] if kind == "gemv_w4a16" else terms_of(x, 2)[1]
        assert_sums(partials.double().sum(0), exact, exact_weight(parts))


def partial_sums(kind: str, parts: list[FP4Tensor], x: torch.Tensor) -> torch.Tensor:
    weight = twins.worded(parts) if kind == "gemv_w4a16" else twins.tiled(parts)
    partials = poisoned(weight.splits.num, len(x), sum(len(part.codes) for part in parts))
    if kind == "gemv_w4a16":
        gemv_w4a16.gemv_w4a16(weight, halves_of(x)[0], partials)
    else:
        skinny_w4a4.skinny_w4a4(weight, terms_of(x, int(kind[-1]))[0], partials)
    return partials


@pytest.mark.parametrize("kind", ["skinny_w4a4 1", "skinny_w4a4 2", "skinny_w4a4 3", "gemv_w4a16"])
def test_a_token_has_the_same_bits_alone_and_among_others(generator, kind):
    parts = weights(generator, 70, 520)
    x = torch.randn(18, 520, generator=generator)
    x[3] *= 1e20  # a neighbour that would show
    together = partial_sums(kind, parts, x)
    for token in (0, 4, 15, 17):
        assert torch.equal(partial_sums(kind, parts, x[token, None])[:, 0], together[:, token])
    assert torch.equal(partial_sums(kind, parts, x[2:7])[:, 2], together[:, 4])


@pytest.mark.parametrize("kind", ["skinny_w4a4 3", "gemv_w4a16"])
def test_what_is_not_finite_stays_in_its_token(generator, kind):
    parts = weights(generator, 20, 300)
    x = torch.randn(3, 300, generator=generator)
    clean = partial_sums(kind, parts, x)
    x[1, 7] = torch.nan
    got = partial_sums(kind, parts, x).sum(0)
    assert bool(got[1].isnan().all())
    assert torch.equal(got[[0, 2]], clean.sum(0)[[0, 2]])


@pytest.mark.parametrize("num_splits", [1, 2, 7])
@DTYPES
def test_splits_are_added_in_their_order(generator, num_splits, dtype, rounding):
    del rounding
    partials = torch.randn(num_splits, 3, 341, generator=generator)  # twice the chunk, less one
    partials *= 10.0 ** torch.randint(-6, 6, partials.shape, generator=generator)
    expected, got = poisoned(3, 341, dtype=dtype), poisoned(3, 341, dtype=dtype)
    twins.sum_splits(partials, expected)
    linear_tokens.sum_splits(partials, got)
    assert torch.equal(got, expected)


def test_canary_the_interpreter_still_takes_e4m3_scales_for_powers_of_two():
    # When this fails, Triton reads them: `mended_dot_scaled` is to be removed, and this test.
    codes = torch.full((16, 32), 0x22, dtype=torch.uint8)  # 1.0
    scales, out = torch.ones(16, 4).to(torch.float8_e4m3fn), poisoned(16, 16)
    _dot_scaled[(1,)](codes, scales, out)
    assert not bool((out == 64).any())
    with mended_dot_scaled():
        _dot_scaled[(1,)](codes, scales, out)
    assert bool((out == 64).all())
