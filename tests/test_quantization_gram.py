"""How pairs of units' errors are summed, and how far the sums are trusted."""

import pytest
import torch
from synthetic_targets import SyntheticTarget

from specfit.quantization.gram import GramSum, correlations, reliability, shrunk
from specfit.quantization.measured import Text
from specfit.quantization.quadratic import form


def tokens(num_units=5, num_tokens=60, vocab=101, seed=0):
    """Log-probabilities and perturbations of very different sizes, in float32."""
    generator = torch.Generator().manual_seed(seed)
    log_probs = (3 * torch.randn(num_tokens, vocab, generator=generator)).log_softmax(-1)
    perturbations = torch.randn(num_units, num_tokens, vocab, generator=generator)
    return log_probs, perturbations * torch.logspace(-3, 1, num_units)[:, None, None]


def gram_of(log_probs, perturbations, *, chunk=1000):
    total = GramSum(len(perturbations))
    for rows in torch.arange(len(log_probs)).split(chunk):
        total.add(log_probs[rows], perturbations[:, rows])
    return total.mean


def relative(difference, gram):
    """The largest entry of a difference, in units of √(G_ii G_jj)."""
    scale = gram.diagonal().sqrt()
    return float((difference / scale / scale[:, None]).abs().max())


def halves_of_noise(seed, noise):
    """Two measurements of one matrix of rho, with independent errors of a given size."""
    generator = torch.Generator().manual_seed(seed)
    above = torch.randn(3, 60, 60, generator=generator, dtype=torch.float64).triu(1)
    above *= 0.05 * torch.tensor([1.0, noise, noise])[:, None, None]
    true, *errors = above + above.mT
    return [torch.eye(60, dtype=torch.float64) + true + error for error in errors]


def test_g_is_the_covariance_of_perturbations_under_the_targets_probabilities():
    log_probs, perturbations = (x.double() for x in tokens())
    expected = torch.zeros(5, 5, dtype=torch.float64)
    for token in range(60):
        p, delta = log_probs[token].exp(), perturbations[:, token]
        expected += delta @ (p.diag() - torch.outer(p, p)) @ delta.T / 60
    # Each product is a sum of 101 terms in float32; the target's p is rounded to it as well.
    difference = gram_of(*tokens()) - expected
    assert relative(difference, expected) < 101 * 2.0**-23


@pytest.mark.parametrize("chunk", [1, 7, 59, 60])
def test_chunks_of_tokens_sum_to_the_whole(chunk):
    whole = gram_of(*tokens())
    # Products of other batch sizes may be added up in another order, in float32.
    assert relative(gram_of(*tokens(), chunk=chunk) - whole, whole) < 4 * 2.0**-23


def test_many_small_terms_are_not_lost_in_a_large_sum():
    log_probs, perturbations = tokens(num_units=2, num_tokens=1)
    total = GramSum(2)
    total.add(log_probs, perturbations * 1e4)
    before = total.mean.clone()
    for _ in range(100):
        total.add(log_probs, perturbations)
    added = total.mean * total.num_tokens - before
    assert relative(added / 100 - gram_of(log_probs, perturbations), before / 1e8) < 1e-6


def test_a_constant_added_to_all_logits_of_a_token_is_no_perturbation():
    log_probs, perturbations = tokens()
    perturbations = perturbations / perturbations.std((1, 2), keepdim=True)
    plain, moved = (gram_of(log_probs, perturbations + constant) for constant in (0.0, 2.0))
    assert relative(moved - plain, plain) < 101 * 2.0**-23


def test_words_of_no_probability_count_for_nothing():
    log_probs, perturbations = tokens()
    log_probs[:, 50:] = -torch.inf
    log_probs = log_probs.log_softmax(-1)
    assert torch.allclose(
        gram_of(log_probs, perturbations), gram_of(log_probs[:, :50], perturbations[..., :50])
    )


@pytest.mark.parametrize("seed", range(3))
def test_second_order_is_within_a_tenth_of_a_small_kl(seed):
    correlated = 0.5 * torch.eye(6) + 0.5
    target = SyntheticTarget(
        torch.linspace(0.02, 0.05, 6), correlated, torch.ones(6), seed=seed, num_sequences=4
    )
    sets = torch.tensor([[bool(i >> unit & 1) for unit in range(6)] for i in range(1, 64)])
    half_a, half_b = target.gram()
    predicted = form((half_a + half_b) / 2, sets)
    measured = torch.stack([target.kl(chosen, Text.units).mean() for chosen in sets])
    small = measured <= 0.01
    assert float(measured[small].max()) > 0.008
    assert float((predicted / measured - 1)[small].abs().max()) < 0.1


def test_units_that_cancel_have_a_correlation_near_minus_one():
    opposite = torch.tensor([[1.0, -0.95], [-0.95, 1.0]])
    target = SyntheticTarget(torch.tensor([0.1, 0.2]), opposite, torch.ones(2))
    rho = correlations(target.gram()[0])
    assert float(rho[0, 1]) == pytest.approx(-0.95, abs=0.01)
    assert rho.diagonal().tolist() == pytest.approx([1, 1])


def test_a_unit_that_changes_nothing_correlates_with_none():
    gram = torch.tensor([[4.0, 0.0], [0.0, 0.0]])
    assert correlations(gram).tolist() == [[1, 0], [0, 0]]


def test_halves_that_agree_are_trusted_and_halves_that_do_not_are_not():
    agreed, _ = halves_of_noise(0, noise=1)
    assert reliability(agreed, agreed) == pytest.approx(1)
    opposed = 2 * agreed.diagonal().diag() - agreed
    assert reliability(agreed, opposed) == 0
    assert reliability(torch.eye(3), torch.eye(3)) == 0
    assert reliability(torch.eye(1), torch.eye(1)) == 0


@pytest.mark.parametrize("noise", [0.5, 1.0, 2.0])
def test_reliability_is_the_share_of_signal_in_the_mean_of_the_halves(noise):
    # The mean of two halves has half the variance of their noise.
    expected = 1 / (1 + noise**2 / 2)
    # r is of 1770 pairs: a standard error of at most 1/√1770 = 0.024.
    assert reliability(*halves_of_noise(1, noise)) == pytest.approx(expected, abs=0.07)


def test_shrinking_keeps_the_diagonal_and_scales_the_rest():
    half_a, half_b = halves_of_noise(2, noise=1)
    gram = shrunk(half_a, half_b)
    mean = (half_a + half_b) / 2
    assert torch.equal(gram.diagonal(), mean.diagonal())
    off = ~torch.eye(60, dtype=torch.bool)
    assert torch.allclose(gram[off], reliability(half_a, half_b) * mean[off])


def test_what_is_shrunk_stays_positive_semidefinite():
    halves = [gram_of(*tokens(num_units=40, num_tokens=1, vocab=20, seed=s)) for s in (0, 1)]
    assert 0 < reliability(*halves) < 1
    assert float(torch.linalg.eigvalsh(shrunk(*halves)).min()) > -1e-5
