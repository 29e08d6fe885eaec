import random

import pytest

from specfit_serve.bootstrap import acceptance_interval, paired_difference_interval
from specfit_serve.stats import DecodeStats, Round


def requests(seed, num, rate, rounds_each=30):
    """Stats of requests, each of which keeps tokens at a rate of its own, `rate` ± 0.2."""
    rng = random.Random(seed)
    stats = []
    for _ in range(num):
        own_rate = rate + rng.uniform(-0.2, 0.2)
        kept = [int(rng.random() < own_rate) for _ in range(rounds_each)]
        stats.append(DecodeStats.from_rounds([Round(0, 1, n) for n in kept], 1))
    return stats


@pytest.mark.slow
def test_the_interval_covers_the_true_mean_about_as_often_as_it_says():
    intervals = [acceptance_interval(requests(s, 40, 0.5), 300, 0.9, seed=s) for s in range(200)]
    covered = sum(low <= 1.5 <= high for low, high in intervals)
    assert 170 <= covered <= 190  # 180 expected, with a standard deviation of 4.2


def test_the_interval_is_wider_than_one_over_single_rounds():
    stats = requests(0, 40, 0.5, rounds_each=200)
    rounds = [
        DecodeStats.from_rounds([Round(0, 1, kept)], 1)
        for s in stats
        for kept, n in enumerate(s.rounds_by_accepted)
        for _ in range(n)
    ]
    (low, high), (low_1, high_1) = (
        acceptance_interval(x, 300, 0.95, seed=0) for x in (stats, rounds)
    )
    assert high - low > 1.4 * (high_1 - low_1)


def test_long_answers_count_for_more_than_short_ones():
    short = DecodeStats.from_rounds([Round(0, 1, 1)], 1)
    long = DecodeStats.from_rounds([Round(0, 1, 0)] * 9, 1)
    low, high = acceptance_interval([short, long] * 50, 300, 0.95, seed=0)
    assert low < 1.1 < high < 1.3  # 550 tokens in 500 rounds; the mean of the lengths is 1.5


def test_pairing_removes_what_requests_have_in_common():
    a = requests(0, 40, 0.5)
    b = [DecodeStats.from_rounds([], 1) + s for s in a]
    assert paired_difference_interval(a, b, 300, 0.95, seed=0) == (0.0, 0.0)


def test_a_difference_has_the_sign_of_a_minus_b():
    low, high = paired_difference_interval(
        requests(0, 40, 0.7), requests(1, 40, 0.3), 300, 0.95, seed=0
    )
    assert 0.2 < low < 0.4 < high < 0.6


def test_the_same_seed_gives_the_same_interval():
    stats = requests(0, 20, 0.5)
    assert acceptance_interval(stats, 300, 0.9, seed=3) == acceptance_interval(
        stats, 300, 0.9, seed=3
    )
    assert acceptance_interval(stats, 300, 0.9, seed=3) != acceptance_interval(
        stats, 300, 0.9, seed=4
    )


def test_requests_without_rounds_are_left_out():
    stats = requests(0, 20, 0.5)
    nothing = DecodeStats.from_rounds([], 1)
    assert acceptance_interval([*stats, nothing], 300, 0.9, 0) == acceptance_interval(
        stats, 300, 0.9, 0
    )
    with pytest.raises(ValueError, match="at least 1 request with rounds"):
        acceptance_interval([nothing], 300, 0.9, 0)


def test_unequal_numbers_of_requests_do_not_pair():
    with pytest.raises(ValueError, match="got 2 and 3"):
        paired_difference_interval(requests(0, 2, 0.5), requests(0, 3, 0.5), 300, 0.9, 0)
