"""Shares of the training, by hand."""

import pytest

from specfit.traffic.config import ComponentConfig, FitConfig, Mixture, ProfileConfig, Quantiles
from specfit.traffic.mixture import mixture, of_first_head, recoverable, token_shares

PROFILE = ProfileConfig(
    "p", [ComponentConfig("code", 0.7, ["a"]), ComponentConfig("chat", 0.3, ["b"])]
)


def shares(config, **more):
    return {s.component: s.training for s in mixture(PROFILE, config, **more)}


def row(component, length, proposer="eagle3", k=4):
    coverage = {"coverage": 0.9} if proposer == "eagle3" else {}
    found = {"component": component, "proposer": proposer, "num_draft_tokens": k}
    return found | {"acceptance_length": length, "temperature": 0.0} | coverage


def test_without_a_floor_the_training_is_the_profile():
    assert shares(FitConfig(floor=0.0)) == pytest.approx({"code": 0.7, "chat": 0.3})


def test_the_floor_is_shared_out_evenly():
    assert shares(FitConfig(floor=0.2)) == pytest.approx({"code": 0.66, "chat": 0.34})
    assert shares(FitConfig(floor=1.0)) == pytest.approx({"code": 0.5, "chat": 0.5})


def test_uniform_is_the_same_for_each():
    assert shares(FitConfig(mixture=Mixture.uniform)) == pytest.approx({"code": 0.5, "chat": 0.5})


def test_requests_with_longer_answers_have_more_of_the_tokens():
    # 0.7 x 10 tokens and 0.3 x 70 tokens: a quarter and three quarters.
    found = token_shares(PROFILE, {"code": 10.0, "chat": 70.0})
    assert found == pytest.approx({"code": 0.25, "chat": 0.75})


def test_the_profile_s_own_lengths_come_before_measured_ones():
    components = [
        ComponentConfig("code", 0.5, ["a"], output_tokens=Quantiles(30.0, 30.0)),
        ComponentConfig("chat", 0.5, ["b"]),
    ]
    profile = ProfileConfig("p", components)
    assert token_shares(profile, {"code": 1.0, "chat": 10.0}) == pytest.approx(
        {"code": 0.75, "chat": 0.25}
    )
    # Where one is not known, requests stand for tokens.
    assert token_shares(profile) == pytest.approx({"code": 0.5, "chat": 0.5})


def test_what_can_be_saved_is_tokens_times_the_rounds_above_the_ceiling():
    # A token of code costs 1/2 round and could cost 1/4; one of chat 1/1.25, and could cost 1/2.
    found = recoverable(
        {"code": 0.5, "chat": 0.5}, {"code": 2.0, "chat": 1.25}, {"code": 4.0, "chat": 2.0}
    )
    assert found == pytest.approx({"code": 0.25 / 0.55, "chat": 0.3 / 0.55})


def test_a_component_at_its_ceiling_gets_no_more_than_the_floor():
    config = FitConfig(mixture=Mixture.recoverable, measured="x", floor=0.1, ceilings={"code": 2.0})
    found = shares(config, measured=[row("code", 2.1), row("chat", 1.5)])
    assert found == pytest.approx({"code": 0.05, "chat": 0.95})


def test_a_component_without_a_measurement_is_an_error_that_names_it():
    config = FitConfig(mixture=Mixture.recoverable, measured="x")
    with pytest.raises(ValueError, match=r"fit\.measured must have rows of chat"):
        shares(config, measured=[row("code", 2.0)])
    # Measured, but its answers were too short for a round.
    with pytest.raises(ValueError, match=r"fit\.measured must have rows of chat"):
        shares(config, measured=[row("code", 2.0), row("chat", None)])


def test_a_ceiling_of_no_component_is_an_error():
    with pytest.raises(ValueError, match=r"fit\.ceilings\.cat must be of code, chat"):
        shares(FitConfig(ceilings={"cat": 2.0}))


def test_nothing_left_to_save_is_an_error():
    with pytest.raises(ValueError, match=r"fit\.ceilings must be above"):
        recoverable({"a": 1.0}, {"a": 2.0}, {"a": 2.0})


def test_only_the_fitted_head_s_first_k_counts():
    rows = [row("code", 1.3, "ngram"), row("code", 2.0), row("code", 2.5, k=6), row("chat", 1.5)]
    found = of_first_head(rows)
    assert [(r["component"], r["acceptance_length"]) for r in found] == [
        ("code", 2.0),
        ("chat", 1.5),
    ]
