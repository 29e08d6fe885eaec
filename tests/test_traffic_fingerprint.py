"""Fingerprints: the noise, what it costs, and what can be read through it."""

import importlib.util
import math
import random
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from specfit.traffic import fingerprint
from specfit.traffic.config import ComponentConfig, ProfileConfig, Quantiles
from specfit.traffic.draw import draw_sessions
from specfit.traffic.fingerprint import (
    Counts,
    Request,
    fingerprint_profile,
    noise,
    record,
    release,
    split,
)
from specfit.traffic.fingerprint_config import FingerprintConfig

NAMES = ["completion", "chat", "agent", "prose", "tools", "documents"]
WEIGHTS = [0.3, 0.25, 0.2, 0.12, 0.08, 0.05]
# Rows: true. Neighbours are mistaken for each other, and everything now and then for chat.
CONFUSION = np.array(
    [
        [0.90, 0.05, 0.03, 0.00, 0.02, 0.00],
        [0.04, 0.84, 0.02, 0.07, 0.01, 0.02],
        [0.05, 0.04, 0.86, 0.00, 0.05, 0.00],
        [0.00, 0.10, 0.00, 0.82, 0.00, 0.08],
        [0.02, 0.03, 0.07, 0.00, 0.88, 0.00],
        [0.00, 0.05, 0.00, 0.10, 0.00, 0.85],
    ]
)
REQUEST = Request("", False, 1, 300, 1.0, 80, (10, 6, 3, 1))


def profile(names=NAMES, weights=WEIGHTS, **lengths):
    components = [
        ComponentConfig(n, w, ["s"], **lengths) for n, w in zip(names, weights, strict=True)
    ]
    return ProfileConfig("base", components)


def counted(of, requests, k=0, seed=0):
    counts = Counts(of, k)
    for request, component in requests:
        counts.add(request, component, random.Random(seed))
    return counts


# The noise.


def unchecked():
    """The module without checked annotations, which make a draw fifteen times as slow."""
    spec = importlib.util.spec_from_file_location("unchecked_fingerprint", fingerprint.__file__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


plain = unchecked()
draw_noise = plain.noise


@pytest.mark.parametrize("epsilon", [Fraction(3, 20), Fraction(1), Fraction(7, 3)])
def test_noise_has_the_probabilities_that_it_says(epsilon):
    num, generator = 40_000, random.Random(5)
    drawn = [draw_noise(epsilon, generator) for _ in range(num)]
    a = math.exp(-epsilon)
    for x in range(-4, 5):
        p = (1 - a) / (1 + a) * a ** abs(x)
        assert drawn.count(x) / num == pytest.approx(p, abs=4.5 * math.sqrt(p * (1 - p) / num))


def test_noise_is_made_of_integers_only():
    class Integers(random.Random):
        def random(self):
            raise AssertionError("a float was drawn")

        def getrandbits(self, k):
            return super().getrandbits(k)

    generator = Integers(0)
    assert all(type(noise(Fraction(1, 3), generator)) is int for _ in range(200))


def test_the_noise_of_production_cannot_be_repeated():
    draws = [[noise(Fraction(1, 50), random.SystemRandom()) for _ in range(40)] for _ in range(2)]
    assert draws[0] != draws[1]


# What it costs.


@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize(
    "request_",
    [
        REQUEST,
        replace(REQUEST, turn=7, new_share=0.01),
        replace(REQUEST, turn=10**9, prompt_tokens=2**52, output_tokens=2**52, has_tools=True),
        replace(REQUEST, prompt_tokens=0, output_tokens=0, accepted=(0, 0)),
        replace(REQUEST, prompt_tokens=None, output_tokens=None, accepted=None),
        replace(REQUEST, accepted=(10**6, *[10**6] * 40)),
    ],
)
def test_a_request_adds_at_most_one_to_one_cell_of_each_table(request_, k):
    counts = counted(profile(), [(request_, "agent")], k)
    for name, table in counts.tables.items():
        assert table.min() >= 0, name
        assert table.sum() <= 1, name
    assert counts.tables["component"].sum() == 1


def test_an_unreadable_line_adds_one_to_one_table():
    counts = Counts(profile(), 3)
    counts.add_unreadable()
    assert {name: int(t.sum()) for name, t in counts.tables.items() if t.sum()} == {"component": 1}


@pytest.mark.parametrize("k", [0, 4])
@pytest.mark.parametrize("epsilon", [1.0, 0.3, 0.1, 2.5, 1e-3])
def test_the_tables_together_cost_epsilon_and_no_more(epsilon, k):
    tables = list(Counts(profile(), k).tables)
    assert sum(split(epsilon, tables).values()) == Fraction(str(epsilon))
    assert len(tables) == (6 if k else 5)


def log_ratios(epsilons, num):
    """What neighbours differ in most: log P(event | with) - log P(event | without), by event.

    Data sets with and without a request differ by 1 in one cell of each table. An event is that in
    the first j tables the released cell is above the count without it; the last is in all.
    """
    generator = random.Random(11)
    drawn = np.array([[draw_noise(e, generator) for e in epsilons] for _ in range(num)])
    hits = [(drawn + more >= 1).cumprod(1).sum(0) for more in (0, 1)]
    return np.log(hits[1] / hits[0]), np.sqrt(1 / hits[1] + 1 / hits[0])


TABLES = list(Counts(profile(), 0).tables)


def test_neighbours_are_told_apart_by_no_more_than_epsilon():
    ratios, errors = log_ratios(split(1.0, TABLES).values(), num=100_000)
    assert (ratios <= 1 + 4 * errors).all()
    assert ratios[-1] == pytest.approx(1, abs=4 * errors[-1])  # all of it is used


def test_noise_half_as_wide_tells_neighbours_apart_by_more_than_epsilon():
    ratios, errors = log_ratios([2 * e for e in split(1.0, TABLES).values()], num=20_000)
    assert ratios[-1] > 1 + 4 * errors[-1]


def test_laplace_of_two_over_epsilon_for_every_table_would_cost_more_than_epsilon():
    # That scale is right for two tables; here there are five.
    ratios, errors = log_ratios([Fraction(1, 2)] * len(TABLES), num=20_000)
    assert ratios[-1] > 1 + 4 * errors[-1]


def test_every_cell_is_released_with_noise():
    found = release(Counts(profile(), 3), 0.01, random.Random(0))
    for name, table in found.tables.items():
        assert (table != 0).mean() > 0.9, name  # zero is drawn with probability below 0.01


# Suppressing.


@pytest.mark.parametrize(("min_requests", "suppressed"), [(100, False), (101, True)])
def test_windows_with_fewer_noisy_requests_are_suppressed(min_requests, suppressed):
    found = release(counted(profile(["a"], [1.0]), [(REQUEST, "a")] * 5), 1.0, random.Random(0))
    found.tables["component"][:] = [100.0, 900.0]  # unreadable ones are no requests
    written = record(found, np.eye(1), min_requests=min_requests, window="w")
    assert written["suppressed"] is suppressed


def test_suppressing_follows_the_noisy_count_and_not_the_true_one():
    counts = counted(profile(["a"], [1.0]), [(REQUEST, "a")] * 100)
    decisions = [
        plain.record(
            plain.release(counts, 1.0, random.Random(s)), np.eye(1), min_requests=100, window="w"
        )
        for s in range(40)
    ]
    assert {d["suppressed"] for d in decisions} == {True, False}


def test_a_suppressed_window_says_no_number_but_the_minimum():
    found = release(Counts(profile(), 0), 1.0, random.Random(0))
    written = record(found, CONFUSION, min_requests=500, window="w")
    assert written == {
        "kind": "fingerprint",
        "window": "w",
        "unit": "request",
        "neighbours": "one request added or removed",
        "noise": "two-sided geometric",
        "epsilon": 1.0,
        "min_requests": 500,
        "suppressed": True,
    }


# What can be read.


def errors_of_the_mix(num, seeds):
    """Total variation from the truth, and how often intervals hold it."""
    distances, held = [], []
    for seed in range(seeds):
        generator, bits = np.random.default_rng(seed), random.Random(seed)
        counts = plain.Counts(profile(), 0)
        for i in generator.choice(6, num, p=WEIGHTS):
            counts.add(REQUEST, NAMES[generator.choice(6, p=CONFUSION[i])], bits)
        found = plain.record(
            plain.release(counts, 1.0, bits), CONFUSION, min_requests=1, window="w"
        )
        rows = found["components"]
        distances.append(sum(abs(r["weight"] - w) for r, w in zip(rows, WEIGHTS, strict=True)) / 2)
        pairs = zip(rows, WEIGHTS, strict=True)
        held += [r["weight_low"] <= w <= r["weight_high"] for r, w in pairs]
    return np.array(distances), np.mean(held)


def test_a_thousand_requests_at_epsilon_one_give_the_mix_within_six_hundredths():
    distances, held = errors_of_the_mix(1000, seeds=30)
    assert distances.mean() <= 0.06  # 0.037, with a standard deviation of 0.018 between seeds
    assert held >= 0.9  # of 95 % intervals, 180 of them


def truth():
    several = {
        "turns": Quantiles(4.0, 12.0),
        "new_tokens_per_turn": Quantiles(120.0, 400.0),
        "think_seconds": Quantiles(5.0, 20.0),
    }
    return ProfileConfig(
        "truth",
        [
            ComponentConfig(
                "chat",
                0.6,
                ["s"],
                0.0,
                Quantiles(600.0, 2400.0),
                output_tokens=Quantiles(130.0, 420.0),
            ),
            ComponentConfig(
                "agent",
                *(0.4, ["s"], 0.5, Quantiles(900.0, 2000.0)),
                output_tokens=Quantiles(60.0, 150.0),
                shared_prefix_tokens=700,
                **several,
            ),
        ],
    )


def fingerprinted(num_sessions):
    counts = Counts(truth(), 4)
    generator = random.Random(3)
    for session in draw_sessions(truth(), num_sessions, seed=1):
        for i, (turn, prompt) in enumerate(zip(session.turns, session.prompts(), strict=True)):
            share = turn.new_tokens / prompt if i else 1.0
            request = Request(
                "", i > 0, i + 1, prompt, share, turn.output_tokens, (100, 60, 30, 20, 10)
            )
            counts.add(request, session.component, generator)
    return record(release(counts, 1.0, generator), np.eye(2), min_requests=1, window="w")


@pytest.fixture(scope="module")
def found():
    return fingerprinted(6000)


def test_a_release_becomes_the_profile_that_the_traffic_was_drawn_from(found):
    base = truth()
    for component in base.components:
        component.prompt_tokens = component.output_tokens = None
    base = replace(base, from_fingerprint="x")
    learned = fingerprint_profile(found, base)
    assert learned.from_fingerprint is None
    for got, want in zip(learned.components, truth().components, strict=True):
        assert got.weight == pytest.approx(want.weight, abs=0.02)
        assert got.shared_prefix_tokens == want.shared_prefix_tokens
        assert got.temperature == want.temperature
        for name in ("prompt_tokens", "output_tokens", "turns", "new_tokens_per_turn"):
            quantiles, wanted = getattr(got, name), getattr(want, name)
            if wanted is None:
                assert quantiles is None
            else:
                assert quantiles.median == pytest.approx(wanted.median, rel=0.12), name
                assert quantiles.p90 == pytest.approx(wanted.p90, rel=0.2), name


def test_accepted_tokens_by_position_come_back(found):
    for row in found["components"]:
        assert row["acceptance_by_position"] == pytest.approx([0.6, 0.3, 0.2, 0.1], abs=0.06)
        assert row["acceptance_length"] == pytest.approx(2.2, abs=0.15)


def test_shares_of_requests_with_tools_come_back(found):
    chat, agent = found["components"]
    assert chat["tools_share"] == pytest.approx(0, abs=0.02)
    assert agent["tools_share"] == pytest.approx(0.8, abs=0.1)  # all but a session's first


def test_the_release_says_what_it_cost_table_by_table(found):
    assert sum(t["epsilon"] for t in found["counts"].values()) == pytest.approx(found["epsilon"])


def test_lengths_that_noise_hides_stay_as_they_were():
    small = fingerprinted(60)
    base = truth()
    assert all(row["output_tokens"] is None for row in small["components"])
    learned = fingerprint_profile(small, base)
    assert [c.output_tokens for c in learned.components] == [
        c.output_tokens for c in base.components
    ]


def test_a_component_without_weight_is_left_out(found):
    rows = [row | {"weight": w} for row, w in zip(found["components"], (1.0, 0.0), strict=True)]
    learned = fingerprint_profile(found | {"components": rows}, truth())
    assert [(c.name, c.weight) for c in learned.components] == [("chat", 1.0)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "acceptance"}, "must be a fingerprint.json"),
        ({"suppressed": True}, "must be a release, got a window that was suppressed"),
        ({"components": [{"name": "poetry"}]}, "profile.components must be those"),
    ],
)
def test_what_is_no_release_of_the_profile_is_refused(found, change, message):
    with pytest.raises(ValueError, match=message):
        fingerprint_profile(found | change, truth())


def test_more_components_than_are_released_are_refused():
    names = [f"c{i}" for i in range(65)]
    with pytest.raises(ValueError, match=r"profile\.components must be at most 64, got 65"):
        Counts(profile(names, [1 / 65] * 65), 0)


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"epsilon": 0.0}, "epsilon"),
        ({"epsilon": -1.0}, "epsilon"),
        ({"epsilon": math.nan}, "epsilon"),
        ({"epsilon": math.inf}, "epsilon"),
        ({"epsilon": 5.0}, "epsilon must be at most fingerprint.budget"),
        ({"budget": 0.0}, "budget"),
        ({"period_days": 0.0}, "period_days"),
        ({"min_requests": 0}, "min_requests"),
        ({"num_draft_tokens": -1}, "num_draft_tokens"),
    ],
)
def test_what_cannot_be_configured_is_refused_by_its_key(values, key):
    with pytest.raises(ValueError, match=rf"^fingerprint\.{key}"):
        FingerprintConfig(**values)
