"""Simulations against closed forms and against each other."""

import math
from dataclasses import replace

import numpy as np
import pytest
from simulated_traffic import HEAD, PLAIN, Costs, Linear, poisson, profile, session

from specfit.prediction.server import Acceptance, ServerConfig
from specfit.prediction.simulate import Served, figures, simulate, sweep
from specfit.traffic.config import (
    ArrivalConfig,
    ArrivalKind,
    ComponentConfig,
    ProfileConfig,
    Quantiles,
    SloConfig,
)
from specfit.traffic.draw import draw_sessions

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
    assert shares[-1] < 0.6


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


def test_intervals_hold_the_mean_they_are_of():
    # Runs of 10 alike: an interval that took requests for independent would be a third as wide.
    generator, covered = np.random.default_rng(0), 0
    for _ in range(150):
        values = np.repeat(generator.normal(1.0, 0.2, 20), 10)
        served = [Served("x", 0, 0, 1, 1, 0, 0.0, float(v), float(v)) for v in values]
        row = figures(served, 1.0, SloConfig())
        covered += row["ttft_ms_mean_low"] <= 1000 <= row["ttft_ms_mean_high"]
    assert 0.9 <= covered / 150 <= 0.99


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
