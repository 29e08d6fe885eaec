"""The choice of units on targets whose best sets are known."""

import json
from dataclasses import replace

import pytest
import torch
from synthetic_targets import Journal, SyntheticTarget, mixed_units

from specfit.files import read_jsonl
from specfit.quantization import in_context
from specfit.quantization.config import Selector
from specfit.quantization.in_context import NUM_FOLDS
from specfit.quantization.measured import Divergence, Measured, Text, mean_interval
from specfit.quantization.problem import JsonlJournal
from specfit.quantization.proposals import Predictor
from specfit.quantization.selection import Budget, Selection, _best, _Problem, select

SETS = torch.tensor([[bool(i >> unit & 1) for unit in range(8)] for i in range(256)])
BUDGETS = [Budget(min_share=0.5), Budget(max_kl_nats=0.05)]
ALONE = [Selector.isolated, Selector.additive, Selector.coverage, Selector.gram]


def slow(*values):
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def chosen_by(selector, target, budget, *, journal=None, num_random=3, seed=0):
    return select(
        target,
        budget,
        selector,
        num_sets=max(NUM_FOLDS, 4 * len(target.costs)),
        num_random=num_random,
        seed=seed,
        journal=journal or Journal(),
    )


def opposite_units():
    """Six units of one cost; the two largest errors, 2 and 5, nearly undo each other."""
    rho = torch.eye(6)
    rho[2, 5] = rho[5, 2] = -0.95
    scales = torch.tensor([0.10, 0.11, 0.2, 0.12, 0.13, 0.2])
    return SyntheticTarget(scales, rho, torch.full((6,), 4096.0))


def share_of(target, chosen):
    return float(target.costs[list(chosen)].sum() / target.costs.sum())


def kl_of(target, chosen):
    as_set = torch.zeros(len(target.costs), dtype=torch.bool)
    as_set[list(chosen)] = True
    return target.kl(as_set, Text.selection)


def measured_kl(target, chosen):
    return float(kl_of(target, chosen).mean())


def upper_kl(target, chosen):
    return mean_interval(kl_of(target, chosen), seed=0)[1]


def test_the_synthetic_target_is_a_divergence():
    assert isinstance(mixed_units(0), Divergence)


def test_units_that_cancel_are_taken_together_by_gram_and_not_by_the_ranking():
    target = opposite_units()
    gram, isolated = (
        chosen_by(selector, target, Budget(min_share=1 / 3))
        for selector in (Selector.gram, Selector.isolated)
    )
    assert isolated.chosen == (0, 1)
    assert gram.chosen == (2, 5)
    assert gram.rows[0].measured_kl_nats < 0.5 * isolated.rows[0].measured_kl_nats


@pytest.mark.parametrize("seed", [0, 1, *slow(2, 3, 4)])
def test_the_portfolio_is_within_a_twentieth_of_the_least_kl_of_all_sets(seed):
    target = mixed_units(seed)
    selection = chosen_by(Selector.portfolio, target, Budget(min_share=0.5))
    meets = SETS.double() @ target.costs >= 0.5 * float(target.costs.sum())
    best = min(float(target.kl(s, Text.selection).mean()) for s in SETS[meets])
    assert share_of(target, selection.chosen) >= 0.5
    assert measured_kl(target, selection.chosen) <= 1.05 * best


@pytest.mark.parametrize("seed", [0, *slow(1, 2)])
def test_the_portfolio_is_within_a_twentieth_of_the_most_bytes_below_a_ceiling(seed):
    target = mixed_units(seed)
    selection = chosen_by(Selector.portfolio, target, Budget(max_kl_nats=0.05))
    fits = [mean_interval(target.kl(s, Text.selection), 0)[1] <= 0.05 for s in SETS]
    best = float((SETS[fits].double() @ target.costs).max() / target.costs.sum())
    assert measured_kl(target, selection.chosen) < upper_kl(target, selection.chosen) <= 0.05
    assert share_of(target, selection.chosen) >= 0.95 * best


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("selector", ALONE)
def test_a_selector_alone_returns_its_proposal_measured(selector, budget):
    target = mixed_units(1)
    selection = chosen_by(selector, target, budget)
    (row,) = selection.rows
    assert (row.proposer, row.chosen) == (selector.name, selection.chosen)
    assert row.share == pytest.approx(share_of(target, row.chosen))
    assert row.measured_kl_nats == pytest.approx(measured_kl(target, row.chosen))
    assert row.measured_kl_nats_low < row.measured_kl_nats < row.measured_kl_nats_high
    assert selection.moves == ()
    if budget.min_share is not None:
        assert row.share >= budget.min_share
    else:
        assert row.measured_kl_nats_high <= budget.max_kl_nats


def test_a_selector_alone_measures_no_more_than_it_needs():
    target = mixed_units(0)
    chosen_by(Selector.isolated, target, Budget(min_share=0.5))
    assert [len(ids) for ids, text in target.calls if text is Text.units] == [1] * 8
    assert len(target.calls) == 8 + 1
    target.calls.clear()
    chosen_by(Selector.coverage, target, Budget(min_share=0.5))
    assert len([ids for ids, text in target.calls if text is Text.calibration]) == 4 * 8


@pytest.mark.parametrize("budget", BUDGETS)
def test_no_row_of_a_portfolio_is_better_than_its_choice_beyond_luck(budget):
    target = mixed_units(2)
    selection = chosen_by(Selector.portfolio, target, budget)
    *others, last = selection.rows
    names = [row.proposer for row in selection.rows]
    proposers = [*(s.name for s in ALONE), "blend", *["random"] * 3, "portfolio"]
    assert sorted(names) == sorted(proposers)
    assert last.chosen == selection.chosen
    if budget.min_share is not None:
        assert all(row.share >= budget.min_share for row in others)
        for row in others:
            change = kl_of(target, row.chosen) - kl_of(target, last.chosen)
            assert float(change.mean()) >= -3 * float(change.std()) / len(change) ** 0.5
    else:
        fitting = [row for row in others if row.measured_kl_nats_high <= budget.max_kl_nats]
        assert len(fitting) >= 4
        assert last.share >= max(row.share for row in fitting)


@pytest.mark.parametrize(("seed", "budget"), [(6, BUDGETS[0]), (4, BUDGETS[1])])
def test_where_no_proposal_is_best_moves_lead_on_from_one(seed, budget, monkeypatch):
    target = mixed_units(seed)
    alone = target.alone

    def know_no_pairs(part):
        return replace(alone(part), gram_sums=torch.eye(8).double().expand(2, 8, 8))

    monkeypatch.setattr(target, "alone", know_no_pairs)
    selection = chosen_by(Selector.portfolio, target, budget)
    kept = [move for move in selection.moves if move.kept]
    assert len(kept) > 1
    at = set(selection.chosen)
    for move in reversed(kept):
        assert set(move.added) <= at
        assert not set(move.removed) & at
        at = at - set(move.added) | set(move.removed)
    assert tuple(sorted(at)) in [row.chosen for row in selection.rows[:-1]]
    assert kept[-1].measured_kl_nats == selection.rows[-1].measured_kl_nats


@pytest.fixture(scope="module")
def uninterrupted():
    """A portfolio on its target, and what was measured on the way."""
    target = mixed_units(3)
    return chosen_by(Selector.portfolio, target, BUDGETS[0]), target.calls


@pytest.mark.parametrize("num_measured", [0, 5, 8, 20, 45, 55])
def test_a_killed_selection_goes_on_and_measures_nothing_twice(num_measured, uninterrupted):
    selection, calls = uninterrupted
    first, second, journal = mixed_units(3), mixed_units(3), Journal(most=num_measured)
    with pytest.raises(KeyboardInterrupt):
        chosen_by(Selector.portfolio, first, BUDGETS[0], journal=journal)
    assert len(journal.values) == num_measured
    written = Journal(json.loads(json.dumps(journal.values)))
    assert chosen_by(Selector.portfolio, second, BUDGETS[0], journal=written) == selection
    assert first.calls + second.calls == calls
    assert len(set(calls)) == len(calls)


@pytest.mark.parametrize("budget", BUDGETS)
def test_the_order_of_the_units_does_not_matter(budget):
    order = [3, 0, 6, 7, 1, 5, 2, 4]
    plain = chosen_by(Selector.portfolio, mixed_units(4), budget)
    permuted = chosen_by(Selector.portfolio, mixed_units(4, order=order), budget)
    assert [plain.isolated_kl_nats[unit] for unit in order] == list(permuted.isolated_kl_nats)
    assert permuted.cv_r2 == pytest.approx(plain.cv_r2)
    renumbered = [
        (row.proposer, tuple(sorted(order[unit] for unit in row.chosen))) for row in permuted.rows
    ]
    assert renumbered == [(row.proposer, row.chosen) for row in plain.rows]


def test_of_equal_units_the_first_are_chosen():
    target = SyntheticTarget(torch.full((5,), 0.1), torch.eye(5), torch.ones(5))
    for text in Text:
        target.perturbations[text] = target.perturbations[text][:1].expand(5, -1, -1)
    selection = chosen_by(Selector.isolated, target, Budget(min_share=0.4))
    assert selection.chosen == (0, 1)


def test_a_third_of_thirty_equal_units_is_ten():
    target = SyntheticTarget(torch.linspace(0.1, 0.2, 30), torch.eye(30), torch.full((30,), 7.0))
    for share in (1 / 3, 0.1, 10 / 30):
        selection = chosen_by(Selector.isolated, target, Budget(min_share=share))
        assert len(selection.chosen) == round(30 * share)


def test_a_share_of_one_is_all_units():
    for selector in Selector:
        selection = chosen_by(selector, mixed_units(0), Budget(min_share=1.0))
        assert selection.chosen == tuple(range(8))


@pytest.mark.parametrize("selector", [*ALONE, Selector.portfolio])
def test_a_ceiling_below_the_best_unit_selects_nothing_and_says_so(selector, caplog):
    selection = chosen_by(selector, mixed_units(0), Budget(max_kl_nats=1e-5))
    assert selection.chosen == ()
    assert selection.rows[-1].measured_kl_nats == pytest.approx(0, abs=1e-12)
    assert "nothing is quantized" in caplog.text


def test_a_ceiling_above_all_units_selects_them_all():
    selection = chosen_by(Selector.portfolio, mixed_units(0), Budget(max_kl_nats=5.0))
    assert selection.chosen == tuple(range(8))


@pytest.mark.parametrize("budget", BUDGETS)
def test_one_unit_is_a_problem_too(budget):
    target = SyntheticTarget(torch.tensor([0.1]), torch.eye(1), torch.tensor([512.0]))
    assert chosen_by(Selector.portfolio, target, budget).chosen == (0,)


def test_each_unit_alone_is_reported_and_so_is_how_well_models_explain_sets():
    target = mixed_units(0)
    selection = chosen_by(Selector.portfolio, target, Budget(min_share=0.5))
    expected = [float(target.kl(s, Text.units).mean()) for s in torch.eye(8).bool()]
    assert list(selection.isolated_kl_nats) == pytest.approx(expected)
    assert set(selection.cv_r2) == {s.name for s in ALONE}
    # Planted correlations of up to ±0.9, on 256 tokens a half: nearly all of it is signal.
    assert 0.9 < selection.rho_reliability <= 1
    assert chosen_by(Selector.isolated, target, Budget(min_share=0.5)).rho_reliability is None


def test_the_same_seed_gives_the_same_selection():
    first, again = (
        chosen_by(Selector.portfolio, mixed_units(5), BUDGETS[0], seed=7) for _ in range(2)
    )
    assert isinstance(first, Selection)
    assert first == again


def test_the_interval_of_a_mean_is_about_two_standard_errors_each_way():
    values = torch.randn(400, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    low, high = mean_interval(values, seed=0)
    error = float(values.std()) / 20
    # 1000 resamples know a 2.5 % quantile to about 0.085 standard errors.
    assert low == pytest.approx(float(values.mean()) - 1.96 * error, abs=0.3 * error)
    assert high == pytest.approx(float(values.mean()) + 1.96 * error, abs=0.3 * error)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "must be either a share of the weight bytes or a largest KL, got None and None"),
        ({"min_share": 0.5, "max_kl_nats": 0.1}, "got 0.5 and 0.1"),
        (
            {"min_share": 1.01},
            "must be a share of the weight bytes above 0 and at most 1, got 1.01",
        ),
        ({"min_share": 0.0}, "got 0.0"),
        ({"min_share": float("nan")}, "got nan"),
        ({"max_kl_nats": 0.0}, "must be a largest KL in nats above 0, got 0.0"),
        ({"max_kl_nats": float("inf")}, "got inf"),
    ],
)
def test_a_budget_that_no_set_can_meet_is_refused(settings, message):
    with pytest.raises(ValueError, match=rf"^quantize\.budget .*{message}$"):
        Budget(**settings)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize(("text", "name"), [(Text.units, r"4"), (Text.selection, r"[\d, ]+")])
def test_what_is_not_finite_is_refused_with_its_units_and_not_kept(tmp_path, text, name, value):
    target = mixed_units(0)
    target.perturbations[text][4] = value
    path = tmp_path / "measured.jsonl"
    with pytest.raises(ValueError, match=rf"KL of units \[{name}\] must be finite, got \["):
        chosen_by(Selector.isolated, target, Budget(min_share=1.0), journal=JsonlJournal(path))
    kept = read_jsonl(path) if path.exists() else []
    assert [key for key, _ in kept] == ([] if text is Text.units else ["alone 0", "alone"])


def test_all_selectors_explain_the_same_halves_of_the_text():
    """A prediction that is right on every text is judged as a fit to half of it is."""
    generator = torch.Generator().manual_seed(0)
    kl = torch.rand(20, 1, generator=generator) + 0.5 * torch.rand(20, 6, generator=generator)
    kl = kl.double()
    first, second = kl[:, 0::2].mean(1), kl[:, 1::2].mean(1)
    found = in_context.r2_on_halves(kl.mean(1), kl)
    expected = [in_context.affine_r2(kl.mean(1), half) for half in (first, second)]
    assert found == pytest.approx(sum(expected) / 2)
    assert found < in_context.affine_r2(kl.mean(1), kl.mean(1)) - 0.01


def test_the_luckiest_of_many_equal_sets_does_not_replace_the_first():
    """They differ by the choice of text alone; of two, one error would be enough."""
    target = SyntheticTarget(torch.ones(12), torch.eye(12), torch.ones(12).double())
    noise = torch.randn(12, 16, generator=torch.Generator().manual_seed(3)).double()
    target.kl = lambda chosen, _text: 0.1 + 0.01 * noise[chosen].sum(0)
    problem = _Problem(Measured(target, Journal(), range(12)), Budget(min_share=1 / 12), 0)
    sets = list(torch.eye(12, dtype=torch.bool))
    agreeing = Predictor.of_alone(torch.arange(12, 0, -1) / 100)
    luckier = [s for s in sets[1:] if problem.better(s, sets[0], -1.0)]
    assert luckier
    assert torch.equal(_best(problem, agreeing, sets), sets[0])
    assert torch.equal(_best(problem, agreeing, [sets[0], luckier[0]]), luckier[0])
