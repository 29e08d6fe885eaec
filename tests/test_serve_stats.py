import itertools
import math
import random

import pytest

from specfit_serve.stats import DecodeStats, Round


def random_rounds(seed, k, num=50):
    rng = random.Random(seed)
    rounds = []
    for _ in range(num):
        num_drafted = rng.randint(0, k)
        rounds.append(Round(0, num_drafted, rng.randint(0, num_drafted)))
    return rounds


@pytest.mark.parametrize("k", [0, 1, 4, 8])
@pytest.mark.parametrize("seed", range(10))
def test_acceptance_length_is_1_plus_the_sum_of_acceptance_by_position(seed, k):
    stats = DecodeStats.from_rounds(random_rounds(seed, k), k)
    assert math.isclose(stats.acceptance_length, 1 + sum(stats.acceptance_by_position))


@pytest.mark.parametrize("seed", range(10))
def test_survival_is_the_product_of_conditional_acceptance_when_all_is_drafted(seed):
    rounds = [Round(0, 4, r.num_kept) for r in random_rounds(seed, 4)]
    stats = DecodeStats.from_rounds(rounds, 4)
    products = itertools.accumulate(stats.conditional_acceptance, lambda a, b: a * b)
    for survival, product in zip(stats.acceptance_by_position, products, strict=True):
        assert math.isclose(survival, product)


def test_a_position_is_tested_when_it_was_drafted_and_all_before_were_kept():
    rounds = [Round(1, 3, 1), Round(3, 1, 1), Round(5, 2, 0), Round(6, 0, 0)]
    stats = DecodeStats.from_rounds(rounds, 4)
    assert stats.tested_by_position == (3, 1, 0, 0)
    assert stats.kept_by_position == (2, 0, 0, 0)
    assert stats.conditional_acceptance == (2 / 3, 0.0, None, None)
    assert stats.rounds_by_accepted == (2, 2, 0, 0, 0)
    assert stats.num_tokens == 6


def test_adding_stats_is_counting_all_rounds():
    a, b = random_rounds(0, 4), random_rounds(1, 4)
    added = DecodeStats.from_rounds(a, 4) + DecodeStats.from_rounds(b, 4)
    assert added == DecodeStats.from_rounds(a + b, 4)


def test_stats_of_different_numbers_of_draft_tokens_do_not_add():
    with pytest.raises(ValueError, match="got 3 and 4"):
        DecodeStats.from_rounds([], 3) + DecodeStats.from_rounds([], 4)


def test_without_rounds_there_is_no_acceptance_length():
    assert math.isnan(DecodeStats.from_rounds([], 3).acceptance_length)
