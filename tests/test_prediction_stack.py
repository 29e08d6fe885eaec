"""The itemised stack of a trillion parameters, as `conf/experiment/trillion.yaml` describes it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from specfit.latency.config import Format
from specfit.prediction.config import (
    ChangeConfig,
    Constant,
    HardwareConfig,
    PredictConfig,
    StackConfig,
)
from specfit.prediction.model import Length, Load, Traffic, configured, token_seconds
from specfit.prediction.stack import State, stack_rows

CONF = Path(__file__).parents[1] / "conf"
NAMES = ["BF16 to FP8", "FP8 to FP4", "speculator, k = 3", "disaggregation", "kernels"]


def loaded(kind: type, value: Any) -> Any:
    return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(kind), value))


@pytest.fixture(scope="module")
def experiment():
    return OmegaConf.load(CONF / "experiment" / "trillion.yaml")


@pytest.fixture(scope="module")
def config(experiment) -> PredictConfig:
    return loaded(PredictConfig, experiment.predict)


@pytest.fixture(scope="module")
def hardware(experiment) -> HardwareConfig:
    machine = OmegaConf.load(CONF / "hardware" / "b200.yaml")
    return loaded(HardwareConfig, OmegaConf.merge(machine, experiment.hardware))


@pytest.fixture(scope="module")
def traffic(config) -> Traffic:
    lengths = (Length(1.0), *map(Length, config.acceptance[0].lengths))
    return Traffic("long_chat", lengths, 382.0, 12160.0, 382.0)


@pytest.fixture(scope="module")
def rows(config, hardware, traffic) -> list[dict[str, Any]]:
    return stack_rows(config.stack, config.model, hardware, traffic, config.hit_rate)


def factors(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in rows if row["kind"] == "factor" and "factor" in row}


def test_the_model_has_a_trillion_parameters_of_which_32_billion_are_active(config):
    model = config.model
    fixed = model.attention.parameters + model.shared.parameters + model.head.parameters
    assert fixed + model.experts.parameters == pytest.approx(1.03e12, rel=0.01)
    assert fixed + model.experts.parameters * 8 / 384 == pytest.approx(32e9, rel=0.02)


def test_the_stack_has_the_episodes_factors_in_its_order(rows):
    assert list(factors(rows)) == NAMES


def test_factors_multiply_to_the_whole(rows):
    start, *_ = rows
    rate = start["tokens_per_second_per_user"]
    for row in factors(rows).values():
        rate *= row["factor"]
        assert row["tokens_per_second_per_user"] == pytest.approx(rate)
    [whole, same] = [row for row in rows if row["kind"] == "stack_total"]
    assert whole["factor"] == pytest.approx(rate / start["tokens_per_second_per_user"])
    apart = factors(rows)["disaggregation"]["factor"]
    assert same["factor"] == pytest.approx(whole["factor"] / apart)


def test_the_shape_is_the_episodes(rows):
    found = factors(rows)
    assert all(row["factor"] > 1.1 for row in found.values())
    assert found["BF16 to FP8"]["side"] == "within"
    assert found["kernels"]["side"] == "within"  # two digits of a percentage
    rates = {row["name"]: row for row in rows if row["kind"] == "stack_rate"}
    assert rates["start"]["side"] == "within"  # 30 to 50 tokens/s
    same = [row for row in rows if row["name"] == "on the same devices"]
    assert same[0]["side"] in ("within", "above")


def test_what_lies_outside_a_range_is_said_to(rows):
    for row in (row for row in rows if "side" in row):
        value = row.get("factor", row.get("tokens_per_second_per_user"))
        inside = row["expected_low"] <= value <= row["expected_high"]
        assert (row["side"] == "within") == inside
        assert (row["side"] == "below") == (value < row["expected_low"])


@pytest.mark.parametrize("name", NAMES)
def test_where_a_factor_cannot_hold_it_is_smaller(rows, name):
    row = factors(rows)[name]
    assert row["limit_factor"] < row["factor"]
    assert row["limit"].endswith(".")


def test_a_row_is_what_the_model_says_before_and_after(rows, config, hardware, traffic):
    model = config.model
    formats = {}
    for form in (Format.bf16, Format.fp8):
        parts = {n: replace(getattr(model, n), format=form) for n in ("attention", "shared")}
        parts["experts"] = replace(model.experts, format=form)
        machine = configured(replace(model, **parts), hardware)
        load = Load(config.stack.concurrency, config.hit_rate)
        formats[form] = token_seconds(machine, traffic, load, 0, 1.0)
    quotient = formats[Format.bf16] / formats[Format.fp8]
    assert factors(rows)["BF16 to FP8"]["factor"] == pytest.approx(quotient)


def test_a_change_leaves_what_it_does_not_name(config, hardware):
    before = State(config.model, hardware)
    assert before.changed(ChangeConfig()) == before
    share = Constant(0.6, "a test")
    after = before.changed(ChangeConfig(num_draft_tokens=2, achieved_bandwidth=share))
    assert after.hardware == replace(hardware, achieved_bandwidth=share)
    assert (after.model, after.num_draft_tokens, after.disaggregated) == (config.model, 2, False)
    formed = before.changed(ChangeConfig(format=Format.nvfp4)).model
    assert formed.experts.format is Format.nvfp4
    assert formed.head == config.model.head


def test_more_drafted_tokens_than_acceptance_is_known_for_are_refused(config, hardware, traffic):
    stack = replace(config.stack, start=ChangeConfig(num_draft_tokens=6))
    message = r"predict\.stack\.start\.num_draft_tokens must lie in \[0, 5\].*got 6"
    with pytest.raises(ValueError, match=message):
        stack_rows(stack, config.model, hardware, traffic, 0.0)


def test_in_bf16_the_weights_do_not_fit_on_eight_devices(config, hardware, traffic):
    small = replace(hardware, num_devices=8)
    with pytest.raises(ValueError, match=r"hardware\.num_devices must hold 2050 GB .*got 8"):
        stack_rows(config.stack, config.model, small, traffic, 0.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"concurrency": 0}, r"predict\.stack\.concurrency must be at least 1"),
        ({"factors": []}, r"predict\.stack\.factors must not be empty"),
        ({"expected_end": [400.0, 300.0]}, r"predict\.stack\.expected_end must be \[low, high\]"),
    ],
)
def test_a_stack_that_cannot_be_is_refused(config, change, message):
    values = vars(config.stack) | change
    with pytest.raises(ValueError, match=message):
        StackConfig(**values)


def test_a_stack_needs_a_model_and_acceptance(config):
    with pytest.raises(ValueError, match=r"predict\.stack must be null without predict\.model"):
        replace(config, acceptance=None)
