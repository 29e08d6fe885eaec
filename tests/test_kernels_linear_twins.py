"""The twins of the linear kernels: layouts bit by bit, and what quantized tokens are worth."""

import pytest
import torch

from specfit_kernels import e2m1, weights
from specfit_kernels import linear_twins as twins
from specfit_kernels.nvfp4 import FP4Tensor, quantize
from specfit_kernels.rules import ScaleRule

CPU = torch.device("cpu")
LAYOUTS = pytest.mark.parametrize("layout", [twins.tiled, twins.worded])


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def matrices(columns: int) -> list[FP4Tensor]:
    """As q, k and v are fused: of both conventions, each with its own global scale."""
    parts = [normal(150, columns), 5 * normal(3, columns, seed=1), normal(40, columns, seed=2)]
    return [quantize(w, divides=i != 1) for i, w in enumerate(parts)]


def terms_of(x: torch.Tensor, num_terms: int) -> twins.Terms:
    terms = twins.Terms.empty(*x.shape, num_terms, CPU)
    twins.quantize_tokens(x, terms)
    return terms


def halves_of(x: torch.Tensor) -> twins.Halves:
    halves = twins.Halves.empty(*x.shape, CPU)
    twins.halve_tokens(x, halves)
    return halves


@LAYOUTS
@pytest.mark.parametrize("columns", [1, 16, 31, 255, 256, 257, 576])
def test_a_layout_holds_every_value_and_zeros_after_them(layout, columns):
    parts = matrices(columns)
    values = layout(parts).values()
    assert values.shape == (193, -(-columns // 256) * 256)
    expected = [
        e2m1.decode(e2m1.unpack(part.codes)) * part.block_scales.float().repeat_interleave(16, 1)
        for part in parts
    ]
    wide = expected[0].shape[1]
    assert torch.equal(values[:, :wide], torch.cat(expected))
    assert bool((values[:, wide:] == 0).all())


def test_the_size_of_chunks_changes_no_word(monkeypatch):
    parts = matrices(300)
    whole = twins.worded(parts).words
    monkeypatch.setattr(weights, "CHUNK_VALUES", 3 * 512)
    assert torch.equal(twins.worded(parts).words, whole)


@LAYOUTS
def test_each_matrix_keeps_its_global_scale(layout):
    parts = matrices(64)
    row_scales = layout(parts).row_scales
    assert torch.equal(row_scales[:150], (1 / parts[0].global_scale).expand(150))
    assert torch.equal(row_scales[150:153], parts[1].global_scale.expand(3))
    assert torch.equal(row_scales[153:], (1 / parts[2].global_scale).expand(40))


@LAYOUTS
def test_a_weight_is_four_and_a_half_bits(layout):
    weight = layout([quantize(normal(128, 512), ScaleRule.amax)])
    codes = weight.codes if isinstance(weight, twins.TiledWeight) else weight.words
    assert 8 * (codes.nbytes + weight.scales.nbytes) == 4.5 * 128 * 512


def test_a_tile_of_scales_lies_as_tensor_cores_take_it():
    scales = torch.randint(1, 126, (256, 16), dtype=torch.uint8).view(torch.float8_e4m3fn)
    codes = torch.zeros(256, 128, dtype=torch.uint8)
    part = FP4Tensor(codes, scales, torch.tensor(1.0), divides=False, columns=256)
    tiles = twins.tiled([part]).scales.view(torch.uint8)
    for row in range(256):
        for group in range(16):
            byte = 16 * (row % 32) + 4 * (row % 128 // 32) + group % 4
            assert tiles[row // 128, group // 4, byte] == scales.view(torch.uint8)[row, group]


def test_a_code_lies_where_a_shift_brings_it_to_float16():
    sign_bits = [13, 14, 12, 15]
    for column in range(64):
        codes = torch.zeros(1, 64, dtype=torch.uint8)
        codes[0, column] = 0b1101  # negative, of size 5
        part = FP4Tensor(
            e2m1.pack(codes), torch.ones(1, 4).to(torch.float8_e4m3fn), torch.tensor(1.0), False, 64
        )
        words = twins.worded([part]).words[0, :8]
        group, inside = divmod(column, 32)
        code, word, half = inside // 8, inside % 8 // 2, inside % 2
        bits = 5 << 3 * code | 1 << sign_bits[code]
        expected = torch.zeros(8, dtype=torch.int64)
        expected[4 * group + word] = bits << 16 * half
        assert torch.equal(words.long() & 0xFFFFFFFF, expected)


def test_every_scale_that_there_is_survives_as_half_of_a_float16():
    scales = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn)[None]
    codes = torch.full((1, 127 * 8), 0x22, dtype=torch.uint8)  # 1.0
    part = FP4Tensor(codes, scales, torch.tensor(1.0), divides=False, columns=127 * 16)
    values = twins.worded([part]).values()[0, : 127 * 16 : 16]
    assert torch.equal(values, scales[0].float())


@pytest.mark.parametrize("num_terms", [1, 2, 3])
def test_a_token_scale_is_the_least_power_of_two_that_brings_it_into_range(num_terms):
    x = normal(40, 48) * torch.logspace(-20, 20, 40)[:, None]
    scales = terms_of(x, num_terms).token_scales
    quotients = x.abs().amax(1) / scales
    assert bool((scales.frexp().mantissa == 0.5).all())
    assert bool(((quotients > 1344 * (1 - 1e-6)) & (quotients < 2688 * (1 + 1e-6))).all())


def test_a_term_is_what_is_nearest_to_what_the_terms_before_left():
    x = normal(7, 96) * torch.exp(2 * normal(7, 96, seed=1))
    three, one = terms_of(x, 3), terms_of(x, 1)
    assert torch.equal(three.codes[:, :1], one.codes)
    rest = x.double() / three.token_scales[:, None]
    for term in range(3):
        steps = three.scales[:, term].double().repeat_interleave(16, 1)[:, :96]
        taken = three.values()[term].double()[:, :96]
        nearest = e2m1.nearest((rest / steps).float()).double() * steps
        # Of a value in the middle of two codes, either may be taken.
        assert torch.allclose((rest - taken).abs(), (rest - nearest).abs(), rtol=1e-5, atol=0)
        rest -= taken


@pytest.mark.parametrize(
    ("num_terms", "most"), [(1, 9.9e-2), (2, 8.9e-3), (3, 8.3e-4), (None, 2.2e-4)]
)
def test_what_quantized_tokens_cost_a_product(num_terms, most):
    x, w = normal(8, 4096), normal(512, 4096, seed=1)
    if num_terms is None:
        halves = halves_of(x)
        got = halves.values.double() * halves.token_scales[:, None]
    else:
        terms = terms_of(x, num_terms)
        got = terms.values().double().sum(0) * terms.token_scales[:, None]
    exact = x.double() @ w.double().T
    assert most * 0.85 < float((got @ w.double().T - exact).norm() / exact.norm()) < most


@pytest.mark.parametrize("size", [0.0, 1e-45, 1e-38, 3e38])
def test_tokens_of_any_size_stay_finite(size):
    x = size * torch.sign(normal(2, 32))
    for tokens in (terms_of(x, 3), halves_of(x)):
        assert bool((tokens.token_scales > 0).all())
        assert bool(tokens.token_scales.isfinite().all())
    assert bool(halves_of(x).values.isfinite().all())


def products(parts: list[FP4Tensor], x: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What each twin writes, and which tokens it multiplied."""
    tiled, worded = twins.tiled(parts), twins.worded(parts)
    terms, halves = terms_of(x, 2), halves_of(x)
    rows = len(tiled.codes)
    skinny = torch.full((tiled.splits.num, len(x), rows), torch.nan)
    gemv = torch.full((worded.splits.num, len(x), rows), torch.nan)
    outs = [torch.full((len(x), rows), torch.nan) for _ in range(4)]
    twins.skinny_w4a4(tiled, terms, skinny)
    twins.sum_splits(skinny, outs[0])
    twins.gemv_w4a16(worded, halves, gemv)
    twins.sum_splits(gemv, outs[1])
    twins.gemm_w4a4(tiled, terms, outs[2])
    twins.gemm_w4a16(worded, halves, outs[3])
    as_terms = terms.values().double().sum(0) * terms.token_scales[:, None]
    as_halves = halves.values.double() * halves.token_scales[:, None]
    return list(zip(outs, [as_terms, as_halves] * 2, strict=True))


@pytest.mark.parametrize("columns", [31, 256, 1216])
@pytest.mark.parametrize("num_programs", [2, 296])
def test_twins_are_the_product(monkeypatch, columns, num_programs):
    monkeypatch.setattr(twins, "_PROGRAMS", num_programs)
    parts = matrices(columns)
    w = torch.cat([part.dequantize().double() for part in parts])
    for got, x in products(parts, normal(3, columns)):
        # The sum of n products is off by n * 2^-24 of their sizes at most.
        limit = (columns + 16) * 2.0**-24 * (x[:, :columns].abs() @ w.abs().T)
        assert bool(((got - x[:, :columns] @ w.T).abs() <= limit).all())


@pytest.mark.parametrize(
    ("rows", "columns", "tiled_splits", "word_splits"),
    [(576, 576, 3, 3), (4096, 4096, 8, 4), (28672, 4096, 1, 1), (4096, 14336, 8, 4)],
)
def test_splits_fill_a_large_device_and_none_is_empty(rows, columns, tiled_splits, word_splits):
    for tile, expected in ((twins.TILED_ROWS, tiled_splits), (twins.WORD_ROWS, word_splits)):
        num_steps = -(-columns // twins.STEP)
        splits = twins._splits(rows, tile, num_steps)
        assert splits.num == expected
        assert (splits.num - 1) * splits.steps < num_steps <= splits.num * splits.steps


@LAYOUTS
def test_what_cannot_be_one_weight_is_refused_by_name(layout):
    narrow, wide = quantize(normal(2, 32)), quantize(normal(2, 64))
    with pytest.raises(
        ValueError, match=r"^parts\[1\] must have 32 columns, as parts\[0\], got 64"
    ):
        layout([narrow, wide])
    wide.block_scales.view(torch.uint8)[1, 2] = 0x7F
    with pytest.raises(ValueError, match=r"^parts\[0\]\.block_scales must be 0 or more, got nan"):
        layout([wide])


def test_a_token_has_one_to_three_terms():
    with pytest.raises(ValueError, match=r"^num_terms must be 1, 2 or 3, got 4$"):
        twins.Terms.empty(1, 16, 4, CPU)


def test_the_scale_of_a_token_that_is_not_finite_says_so():
    x = normal(4, 64)
    x[0, 3], x[1, 5] = torch.nan, torch.inf
    assert terms_of(x, 3).token_scales.isnan().tolist() == [True, True, False, False]
