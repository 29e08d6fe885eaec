"""Conversations are taken so that their lengths lie as the profile's do."""

import math
import random

import pytest

from specfit.traffic.config import Quantiles
from specfit.traffic.matching import distance, nearest, quantiles_of, quantiles_wanted
from specfit.traffic.matching import wanted_lengths as lengths_of


def test_wanted_lengths_have_the_quantiles_that_they_are_of():
    found = lengths_of(Quantiles(100.0, 400.0), 1000)
    assert found == sorted(found)
    assert quantiles_of(found)[1:] == pytest.approx([100, 400], rel=0.01)


def test_every_wanted_length_takes_the_nearest_by_ratio_that_is_left():
    # 100 lies nearer to 60 than to 170 by ratio (1.67 against 1.7), though not by difference.
    assert nearest([60, 170], [100.0]) == [0]
    assert nearest([50, 170], [100.0]) == [1]
    # The longest chooses first: 40 is taken by 50, so 38 is left with 10.
    assert nearest([10, 40], [38.0, 50.0]) == [1, 0]


def test_of_equal_lengths_the_one_drawn_first_is_taken():
    assert nearest([7, 5, 5, 5], [5.0, 5.0]) == [1, 2]


def test_nothing_is_taken_twice_and_the_shortest_go_without():
    assert sorted(nearest([3, 5, 8], lengths_of(Quantiles(5.0, 9.0), 10))) == [0, 1, 2]


def test_a_source_with_all_lengths_is_matched_closely():
    generator = random.Random(0)
    there = [generator.randint(5, 2000) for _ in range(4000)]
    wanted = Quantiles(120.0, 480.0)
    taken = [there[i] for i in nearest(there, lengths_of(wanted, 200))]
    assert quantiles_of(taken) == pytest.approx(quantiles_wanted(wanted), rel=0.05)
    assert distance(taken, wanted) < 0.03
    assert distance(there[:200], wanted) > 0.4


def test_the_distance_of_one_value_at_the_median_is_a_half():
    assert distance([100], Quantiles(100.0, 300.0)) == pytest.approx(0.5)


def test_the_distance_is_that_of_the_definition():
    quantiles = Quantiles(math.e, math.e**2.2815515655446004)  # mu 1, sigma 1
    values = [math.exp(0.0), math.exp(1.0), math.exp(3.0)]
    # CDF at -1, 0 and 2 standard deviations: .1587, .5, .9772; the largest step is 2/3 to .9772.
    assert distance(values, quantiles) == pytest.approx(0.9772 - 2 / 3, abs=1e-3)


def test_a_constant_length_is_as_far_as_its_values_lie_elsewhere():
    assert distance([4, 5, 5, 5], Quantiles(5.0, 5.0)) == 0.25
