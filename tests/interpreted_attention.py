"""Attention in Triton's interpreter: test_kernels_triton_interpreter.py runs this file."""

from dataclasses import dataclass, replace
from types import ModuleType

import pytest
import torch
import triton
import triton.language as tl
from triton_harness import INTERPRETING, SEED

from specfit_kernels import attention, attention_twins, linear_twins
from specfit_kernels.attention_twins import SPLIT, AttentionPartials
from specfit_kernels.kv_pages import PAGE, KVPages, Places

assert INTERPRETING, "run this file with TRITON_INTERPRET=1"
CPU = torch.device("cpu")


@pytest.fixture(params=[SEED], ids=lambda seed: f"SEED={seed}")
def generator(request: pytest.FixtureRequest) -> torch.Generator:
    return torch.Generator().manual_seed(request.param)


@dataclass(frozen=True)
class Pass:
    """Tokens of some sequences over a cache that is NaN wherever there is nothing to see."""

    queries: torch.Tensor
    places: Places
    kv: KVPages
    each: int
    tree: torch.Tensor | None = None

    @property
    def num_heads(self) -> int:
        return self.queries.shape[1] // self.kv.head_dim

    def partials(self, module: ModuleType = attention, max_length: int = 512) -> AttentionPartials:
        shape = (len(self.queries), self.num_heads, self.kv.head_dim)
        partials = AttentionPartials.empty(*shape, max_length, CPU)
        for tensor in (partials.sums, partials.tops, partials.weights, partials.attended):
            tensor.fill_(torch.nan)
        module.attn_verify(self.queries, self.places, self.kv, partials, self.each, tree=self.tree)
        return partials

    def attended(self, module: ModuleType = attention) -> torch.Tensor:
        out = torch.full_like(self.queries, torch.nan)
        module.attn_combine(self.partials(module), self.places, out, self.each)
        return out

    def of(self, sequence: int, first: int, each: int) -> "Pass":
        """Some tokens of one sequence alone."""
        at = slice(sequence * self.each + first, sequence * self.each + first + each)
        places = Places(
            self.places.positions[at], self.places.sequences[at], self.places.block_table
        )
        return replace(self, queries=self.queries[at], places=places, each=each)


def made(
    generator: torch.Generator,
    bases: list[int],
    each: int,
    group: int,
    *,
    dim: int = 64,
    num_kv_heads: int = 1,
) -> Pass:
    """`each` tokens from a base on, of each sequence; a base of -1 is that of none."""
    num_pages = [-(-(base + each) // PAGE) if base >= 0 else 0 for base in bases]
    kv = KVPages.empty(sum(num_pages) + 1, num_kv_heads, dim, CPU)
    nowhere = len(kv.keys) - 1
    order = torch.randperm(nowhere, generator=generator)
    table = torch.full((len(bases) + 1, 9), nowhere, dtype=torch.int32)
    for cache in (kv.keys, kv.values):
        cache.fill_(torch.nan)
    # Sequences stand in another order than their lines of the table.
    lines = torch.randperm(len(bases) + 1, generator=generator)[: len(bases)]
    for line, base, count in zip(lines.tolist(), bases, num_pages, strict=True):
        pages, order = order[:count], order[count:]
        table[line, :count] = pages.int()
        for cache in (kv.keys, kv.values):
            columns = torch.randn(num_kv_heads, count * PAGE, dim, generator=generator)
            columns[:, base + each :] = torch.nan
            cache[pages] = columns.unflatten(1, (-1, PAGE)).transpose(0, 1).bfloat16()
    firsts = torch.tensor(bases)[:, None]
    positions = torch.where(firsts < 0, -1, firsts + torch.arange(each)).flatten().int()
    places = Places(positions, lines.repeat_interleave(each).int(), table)
    shape = (len(positions), group * num_kv_heads * dim)
    return Pass(torch.randn(shape, generator=generator), places, kv, each)


def trees(generator: torch.Generator, num_sequences: int, each: int) -> torch.Tensor:
    """Ancestors of each token, whose parent is any before it; bits from its own on are noise."""
    masks = []
    for _ in range(num_sequences):
        own: list[int] = []
        for token in range(each):
            parent = int(torch.randint(token, (), generator=generator)) if token else -1
            own.append(own[parent] | 1 << parent if token else 0)
        noise = torch.randint(1 << 62, (each,), generator=generator)
        masks += [
            mask | int(n) >> i << i for i, (mask, n) in enumerate(zip(own, noise, strict=True))
        ]
    return torch.tensor(masks)


def exact(given: Pass) -> tuple[torch.Tensor, torch.Tensor]:
    """What is attended to, in float64, and how far roundings may bring another from it."""
    dim, kv, table = given.kv.head_dim, given.kv, given.places.block_table
    values, errors = [], []
    for token, query in enumerate(given.queries.double()):
        first = token - token % given.each
        base, drafted = int(given.places.positions[first]), token - first
        if base < 0:
            values.append(torch.zeros_like(query))
            errors.append(torch.zeros_like(query))
            continue
        columns = list(range(base + drafted + 1))
        if given.tree is not None:
            mask = int(given.tree[token])
            columns = columns[:base] + [
                base + i for i in range(drafted + 1) if i == drafted or mask >> i & 1
            ]
        at = torch.tensor(columns)
        pages = table[int(given.places.sequences[first])][at // PAGE].long()
        k, v = (cache[pages, :, at % PAGE].double() for cache in (kv.keys, kv.values))
        heads = query.view(kv.num_kv_heads, -1, dim) * dim**-0.5
        probs = torch.einsum("hgd,chd->hgc", heads, k).softmax(-1)
        values.append(torch.einsum("hgc,chd->hgd", probs, v).flatten())
        # Of a logit, 2^-17 of its products; of a power and of what is added up, as much.
        sizes = torch.einsum("hgd,chd->hgc", heads.abs(), k.abs()).amax(-1, keepdim=True)
        spread = torch.einsum("hgc,chd->hgd", probs, v.abs())
        errors.append((2.0**-15 * (1 + sizes) * spread).flatten())
    return torch.stack(values), torch.stack(errors)


# Last columns around a page and around a split, and one alone; -1 is nowhere.
AROUND = [0, 62, 63, 64, 254, 255, 256, -1]


@pytest.mark.parametrize(
    ("group", "dim", "num_kv_heads", "each", "bases", "is_tree"),
    [
        (1, 64, 2, 1, AROUND, False),
        (1, 64, 1, 3, [60, 61, 62, 63, 253], True),
        (3, 64, 2, 5, [0, 60, -1, 253], False),
        (3, 64, 1, 5, [0, 253], True),
        (4, 128, 1, 3, [62, 254], False),
        (4, 128, 1, 3, [254], True),
        (8, 64, 1, 5, [63, 252], False),  # 40 rows, in two programs
        (8, 64, 1, 5, [253], True),
    ],
)
def test_attention_is_the_softmax_over_what_is_seen(
    generator, group, dim, num_kv_heads, each, bases, is_tree
):
    given = made(generator, bases, each, group, dim=dim, num_kv_heads=num_kv_heads)
    if is_tree:
        given = replace(given, tree=trees(generator, len(bases), each))
    expected, error = exact(given)
    for module in (attention_twins, attention):
        assert bool(((given.attended(module).double() - expected).abs() <= error).all())


def test_a_token_has_the_same_bits_alone_and_among_others_and_at_any_k(generator):
    bases = [250, *torch.randint(100, (15,), generator=generator).tolist()]
    given = made(generator, bases, 9, 3)  # 27 rows, in two programs
    given.queries[9 * 4 : 9 * 5] *= 1e20  # a neighbour that would show
    together = given.partials()
    for sequence, first, each in ((0, 0, 9), (0, 2, 1), (0, 5, 2), (0, 6, 3), (8, 3, 4)):
        alone = given.of(sequence, first, each).partials()
        start = sequence * 9 + first
        for token in range(each):
            num_splits = (bases[sequence] + first + token) // SPLIT + 1
            for name in ("sums", "tops", "weights"):
                mine = getattr(alone, name)[:num_splits, token]
                assert torch.equal(mine, getattr(together, name)[:num_splits, start + token])
                assert not bool(mine.isnan().any())


def test_how_many_splits_are_launched_changes_nothing(generator):
    given = made(generator, [255, 10], 2, 1)
    outs = []
    for max_length in (258, 1500):
        outs.append(torch.full_like(given.queries, torch.nan))
        partials = given.partials(max_length=max_length)
        attention.attn_combine(partials, given.places, outs[-1], 2)
    assert torch.equal(*outs)


@pytest.mark.parametrize("num_splits", [1, 16, 17, 35])
def test_splits_are_combined_as_one_softmax(generator, num_splits):
    shape = (num_splits + 1, 2, 1)  # the last is behind all columns, and poison
    tops = 20 * torch.randn(shape, generator=generator)
    weights = 1 + 255 * torch.rand(shape, generator=generator)
    sums = torch.randn(*shape, 64, generator=generator)
    if num_splits > 2:
        sums[1], tops[1], weights[1] = 0, -torch.inf, 0  # of a tree: nothing is seen
    for tensor in (sums, tops, weights):
        tensor[-1] = torch.nan
    empty = AttentionPartials.empty(2, 1, 64, SPLIT, CPU)
    partials = replace(empty, sums=sums, tops=tops, weights=weights)
    positions = torch.tensor([num_splits * SPLIT - 2, num_splits * SPLIT - 1]).int()
    nothing = torch.zeros(1, 1, dtype=torch.int32)
    places = Places(positions, torch.zeros(2, dtype=torch.int32), nothing)
    factors = torch.exp2(tops[:-1].double() - tops[:-1].double().amax(0))[..., None]
    total = (factors * weights[:-1, ..., None].double()).sum(0)
    expected = ((factors * sums[:-1].double()).sum(0) / total).flatten(1)
    spread = ((factors * sums[:-1].double().abs()).sum(0) / total).flatten(1)
    for module in (attention_twins, attention):
        out = torch.full((2, 64), torch.nan)
        module.attn_combine(partials, places, out, 2)
        # A power of two of a difference of 100 or so loses 2^-17; a sum of 35, less.
        assert bool(((out - expected).abs() <= 2.0**-16 * spread).all())


@pytest.mark.parametrize("num_terms", [0, 1, 3])  # 0: float16
def test_what_is_attended_to_is_quantized_as_any_token(generator, num_terms):
    # More columns than are quantized at a time, and no multiple of 256.
    given = made(generator, [70], 1, 17)
    partials = given.partials()
    attended = torch.full_like(given.queries, torch.nan)
    attention.attn_combine(partials, given.places, attended, 1)
    columns = given.queries.shape[1]
    for _ in range(2):  # the second time counts from zero again
        if num_terms:
            expected, got = (linear_twins.Terms.empty(1, columns, num_terms, CPU) for _ in range(2))
            got.codes.fill_(0xAA)
            got.scales.view(torch.uint8).fill_(0xAA)
            linear_twins.quantize_tokens(attended, expected)
            attention.attn_combine(partials, given.places, got, 1)
            assert torch.equal(got.codes, expected.codes)
            assert torch.equal(got.scales.view(torch.uint8), expected.scales.view(torch.uint8))
        else:
            expected, got = (linear_twins.Halves.empty(1, columns, CPU) for _ in range(2))
            got.values.fill_(-1)
            linear_twins.halve_tokens(attended, expected)
            attention.attn_combine(partials, given.places, got, 1)
            assert torch.equal(got.values, expected.values)
        assert torch.equal(got.token_scales, expected.token_scales)
    assert not bool(partials.arrived.any() | partials.largest.any())


def test_what_is_not_finite_in_a_query_stays_in_its_token(generator):
    given = made(generator, [63, 5], 2, 3)
    clean = given.attended()
    given.queries[1, 64:128].view(torch.int32)[5] = 0x7FFFFFFF  # the NaN of a GPU
    got = given.attended()
    others = torch.arange(3 * 64) // 64 != 1
    assert bool(got[1, 64:128].isnan().all())
    assert torch.equal(got[1, others], clean[1, others])
    assert torch.equal(got[[0, 2, 3]], clean[[0, 2, 3]])


def test_wrong_sizes_are_refused(generator):
    given = made(generator, [3], 65, 1)
    partials = AttentionPartials.empty(65, 1, 64, 256, CPU)
    arguments = (given.queries, given.places, given.kv, partials, 65)
    with pytest.raises(ValueError, match=r"^a tree must have at most 64 tokens, got 65$"):
        attention.attn_verify(*arguments, tree=torch.zeros(65, dtype=torch.int64))
    kv = KVPages.empty(1, 1, 96, CPU)
    with pytest.raises(ValueError, match=r"^kv.head_dim must be 64 or 128, got 96$"):
        attention.attn_verify(given.queries, given.places, kv, partials, 65)


@triton.jit
def _multiply_bf16(x, out):
    at = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
    some = tl.load(x + at)
    tl.store(out + at, tl.dot(some, some))


def test_canary_the_interpreter_still_multiplies_bf16_wrongly():
    # When this fails, Triton has mended it, and `attn_verify` needs no DOT.
    x, out = torch.full((16, 16), 1.5, dtype=torch.bfloat16), torch.zeros(16, 16)
    _multiply_bf16[(1,)](x, out)
    assert not bool((out == 36).all())
