import pytest

from specfit.report.figures import Estimate, compare, duration, ratio


@pytest.mark.parametrize(
    ("low", "high", "order"), [(1.1, 1.9, -1), (1.5, 2.0, 0), (2.0, 3.5, 0), (3.1, 4.0, 1)]
)
def test_figures_are_told_apart_where_intervals_do_not_meet(low, high, order):
    assert compare(Estimate((low + high) / 2, low, high), Estimate(2.5, 2.0, 3.0)) == order


def test_the_interval_of_a_ratio_runs_between_opposite_ends():
    assert ratio(Estimate(6, 4, 8), Estimate(3, 2, 4)) == Estimate(2, 1, 4)


def test_durations_choose_their_unit():
    assert [duration(s) for s in (3.25, 119, 120, 7199, 7200)] == [
        "3.2 s",
        "119.0 s",
        "2.0 min",
        "120.0 min",
        "2.0 h",
    ]
