"""What selectors expect of sets, and the sets that they propose."""

import pytest
import torch

from specfit.quantization import in_context, knapsack
from specfit.quantization.config import Selector
from specfit.quantization.knapsack import cheapest
from specfit.quantization.proposals import Predictor, proposal, ranked
from specfit.quantization.quadratic import annealed, flipped, form, neighbours, random_set


def subsets(num_units):
    return torch.tensor([[bool(i >> u & 1) for u in range(num_units)] for i in range(2**num_units)])


def draws(*shape, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def whole_costs(num_units, seed):
    generator = torch.Generator().manual_seed(seed)
    return 512 * torch.randint(1, 30, (num_units,), generator=generator).double()


def a_gram(num_units, seed):
    factor = draws(num_units, num_units, seed=seed)
    return factor @ factor.T


def measured_sets(num_units, num_sets, seed=0):
    costs = torch.ones(num_units, dtype=torch.float64)
    return in_context.random_sets(costs, 0.5, num_sets, seed)


@pytest.mark.parametrize("share", [0.01, 0.3, 0.7, 1.0])
@pytest.mark.parametrize("num_units", [1, 2, 6, 10])
def test_the_knapsack_is_the_best_of_all_sets(num_units, share):
    sets = subsets(num_units)
    for seed in range(5):
        costs, values = whole_costs(num_units, seed), draws(num_units, seed=seed)
        min_cost = share * float(costs.sum())
        chosen = cheapest(values, costs, min_cost)
        totals = (sets.double() @ values).where(sets.double() @ costs >= min_cost, torch.inf)
        assert float(costs[chosen].sum()) >= min_cost
        assert float(values[chosen].sum()) == pytest.approx(float(totals.min()))


def test_units_that_help_are_taken_beyond_what_is_needed():
    values = torch.tensor([1.0, -0.5, 3.0, -0.1])
    assert cheapest(values, torch.ones(4), 1.0).tolist() == [False, True, False, True]
    assert cheapest(values, torch.ones(4), 3.0).tolist() == [True, True, False, True]
    assert cheapest(values, torch.ones(4), 0.0).tolist() == [False, True, False, True]


def test_equal_units_are_taken_in_order():
    assert cheapest(torch.ones(5), torch.ones(5), 2.0).tolist() == [True, True, False, False, False]
    values = torch.ones(5).double()
    assert ranked(values, values, 2.0).tolist() == [True, True, False, False, False]


def test_a_table_too_large_costs_no_more_than_it_says(monkeypatch):
    monkeypatch.setattr(knapsack, "MAX_CELLS", 2000)
    sets = subsets(10)
    for seed in range(10):
        costs, values = 1 + draws(10, seed=seed).square(), draws(10, seed=seed + 100).abs()
        min_cost = 0.5 * float(costs.sum())
        chosen = cheapest(values, costs, min_cost)
        assert float(costs[chosen].sum()) >= min_cost
        slack = 11 * min_cost * 10 / 2000
        totals = (sets.double() @ values).where(
            sets.double() @ costs >= min_cost + slack, torch.inf
        )
        assert float(values[chosen].sum()) <= float(totals.min()) + 1e-12


def test_the_ranking_takes_the_least_value_a_byte_first_and_fills_exactly():
    values = torch.tensor([1.0, 4.0, 9.0, 30.0, 10.0])
    costs = torch.tensor([10.0, 20.0, 30.0, 50.0, 12.0])
    # A byte: .1, .2, .3, .6, .83. Of 70, the first three hold 60; the last is cheaper than the
    # fourth and enough.
    assert ranked(values, costs, 70.0).tolist() == [True, True, True, False, True]
    assert ranked(values, costs, 60.0).tolist() == [True, True, True, False, False]


@pytest.mark.parametrize("seed", range(5))
def test_annealing_finds_the_best_of_all_sets(seed):
    quadratic, costs = a_gram(10, seed), whole_costs(10, seed)
    min_cost = 0.5 * float(costs.sum())
    sets = subsets(10)
    best = form(quadratic, sets).where(sets.double() @ costs >= min_cost, torch.inf).min()
    chosen = annealed(quadratic, costs, min_cost, seed=0)
    assert float(costs[chosen].sum()) >= min_cost
    assert float(form(quadratic, chosen[None])) == pytest.approx(float(best))


def test_annealing_is_never_worse_than_the_diagonal_alone():
    quadratic, costs = a_gram(40, 0), whole_costs(40, 0)
    min_cost = 0.4 * float(costs.sum())
    sets = torch.stack(
        [
            annealed(quadratic, costs, min_cost, seed=0),
            cheapest(quadratic.diagonal(), costs, min_cost),
        ]
    )
    annealing, diagonal = form(quadratic, sets).tolist()
    assert annealing < diagonal


def test_the_same_seed_anneals_to_the_same_set():
    quadratic, costs = a_gram(40, 1), whole_costs(40, 1)
    first, again = (annealed(quadratic, costs, 0.5 * float(costs.sum()), 3) for _ in range(2))
    assert torch.equal(first, again)


@pytest.mark.parametrize(("num_units", "max_flips", "expected"), [(6, 3, 41), (2, 3, 3), (1, 2, 1)])
def test_neighbours_are_all_sets_of_few_differences_with_their_changes(
    num_units, max_flips, expected
):
    quadratic, costs = a_gram(num_units, 0), whole_costs(num_units, 0)
    chosen = random_set(costs, 0.5 * float(costs.sum()), torch.Generator().manual_seed(0))
    around = neighbours(quadratic, chosen, costs, max_flips)
    sets = torch.stack([flipped(chosen, flips) for flips in around.flips])
    assert len({tuple(s.tolist()) for s in sets}) == len(sets) == expected
    assert bool(((sets ^ chosen).sum(1) <= max_flips).all())
    changes = form(quadratic, sets) - form(quadratic, chosen[None])
    assert torch.allclose(around.changes, changes)
    assert torch.allclose(around.costs, sets.double() @ costs)


def alike(kl):
    """The same on two sequences, so that halves of the text agree."""
    return kl[:, None].expand(-1, 2)


def test_random_sets_differ_and_hold_about_the_share():
    costs = whole_costs(30, 0)
    sets = in_context.random_sets(costs, 0.4, 120, seed=0)
    assert len({tuple(s.tolist()) for s in sets}) == 120
    shares = sets.double() @ costs / costs.sum()
    largest = float(costs.max() / costs.sum())
    assert 0.3 <= float(shares.min()) < float(shares.max()) <= 0.5 + largest


def test_there_are_no_more_random_sets_than_sets():
    assert len(in_context.random_sets(torch.ones(2), 0.5, 8, seed=0)) <= 3


@pytest.mark.parametrize("offset", [0.0, 0.3])
def test_the_additive_fit_recovers_planted_weights(offset):
    weights = torch.linspace(-0.02, 0.2, 12, dtype=torch.float64)
    sets = measured_sets(12, 48)
    misleading = draws(12, seed=1).abs()
    fit = in_context.additive(sets, alike(offset + sets.double() @ weights), misleading)
    assert torch.allclose(fit.weights_nats, weights, atol=1e-6)
    assert fit.offset_nats == pytest.approx(offset, abs=1e-6)
    assert fit.cv_r2 == pytest.approx(1, abs=1e-6)
    assert torch.allclose(fit(sets), offset + sets.double() @ weights)


def test_with_few_sets_the_additive_fit_leans_to_the_values_alone():
    alone = torch.linspace(0.01, 0.2, 40, dtype=torch.float64)
    sets = measured_sets(40, 20)
    kl = 0.1 + 0.5 * (sets.double() @ alone) + 1e-4 * draws(20, seed=0)
    fit = in_context.additive(sets, alike(kl), alone)
    assert torch.allclose(fit.weights_nats, 0.5 * alone, atol=5e-3)


def test_values_alone_that_mislead_are_overruled_by_what_was_measured():
    weights = torch.linspace(0.01, 0.2, 12, dtype=torch.float64)
    sets = measured_sets(12, 48)
    kl = sets.double() @ weights + 1e-3 * draws(48, seed=0)
    fit = in_context.additive(sets, alike(kl), weights.flip(0))
    assert torch.allclose(fit.weights_nats, weights, atol=2e-3)


@pytest.mark.parametrize("ceiling", [0.2, 0.6, 5.0])
def test_the_coverage_fit_recovers_a_planted_ceiling_and_shares(ceiling):
    shares = torch.linspace(-0.02, 0.3, 12, dtype=torch.float64)
    sets = measured_sets(12, 48)
    kl = ceiling * (1 - (1 - sets.double() * shares).prod(1))
    fit = in_context.coverage(sets, alike(kl), draws(12, seed=1).abs())
    assert fit.ceiling_nats == pytest.approx(ceiling, rel=1e-3)
    assert torch.allclose(fit.spoilt, shares, atol=1e-3)
    assert fit.cv_r2 == pytest.approx(1, abs=1e-6)
    assert torch.allclose(fit(sets), kl, atol=1e-6)


def test_what_saturates_is_explained_better_by_coverage_than_by_a_sum():
    sets = measured_sets(12, 48)
    shares = torch.linspace(0.1, 0.5, 12, dtype=torch.float64)
    kl = 0.6 * (1 - (1 - sets.double() * shares).prod(1)) * (1 + 0.002 * draws(48, seed=0))
    covered = in_context.coverage(sets, alike(kl), shares).cv_r2
    assert in_context.additive(sets, alike(kl), shares).cv_r2 < covered - 0.01 < 1


@pytest.mark.parametrize("fit", [in_context.additive, in_context.coverage])
def test_what_halves_of_the_text_do_not_agree_on_is_not_believed(fit):
    sets, alone = measured_sets(12, 48), torch.full((12,), 0.02, dtype=torch.float64)
    members = sets.double()
    of_text = torch.stack([draws(12, seed=7), -draws(12, seed=7)]) * 0.01
    own = torch.linspace(-0.01, 0.01, 12, dtype=torch.float64)
    peculiar = fit(sets, 0.1 + members @ (alone + of_text).mT, alone)
    true = fit(sets, alike(0.1 + members @ (alone + own)), alone)
    spreads = [(f(torch.eye(12).bool())).std() for f in (peculiar, true)]
    assert float(spreads[0]) < 0.05 * float(spreads[1])
    assert peculiar.cv_r2 < true.cv_r2 - 0.05


def test_noise_is_not_explained():
    sets, kl = measured_sets(12, 48), draws(48, seed=0).abs()
    alone = draws(12, seed=1).abs()
    assert in_context.additive(sets, alike(kl), alone).cv_r2 < 0.2
    assert in_context.coverage(sets, alike(kl), alone).cv_r2 < 0.2
    assert in_context.affine_r2(sets.double() @ alone, kl) < 0.2


def test_a_prediction_is_judged_up_to_its_scale():
    kl = draws(48, seed=0)
    assert in_context.affine_r2(3 + 0.01 * kl, kl) == pytest.approx(1)


@pytest.mark.parametrize("num", [1, 2, 7])
def test_a_handful_of_equal_measurements_can_be_fitted(num):
    sets, kl = measured_sets(4, num), torch.zeros(num, dtype=torch.float64)
    assert in_context.additive(sets, alike(kl), torch.zeros(4)).cv_r2 == 0
    assert in_context.coverage(sets, alike(kl), torch.zeros(4)).cv_r2 == 0


@pytest.mark.parametrize("selector", [Selector.additive, Selector.coverage, Selector.gram])
def test_a_proposal_is_the_set_that_its_predictor_likes_best(selector):
    costs, sets = whole_costs(9, 0), subsets(9)
    values = draws(9, seed=0).abs() / 10
    predictor = {
        Selector.additive: Predictor.of_additive(in_context.Additive(0.2, values, 1.0)),
        Selector.coverage: Predictor.of_coverage(in_context.Coverage(0.5, values, 1.0)),
        Selector.gram: Predictor.of_gram(a_gram(9, 0)),
    }[selector]
    min_cost = 0.45 * float(costs.sum())
    chosen = proposal(selector, predictor, costs, min_cost, seed=0)
    best = predictor(sets).where(sets.double() @ costs >= min_cost, torch.inf).min()
    assert float(costs[chosen].sum()) >= min_cost
    assert float(predictor(chosen[None])) == pytest.approx(float(best))


def test_predictors_give_the_nats_of_their_fits():
    sets, values = subsets(6), draws(6, seed=0) / 10
    additive = in_context.Additive(0.2, values, 1.0)
    covered = in_context.Coverage(0.5, values, 1.0)
    assert torch.allclose(Predictor.of_additive(additive)(sets), additive(sets))
    assert torch.allclose(Predictor.of_coverage(covered)(sets), covered(sets))
    assert torch.allclose(Predictor.of_alone(values)(sets), sets.double() @ values)
