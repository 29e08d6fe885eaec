"""What the adaptive draft length reckons with: costs, and how many tokens are kept."""

import random

import pytest

from specfit_serve import adaptive
from specfit_serve.adaptive import Costs, Survival

FADING = [0.7, 0.65, 0.6, 0.55, 0.5, 0.45, 0.4]  # as heads do


def test_survival_is_the_mean_of_beta_distributions_whose_counts_fade():
    survival = Survival(10.0)
    survival.record(3, 1)
    survival.record(3, 3)
    weight = adaptive.PRIOR_WEIGHT
    first = (0.9 + 1 + weight * 0.5) / (1.9 + weight)
    second = (1 + weight * first) / (1.9 + weight)
    third = (1 + weight * second) / (1 + weight)
    assert survival.conditional(4) == pytest.approx([first, second, third, third])
    assert survival.curve(2) == pytest.approx([first, first * second])


def test_what_the_first_position_shows_holds_for_those_that_are_not_reached():
    shared = Survival(100.0)
    for _ in range(100):
        shared.record(4, 4)
    one = Survival(10.0)
    for _ in range(50):
        one.record(4, 0)
    assert min(shared.conditional(4)) > 0.9
    assert max(one.conditional(4, shared.conditional(4))) < 0.5


def test_estimates_follow_the_counts_of_many_rounds():
    rng, survival = random.Random(0), Survival(1000.0)
    for _ in range(4000):
        kept = 0
        while kept < 4 and rng.random() < FADING[kept]:
            kept += 1
        survival.record(4, kept)
    assert survival.conditional(4) == pytest.approx(FADING[:4], abs=0.05)


def costs(fixed=False):
    return Costs({1: [1.0, 1.2, 1.4], 4: [2.0, 3.0, 4.0]}, 0.1, fixed=fixed)


def test_rows_are_read_at_the_next_larger_number():
    for rows, expected in ((1, [1.0, 1.2, 1.4]), (2, [2, 3, 4]), (4, [2, 3, 4]), (9, [2, 3, 4])):
        assert costs().verify(rows) == expected


def test_measured_passes_replace_the_table_in_their_ratio():
    found = costs()
    for _ in range(2):
        found.record(1, 2, 2.4)
    assert found.verify(1) == [1.0, 1.2, 1.4]  # two may be chance
    found.record(1, 2, 2.4)
    assert found.verify(1) == [2.0, 2.4, 2.8]
    assert found.verify(3) == [4.0, 6.0, 8.0]


def test_a_width_without_passes_has_the_ratio_of_the_nearest():
    found = costs()
    for _ in range(3):
        found.record(1, 1, 1.0)
        found.record(1, 3, 2.8)
    assert found.verify(1) == [1.0, 1.2, 2.8]


def test_one_slow_pass_among_many_changes_nothing():
    found = costs()
    for seconds in (1.5, 1.5, 90.0, 1.5, 1.5):
        found.record(1, 1, seconds)
    assert found.verify(1)[0] == 1.5


def test_old_passes_no_longer_count():
    found = costs()
    for _ in range(3):
        found.record(1, 3, 2.8)
    for _ in range(adaptive.MAX_AGE):
        found.record(1, 1, 1.0)
    assert found.verify(1) == [1.0, 1.2, 1.4]


def test_drafting_costs_the_median_of_the_latest_tokens():
    found = costs()
    for seconds in (0.3, 0.2, 9.0):
        found.record_draft(seconds)
    assert found.draft == pytest.approx(0.25)


def test_fixed_costs_stay():
    found = costs(fixed=True)
    for _ in range(9):
        found.record(1, 1, 5.0)
        found.record_draft(5.0)
    assert found.verify(1) == [1.0, 1.2, 1.4]
    assert found.draft == 0.1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (({}, 0.1), r"verify_seconds must be rows of one length, got \[\]"),
        (({1: [1.0], 2: [1.0, 2.0]}, 0.1), r"rows of one length, got \[1, 2\]"),
        (({1: []}, 0.1), r"rows of one length, got \[0\]"),
        (({1: [1.0, 0.0]}, 0.1), r"verify_seconds must be positive, got 0.0"),
        (({1: [1.0]}, -0.1), r"draft_seconds must be at least 0, got -0.1"),
    ],
)
def test_costs_that_are_none_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Costs(*arguments, fixed=True)
