"""The simulated server against closed forms, against hand-computed cases, and against itself."""

import math
from dataclasses import replace
from random import Random

import numpy as np
import pytest
import simpy

from specfit.prediction.server import Acceptance, Job, KvCache, ServerConfig
from specfit.prediction.simulate import Served, figures, simulate, sweep
from specfit.traffic.config import (
    ArrivalConfig,
    ArrivalKind,
    ComponentConfig,
    ProfileConfig,
    Quantiles,
    SloConfig,
)
from specfit.traffic.draw import Session, Turn, draw_sessions

PLAIN = {"x": Acceptance({(0, 0): 1}, 0)}


class Costs:
    """By constants, or by whatever is called for each pass."""

    def __init__(self, step=1.0, draft=0.0, prefill=0.0):
        self.step, self.draft, self.prefill = step, draft, prefill
        self.steps = []

    def step_seconds(self, batch, tokens_per_sequence, context_tokens):
        self.steps.append((batch, tokens_per_sequence, context_tokens))
        return self.step() if callable(self.step) else self.step

    def draft_seconds(self, _batch, num_draft_tokens):
        return self.draft * num_draft_tokens

    def prefill_seconds(self, num_tokens, _context_tokens):
        return self.prefill * num_tokens


class Linear:
    """A server that grows slower with all that it has to do."""

    def step_seconds(self, batch, tokens_per_sequence, context_tokens):
        return 0.01 + 1e-4 * batch * tokens_per_sequence + 1e-7 * batch * context_tokens

    def draft_seconds(self, _batch, num_draft_tokens):
        return 0.001 * num_draft_tokens

    def prefill_seconds(self, num_tokens, _context_tokens):
        return 0.01 + 1e-4 * num_tokens


def session(start=0.0, *turns, prefix=0, component="x"):
    return Session(component, start, prefix, tuple(Turn(*turn) for turn in turns))


def poisson(rate, num, output_tokens, seed=0):
    times = np.cumsum(np.random.default_rng(seed).exponential(1 / rate, num)).tolist()
    return [session(t, (1, n, 0.0)) for t, n in zip(times, output_tokens, strict=True)]


def profile(rate=4.0, **settings):
    components = [
        ComponentConfig(
            "chat",
            0.7,
            ["s"],
            prompt_tokens=Quantiles(200.0, 800.0),
            output_tokens=Quantiles(60.0, 200.0),
            turns=Quantiles(2.0, 5.0),
            think_seconds=Quantiles(1.0, 4.0),
            shared_prefix_tokens=100,
        ),
        ComponentConfig(
            "edit",
            0.3,
            ["s"],
            prompt_tokens=Quantiles(500.0, 1500.0),
            output_tokens=Quantiles(40.0, 90.0),
        ),
    ]
    arrival = ArrivalConfig(rate=rate, cv=1.5)
    return ProfileConfig("p", components, arrival, SloConfig(600.0, 30.0), **settings)


HEAD = {
    "chat": Acceptance.from_positions([0.7, 0.45, 0.3, 0.2]),
    "edit": Acceptance.from_positions([0.8, 0.6, 0.5, 0.4]),
}
SERVERS = [
    ServerConfig(max_batch=8),
    ServerConfig(max_batch=8, prefill_chunk_tokens=64),
    ServerConfig(max_batch=3, cache_tokens=30_000),
    ServerConfig(max_batch=8, prefix_cache=False, cache_tokens=30_000),
    ServerConfig(max_batch=8, disaggregated=True, transfer_us_per_token=5.0),
]


def lindley(starts, services):
    """Responses of a queue with one server, in order."""
    free, found = 0.0, []
    for start, service in zip(starts, services, strict=True):
        free = max(free, start) + service
        found.append(free - start)
    return found


def one_at_a_time(load, kind, num):
    """A simulated queue of one server, and the responses that Lindley's recursion gives it."""
    drawn = np.random.default_rng(1).exponential(1.0, num)
    services = drawn.tolist() if kind == "exponential" else [1.0] * num
    # The first token takes no time, the second is a round.
    sessions = poisson(load, num, [2] * num)
    costs = Costs(step=iter(services).__next__)
    found = simulate(sessions, costs, PLAIN, ServerConfig(max_batch=1), num_draft_tokens=0)
    return found, lindley([s.start_seconds for s in sessions], services)


def pollaczek_khinchine(load, kind):
    """The mean response to services of mean 1; if they are exponential, 1 / (1 - load)."""
    variation = 1 if kind == "exponential" else 0
    return 1 + load * (1 + variation) / (2 * (1 - load))


LOADS = pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
KINDS = pytest.mark.parametrize("kind", ["exponential", "constant"])


@LOADS
@KINDS
def test_one_at_a_time_is_the_queue_of_the_textbook(load, kind):
    found, responses = one_at_a_time(load, kind, 800)
    assert [s.latency_seconds for s in found.served] == pytest.approx(responses)
    # So few have no mean yet. The recursion that the simulation follows to the job has the
    # textbook's.
    num = 500_000
    generator = np.random.default_rng(1)
    services = generator.exponential(1.0, num) if kind == "exponential" else np.ones(num)
    starts = generator.exponential(1 / load, num).cumsum()
    responses = lindley(starts.tolist(), services.tolist())
    assert np.mean(responses) == pytest.approx(pollaczek_khinchine(load, kind), rel=0.03)


@pytest.mark.slow
@LOADS
@KINDS
def test_many_jobs_one_at_a_time_have_the_mean_of_the_textbook(load, kind):
    found, _ = one_at_a_time(load, kind, 100_000)
    measured = np.mean([s.latency_seconds for s in found.served])
    assert measured == pytest.approx(pollaczek_khinchine(load, kind), rel=0.03)
    assert found.rows(SloConfig())[0]["utilization"] == pytest.approx(load, rel=0.03)


def erlang_c(servers, offered):
    """Probability of waiting in an M/M/c queue."""
    terms = [offered**n / math.factorial(n) for n in range(servers)]
    last = offered**servers / math.factorial(servers) * servers / (servers - offered)
    return last / (sum(terms) + last)


@pytest.mark.slow
def test_a_batch_that_slows_nobody_down_is_a_queue_with_as_many_servers():
    servers, offered, num, tokens = 4, 2.8, 12_000, 40
    step = 1 / tokens  # so that an answer takes a second on average
    generator = np.random.default_rng(2)
    outputs = (1 + generator.geometric(1 / tokens, num)).tolist()
    costs, config = Costs(step=step), ServerConfig(max_batch=servers)
    found = simulate(poisson(offered, num, outputs), costs, PLAIN, config, num_draft_tokens=0)
    wait = erlang_c(servers, offered) / (servers - offered)
    # Who comes while a round runs waits for its end: half of it, if anyone is there at all.
    expected = 1 + wait + step / 2
    measured = np.mean([s.latency_seconds for s in found.served])
    assert measured == pytest.approx(expected, rel=0.04)


@pytest.mark.parametrize("config", SERVERS)
@pytest.mark.parametrize("k", [0, 3])
def test_littles_law_holds_and_every_token_is_emitted(config, k):
    sessions = draw_sessions(profile(), 60, seed=3)
    found = simulate(sessions, Linear(), HEAD, config, num_draft_tokens=k)
    in_flight = sum(s.latency_seconds for s in found.served) / found.seconds
    assert found.mean_in_flight == pytest.approx(in_flight)
    asked = [turn.output_tokens for s in sessions for turn in s.turns]
    assert sorted(s.output_tokens for s in found.served) == sorted(asked)
    for s in found.served:
        assert s.arrived_seconds < s.first_token_seconds <= s.finished_seconds
        assert s.prompt_tokens == sessions[s.session].prompts()[s.turn]


@pytest.mark.parametrize("config", SERVERS)
def test_a_seed_gives_the_same_again_and_another_gives_others(config):
    sessions = draw_sessions(profile(), 20, seed=3)
    runs = [
        simulate(sessions, Linear(), HEAD, config, num_draft_tokens=3, seed=seed)
        for seed in (0, 0, 1)
    ]
    assert runs[0].served == runs[1].served
    assert runs[0].served != runs[2].served


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


@pytest.mark.parametrize("rate", [0.5, 2.0, 8.0])
def test_prefill_elsewhere_makes_no_gap_between_tokens_longer(rate):
    sessions = draw_sessions(profile(rate), 40, seed=5)
    together, apart = (
        simulate(
            sessions,
            Linear(),
            HEAD,
            ServerConfig(disaggregated=d, max_batch=64),
            num_draft_tokens=2,
        )
        for d in (False, True)
    )
    itls = [[s.itl_seconds for s in run.served if s.itl_seconds] for run in (together, apart)]
    assert np.mean(itls[1]) < np.mean(itls[0])


@pytest.mark.parametrize("k", [0, 3])
def test_a_higher_rate_never_gives_a_larger_share_in_time(k):
    rows = sweep(
        profile(),
        Linear(),
        HEAD,
        ServerConfig(max_batch=8),
        rates=[0.25, 1.0, 4.0, 16.0],
        num_draft_tokens=[k],
        num_sessions=60,
        seed=0,
    )
    shares = [row["goodput_share"] for row in rows if row["component"] == "all"]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > 0.9
    assert shares[-1] < 0.3


def test_a_sweep_marks_the_best_k_of_each_rate():
    acceptance = {"x": Acceptance.from_positions([0.5, 0.25, 0.125])}
    component = ComponentConfig(
        "x", 1.0, ["s"], prompt_tokens=Quantiles(9.0, 9.0), output_tokens=Quantiles(50.0, 50.0)
    )
    traffic = ProfileConfig("p", [component])

    def best(draft):
        rows = sweep(
            traffic,
            Costs(step=0.01, draft=draft),
            acceptance,
            ServerConfig(),
            rates=[0.1, 1.0],
            num_draft_tokens=[0, 1, 2, 3],
            num_sessions=30,
            seed=0,
        )
        assert {row["kind"] for row in rows} == {"simulated"}
        marked = [r for r in rows if r["is_best_k"] and r["component"] == "all"]
        assert [row["sessions_per_second"] for row in marked] == [0.1, 1.0]
        return [row["num_draft_tokens"] for row in marked]

    # A third token adds 1/8 of a token to 1.75 of them.
    assert best(0.0) == [3, 3]
    assert best(0.002) == [1, 1]
    assert best(0.02) == [0, 0]


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


def test_intervals_hold_the_mean_they_are_of():
    # Runs of 10 alike: an interval that took requests for independent would be a third as wide.
    generator, covered = np.random.default_rng(0), 0
    for _ in range(150):
        values = np.repeat(generator.exponential(1.0, 20), 10)
        served = [Served("x", 0, 0, 1, 1, 0, 0.0, float(v), float(v)) for v in values]
        row = figures(served, 1.0, SloConfig())
        covered += row["ttft_ms_mean_low"] <= 1000 <= row["ttft_ms_mean_high"]
    assert 0.88 <= covered / 150 <= 0.98


def test_goodput_counts_who_meets_both_promises():
    slo = SloConfig(ttft_ms=1000.0, itl_ms=100.0)
    served = [
        Served("x", 0, 0, 1, 11, 0, 0.0, 1.0, 2.0),
        Served("x", 1, 0, 1, 11, 0, 0.0, 1.01, 2.01),
        Served("x", 2, 0, 1, 11, 0, 0.0, 1.0, 2.01),
        Served("y", 3, 0, 1, 1, 0, 0.0, 1.0, 1.0),
    ]
    row = figures(served, 4.0, slo)
    assert row["goodput_share"] == 0.5
    assert row["goodput_requests_per_second"] == 0.5
    assert figures(served, 4.0, slo, "x")["goodput_share"] == pytest.approx(1 / 3)
    assert row["latency_ms_p50"] == pytest.approx(2005)
    assert "itl_ms_mean" not in figures(served, 4.0, slo, "y")


REFUSALS = [
    ({"num_draft_tokens": -1}, "predict.num_draft_tokens must be at least 0, got -1"),
    (
        {"num_draft_tokens": 5},
        "predict.num_draft_tokens must be at most 4, measured of chat, got 5",
    ),
    ({"concurrency": 0}, "profile.arrival.concurrency must be at least 1, got 0"),
    ({"sessions": []}, "predict.num_sessions must be at least 1, got 0"),
    (
        {"server": ServerConfig(cache_tokens=29)},
        "predict.server.cache_tokens must be at least the 30 tokens of a request of chat, got 29",
    ),
]


@pytest.mark.parametrize(("change", "message"), REFUSALS)
def test_what_cannot_be_served_is_refused(change, message):
    given = {
        "sessions": [session(0.0, (20, 10, 0.0), component="chat")],
        "costs": Linear(),
        "acceptance": HEAD,
        "server": ServerConfig(),
        "num_draft_tokens": 1,
    }
    with pytest.raises(ValueError) as error:  # noqa: PT011
        simulate(**given | change)
    assert str(error.value) == message


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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rates": [0.0]}, r"predict.rates\[\] must be positive, got 0.0"),
        (
            {"profile": replace(profile(), arrival=ArrivalConfig(kind=ArrivalKind.closed))},
            "profile.arrival.kind must be gamma for a sweep, got closed",
        ),
    ],
)
def test_a_sweep_of_no_rate_is_refused(change, message):
    given = {"profile": profile(), "rates": [1.0]} | change
    with pytest.raises(ValueError, match=message):
        sweep(
            costs=Linear(),
            acceptance=HEAD,
            server=ServerConfig(),
            num_draft_tokens=[0],
            num_sessions=3,
            seed=0,
            **given,
        )
