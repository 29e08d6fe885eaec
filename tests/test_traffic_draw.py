"""Sessions that are drawn have the lengths, turns, arrivals and shares that the profile says."""

import math
from collections import Counter
from dataclasses import replace
from itertools import islice, pairwise
from statistics import NormalDist

import numpy as np
import pytest

from specfit.traffic.config import (
    ArrivalConfig,
    ArrivalKind,
    ComponentConfig,
    ProfileConfig,
    Quantiles,
)
from specfit.traffic.draw import Session, Turn, arrivals, draw_sessions, lognormal, mean, mean_turns
from specfit.traffic.draw import quantile as quantile_of

CHAT = ComponentConfig(
    name="chat",
    weight=0.6,
    sources=["a"],
    prompt_tokens=Quantiles(300.0, 600.0),
    new_tokens_per_turn=Quantiles(80.0, 130.0),
    output_tokens=Quantiles(200.0, 350.0),
    turns=Quantiles(3.0, 6.0),
    think_seconds=Quantiles(10.0, 30.0),
    shared_prefix_tokens=64,
)
COMPLETION = ComponentConfig(
    name="completion",
    weight=0.4,
    sources=["b"],
    prompt_tokens=Quantiles(1000.0, 2000.0),
    output_tokens=Quantiles(20.0, 40.0),
)
NUM = 1500  # sessions: with shapes checked, one takes milliseconds


def profile(*components, **options):
    components = [replace(c) for c in components or (CHAT, COMPLETION)]
    if len(components) == 1:
        components[0].weight = 1.0
    return ProfileConfig("p", components, **options)


@pytest.fixture(scope="module")
def chats():
    return draw_sessions(profile(CHAT), NUM, seed=1)


def assert_quantiles(values, expected):
    middle, high = np.quantile(values, [0.5, 0.9])
    assert middle == pytest.approx(expected.median, rel=0.05)
    assert high == pytest.approx(expected.p90, rel=0.05)


def test_first_prompts_have_the_quantiles_of_the_profile(chats):
    assert_quantiles([s.turns[0].new_tokens for s in chats], CHAT.prompt_tokens)


def test_later_turns_add_what_the_profile_says(chats):
    added = [t.new_tokens for s in chats for t in s.turns[1:]]
    assert_quantiles(added, CHAT.new_tokens_per_turn)


def test_answers_have_the_quantiles_of_the_profile(chats):
    assert_quantiles([t.output_tokens for s in chats for t in s.turns], CHAT.output_tokens)


def test_think_times_have_the_quantiles_of_the_profile(chats):
    assert_quantiles([t.think_seconds for s in chats for t in s.turns[1:]], CHAT.think_seconds)


def test_a_first_request_does_not_wait(chats):
    assert {s.turns[0].think_seconds for s in chats} == {0.0}


def test_turns_are_the_rounded_lognormal(chats):
    mu, sigma = lognormal(CHAT.turns)
    turns = np.array([len(s.turns) for s in chats])
    # Kolmogorov-Smirnov; 1.63 over the root of n is its 1 % point.
    for most in range(1, turns.max() + 1):
        expected = NormalDist(mu, sigma).cdf(math.log(most + 0.5))
        assert abs((turns <= most).mean() - expected) < 1.63 / math.sqrt(NUM)


def test_mean_turns_is_the_mean_of_what_is_drawn(chats):
    drawn = np.mean([len(s.turns) for s in chats])
    assert mean_turns(CHAT, None) == pytest.approx(drawn, rel=0.03)


@pytest.mark.parametrize("cv", [0.5, 1.0, 2.0])
def test_intervals_have_the_rate_and_the_cv_of_the_profile(cv):
    drawn = arrivals(ArrivalConfig(rate=4.0, cv=cv), np.random.default_rng(2))
    intervals = np.diff(list(islice(drawn, 8000)))
    assert (intervals >= 0).all()
    assert 1 / intervals.mean() == pytest.approx(4.0, rel=0.1)
    assert intervals.std() / intervals.mean() == pytest.approx(cv, rel=0.1)


@pytest.mark.parametrize("max_turns", [None, 2])
def test_shares_of_the_requests_are_the_weights_though_turns_differ(max_turns):
    sessions = draw_sessions(profile(max_turns=max_turns), NUM, seed=3)
    requests = Counter()
    for session in sessions:
        requests[session.component] += len(session.turns)
    assert requests["chat"] / requests.total() == pytest.approx(0.6, abs=0.03)
    begun = sum(s.component == "chat" for s in sessions) / NUM
    assert begun < 0.5


def test_turns_past_the_last_are_cut():
    sessions = draw_sessions(profile(CHAT, max_turns=2), 200, seed=4)
    assert {len(s.turns) for s in sessions} == {1, 2}


def test_every_session_begins_with_the_shared_prefix(chats):
    assert {s.prefix_tokens for s in chats} == {64}


def test_a_prompt_is_the_prefix_what_came_before_and_what_is_new():
    turns = (Turn(10, 3, 0.0), Turn(5, 4, 1.0), Turn(2, 9, 1.0))
    assert Session("c", 0.0, 100, turns).prompts() == [110, 118, 124]


def test_scale_divides_contexts_and_neither_answers_nor_turns(chats):
    scaled = draw_sessions(profile(CHAT, scale=4.0), NUM, seed=1)
    assert_quantiles([s.turns[0].new_tokens for s in scaled], Quantiles(75.0, 150.0))
    assert_quantiles([t.output_tokens for s in scaled for t in s.turns], Quantiles(200.0, 350.0))
    assert {s.prefix_tokens for s in scaled} == {16}
    assert [len(s.turns) for s in scaled] == [len(s.turns) for s in chats]


def test_lengths_are_at_least_one():
    tiny = replace(CHAT, output_tokens=Quantiles(1.0, 1.0), prompt_tokens=Quantiles(1.0, 3.0))
    sessions = draw_sessions(profile(tiny, scale=50.0), 200, seed=5)
    assert min(t.output_tokens for s in sessions for t in s.turns) == 1
    assert min(t.new_tokens for s in sessions for t in s.turns) == 1


def test_closed_sessions_begin_at_once():
    closed = profile(arrival=ArrivalConfig(kind=ArrivalKind.closed, concurrency=3))
    assert {s.start_seconds for s in draw_sessions(closed, 10, seed=6)} == {0.0}


def replay(path, text):
    path.write_text(text)
    return profile(arrival=ArrivalConfig(kind=ArrivalKind.replay, file=str(path)))


def test_a_replay_begins_sessions_when_the_file_says(tmp_path):
    text = '{"timestamp": 5}\n{"timestamp": 5.5, "more": 1}\n{"timestamp": 9}\n'
    sessions = draw_sessions(replay(tmp_path / "t.jsonl", text), 10, seed=7)
    assert [s.start_seconds for s in sessions] == [0.0, 0.5, 4.0]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('{"timestamp": 5}\n{"timestamp": 4}\n', 2),
        ('{"timestamp": 5}\n{"time": 6}\n', 2),
        ("5\n", 1),
        ('{"timestamp": NaN}\n', 1),
    ],
)
def test_a_broken_replay_names_its_line(tmp_path, text, line):
    with pytest.raises(ValueError, match=rf"t\.jsonl:{line}:"):
        draw_sessions(replay(tmp_path / "t.jsonl", text), 10, seed=0)


def test_a_replay_without_its_file_is_refused(tmp_path):
    arrival = ArrivalConfig(kind=ArrivalKind.replay, file=str(tmp_path / "no.jsonl"))
    with pytest.raises(FileNotFoundError, match=r"profile\.arrival\.file"):
        draw_sessions(profile(arrival=arrival), 1, seed=0)


@pytest.mark.parametrize("name", ["prompt_tokens", "output_tokens"])
def test_a_component_without_lengths_is_refused(name):
    with pytest.raises(ValueError, match=rf"profile\.components\.chat\.{name}"):
        draw_sessions(profile(replace(CHAT, **{name: None})), 1, seed=0)


def test_a_seed_draws_the_same_sessions_and_another_one_others():
    one, same, other = (draw_sessions(profile(), 50, seed) for seed in (1, 1, 2))
    assert one == same
    assert one != other


def test_quantiles_of_the_lognormal_are_those_it_is_made_from():
    assert quantile_of(CHAT.turns, 0.5) == pytest.approx(3)
    assert quantile_of(CHAT.turns, 0.9) == pytest.approx(6)
    points = [quantile_of(CHAT.turns, (i + 0.5) / 20000) for i in range(20000)]
    assert mean(CHAT.turns) == pytest.approx(np.mean(points), rel=1e-3)
    assert all(a < b for a, b in pairwise(points))
