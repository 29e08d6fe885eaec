"""Acceptance in Triton's interpreter: test_kernels_triton_interpreter.py runs this file."""

from dataclasses import dataclass, replace
from types import ModuleType

import pytest
import torch
from triton_harness import INTERPRETING, SEED

from specfit_kernels import rejection, sampling, sampling_twins
from specfit_kernels.sampling_twins import CHUNK, Acceptance
from specfit_serve.protocols import Draft
from specfit_serve.verify import sample, target_distribution, verify_greedy, verify_sampled

assert INTERPRETING, "run this file with TRITON_INTERPRET=1"
CPU = torch.device("cpu")


@pytest.fixture(params=[SEED], ids=lambda seed: f"SEED={seed}")
def generator(request: pytest.FixtureRequest) -> torch.Generator:
    return torch.Generator().manual_seed(request.param)


def poisoned(num_rows: int, k: int, vocab_size: int) -> Acceptance:
    out = Acceptance.empty(num_rows, k, vocab_size, CPU)
    for tensor in vars(out).values():
        tensor.fill_(torch.nan if tensor.is_floating_point() else -7)
    return out


def assert_outcome(out: Acceptance, draft: Draft, num_kept: torch.Tensor, own: torch.Tensor):
    assert out.num_kept.tolist() == num_kept.tolist()
    assert out.own_tokens.tolist() == own.tolist()
    for row, (kept, token) in enumerate(zip(num_kept.tolist(), own.tolist(), strict=True)):
        behind = [-1] * (out.emitted.shape[1] - kept - 1)
        assert out.emitted[row].tolist() == [*draft.tokens[row, :kept].tolist(), token, *behind]


@pytest.mark.parametrize("vocab_size", [1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5])
def test_argmax_is_torchs(generator, vocab_size):
    logits = torch.randint(-3, 4, (7, vocab_size), generator=generator).float()  # ties
    logits[1] = -torch.inf
    logits[2] = torch.where(torch.rand(vocab_size, generator=generator) < 0.5, 0.0, -0.0)
    logits[3, int(torch.randint(vocab_size, (), generator=generator))] = torch.nan
    logits[3, -1] = -torch.nan
    logits[4, -1] = torch.inf
    logits[5] = -logits[5].abs() - 1
    out = poisoned(7, 0, vocab_size)
    expected = torch.empty_like(out.best)
    sampling_twins.argmax_partials(logits, expected)
    sampling.argmax_partials(logits, out.best)
    assert torch.equal(out.best, expected)
    for module in (sampling_twins, sampling):
        ids = torch.full((7,), -7)
        module.argmax(out.best, ids)
        assert torch.equal(ids, logits.argmax(-1))


@pytest.mark.parametrize(("vocab_size", "k"), [(5, 4), (CHUNK + 3, 2), (9, 0)])
def test_a_greedy_target_keeps_what_verify_keeps(generator, vocab_size, k):
    num_rows = 12
    logits = torch.randint(-4, 5, (num_rows, k + 1, vocab_size), generator=generator).float()
    tokens = torch.randint(vocab_size, (num_rows, k), generator=generator)
    agree = torch.rand(num_rows, k, generator=generator) < 0.7
    tokens = torch.where(agree, logits[:, :-1].argmax(-1), tokens)
    lengths = torch.randint(k + 1, (num_rows,), generator=generator)
    draft = Draft(tokens, lengths)
    expected = verify_greedy(logits, draft)
    for module in (sampling_twins, sampling):
        out = poisoned(num_rows, k, vocab_size)
        module.argmax_partials(logits.flatten(0, 1), out.best)
        module.accept(tokens, lengths, out)
        assert_outcome(out, draft, expected.num_kept, expected.own_tokens)


@dataclass(frozen=True)
class Case:
    """What a round is decided by."""

    logits: torch.Tensor  # rows seq vocab
    draft: Draft
    temperatures: torch.Tensor
    uniforms: torch.Tensor

    def decided(self, module: ModuleType) -> Acceptance:
        num_rows, seq, vocab_size = self.logits.shape
        out = poisoned(num_rows, seq - 1, vocab_size)
        draft = self.draft
        module.accept_sampled(
            self.logits.flatten(0, 1),
            draft.tokens,
            draft.lengths,
            draft.probs,
            self.temperatures,
            self.uniforms,
            out,
        )
        return out


def case(
    generator: torch.Generator, num_rows: int, k: int, vocab_size: int, has_probs: bool
) -> Case:
    """Drafts that are sampled from something like the target, greedy rows among the others."""
    logits = 2 * torch.randn(num_rows, k + 1, vocab_size, generator=generator)
    logits[:, :, ::7] = -torch.inf  # tokens of probability 0
    temperatures = 0.5 + torch.rand(num_rows, generator=generator)
    temperatures[::4] = 0
    near = logits[:, :-1] + torch.randn(num_rows, k, vocab_size, generator=generator)
    probs = near.softmax(-1)
    uniforms = torch.rand(num_rows, 2 * k + 1, dtype=torch.float64, generator=generator)
    tokens = sample(probs.flatten(0, 1), uniforms[:, :k].flatten()).view(num_rows, k)
    greedy = torch.rand(num_rows, k, generator=generator) < 0.4
    if not has_probs:
        tokens = torch.where(greedy, logits[:, :-1].argmax(-1), tokens)
    lengths = torch.randint(k + 1, (num_rows,), generator=generator)
    tokens[torch.arange(k) >= lengths[:, None]] = 1 << 40  # nothing may look there
    draft = Draft(tokens, lengths, probs if has_probs else None)
    return Case(logits, draft, temperatures, uniforms[:, k:].contiguous())


def differing(given: Case, out: Acceptance) -> list[int]:
    """Rows decided otherwise than by `verify`, whose ids behind a row's draft must exist."""
    inside = torch.arange(given.draft.tokens.shape[1]) < given.draft.lengths[:, None]
    draft = Draft(
        given.draft.tokens.masked_fill(~inside, 0), given.draft.lengths, given.draft.probs
    )
    target = target_distribution(given.logits, given.temperatures, 1.0)
    expected = verify_sampled(target, draft, given.uniforms)
    same = (out.num_kept == expected.num_kept) & (out.own_tokens == expected.own_tokens)
    rows = same.nonzero().flatten()
    some = {name: getattr(out, name)[rows] for name in ("num_kept", "own_tokens", "emitted")}
    of_rows = replace(out, **some)
    tokens = Draft(draft.tokens[rows], draft.lengths[rows])
    assert_outcome(of_rows, tokens, expected.num_kept[rows], expected.own_tokens[rows])
    return (~same).nonzero().flatten().tolist()


@pytest.mark.parametrize("module", [sampling_twins, rejection])
@pytest.mark.parametrize("has_probs", [False, True])
@pytest.mark.parametrize(("num_rows", "k", "vocab_size"), [(9, 3, CHUNK + 9), (4, 0, 50)])
def test_equal_random_numbers_are_decided_as_verify_does(
    generator, module, has_probs, num_rows, k, vocab_size
):
    given = case(generator, num_rows, k, vocab_size, has_probs)
    # A random number on the rounding of a probability decides otherwise: less than one in 10^4.
    assert len(differing(given, given.decided(module))) <= 1


def test_the_twin_decides_as_verify_does_in_many_rows(generator):
    for has_probs in (False, True):
        given = case(generator, 3000, 4, 40, has_probs)
        assert len(differing(given, given.decided(sampling_twins))) <= 2


@pytest.mark.parametrize(
    ("module", "num_rows", "has_probs"),
    [(sampling_twins, 40000, False), (sampling_twins, 40000, True), (rejection, 40, True)],
)
def test_what_is_emitted_first_is_distributed_as_the_target(generator, module, num_rows, has_probs):
    target = torch.tensor([0.4, 0.3, 0.2, 0.1, 0.0])
    probs = torch.tensor([0.1, 0.2, 0.2, 0.25, 0.25])
    uniforms = torch.rand(num_rows, 3, dtype=torch.float64, generator=generator)
    drawn = sample(probs.expand(num_rows, -1), uniforms[:, 0])
    draft = Draft(
        drawn[:, None] if has_probs else torch.full((num_rows, 1), 1),
        torch.ones(num_rows, dtype=torch.int64),
        probs.expand(num_rows, 1, -1).contiguous() if has_probs else None,
    )
    # At half the temperature, so that it counts.
    logits = (0.5 * target.log()).expand(num_rows, 2, -1).contiguous()
    given = Case(logits, draft, torch.full((num_rows,), 0.5), uniforms[:, 1:].contiguous())
    first = given.decided(module).emitted[:, 0]
    counts = first.bincount(minlength=5).double()
    assert counts[4] == 0
    wanted = num_rows * target[:4].double()
    statistic = ((counts[:4] - wanted).square() / wanted).sum()
    # The chance of a larger one, of three degrees of freedom.
    chance = torch.special.gammaincc(torch.tensor(1.5).double(), statistic / 2)
    assert chance > 1e-6


def test_a_draft_that_equals_the_target_is_kept_or_gives_way_to_the_target(generator):
    logits = torch.randn(3, 2, 30, generator=generator)
    temperatures = torch.ones(3)
    probs = target_distribution(logits, temperatures, 1.0)[:, :1]
    # More than the target everywhere, so that nothing is left of it, and a draft that is rejected.
    draft = Draft(torch.zeros(3, 1).long(), torch.ones(3).long(), (4 * probs).contiguous())
    uniforms = torch.tensor([[0.3, 0.9999]] * 3).double()
    given = Case(logits, draft, temperatures, uniforms)
    for module in (sampling_twins, rejection):
        assert differing(given, given.decided(module)) == []
        assert given.decided(module).num_kept.tolist() == [0, 0, 0]


@pytest.mark.parametrize("point", [0.0, 1 - 2.0**-53])
def test_the_ends_of_a_distribution_are_tokens_of_probability(generator, point):
    logits = torch.full((2, 1, CHUNK + 40), -torch.inf)
    logits[:, 0, CHUNK - 9 : CHUNK + 9] = torch.randn(18, generator=generator)
    draft = Draft(torch.empty(2, 0).long(), torch.zeros(2).long())
    given = Case(logits, draft, torch.ones(2), torch.full((2, 1), point).double())
    own = given.decided(rejection).own_tokens
    assert own.tolist() == [CHUNK - 9 if point == 0 else CHUNK + 8] * 2


def test_where_logits_have_a_nan_it_is_chosen():
    logits = torch.zeros(1, 2, 30)
    logits[0, 0, [20, 7]] = torch.nan
    draft = Draft(torch.tensor([[3]]), torch.tensor([1]))
    given = Case(logits, draft, torch.ones(1), torch.full((1, 2), 0.5).double())
    out = given.decided(rejection)
    assert out.emitted.tolist() == [[7, -1]]
