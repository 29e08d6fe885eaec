import pytest
import torch

from specfit_serve.protocols import Draft
from specfit_serve.verify import sample, target_distribution, verify_greedy, verify_sampled

ROWS = 20_000
TARGET = torch.tensor([[0.5, 0.2, 0.2, 0.1], [0.05, 0.0, 0.9, 0.05], [0.25, 0.25, 0.4, 0.1]])


def uniforms(*shape):
    return torch.rand(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def p_value(tokens, probs):
    """Of a chi-square test that `tokens` are samples of `probs`."""
    counts = torch.bincount(tokens, minlength=len(probs))
    assert counts[probs == 0].sum() == 0
    expected = probs[probs > 0] * len(tokens)
    statistic = ((counts[probs > 0] - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(expected) - 1) / 2), statistic / 2))


def emitted(draft, verification):
    """Emitted tokens, `rows k+1`, -1 past the own token."""
    rows, k = draft.tokens.shape
    positions = torch.arange(k + 1)
    padded = torch.cat([draft.tokens, torch.zeros(rows, 1, dtype=torch.long)], dim=1)
    kept, own = verification.num_kept[:, None], verification.own_tokens[:, None]
    return torch.where(positions < kept, padded, torch.where(positions == kept, own, -1))


def drafts():
    """The same for all rows: point masses, the target itself, others, and one that never hits."""
    yield "point_mass", torch.tensor([0, 2]), None
    yield "impossible", torch.tensor([0, 1]), None
    yield "itself", None, TARGET[:2]
    yield "flat", None, torch.full((2, 4), 0.25)
    yield "disjoint_support", None, torch.tensor([[0.0, 0.0, 0.0, 1.0], [0.0, 1.0, 0.0, 0.0]])


@pytest.mark.parametrize(
    ("tokens", "probs"), [d[1:] for d in drafts()], ids=[d[0] for d in drafts()]
)
def test_every_emitted_position_has_the_targets_distribution(tokens, probs):
    draws = uniforms(ROWS, 5)
    if probs is None:
        draft_tokens = tokens.expand(ROWS, 2)
    else:
        draft_tokens = torch.stack(
            [sample(probs[i].expand(ROWS, -1), draws[:, i]) for i in (0, 1)], 1
        )
        probs = probs.expand(ROWS, 2, 4)
    draft = Draft(draft_tokens, torch.full((ROWS,), 2), probs)
    result = emitted(draft, verify_sampled(TARGET.expand(ROWS, 3, 4), draft, draws[:, 2:]))
    for position in range(3):
        tokens_there = result[:, position][result[:, position] >= 0]
        if len(tokens_there) > 0:
            assert p_value(tokens_there, TARGET[position]) > 1e-3


def test_a_draft_from_the_targets_own_distribution_is_always_kept():
    draws = uniforms(ROWS, 5)
    target = TARGET.expand(ROWS, 3, 4)
    tokens = torch.stack([sample(target[:, i], draws[:, i]) for i in (0, 1)], dim=1)
    draft = Draft(tokens, torch.full((ROWS,), 2), target[:, :2])
    assert bool((verify_sampled(target, draft, draws[:, 2:]).num_kept == 2).all())


def test_a_point_mass_is_the_one_hot_distribution():
    tokens = torch.randint(4, (ROWS, 2), generator=torch.Generator().manual_seed(1))
    lengths = torch.randint(3, (ROWS,), generator=torch.Generator().manual_seed(2))
    one_hot = torch.nn.functional.one_hot(tokens, 4).float()
    results = [
        verify_sampled(TARGET.expand(ROWS, 3, 4), Draft(tokens, lengths, p), uniforms(ROWS, 3))
        for p in (None, one_hot)
    ]
    assert torch.equal(results[0].num_kept, results[1].num_kept)
    assert torch.equal(results[0].own_tokens, results[1].own_tokens)


def test_what_lies_past_a_rows_length_is_not_looked_at():
    tokens = torch.tensor([[0, 2]]).expand(ROWS, 2)
    short = Draft(tokens, torch.ones(ROWS, dtype=torch.long))
    cut = Draft(tokens[:, :1], torch.ones(ROWS, dtype=torch.long))
    draws = uniforms(ROWS, 3)
    padded = verify_sampled(TARGET.expand(ROWS, 3, 4), short, draws)
    alone = verify_sampled(TARGET[:2].expand(ROWS, 2, 4), cut, draws[:, :2])
    assert torch.equal(padded.num_kept, alone.num_kept)
    assert torch.equal(padded.own_tokens, alone.own_tokens)


def test_greedy_is_sampling_at_temperature_0():
    logits = torch.randn(500, 4, 6, generator=torch.Generator().manual_seed(0))
    tokens = torch.where(uniforms(500, 3) < 0.7, logits[:, :-1].argmax(-1), 2)
    lengths = torch.randint(4, (500,), generator=torch.Generator().manual_seed(2))
    draft = Draft(tokens, lengths)
    target = target_distribution(logits, torch.zeros(500), 0.9)
    greedy, sampled = verify_greedy(logits, draft), verify_sampled(target, draft, uniforms(500, 4))
    assert torch.equal(greedy.num_kept, sampled.num_kept)
    assert torch.equal(greedy.own_tokens, sampled.own_tokens)


def test_the_nucleus_is_the_smallest_set_of_at_least_top_p():
    logits = torch.tensor([0.5, 0.2, 0.2, 0.1]).log().expand(1, 1, 4)
    one = torch.ones(1)
    expected = {0.5: [1, 0, 0, 0], 0.6: [5 / 7, 2 / 7, 0, 0], 0.9: [5 / 9, 2 / 9, 2 / 9, 0]}
    for top_p, probs in expected.items():
        # 1e-3 less, since 0.5 + 0.2 + 0.2 is not exactly 0.9.
        got = target_distribution(logits, one, top_p - 1e-3)[0, 0]
        torch.testing.assert_close(got, torch.tensor(probs, dtype=torch.float32))


def test_each_row_has_its_own_temperature():
    logits = torch.tensor([1.0, 2.0, 0.0]).expand(3, 2, 3)
    probs = target_distribution(logits, torch.tensor([0.0, 1.0, 0.5]), 1.0)
    assert probs[0].tolist() == [[0, 1, 0]] * 2
    torch.testing.assert_close(probs[1], logits[1].softmax(-1))
    torch.testing.assert_close(probs[2], (2 * logits[2]).softmax(-1))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 0.0])
def test_probabilities_without_a_sum_are_refused(value):
    probs = torch.ones(3, 5)
    probs[1] = value
    with pytest.raises(ValueError, match=f"logits must be finite.* a sum of {value}"):
        sample(probs, torch.full((3,), 0.5))


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("position", [0, 1])
@pytest.mark.parametrize("probs", [None, torch.full((1, 1, 4), 0.25)])
def test_logits_that_are_not_finite_sample_nothing(temperature, position, probs):
    logits = torch.zeros(1, 2, 4)
    logits[0, position, 2] = torch.nan
    target = target_distribution(logits, torch.tensor([temperature]), 0.9)
    draft = Draft(torch.tensor([[1]]), torch.tensor([1]), probs)
    with pytest.raises(ValueError, match="logits must be finite"):
        verify_sampled(target, draft, torch.zeros(1, 2))


@pytest.mark.parametrize("uniform", [0.0, 0.3, 1 - 2**-53])
def test_a_token_of_probability_0_is_never_sampled(uniform):
    probs = torch.rand(200, 1000, generator=torch.Generator().manual_seed(0))
    probs[:, :10] = probs[:, -10:] = 0
    tokens = sample(probs, torch.full((200,), uniform, dtype=torch.float64))
    assert bool((probs.gather(1, tokens[:, None]) > 0).all())
