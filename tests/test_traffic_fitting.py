"""A profile that is drawn, logged and fitted comes back."""

import json
import random
from dataclasses import replace
from datetime import UTC, datetime

import numpy as np
import pytest

from specfit.traffic import fitting
from specfit.traffic.config import (
    ArrivalConfig,
    ComponentConfig,
    ProfileConfig,
    Quantiles,
    SloConfig,
)
from specfit.traffic.draw import draw_sessions
from specfit.traffic.fitting import fit_profile
from specfit.traffic.logs import read_lines
from specfit.traffic.observed import Observed

NUM = 800  # sessions
TRUTH = ComponentConfig(
    name="chat",
    weight=1.0,
    sources=["a"],
    temperature=0.6,
    prompt_tokens=Quantiles(60.0, 100.0),
    new_tokens_per_turn=Quantiles(30.0, 50.0),
    output_tokens=Quantiles(20.0, 35.0),
    turns=Quantiles(2.0, 4.0),
    think_seconds=Quantiles(10.0, 18.0),
    shared_prefix_tokens=150,
)
BASE = ProfileConfig(
    "base",
    [ComponentConfig("chat", sources=["a"], temperature=0.6)],
    slo=SloConfig(300.0, 30.0),
    scale=2.0,
    max_turns=9,
)


def one(component, **options):
    return ProfileConfig("truth", [component], **options)


@pytest.fixture(scope="module")
def sessions():
    arrival = ArrivalConfig(rate=0.5, cv=1.6)
    return draw_sessions(one(TRUTH, arrival=arrival), NUM, seed=1)


class Writer:
    """Made-up texts: a token is five characters, and a word to `count`."""

    def __init__(self):
        self.random = random.Random(0)
        self.prefix = self.text(10_000)

    def text(self, num):
        return "".join(
            "w" + "".join(self.random.choices("abcdefgh", k=3)) + " " for _ in range(num)
        )

    @staticmethod
    def count(text):
        return len(text.split())


def times(session):
    """When each request arrives; answers take no time."""
    return session.start_seconds + np.cumsum([t.think_seconds for t in session.turns])


def openai_lines(sessions):
    writer = Writer()
    lines = []
    for session in sessions:
        messages = [{"role": "system", "content": writer.prefix[: 5 * session.prefix_tokens]}]
        for turn, prompt, at in zip(session.turns, session.prompts(), times(session), strict=True):
            messages.append({"role": "user", "content": writer.text(turn.new_tokens)})
            answer = {"role": "assistant", "content": writer.text(turn.output_tokens)}
            usage = {"prompt_tokens": prompt, "completion_tokens": turn.output_tokens}
            response = {"choices": [{"message": answer}], "usage": usage}
            row = {"timestamp": at, "request": {"messages": messages}, "response": response}
            lines.append((at, json.dumps(row)))
            messages = [*messages, answer]
    return [line for _, line in sorted(lines)]


def trace_lines(sessions, *, by_id):
    """Lengths are a hundred times the drawn ones, so that there are whole blocks."""
    lines = []
    for i, session in enumerate(sessions):
        parts = zip(session.turns, session.prompts(), times(session), strict=True)
        for j, (turn, prompt, at) in enumerate(parts):
            row = {"timestamp": 1000 * at, "output_length": 100 * turn.output_tokens}
            if by_id:
                new = turn.new_tokens + (session.prefix_tokens if j == 0 else 0)
                row |= {"input_length": 100 * new, "session_id": f"s{i}"}
                if j > 0:
                    row = {"delay": 1000 * turn.think_seconds} | row
                    del row["timestamp"]
            else:
                row |= {
                    "input_length": 100 * prompt,
                    "hash_ids": blocks(session, i, j, 100 * prompt),
                }
            lines.append((at, json.dumps(row)))
    return [line for _, line in sorted(lines)] if not by_id else [line for _, line in lines]


def blocks(session, i, j, num_tokens):
    whole, rest = divmod(num_tokens, 512)
    shared = 100 * session.prefix_tokens // 512
    ids = [b if b < shared else 10**9 * (i + 1) + b for b in range(whole)]
    return ids + ([10**9 * (i + 1) + 10**6 * (j + 1)] if rest else [])


def vllm_lines(sessions):
    writer = Writer()
    lines = []
    for i, session in enumerate(sessions):
        text = writer.prefix[: 5 * session.prefix_tokens]
        for j, (turn, at) in enumerate(zip(session.turns, times(session), strict=True)):
            text += writer.text(turn.new_tokens)
            answer = writer.text(turn.output_tokens)
            stamp = f"{datetime.fromtimestamp(at, UTC):%m-%d %H:%M:%S}"
            ids = [7] * turn.output_tokens
            at_id = f"cmpl-{i}-{j}: "
            received = f"INFO {stamp} [logger.py:39] Received request {at_id}prompt: {text!r}, "
            received += "params: SamplingParams(n=1), prompt_token_ids: None, lora_request: None."
            generated = (
                f"INFO {stamp} [logger.py:71] Generated response {at_id}output: {answer!r}, "
            )
            generated += f"output_token_ids: {ids}, finish_reason: stop"
            lines += [(at, 0, received), (at, 1, generated)]
            text += answer
    return [line for *_, line in sorted(lines)]


def assert_close(found, expected, scale=1.0, rel=0.05):
    assert found.median == pytest.approx(scale * expected.median, rel=rel)
    assert found.p90 == pytest.approx(scale * expected.p90, rel=rel)


def assert_lengths(component, scale=1.0):
    assert_close(component.prompt_tokens, TRUTH.prompt_tokens, scale)
    assert_close(component.new_tokens_per_turn, TRUTH.new_tokens_per_turn, scale)
    assert_close(component.output_tokens, TRUTH.output_tokens, scale)
    assert component.turns == TRUTH.turns


def fitted(lines, count=None):
    return fit_profile(read_lines(lines, "log", count), BASE, None)


@pytest.fixture(scope="module")
def from_openai(sessions):
    return fitted(openai_lines(sessions))


def test_lengths_and_turns_come_back_from_messages(from_openai):
    assert_lengths(from_openai.profile.components[0])


def test_think_times_come_back(from_openai):
    assert_close(from_openai.profile.components[0].think_seconds, TRUTH.think_seconds)


def test_the_shared_prefix_comes_back(from_openai):
    [component] = from_openai.profile.components
    assert component.shared_prefix_tokens == pytest.approx(150, rel=0.05)
    assert from_openai.record["components"][0]["num_sessions_with_prefix"] == NUM


def test_arrivals_come_back(from_openai):
    assert from_openai.profile.arrival.rate == pytest.approx(0.5, rel=0.1)
    assert from_openai.profile.arrival.cv == pytest.approx(1.6, rel=0.1)


def test_what_a_log_cannot_say_stays_the_bases(from_openai):
    profile = from_openai.profile
    assert (profile.name, profile.scale, profile.max_turns) == ("base", 2.0, 9)
    assert profile.slo == BASE.slo
    assert (profile.components[0].sources, profile.components[0].temperature) == (["a"], 0.6)


def test_the_record_counts_requests_and_sessions(from_openai, sessions):
    record = from_openai.record
    assert record["num_sessions"] == NUM
    assert record["num_requests"] == sum(len(s.turns) for s in sessions)
    assert json.loads(json.dumps(record)) == record


def test_a_trace_of_blocks_comes_back(sessions):
    result = fitted(trace_lines(sessions, by_id=False))
    [component] = result.profile.components
    assert_lengths(component, 100.0)
    # Whole blocks only: 29 of 512 tokens.
    assert component.shared_prefix_tokens == 14848
    assert result.profile.arrival.cv == pytest.approx(1.6, rel=0.1)


def test_a_trace_of_sessions_comes_back(sessions):
    result = fitted(trace_lines(sessions, by_id=True))
    [component] = result.profile.components
    # Later requests have a delay and no time stamp, but sessions begin with one.
    assert result.record["arrival"]["fitted"]
    assert not any("arrivals" in note for note in result.record["notes"])
    # Without blocks a shared prefix cannot be told from the prompt.
    assert component.shared_prefix_tokens == 0
    whole = [100 * (s.prefix_tokens + s.turns[0].new_tokens) for s in sessions]
    assert component.prompt_tokens.median == np.median(whole)
    assert_close(component.new_tokens_per_turn, TRUTH.new_tokens_per_turn, 100.0)
    assert_close(component.think_seconds, TRUTH.think_seconds)
    assert component.turns == TRUTH.turns


def test_a_log_of_vllm_comes_back(sessions):
    result = fitted(vllm_lines(sessions), Writer.count)
    [component] = result.profile.components
    # A block of 256 characters is 51 tokens: the prefix is that much too short at most.
    assert 150 - 52 <= component.shared_prefix_tokens <= 150
    missing = 150 - component.shared_prefix_tokens
    assert component.prompt_tokens.median - missing == pytest.approx(60, rel=0.05)
    assert_close(component.new_tokens_per_turn, TRUTH.new_tokens_per_turn)
    assert_close(component.output_tokens, TRUTH.output_tokens)
    assert component.turns == TRUTH.turns
    assert any("whole seconds" in note for note in result.record["notes"])


# --- The mix ---


class Mistaken:
    """A classifier that reads the component in the text, and is wrong as often as it says."""

    def __init__(self, confusion):
        self.components = ["code", "chat"]
        self.confusion = np.array(confusion)
        self.random = np.random.default_rng(5)

    def component(self, text, has_tools):
        assert not has_tools
        return str(
            self.random.choice(self.components, p=self.confusion[self.components.index(text)])
        )


MIX = ProfileConfig(
    "mix",
    [ComponentConfig("chat", 0.5, ["a"]), ComponentConfig("code", 0.5, ["b"])],
)


def mixed(num, share_of_code, rng):
    """Requests, each a session of its own."""
    return [
        Observed(float(i), 100, 10, text="code" if rng.random() < share_of_code else "chat")
        for i in range(num)
    ]


def test_weights_are_corrected_by_the_confusion():
    requests = mixed(3000, 0.8, np.random.default_rng(0))
    truth = sum(r.text == "code" for r in requests) / 3000
    result = fit_profile(requests, MIX, Mistaken([[0.7, 0.3], [0.1, 0.9]]))
    code = result.record["components"][1]
    assert code["name"] == "code"
    assert code["weight_low"] < truth < code["weight_high"]
    # What the classifier says is far outside.
    assert code["num_requests"] / 3000 < code["weight_low"] - 0.1
    assert sum(c.weight for c in result.profile.components) == pytest.approx(1)
    confusion = {"components": ["code", "chat"], "rows": [[0.7, 0.3], [0.1, 0.9]]}
    assert result.record["confusion"] == confusion


def test_the_interval_covers_the_weight_as_often_as_it_says(monkeypatch):
    monkeypatch.setattr(fitting, "NUM_BOOTSTRAP", 200)
    covered = 0
    for seed in range(20):
        requests = mixed(300, 0.6, np.random.default_rng(seed))
        classifier = Mistaken([[0.9, 0.1], [0.1, 0.9]])
        classifier.random = np.random.default_rng(seed + 100)
        row = fit_profile(requests, MIX, classifier, seed=seed).record["components"][1]
        covered += row["weight_low"] <= 0.6 <= row["weight_high"]
    # 95 % of 20 is 19; 16 or fewer has a chance of 1.6 %.
    assert covered >= 17


def test_weights_are_shares_of_requests_not_of_sessions():
    requests = [Observed(float(i), 100, 10, text="chat") for i in range(60)]
    requests += [
        Observed(100.0 + i, 100 + i, 10, text="code", session=str(i // 6)) for i in range(60)
    ]
    result = fit_profile(requests, MIX, Mistaken(np.eye(2)))
    assert [c.weight for c in result.profile.components] == [0.5, 0.5]
    assert [row["num_sessions"] for row in result.record["components"]] == [60, 10]


def test_a_component_that_does_not_occur_is_dropped_and_said():
    requests = [Observed(float(i), 100, 10, text="code") for i in range(60)]
    result = fit_profile(requests, MIX, Mistaken(np.eye(2)))
    assert [(c.name, c.weight) for c in result.profile.components] == [("code", 1.0)]
    assert result.record["dropped"] == ["chat"]


def test_a_mix_without_texts_is_refused():
    requests = [Observed(float(i), 100, 10) for i in range(60)]
    with pytest.raises(ValueError, match=r"profile\.components must be one where t\.jsonl has"):
        fit_profile(requests, MIX, Mistaken(np.eye(2)), where="t.jsonl")


def test_a_classifier_of_other_components_is_refused():
    other = replace(MIX, components=[replace(c, name=c.name + "s") for c in MIX.components])
    requests = [Observed(float(i), 100, 10, text="code") for i in range(60)]
    with pytest.raises(ValueError, match=r"profile\.components must be those of the classifier"):
        fit_profile(requests, other, Mistaken(np.eye(2)))


def test_components_that_are_not_told_apart_are_refused():
    requests = mixed(100, 0.5, np.random.default_rng(0))
    with pytest.raises(ValueError, match="does not tell code from chat"):
        fit_profile(requests, MIX, Mistaken([[0.5, 0.5], [0.5, 0.5]]))


# --- What a log leaves out ---


def test_too_few_requests_are_refused():
    requests = [Observed(float(i), 100, 10) for i in range(49)]
    with pytest.raises(ValueError, match=r"t\.jsonl must have at least 50 requests, got 49"):
        fit_profile(requests, BASE, None, where="t.jsonl")


def test_answers_of_unknown_length_stay_the_bases():
    known = replace(BASE.components[0], output_tokens=Quantiles(5.0, 6.0))
    base = replace(BASE, components=[known])
    result = fit_profile([Observed(float(i), 100, None) for i in range(60)], base, None)
    assert result.profile.components[0].output_tokens == Quantiles(5.0, 6.0)
    assert result.record["components"][0]["from_base"] == ["output_tokens"]
    assert any("without the answer's length" in note for note in result.record["notes"])


def test_single_requests_have_neither_turns_nor_think_times():
    [component] = fit_profile(
        [Observed(float(i), 100, 10) for i in range(60)], BASE, None
    ).profile.components
    assert (component.turns, component.new_tokens_per_turn, component.think_seconds) == (None,) * 3


@pytest.mark.parametrize("stamps", [[None] * 60, [5.0] * 60])
def test_arrivals_that_are_not_known_stay_the_bases(stamps):
    base = replace(BASE, arrival=ArrivalConfig(rate=7.0, cv=3.0))
    result = fit_profile([Observed(t, 100, 10) for t in stamps], base, None)
    assert result.profile.arrival == base.arrival
    assert result.record["arrival"] == {"fitted": False}
    assert any("arrivals are the base profile's" in note for note in result.record["notes"])


def test_the_prefix_is_the_longest_that_a_quarter_of_the_sessions_share():
    # All share the first block, half of them the first two, a tenth the first three.
    def hash_ids(i):
        return [1, 2 if i % 2 else 100 + i, 3 if i % 10 == 1 else 200 + i, 300 + i]

    lines = [json.dumps({"input_length": 2048 + i, "output_length": 5, "hash_ids": hash_ids(i)})
             for i in range(60)]  # fmt: skip
    result = fitted(lines)
    [component] = result.profile.components
    assert component.shared_prefix_tokens == 1024
    assert result.record["components"][0]["num_sessions_with_prefix"] == 30
    # What is not shared counts as the prompt's, in every session.
    assert component.prompt_tokens.median == 1024 + 29.5


def test_a_whole_prompt_is_no_prefix():
    row = {"messages": [{"role": "user", "content": "hello"}], "usage": {"prompt_tokens": 9}}
    [component] = fitted([json.dumps(row)] * 60).profile.components
    assert component.shared_prefix_tokens == 0
    assert component.prompt_tokens == Quantiles(9.0, 9.0)


def test_no_text_is_in_what_is_fitted():
    requests = [Observed(float(i), 100, 10, text="SECRET", session="SECRET") for i in range(60)]
    assert "SECRET" not in repr(fit_profile(requests, BASE, None))
