"""Figures of a mix, by hand."""

import math

import pytest

from specfit.mix import each_alone, weights_of_tokens
from specfit.mix import mixed_acceptance_length as length_of_sessions
from specfit.mix import mixed_change as change_of_sessions
from specfit.mix import mixed_interval as interval_of_sessions
from specfit_serve.stats import DecodeStats, Round


def alone(stats):
    return {name: each_alone(own) for name, own in stats.items()}


def mixed_acceptance_length(stats, weights):
    return length_of_sessions(alone(stats), weights)


def mixed_interval(stats, weights, **settings):
    return interval_of_sessions(alone(stats), weights, **settings)


def mixed_change(before, after, weights, **settings):
    return change_of_sessions(alone(before), alone(after), weights, **settings)


def stats(*kept: int) -> DecodeStats:
    return DecodeStats.from_rounds([Round(0, 3, k) for k in kept], 3)


def test_a_mix_is_tokens_over_rounds_and_no_mean_of_lengths():
    # A request of `code` takes 12 tokens in 4 rounds, one of `chat` 12 tokens in 12 rounds.
    # Of four requests three are code: 3 * 12 + 12 tokens in 3 * 4 + 12 rounds.
    found = mixed_acceptance_length(
        {"code": [stats(2, 2, 2, 2)], "chat": [stats(*[0] * 12)]}, {"code": 3.0, "chat": 1.0}
    )
    assert found == pytest.approx(48 / 24)
    assert found != pytest.approx((3 * 3.0 + 1 * 1.0) / 4)  # the mean weighted by requests


def test_a_component_counts_by_its_weight_however_many_requests_were_measured():
    weights = {"code": 0.5, "chat": 0.5}
    one = {"code": [stats(2, 2)], "chat": [stats(0, 0, 0)]}
    many = {"code": [stats(2, 2)] * 7, "chat": [stats(0, 0, 0)]}
    assert mixed_acceptance_length(one, weights) == pytest.approx(9 / 5)
    assert mixed_acceptance_length(many, weights) == pytest.approx(9 / 5)


def test_a_component_without_requests_is_left_out():
    weights = {"code": 0.1, "chat": 0.9}
    assert mixed_acceptance_length({"code": [stats(2, 1)], "chat": []}, weights) == 2.5


def test_nothing_measured_is_not_a_number():
    assert math.isnan(mixed_acceptance_length({"code": []}, {"code": 1.0}))


def test_the_interval_holds_the_mix_and_narrows_with_confidence():
    of = {"code": [stats(*k) for k in ((3, 1), (0,), (2, 2, 0), (1,))], "chat": [stats(0, 1)] * 3}
    weights = {"code": 2.0, "chat": 1.0}
    settings = {"num_bootstrap": 400, "seed": 0}
    wide = mixed_interval(of, weights, confidence=0.95, **settings)
    narrow = mixed_interval(of, weights, confidence=0.5, **settings)
    length = mixed_acceptance_length(of, weights)
    assert wide[0] < narrow[0] < length < narrow[1] < wide[1]


def test_requests_that_are_all_alike_leave_no_interval():
    found = mixed_interval(
        {"code": [stats(2, 1)] * 5}, {"code": 1.0}, num_bootstrap=50, confidence=0.95, seed=0
    )
    assert found == pytest.approx((2.5, 2.5))


CHANGE = {"num_bootstrap": 200, "confidence": 0.9, "seed": 0}


def test_a_change_is_one_of_tokens_over_rounds_of_the_mix():
    weights = {"code": 1.0, "chat": 1.0}
    before = {"code": [stats(1, 1)], "chat": [stats(0, 0)]}  # 4 + 2 tokens in 4 rounds
    after = {"code": [stats(2)], "chat": [stats(0, 0)]}  # 3 + 2 tokens in 3 rounds
    change, *_ = mixed_change(before, after, weights, **CHANGE)
    assert change == pytest.approx((5 / 3) / (6 / 4) - 1)


def test_what_does_not_change_has_no_interval_however_unlike_the_requests_are():
    same = {"code": [stats(*k) for k in ((3, 3, 3), (0, 0), (1,), (2, 0, 3))]}
    assert mixed_change(same, same, {"code": 1.0}, **CHANGE) == (0, 0, 0)
    low, high = mixed_interval(same, {"code": 1.0}, **CHANGE)
    assert high - low > 0.5


def test_a_component_counts_by_its_requests_and_not_by_its_sessions():
    # One session of two requests of 3 tokens a round each, one request of 1 token a round: by
    # requests both weigh the same, 3 + 1 tokens in 1 + 1 rounds.
    sessions = {"agent": [[stats(2), stats(2)]], "chat": [[stats(0)]]}
    assert length_of_sessions(sessions, {"agent": 0.5, "chat": 0.5}) == pytest.approx(2.0)


def test_requests_of_one_session_are_drawn_together():
    # Ten requests that are all alike within their session: one session says as little as one
    # request, so two sessions of five leave a wider interval than ten requests do.
    good, bad = [stats(3)] * 5, [stats(0)] * 5
    settings = {"num_bootstrap": 400, "confidence": 0.9, "seed": 0}
    low, high = interval_of_sessions({"c": [good, bad]}, {"c": 1.0}, **settings)
    alone_low, alone_high = mixed_interval({"c": [*good, *bad]}, {"c": 1.0}, **settings)
    assert (low, high) == (1.0, 4.0)
    assert alone_high - alone_low < 2.5


def test_components_can_count_by_their_share_of_the_tokens_however_short_they_are_cut():
    # A request of agent was cut after 3 tokens in 1 round, one of chat ran for 12 in 12. Of the
    # traffic's tokens three quarters are agent's: .75 / 3 + .25 / 1 rounds a token.
    sessions = {"agent": [[stats(2)], [stats(2)]], "chat": [[stats(*[0] * 12)]]}
    weights = weights_of_tokens(sessions, {"agent": 0.75, "chat": 0.25})
    assert length_of_sessions(sessions, weights) == pytest.approx(1 / (0.75 / 3 + 0.25))
    by_request = length_of_sessions(sessions, {"agent": 0.75, "chat": 0.25})
    assert by_request < 1.5 < length_of_sessions(sessions, weights)


def test_a_component_without_rounds_does_not_spoil_the_others():
    weights = weights_of_tokens({"a": [[stats(1)]], "b": []}, {"a": 0.5, "b": 0.5})
    assert length_of_sessions({"a": [[stats(1)]], "b": []}, weights) == 2.0
