"""Projection onto the simplex, and counts taken back through a confusion matrix."""

import itertools

import numpy as np
import pytest

from specfit.traffic.simplex import check_confusion, project, projected_counts, unmixed


@pytest.mark.parametrize(
    ("values", "nearest"),
    [
        ([0.2, 0.3, 0.5], [0.2, 0.3, 0.5]),  # is on it
        ([1.2, 0.3, -0.5], [0.95, 0.05, 0.0]),  # 0.25 off each, and what falls below 0 is cut
        ([5.0, 0.0], [1.0, 0.0]),
        ([0.0, 0.0, 0.0, 0.0], [0.25] * 4),
        ([-3.0], [1.0]),
    ],
)
def test_the_projection_is_the_one_by_hand(values, nearest):
    assert project(np.array(values)) == pytest.approx(nearest)


def test_no_point_of_the_simplex_is_nearer_than_the_projection():
    grid = np.array([p for p in itertools.product(range(21), repeat=3) if sum(p) == 20]) / 20
    generator = np.random.default_rng(0)
    for values in generator.normal(0.3, 0.6, (200, 3)):
        found = project(values)
        distances = ((grid - values) ** 2).sum(1)
        assert ((found - values) ** 2).sum() <= distances.min() + 1e-12


def test_projected_counts_keep_their_sum_and_have_none_below_zero():
    for values in np.random.default_rng(1).normal(20, 30, (100, 8)):
        found = projected_counts(values)
        assert (found >= 0).all()
        assert found.sum() == pytest.approx(max(0.0, values.sum()))


def test_a_known_confusion_is_inverted():
    confusion = np.array([[0.9, 0.1, 0.0], [0.2, 0.7, 0.1], [0.0, 0.05, 0.95]])
    true = np.array([100.0, 300.0, 600.0])
    # By hand: of 100, 300, 600 there are 90 + 60, 10 + 210 + 30 and 30 + 570 predicted.
    assert unmixed(confusion, np.array([150.0, 250.0, 600.0])) == pytest.approx(true)


def test_further_axes_are_each_inverted_alone():
    confusion = np.array([[0.8, 0.2], [0.3, 0.7]])
    true = np.arange(12.0).reshape(2, 3, 2)
    predicted = np.einsum("tp,tab->pab", confusion, true)
    assert unmixed(confusion, predicted) == pytest.approx(true)


def test_two_components_that_are_not_told_apart_are_named():
    confusion = np.array([[0.5, 0.5, 0.0], [0.02, 0.0, 0.98], [0.5, 0.5, 0.0]])
    with pytest.raises(ValueError, match="does not tell chat from prose"):
        check_confusion(confusion, ["chat", "code", "prose"])


@pytest.mark.parametrize(
    "confusion",
    [[[1.0, 0.0]], [[0.9, 0.2], [0.1, 0.9]], [[1.1, -0.1], [0.0, 1.0]], [[np.nan, 1], [0, 1]]],
)
def test_what_is_no_confusion_matrix_is_refused(confusion):
    with pytest.raises(ValueError, match="confusion must"):
        check_confusion(np.array(confusion, dtype=np.float64), ["a", "b"])


def test_a_perfect_classifier_passes():
    check_confusion(np.eye(4), list("abcd"))
