"""Drift: distances by hand, the change that measured acceptance predicts, verdicts at edges."""

import json
import math
from dataclasses import replace
from statistics import NormalDist

import numpy as np
import pytest

from specfit.stages import drift as stage
from specfit.traffic.config import ComponentConfig, ProfileConfig, Quantiles
from specfit.traffic.draw import lognormal
from specfit.traffic.drift import (
    Verdict,
    drift,
    jensen_shannon_bits,
    kolmogorov_smirnov,
    total_variation,
    verdict_of,
)
from specfit.traffic.fingerprint_config import DriftConfig

CODE = Quantiles(100.0, 100.0)  # no spread: a mean of 100 tokens
CHAT = Quantiles(300.0, 300.0)


def profile(name, code=0.5, chat=0.5, other=0.0, **changes):
    components = [
        ComponentConfig("code", code, ["s"], output_tokens=CODE, prompt_tokens=CHAT),
        ComponentConfig("chat", chat, ["s"], output_tokens=CHAT, prompt_tokens=CODE),
        ComponentConfig("other", other, ["s"], output_tokens=CODE),
    ]
    return ProfileConfig(name, [replace(c, **changes) for c in components if c.weight > 0])


def row(component, length, *, spread=1.05, k=4, proposer="eagle3", temperature=0.0, rate=50.0):
    return {
        "component": component,
        "proposer": proposer,
        "temperature": temperature,
        "num_draft_tokens": k,
        "num_prompts": 10,
        "num_tokens": 1200,
        "num_rounds": round(1200 / length),
        "acceptance_length": length,
        "acceptance_length_low": length / spread,
        "acceptance_length_high": length * spread,
        "tokens_per_second": rate,
        "timed_acceptance_length": length,
    }


ROWS = [
    row("code", 3.0, rate=60.0),
    row("chat", 2.0, rate=40.0),
    row("all", 2.3),
    row("code", 1.5, proposer="ngram"),
    row("code", 2.5, k=2),
    row("chat", 1.0, proposer="none", k=0),
]


# Distances.


@pytest.mark.parametrize(
    ("old", "new", "distance"),
    [
        ({"a": 1.0}, {"a": 1.0}, 0.0),
        ({"a": 1.0}, {"b": 1.0}, 1.0),
        ({"a": 0.5, "b": 0.5}, {"a": 0.8, "b": 0.2}, 0.3),
        ({"a": 0.5, "b": 0.5}, {"a": 0.5, "c": 0.5}, 0.5),
    ],
)
def test_total_variation_is_the_share_that_moved(old, new, distance):
    assert total_variation(old, new) == pytest.approx(distance)


def test_jensen_shannon_is_by_hand():
    # From (1, 0) to (1/2, 1/2), middle (3/4, 1/4): half of log2(4/3), and of both halves' terms.
    half = math.log2(4 / 3) / 2 + (math.log2(2 / 3) / 2 + math.log2(2) / 2) / 2
    assert jensen_shannon_bits({"a": 1.0}, {"a": 0.5, "b": 0.5}) == pytest.approx(half)
    assert jensen_shannon_bits({"a": 1.0}, {"b": 1.0}) == pytest.approx(1)
    assert jensen_shannon_bits({"a": 0.3, "b": 0.7}, {"a": 0.3, "b": 0.7}) == 0


def test_kolmogorov_smirnov_is_the_largest_difference_on_a_fine_grid():
    generator = np.random.default_rng(0)
    grid = np.linspace(-5, 20, 20001)
    for _ in range(20):
        medians = np.exp(generator.uniform(1, 9, 2))
        one, two = (
            Quantiles(float(m), float(m * np.exp(generator.uniform(0.05, 2)))) for m in medians
        )
        f, g = (np.vectorize(NormalDist(*lognormal(q)).cdf)(grid) for q in (one, two))
        assert kolmogorov_smirnov(one, two) == pytest.approx(abs(f - g).max(), abs=1e-3)
        assert kolmogorov_smirnov(one, two) == pytest.approx(kolmogorov_smirnov(two, one))


@pytest.mark.parametrize(
    ("old", "new", "distance"),
    [
        ((50.0, 90.0), (50.0, 90.0), 0.0),
        ((50.0, 50.0), (50.0, 50.0), 0.0),
        ((50.0, 50.0), (60.0, 60.0), 1.0),
        ((50.0, 50.0), (50.0, 90.0), 0.5),  # a point in the middle of the other
        ((50.0, 90.0), (90.0, 90.0), 0.9),
        # Equal spreads, a median one standard deviation off: 2 · Phi(1/2) - 1.
        ((1.0, math.exp(1.2815515655446004)), (math.e, math.exp(2.2815515655446004)), 0.3829249),
    ],
)
def test_kolmogorov_smirnov_has_its_known_values(old, new, distance):
    assert kolmogorov_smirnov(Quantiles(*old), Quantiles(*new)) == pytest.approx(distance)


# What acceptance predicts.


def test_identical_profiles_keep_the_head_at_distance_zero():
    found = drift(profile("a"), profile("a"), ROWS, DriftConfig())
    assert found["verdict"] == "keep"
    assert set(found["distances"].values()) == {0.0}
    for end in ("", "_low", "_high"):
        assert found["acceptance"][f"acceptance_length_change{end}"] == 0
    for component in found["components"]:
        distances = [length["kolmogorov_smirnov"] for length in component["lengths"]]
        assert set(distances) == {0.0, None}


def test_swapped_weights_move_acceptance_as_by_hand():
    old, new = profile("old", 0.8, 0.2), profile("new", 0.2, 0.8)
    found = drift(old, new, ROWS, DriftConfig())["acceptance"]
    # 80 + 60 tokens in 80/3 + 60/2 rounds; 20 + 240 in 20/3 + 240/2.
    before, after = 140 / (80 / 3 + 30), 260 / (20 / 3 + 120)
    assert found["acceptance_length_old"] == pytest.approx(before)
    assert found["acceptance_length_new"] == pytest.approx(after)
    assert found["acceptance_length_change"] == pytest.approx(after / before - 1)


def test_time_a_token_is_rounds_times_what_a_round_takes():
    old, new = profile("old", 0.8, 0.2), profile("new", 0.2, 0.8)
    found = drift(old, new, ROWS, DriftConfig())["acceptance"]
    # A round takes 3/60 s and 2/40 s, so a token 1/60 and 1/40.
    before, after = 1e3 * (80 / 60 + 60 / 40) / 140, 1e3 * (20 / 60 + 240 / 40) / 260
    assert found["ms_per_token_old"] == pytest.approx(before)
    assert found["ms_per_token_new"] == pytest.approx(after)
    assert found["ms_per_token_change"] == pytest.approx(after / before - 1)


def test_what_a_round_takes_is_of_the_answers_that_were_timed():
    lucky = [r | {"timed_acceptance_length": 1.5 * r["acceptance_length"]} for r in ROWS]
    plain, found = (
        drift(profile("old"), profile("new"), rows, DriftConfig())["acceptance"]
        for rows in (ROWS, lucky)
    )
    # As quick, with half as many tokens again in a round: so a round took half as long again.
    assert found["ms_per_token_old"] == pytest.approx(1.5 * plain["ms_per_token_old"])


def test_scale_shortens_contexts_and_no_answers():
    # `chat` has no length in the profiles, so it counts with its measured 120 tokens a request.
    def unknown(scale):
        made = profile("p", 0.5, 0.5)
        made.components[1].output_tokens = None
        return replace(made, scale=scale)

    found = drift(unknown(1.0), unknown(10.0), ROWS, DriftConfig())["acceptance"]
    assert found["acceptance_length_old"] == pytest.approx(220 / (100 / 3 + 120 / 2))
    assert found["acceptance_length_new"] == pytest.approx(found["acceptance_length_old"])


def test_distances_of_swapped_weights_are_by_hand():
    found = drift(profile("old", 0.8, 0.2), profile("new", 0.2, 0.8), None, DriftConfig())
    assert found["distances"]["total_variation_by_requests"] == pytest.approx(0.6)
    assert found["distances"]["total_variation_by_tokens"] == pytest.approx(80 / 140 - 20 / 260)


def test_one_component_keeps_its_measured_interval():
    alone = profile("a", 1.0, 0.0)
    found = drift(alone, alone, ROWS, DriftConfig())["acceptance"]
    assert found["acceptance_length_old_low"] == pytest.approx(3 / 1.05, rel=0.01)
    assert found["acceptance_length_old_high"] == pytest.approx(3 * 1.05, rel=0.01)


def test_without_output_lengths_a_request_has_the_tokens_that_were_measured():
    old, new = (profile("p", *w, output_tokens=None) for w in ((0.8, 0.2), (0.2, 0.8)))
    found = drift(old, new, ROWS, DriftConfig())["acceptance"]
    assert found["acceptance_length_old"] == pytest.approx(1 / (0.8 / 3 + 0.2 / 2))  # 120 of each
    assert found["acceptance_length_new"] == pytest.approx(1 / (0.2 / 3 + 0.8 / 2))


def test_the_most_measured_draft_tokens_count_unless_it_is_said():
    alone = profile("a", 1.0, 0.0)
    assert drift(alone, alone, ROWS, DriftConfig())["acceptance"]["num_draft_tokens"] == 4
    fewer = drift(alone, alone, ROWS, DriftConfig(num_draft_tokens=2))["acceptance"]
    assert fewer["acceptance_length_old"] == pytest.approx(2.5)


def test_components_count_at_the_temperature_that_they_are_served_at():
    cold, hot = profile("cold", 1.0, 0.0), profile("hot", 1.0, 0.0, temperature=1.0)
    rows = [row("code", 3.0), row("code", 2.4, temperature=1.0)]
    found = drift(cold, hot, rows, DriftConfig())
    assert found["acceptance"]["acceptance_length_change"] == pytest.approx(-0.2)
    assert found["verdict"] == "retrain"


# Verdicts.


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        (0.3, Verdict.keep),
        (0.0, Verdict.keep),
        (-0.0199, Verdict.keep),
        (-0.02, Verdict.refit),
        (-0.1, Verdict.refit),
        (-0.1499, Verdict.refit),
        (-0.15, Verdict.retrain),
        (-0.9, Verdict.retrain),
    ],
)
def test_verdicts_change_at_their_thresholds(change, verdict):
    assert verdict_of(change, DriftConfig()) is verdict


@pytest.mark.parametrize(("spread", "decided"), [(1.0001, True), (2.0, False)])
def test_a_wide_interval_leaves_the_verdict_undecided(spread, decided):
    rows = [row("code", 3.0, spread=spread), row("chat", 2.7, spread=spread)]
    found = drift(profile("a", 0.8, 0.2), profile("b", 0.2, 0.8), rows, DriftConfig())
    assert found["verdict"] == "refit"
    assert found["decided"] is decided


@pytest.mark.parametrize(("share", "verdict"), [(0.01, "keep"), (0.02, "keep"), (0.03, "refit")])
def test_unmeasured_components_ask_for_a_refit_beyond_a_share(share, verdict):
    new = profile("new", 0.5 - share / 2, 0.5 - share / 2, share)
    found = drift(profile("old"), new, ROWS, DriftConfig())
    assert found["verdict"] == verdict
    assert found["acceptance"]["unmeasured_new"] == {"other": pytest.approx(share)}
    assert "not measured" in found["reason"]
    assert "other" in found["reason"]


def test_nothing_measured_of_the_new_traffic_is_at_least_a_refit():
    found = drift(profile("old"), profile("new", 0.0, 0.0, 1.0), ROWS, DriftConfig())
    assert found["verdict"] == "refit"
    assert found["decided"] is None
    assert "nothing can be predicted" in found["reason"]


def test_an_unmeasured_component_does_not_soften_retraining():
    rows = [row("code", 3.0), row("chat", 1.5)]
    found = drift(profile("old", 0.9, 0.1), profile("new", 0.1, 0.5, 0.4), rows, DriftConfig())
    assert found["verdict"] == "retrain"


@pytest.mark.parametrize(("code", "verdict"), [(0.5, "keep"), (0.59, "keep"), (0.75, "refit")])
def test_without_acceptance_the_distance_decides(code, verdict):
    new = profile("new", code, 1 - code, output_tokens=CODE)
    found = drift(profile("old", output_tokens=CODE), new, None, DriftConfig())
    assert found["verdict"] == verdict
    assert "no acceptance was measured" in found["reason"]


# What is refused.


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (DriftConfig(proposer="suffix"), r"drift\.proposer must be one that was measured"),
        (DriftConfig(num_draft_tokens=7), r"drift\.num_draft_tokens must be one of \[2, 4\]"),
    ],
)
def test_rows_that_are_not_there_are_an_error(config, message):
    with pytest.raises(ValueError, match=message):
        drift(profile("a"), profile("a"), ROWS, config)


def test_an_old_profile_that_was_never_measured_is_an_error():
    with pytest.raises(ValueError, match=r"drift\.old must have a component that was measured"):
        drift(profile("old", 0.0, 0.0, 1.0), profile("new"), ROWS, DriftConfig())


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"refit_above": -0.01}, "refit_above"),
        ({"refit_above": -1.0}, "refit_above"),
        ({"max_distance": 1.5}, "max_distance"),
        ({"max_unmeasured": -0.1}, "max_unmeasured"),
        ({"num_draft_tokens": 0}, "num_draft_tokens"),
    ],
)
def test_what_cannot_be_configured_is_refused_by_its_key(values, key):
    with pytest.raises(ValueError, match=rf"^drift\.{key} must"):
        DriftConfig(**values)


# The stage.


@pytest.mark.parametrize("rows", [ROWS, None])
def test_the_page_says_the_verdict_first(tmp_path, rows):
    old, new = profile("summer", 0.8, 0.2), profile("winter", 0.1, 0.7, 0.2)
    stage.run(tmp_path, config=DriftConfig(), old=old, new=new, acceptance=rows)
    found = json.loads((tmp_path / "drift.json").read_text())
    text = (tmp_path / "drift.md").read_text().replace("\\", "")
    assert text.startswith("# Drift from summer to winter\n\nVerdict: ")
    assert found["reason"] in text.splitlines()[2]
    assert text.index("Verdict") < text.index("## The mixes")
    for name in ("code", "chat", "other"):
        assert f"| {name} |" in text
    assert (tmp_path / "drift.png").stat().st_size > 1000
    assert "data:image/png;base64," in (tmp_path / "drift.html").read_text()
