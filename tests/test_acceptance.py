"""Figures from rounds that were written by hand, with values worked out on paper."""

import json

import pytest

from specfit.acceptance import Intervals, Measured, Timed, changes, component_row, mix_row

INTERVALS = Intervals(num_bootstrap=200, confidence=0.9, seed=0)
WEIGHTS = {"code": 3.0, "tools": 1.0}
UNTIMED: dict[str, list[Timed]] = {"code": []}


def measured(rounds, *, num_tokens=None, loop_start=None, num_prompt_tokens=10, **changes):
    """An answer with `rounds` of (num_drafted, num_kept), k = 2; the first token is no round's."""
    start, placed = 1, []
    for num_drafted, num_kept in rounds:
        placed.append([start, num_drafted, num_kept])
        start += num_kept + 1
    values = {
        "id": "a",
        "component": "code",
        "proposer": "eagle3",
        "temperature": 0.0,
        "num_draft_tokens": 2,
        "finish_reason": "length" if loop_start is None else "repetition",
    }
    return Measured(
        **values | changes,
        num_prompt_tokens=num_prompt_tokens,
        tokens=[0] * (start if num_tokens is None else num_tokens),
        loop_start=loop_start,
        rounds=placed,
    )


def timed(num_tokens, target_seconds, draft_seconds, component="code"):
    return Timed(component, "eagle3", 0.0, 2, num_tokens, 3, 10, target_seconds, draft_seconds)


def test_figures_of_known_rounds():
    # Kept 2, 0, 1 and 2 of 2 drafted: 4 rounds of 3, 1, 2 and 3 tokens.
    answers = [measured([(2, 2), (2, 0)]), measured([(2, 1), (2, 2)], id="b")]
    row = component_row(answers, [], INTERVALS)
    assert (row["num_rounds"], row["num_tokens"], row["num_prompts"]) == (4, 9, 2)
    assert row["acceptance_length"] == 9 / 4
    assert row["acceptance_by_position"] == [3 / 4, 2 / 4]
    assert row["conditional_acceptance"] == [3 / 4, 2 / 3]
    assert row["acceptance_length_per_request_mean"] == (2.0 + 2.5) / 2
    assert row["acceptance_length_low"] == 2.0
    assert row["acceptance_length_high"] == 2.5


def test_requests_count_by_their_rounds_and_not_alike():
    answers = [measured([(2, 2)]), measured([(2, 0)] * 9, id="b")]
    row = component_row(answers, [], INTERVALS)
    assert row["acceptance_length"] == 12 / 10
    assert row["acceptance_length_per_request_mean"] == (3 + 1) / 2


def test_rounds_of_a_loop_are_left_out_and_the_answer_counted():
    # The loop starts at token 4: rounds at 1 and 2 count, those at 5 and 8 do not.
    answers = [measured([(2, 0), (2, 2), (2, 2), (2, 2)], loop_start=4)]
    row = component_row(answers, [], INTERVALS)
    assert (row["num_rounds"], row["num_tokens"]) == (2, 4)
    assert row["num_looped"] == 1


def test_the_first_twenty_tokens_are_those_before_token_twenty():
    # Rounds of one token at 1..19 (19 of them), then rounds of three from 20 on.
    answers = [measured([(2, 0)] * 19 + [(2, 2)] * 5)]
    row = component_row(answers, [], INTERVALS)
    assert row["first_20_acceptance_length"] == 1.0
    assert row["acceptance_length"] == (19 + 15) / 24


def test_rounds_are_sorted_by_the_tokens_before_them_prompt_included():
    # 250 of prompt: rounds at 1..5 lie below 256 tokens, the one at 6 does not.
    answers = [measured([(2, 0)] * 5 + [(2, 2)], num_prompt_tokens=250)]
    assert component_row(answers, [], INTERVALS)["by_context"] == [
        {"low": 0, "high": 256, "acceptance_length": 1.0, "num_rounds": 5},
        {"low": 256, "high": 512, "acceptance_length": 3.0, "num_rounds": 1},
    ]


def test_every_round_has_one_context():
    answers = [
        measured([(2, 1)] * 300, num_prompt_tokens=n, id=str(n)) for n in (1, 255, 256, 257, 600)
    ]
    row = component_row(answers, [], INTERVALS)
    assert sum(part["num_rounds"] for part in row["by_context"]) == row["num_rounds"] == 1500


def test_without_rounds_nothing_is_measured_and_nothing_is_zero():
    answers = [measured([])]
    for row in (
        component_row(answers, [timed(0, 0.0, 0.0)], INTERVALS),
        mix_row({"code": answers}, UNTIMED, WEIGHTS, INTERVALS),
    ):
        assert row["acceptance_length"] is None
        assert row["num_rounds"] == 0
        assert "tokens_per_second" not in row
        json.dumps(row, allow_nan=False)


def test_tokens_a_second_are_all_tokens_over_all_seconds():
    times = [timed(10, 1.0, 1.0), timed(30, 1.0, 0.0), timed(0, 0.0, 0.0)]
    row = component_row([measured([(2, 1)])], times, INTERVALS)
    assert row["tokens_per_second"] == pytest.approx(40 / 3)
    assert row["draft_time_share"] == pytest.approx(1 / 3)
    assert (row["tokens_per_second_low"], row["tokens_per_second_high"]) == (5.0, 30.0)


def test_a_mix_is_tokens_over_rounds_by_the_share_of_requests():
    # Of requests, 3 in 4 are code: 10 rounds of 1 token each; 1 in 4 are tools: 2 rounds of 3.
    by_component = {
        "code": [measured([(2, 0)] * 10)],
        "tools": [measured([(2, 2)] * 2, component="tools")],
    }
    row = mix_row(by_component, UNTIMED, WEIGHTS, INTERVALS)
    assert row["acceptance_length"] == pytest.approx((3 * 10 + 6) / (3 * 10 + 2))
    assert row["acceptance_length"] != pytest.approx((3 * 1.0 + 3.0) / 4)  # by requests
    assert (row["component"], row["num_prompts"]) == ("all", 2)


def test_a_component_counts_as_much_with_many_prompts_as_with_few():
    code = measured([(2, 0)] * 10)
    tools = measured([(2, 2)] * 2, component="tools")
    few = mix_row({"code": [code], "tools": [tools]}, UNTIMED, WEIGHTS, INTERVALS)
    many = mix_row({"code": [code] * 5, "tools": [tools]}, UNTIMED, WEIGHTS, INTERVALS)
    assert many["acceptance_length"] == pytest.approx(few["acceptance_length"])


@pytest.mark.parametrize(("temperature", "of_mix"), [(0.0, 0.0), (1.0, None)])
def test_a_mix_has_a_temperature_if_its_components_share_it(temperature, of_mix):
    tools = measured([(2, 2)], component="tools", temperature=temperature)
    row = mix_row({"code": [measured([(2, 0)])], "tools": [tools]}, UNTIMED, WEIGHTS, INTERVALS)
    assert row["temperature"] == of_mix


def test_a_mix_takes_as_long_as_its_requests_by_their_share():
    # Code runs at 5 tokens a second, tools at 10. Answers have 2 tokens each, three of code to one
    # of tools, however long those that were timed.
    times = {
        "code": [timed(10, 1.5, 0.5)],
        "tools": [timed(20, 1.0, 1.0, "tools"), timed(20, 1.5, 0.5, "tools")],
    }
    answers = {name: [measured([(2, 1)], component=name)] for name in times}
    row = mix_row(answers, times, WEIGHTS, INTERVALS)
    assert row["tokens_per_second"] == pytest.approx(8 / (6 / 5 + 2 / 10))
    assert row["draft_time_share"] == pytest.approx((1.2 * 0.25 + 0.2 * 0.375) / 1.4)


def test_the_speed_of_a_mix_lies_between_its_slowest_and_fastest_prompts():
    times = {
        "code": [timed(10, 2.0, 0.0), timed(40, 2.0, 0.0)],  # 5 and 20 tokens a second
        "tools": [timed(30, 3.0, 0.0, "tools")] * 2,
    }
    answers = {name: [measured([(2, 1)], component=name)] for name in times}
    row = mix_row(answers, times, WEIGHTS, INTERVALS)
    # 6 tokens of code and 2 of tools in four requests.
    assert row["tokens_per_second"] == pytest.approx(8 / (6 / 12.5 + 2 / 10))
    assert row["tokens_per_second_low"] == pytest.approx(8 / (6 / 5 + 2 / 10))
    assert row["tokens_per_second_high"] == pytest.approx(8 / (6 / 20 + 2 / 10))


def test_one_timed_prompt_has_a_speed_and_no_range():
    row = component_row([measured([(2, 1)])], [timed(10, 1.5, 0.5)], INTERVALS)
    assert row["tokens_per_second"] == 5
    assert "tokens_per_second_low" not in row


def test_a_change_is_of_the_same_requests_by_component_and_of_the_mix():
    before = [
        measured([(2, 0), (2, 0)], id="a"),
        measured([(2, 1)], id="b"),
        measured([(2, 0)], id="c", component="tools"),
        measured([], id="d", component="tools"),  # over after the prefill: says nothing
    ]
    after = [
        measured([(2, 1)], id="b"),
        measured([(2, 2)], id="d", component="tools"),
        measured([(2, 1)], id="c", component="tools"),
        measured([(2, 1)], id="a"),
    ]
    code, tools, mix = changes(before, after, WEIGHTS, INTERVALS)
    assert [row["component"] for row in (code, tools, mix)] == ["code", "tools", "all"]
    assert [row["num_prompts"] for row in (code, tools, mix)] == [2, 1, 3]
    assert (code["acceptance_length_before"], code["acceptance_length_after"]) == (4 / 3, 2)
    assert code["acceptance_length_change"] == pytest.approx(0.5)
    assert (tools["acceptance_length_before"], tools["acceptance_length_after"]) == (1, 2)
    # Three requests of code to one of tools: 3 / 2 of what two of code take.
    tokens, rounds = 1.5 * 4 + 1, 1.5 * 3 + 1
    assert mix["acceptance_length_before"] == pytest.approx(tokens / rounds)
    assert mix["acceptance_length_after"] == 2
    # Request a alone doubles, request b alone stays.
    assert code["acceptance_length_change_low"] == 0
    assert code["acceptance_length_change_high"] == 1
