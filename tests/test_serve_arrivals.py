"""Requests that reach the decode loop while it runs."""

from dataclasses import asdict

import pytest
from hash_target import HashTarget, proposer, ragged_requests

from specfit_serve.arrivals import Arrivals
from specfit_serve.decode import DecodeSettings, Request, decode
from specfit_serve.ngram import NoProposer

KINDS = ["none", "right", "wrong", "right_until", "eos", "ngram"]
TIMES = {f"{name}_seconds" for name in ("prefill", "target", "draft")}
TIMES |= {"first_token_at", "finished_at"}


class Script:
    """Gives what is due at each look, one list after the other, and keeps a log."""

    def __init__(self, looks):
        self.looks = list(looks)
        self.log = []

    def take(self):
        self.log.append("take")
        return self.looks.pop(0) if self.looks else []

    def wait(self):
        self.log.append("wait")
        return bool(self.looks)

    def close(self):
        self.log.append("close")


class Clock:
    """Seconds that only the target lets pass: one a pass."""

    now = 0.0

    def of(self, target, monkeypatch):
        monkeypatch.setattr("specfit_serve.decode.perf_counter", lambda: self.now)
        forward = target.forward

        def slow(*args, **kwargs):
            self.now += 1
            return forward(*args, **kwargs)

        target.forward = slow
        return target


def timeless(answer):
    return {name: value for name, value in asdict(answer).items() if name not in TIMES}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch_size", [1, 3, 5])
def test_all_at_once_they_are_a_sequence(kind, batch_size):
    requests, settings = ragged_requests(9), DecodeSettings(3, 13, batch_size)
    runs = []
    for given in (requests, Script([requests])):
        target = HashTarget()
        answers = list(decode(target, proposer(kind, target), given, settings))
        runs.append([timeless(a) for a in answers])
    assert runs[0] == runs[1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gap", [1, 2, 5])
def test_whenever_they_come_the_answers_are_the_targets_own(kind, gap):
    target, requests = HashTarget(), ragged_requests(9)
    looks = [look for request in requests for look in ([request], *[[]] * (gap - 1))]
    settings = DecodeSettings(3, max_new_tokens=13, batch_size=3)
    answers = decode(target, proposer(kind, target), Script(looks), settings)
    expected = {r.id: target.answer(r.prompt, 13) for r in requests}
    assert {a.id: a.tokens for a in answers} == expected


def test_who_comes_between_two_rounds_is_in_the_next(monkeypatch):
    target = Clock().of(HashTarget(eos_ids=()), monkeypatch)
    # Looks: one at each free slot before the first, the second and the third round.
    first, second = Request("a", [1], 0.0, 4), Request("b", [2], 0.0, 2)
    looks = [[first], [], [], [second]]
    answers = list(decode(target, NoProposer(), Script(looks), DecodeSettings(0, 9, 2)))
    # Prefill of a; two rounds of a; prefill of b; a round of both.
    assert [(a.id, a.first_token_at, a.finished_at) for a in answers] == [
        ("a", 1, 5),
        ("b", 4, 5),
    ]


def test_waiting_is_for_when_nothing_is_in_flight_and_what_it_says_ends_the_loop():
    target = HashTarget(eos_ids=())
    one, other = (Request(name, [1], 0.0, 1) for name in "ab")
    script = Script([[], [one], [], [], [other]])
    answers = decode(target, NoProposer(), script, DecodeSettings(0, 9, 1))
    assert [a.id for a in answers] == ["a", "b"]
    # A look that finds nobody. Twice: the request, and nobody for its slot nor for a free one.
    looks = ["take", "take", "take", "wait"]
    assert script.log == ["take", "wait", *looks, *looks, "close"]


def test_arrivals_are_closed_when_nobody_asks_for_answers_any_more():
    script = Script([ragged_requests(3)])
    answers = decode(HashTarget(), NoProposer(), script, DecodeSettings(0, 9, 1))
    next(answers)
    assert "close" not in script.log
    answers.close()
    assert script.log[-1] == "close"


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request("long", [1] * 44, 0.0), "request long: the prompt must have 1 to 43 tokens"),
        (Request("foreign", [1, 9], 0.0), r"request foreign: prompt tokens must lie in \[0, 9\)"),
        (Request("cold", [1], -1.0), "request cold: temperature must be at least 0"),
        (Request("none", [1], 0.0, 0), "request none: max_new_tokens must be at least 1, got 0"),
        (Request("r1", [1], 0.0), "request r1: ids must be distinct"),
    ],
)
def test_one_that_cannot_be_answered_is_named_when_it_comes(request_, message):
    script = Script([ragged_requests(2), [request_]])
    answers = decode(HashTarget(), NoProposer(), script, DecodeSettings(4, 13, 2))
    with pytest.raises(ValueError, match=message):
        list(answers)
    assert script.log[-1] == "close"


def test_an_id_is_free_again_when_its_answer_is_out():
    class Echo(Script):
        def answered(self, answer):
            if len(self.log) < 20:
                self.looks.append([Request(answer.id, [*answer.tokens, 1], 0.0, 2)])

    script = Echo([[Request("a", [1], 0.0, 2)]])
    num_answers = 0
    for answer in decode(HashTarget(), NoProposer(), script, DecodeSettings(0, 9, 1)):
        script.answered(answer)
        num_answers += 1
    assert num_answers > 3


@pytest.mark.parametrize("asked", [1, 2, 9, 12, 13, 20, None])
def test_an_answer_is_no_longer_than_asked_nor_than_the_settings_say(asked):
    target = HashTarget(eos_ids=())
    request = Request("a", [1, 2], 0.0, asked)
    (answer,) = decode(target, proposer("right", target), [request], DecodeSettings(3, 12, 1))
    assert answer.tokens == target.answer([1, 2], min(asked or 12, 12))
    assert answer.finish_reason == "length"


def test_who_ignores_the_eos_goes_on_past_it():
    target, settings = HashTarget(), DecodeSettings(3, 30, 5)
    requests = ragged_requests(9)
    ignoring = [Request(r.id, r.prompt, 0.0, ignores_eos=True) for r in requests]
    stopped = {a.id: a for a in decode(target, proposer("right", target), requests, settings)}
    assert "stop" in {a.finish_reason for a in stopped.values()}
    endless = HashTarget(eos_ids=())
    for answer in decode(target, proposer("right", endless), ignoring, settings):
        own = stopped[answer.id].tokens
        assert answer.tokens[: len(own)] == own
        assert answer.finish_reason == "length"
        assert len(answer.tokens) == min(30, 48 - 3 - len(requests[int(answer.id[1:])].prompt))


def test_times_are_of_the_passes_that_emitted(monkeypatch):
    target = Clock().of(HashTarget(eos_ids=()), monkeypatch)
    requests = [Request("a", [1], 0.0, 3, arrived_at=-2.0), Request("b", [2], 0.0, 1)]
    answers = {
        a.id: a for a in decode(target, NoProposer(), requests, DecodeSettings(0, 9, batch_size=1))
    }
    a, b = answers["a"], answers["b"]
    assert (a.arrived_at, a.first_token_at, a.finished_at) == (-2, 1, 3)
    assert (b.arrived_at, b.first_token_at, b.finished_at) == (None, 4, 4)


def test_the_first_token_of_one_that_was_put_back_stays_the_first(monkeypatch):
    # Two of 5 + 12 tokens do not fit 24 columns: the second gives way and is prefilled again.
    target = Clock().of(HashTarget(eos_ids=(), num_columns=24), monkeypatch)
    requests = [Request(name, [1] * 5, 0.0, 12) for name in "ab"]
    first, second = decode(target, NoProposer(), requests, DecodeSettings(0, 12, 2))
    assert (first.first_token_at, second.first_token_at) == (1, 2)
    # Two prefills, 11 rounds of a. In 7 of them both have columns, until each has 12 tokens; then
    # b is prefilled again and lacks 4.
    assert (first.finished_at, second.finished_at) == (13, 13 + 1 + 4)


def test_a_script_has_the_form_of_arrivals_and_a_list_has_not():
    assert isinstance(Script([]), Arrivals)
    assert not isinstance([], Arrivals)
