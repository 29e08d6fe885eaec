"""The best k, from one measurement worked out by hand."""

import pytest

from specfit.traffic.draft_length import chosen
from specfit.traffic.mixture import Share

# Plain: 10 ms a token. At k = 2: rounds of 20 ms, a quarter of it drafting, 2.5 tokens each.
PLAIN = {
    "component": "code",
    "proposer": "none",
    "temperature": 0.0,
    "num_draft_tokens": 0,
    "tokens_per_second": 100.0,
}
HEAD = {
    "component": "code",
    "proposer": "eagle3",
    "temperature": 0.0,
    "num_draft_tokens": 2,
    "coverage": 1.0,
    "acceptance_length": 2.5,
    "acceptance_by_position": [0.9, 0.6],
    "timed_acceptance_length": 2.5,
    "tokens_per_second": 125.0,
    "draft_time_share": 0.25,
}


def test_milliseconds_a_token_are_those_of_the_rounds():
    found = chosen([PLAIN, HEAD], [Share("code", 1.0, 1.0, 1.0)])
    times = {
        row["num_draft_tokens"]: row["ms_per_token"]
        for row in found["rows"]
        if row["component"] == "code"
    }
    # Passes of 10, 12.5 and 15 ms, and 2.5 ms a draft.
    assert times == pytest.approx({0: 10.0, 1: (12.5 + 2.5) / 1.9, 2: (15 + 5) / 2.5})
    assert found["best"] == {"code": 1, "all": 1}


def test_the_mix_is_a_mean_over_tokens():
    chat = HEAD | {"component": "chat", "acceptance_by_position": [0.0, 0.0]}
    chat |= {"timed_acceptance_length": 1.0, "tokens_per_second": 50.0}
    rows = [PLAIN, PLAIN | {"component": "chat"}, HEAD, chat]
    shares = [Share("code", 0.5, 0.25, 0.5), Share("chat", 0.5, 0.75, 0.5)]
    found = chosen(rows, shares)
    at = {(r["component"], r["num_draft_tokens"]): r["ms_per_token"] for r in found["rows"]}
    for k in range(3):
        expected = 0.25 * at["code", k] + 0.75 * at["chat", k]
        assert at["all", k] == pytest.approx(expected)
    assert found["best"] == {"code": 1, "chat": 0, "all": 0}


def test_what_a_round_took_is_of_the_answers_that_were_timed():
    # The same rounds of 20 ms, timed on answers of which less was accepted.
    lucky = HEAD | {"timed_acceptance_length": 2.0, "tokens_per_second": 100.0}
    shares = [Share("code", 1.0, 1.0, 1.0)]
    assert chosen([PLAIN, lucky], shares) == chosen([PLAIN, HEAD], shares)


def test_without_times_no_k_is_chosen():
    of_times = ("tokens_per_second", "timed_acceptance_length", "draft_time_share")
    untimed = {k: v for k, v in HEAD.items() if k not in of_times}
    assert chosen([PLAIN, untimed], [Share("code", 1.0, 1.0, 1.0)]) is None
