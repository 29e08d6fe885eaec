"""The simulated server in cases computed by hand."""

from random import Random

import numpy as np
import pytest
import simpy
from simulated_traffic import PLAIN, Costs, session

from specfit.prediction.server import Acceptance, Job, KvCache, ServerConfig
from specfit.prediction.simulate import simulate
from specfit.traffic.config import SloConfig


def test_turns_follow_the_answer_before_after_their_think_time():
    turns = [(4, 3, 0.0), (5, 2, 7.0)]
    sessions = [session(1.0, *turns)]
    found = simulate(sessions, Costs(prefill=1.0), PLAIN, ServerConfig(), num_draft_tokens=0)
    first, second = found.served
    # Prefill of 4; two rounds. Then 4 + 3 + 5 tokens, of which 6 are cached; one round.
    assert (first.arrived_seconds, first.first_token_seconds, first.finished_seconds) == (1, 5, 7)
    assert (second.arrived_seconds, second.hit_tokens) == (14, 6)
    assert (second.first_token_seconds, second.finished_seconds) == (20, 21)
    assert first.itl_seconds == second.itl_seconds == 1


def test_a_prefix_is_found_by_the_next_session_and_a_context_by_the_next_turn():
    sessions = [
        session(0.0, (10, 3, 0.0), prefix=100),
        session(1000.0, (20, 5, 0.0), (30, 1, 1.0), prefix=100),
        session(1000.0, (20, 5, 0.0), prefix=50, component="y"),
    ]
    acceptance = PLAIN | {"y": PLAIN["x"]}
    found = simulate(sessions, Costs(prefill=0.1), acceptance, ServerConfig(), num_draft_tokens=0)
    hits = {(s.session, s.turn): s.hit_tokens for s in found.served}
    # The last turn finds 120 tokens of its prompt before, and 4 of the 5 that answered it.
    assert hits == {(0, 0): 0, (1, 0): 100, (1, 1): 124, (2, 0): 0}
    row = found.rows(SloConfig())[0]
    assert row["prefix_hit_rate"] == (100 + 124) / (110 + 120 + 155 + 70)
    without = simulate(
        sessions,
        Costs(prefill=0.1),
        acceptance,
        ServerConfig(prefix_cache=False),
        num_draft_tokens=0,
    )
    assert {s.hit_tokens for s in without.served} == {0}


def job(session_idx, prompt_tokens, output_tokens, prefix_tokens=0):
    done = simpy.Environment().event()
    return Job("x", session_idx, prefix_tokens, prompt_tokens, output_tokens, Random(0), done, 0.0)


def test_the_session_out_of_use_for_longest_gives_way_and_prefixes_last():
    cache = KvCache(100, keeps=True)
    for i in range(2):
        first = job(i, 30, 11, prefix_tokens=10)
        assert cache.admit(first)
        cache.leave(first)
    # 10 of the prefix, twice 30 of sessions; 40 more need the first one's.
    newer = job(2, 40, 10, prefix_tokens=10)
    assert cache.admit(newer)
    assert newer.hit_tokens == 10
    assert cache.held == {1: 30, "x": 10, 2: 40}
    # All that is not in use may go, not what is.
    assert not cache.admit(job(3, 50, 11, prefix_tokens=10))
    last = job(3, 50, 10, prefix_tokens=10)
    assert cache.admit(last)
    assert cache.held == {"x": 10, 2: 40, 3: 50}
    assert cache.num_held == 100


def test_a_wholly_cached_prompt_still_runs_one_token():
    cache = KvCache(None, keeps=True)
    for hits in (0, 9):
        again = job(0, 10, 5, prefix_tokens=10)
        assert cache.admit(again)
        assert again.hit_tokens == hits
        cache.leave(again)


def test_without_room_a_request_waits_for_another_to_end():
    sessions = [session(0.0, (10, 11, 0.0)), session(0.5, (10, 11, 0.0))]
    small, large = (
        simulate(sessions, Costs(), PLAIN, ServerConfig(cache_tokens=n), num_draft_tokens=0)
        for n in (41, 42)
    )
    assert [s.first_token_seconds for s in small.served] == [0, 10]
    assert [s.first_token_seconds for s in large.served] == [0, 1]


def test_a_round_is_as_wide_as_its_longest_draft_and_emits_what_was_kept():
    acceptance = {
        "x": Acceptance({(3, 3): 1}, 3),
        "y": Acceptance({(1, 0): 1}, 3),
    }
    costs = Costs(step=1.0, draft=0.1)
    sessions = [session(0.0, (5, 8, 0.0)), session(0.0, (7, 4, 0.0), component="y")]
    found = simulate(sessions, costs, acceptance, ServerConfig(), num_draft_tokens=3)
    # x emits 1, 4 and 3, whose last round has room for two draft tokens; y one a round, whose last
    # has room for none.
    assert [(batch, width) for batch, width, _ in costs.steps] == [(2, 4), (2, 3), (1, 1)]
    assert costs.steps[0][2] == (6 + 8) / 2
    assert [s.finished_seconds for s in found.served] == pytest.approx([2.6, 3.9])
    assert found.rounds_by_batch == {2: 2, 1: 1}


def test_a_chunk_is_all_that_is_prefilled_between_two_rounds():
    sessions = [session(0.0, (1, 11, 0.0)), session(0.5, (100, 2, 0.0))]
    firsts, lasts = [], []
    for chunk in (None, 50):
        config = ServerConfig(prefill_chunk_tokens=chunk)
        found = simulate(sessions, Costs(prefill=0.1), PLAIN, config, num_draft_tokens=0)
        firsts.append(found.served[1].first_token_seconds)
        lasts.append(found.served[0].finished_seconds)
    # A round until 1.1; then 10 s of prefill, or twice 5 s with a round between them.
    assert firsts == pytest.approx([11.1, 12.1])
    assert lasts == pytest.approx([20.1, 20.1])


def test_prefill_elsewhere_holds_up_nobodys_rounds():
    sessions = [session(0.0, (1, 11, 0.0)), session(0.5, (100, 2, 0.0))]
    config = ServerConfig(disaggregated=True, transfer_us_per_token=20_000.0)
    found = simulate(sessions, Costs(prefill=0.1), PLAIN, config, num_draft_tokens=0)
    other, long = found.served
    # Prefilled at 0.1 and there at 0.12; ten rounds of a second.
    assert (other.first_token_seconds, other.finished_seconds) == pytest.approx((0.1, 10.12))
    # 10 s of prefill from 0.5 on, 2 s of transfer, a round.
    assert (long.first_token_seconds, long.finished_seconds) == pytest.approx((10.5, 13.5))


def test_closed_arrivals_keep_as_many_sessions_in_flight():
    sessions = [session(0.0, (1, 5, 0.0)) for _ in range(12)]
    found = simulate(sessions, Costs(), PLAIN, ServerConfig(), num_draft_tokens=0, concurrency=3)
    assert found.rounds_by_batch == {3: 16}
    assert found.mean_in_flight == 3
    assert [s.session for s in found.served] == list(range(12))


def test_acceptance_is_that_of_the_row():
    rows = {
        (0.6, 0.3): {"num_draft_tokens": 2, "acceptance_by_position": [0.6, 0.3]},
        (0.5, 0.25): {"num_draft_tokens": 2, "acceptance_length": 1.75, "component": "all"},
        (0.0, 0.0): {"num_draft_tokens": 2, "acceptance_length": 1.0, "component": "all"},
        (1.0, 1.0): {"num_draft_tokens": 2, "acceptance_length": 3.0, "component": "all"},
    }
    for by_position, row in rows.items():
        found = Acceptance.from_row(row)
        assert found.acceptance_length == pytest.approx(1 + sum(by_position))
        random = Random(0)
        kept = [found.draw(random)[1] for _ in range(20_000)]
        for i, share in enumerate(by_position):
            assert np.mean([k > i for k in kept]) == pytest.approx(share, abs=0.01)
        assert found.cut(1).acceptance_length == pytest.approx(1 + by_position[0])


@pytest.mark.parametrize(
    ("name", "value", "requirement"),
    [
        ("max_batch", 0, "be at least 1"),
        ("prefill_chunk_tokens", 0, "be at least 1, or null"),
        ("cache_tokens", 0, "be at least 1, or null"),
        ("transfer_us_per_token", -1.0, "be at least 0"),
    ],
)
def test_a_server_that_cannot_be_is_refused(name, value, requirement):
    with pytest.raises(ValueError, match=f"predict.server.{name} must {requirement}, got {value}"):
        ServerConfig(**{name: value})


def test_chunks_and_another_device_exclude_each_other():
    with pytest.raises(ValueError, match="prefill_chunk_tokens must be null where"):
        ServerConfig(disaggregated=True, prefill_chunk_tokens=64)
