from collections import Counter

import pytest
import torch
from hash_target import (
    EOS,
    HashTarget,
    SamplingProposer,
    StatelessProposer,
    WitnessProposer,
    chi_square_p_value,
    drafter_over_three,
    exact_distribution,
    proposer,
    ragged_requests,
)

from specfit_serve.decode import DecodeSettings, Request, decode
from specfit_serve.ngram import NoProposer
from specfit_serve.repetition import TokenClass
from specfit_serve.stats import DecodeStats

KINDS = ["none", "right", "wrong", "right_until", "eos", "random", "ngram"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_draft_tokens", range(1, 7))
@pytest.mark.parametrize("batch_size", range(1, 6))
def test_greedy_output_is_the_targets_own_whatever_is_drafted(kind, num_draft_tokens, batch_size):
    target = HashTarget()
    requests = ragged_requests(9)
    settings = DecodeSettings(num_draft_tokens, max_new_tokens=13, batch_size=batch_size)
    answers = decode(target, proposer(kind, target), requests, settings)
    expected = {r.id: target.answer(r.prompt, 13) for r in requests}
    assert {a.id: a.tokens for a in answers} == expected


def test_a_greedy_request_among_sampled_ones_stays_greedy():
    target = HashTarget()
    requests = [*ragged_requests(4, temperature=1.0), Request("greedy", [3, 4], 0.0)]
    settings = DecodeSettings(3, max_new_tokens=13, batch_size=5)
    answers = decode(target, proposer("right_until", target), requests, settings)
    assert {a.id: a.tokens for a in answers}["greedy"] == target.answer([3, 4], 13)


@pytest.mark.parametrize("batch_size", [1, 3, 5])
def test_a_proposer_sees_the_features_of_every_token_but_the_newest(batch_size):
    target = HashTarget()
    witness = WitnessProposer(target, proposer("right_until", target).draft_row)
    settings = DecodeSettings(4, max_new_tokens=13, batch_size=batch_size)
    list(decode(target, witness, ragged_requests(9), settings))
    assert witness.num_compared > 9


@pytest.mark.parametrize(("kind", "expected"), [("right", 5.0), ("wrong", 1.0), ("none", 1.0)])
def test_acceptance_length_runs_from_1_to_k_plus_1(kind, expected):
    target = HashTarget(eos_ids=())
    settings = DecodeSettings(4, max_new_tokens=21, batch_size=3)
    answers = list(decode(target, proposer(kind, target), ragged_requests(6), settings))
    stats = [DecodeStats.from_rounds(a.rounds, 4) for a in answers]
    assert sum(stats[1:], stats[0]).acceptance_length == expected


@pytest.mark.parametrize("kind", KINDS)
def test_rounds_tile_the_answer_after_its_first_token(kind):
    target = HashTarget()
    settings = DecodeSettings(4, max_new_tokens=13, batch_size=4)
    for answer in decode(target, proposer(kind, target), ragged_requests(9), settings):
        position = 1
        for r in answer.rounds:
            assert r.start == position
            assert r.num_kept <= r.num_drafted <= 4
            position += r.num_kept + 1
        assert position == len(answer.tokens)


@pytest.mark.parametrize("kind", KINDS)
def test_no_round_drafts_past_the_limit(kind):
    target = HashTarget(eos_ids=())
    settings = DecodeSettings(4, max_new_tokens=13, batch_size=4)
    for answer in decode(target, proposer(kind, target), ragged_requests(9), settings):
        assert all(r.start + r.num_drafted < 13 for r in answer.rounds)


def test_a_draft_is_not_counted_from_the_end_of_the_answer_on():
    target = HashTarget()
    settings = DecodeSettings(4, max_new_tokens=13, batch_size=4)
    past_eos = StatelessProposer(lambda s, k: [*target.answer(s, k), 1, 2, 3])
    for answer in decode(target, past_eos, ragged_requests(9), settings):
        assert all(r.num_drafted == r.num_kept for r in answer.rounds)


def test_an_answer_ends_with_its_first_eos():
    target = HashTarget()
    settings = DecodeSettings(5, max_new_tokens=30, batch_size=4)
    answers = list(decode(target, proposer("right", target), ragged_requests(9), settings))
    stopped = [a for a in answers if a.finish_reason == "stop"]
    assert len(stopped) > 2
    assert all(a.tokens.index(EOS) == len(a.tokens) - 1 for a in stopped)


@pytest.mark.parametrize("kind", ["none", "right"])
@pytest.mark.parametrize("max_new_tokens", [1, 2, 7])
def test_an_answer_has_at_most_max_new_tokens(kind, max_new_tokens):
    target = HashTarget(eos_ids=())
    settings = DecodeSettings(5, max_new_tokens, batch_size=4)
    for answer in decode(target, proposer(kind, target), ragged_requests(6), settings):
        assert len(answer.tokens) == max_new_tokens
        assert answer.finish_reason == "length"


def test_full_slots_end_an_answer_and_no_pass_reaches_past_them():
    target = HashTarget(eos_ids=(), max_length=20)
    settings = DecodeSettings(4, max_new_tokens=99, batch_size=3)
    for answer in decode(target, proposer("random", target), ragged_requests(6), settings):
        prompt = next(r.prompt for r in ragged_requests(6) if r.id == answer.id)
        assert len(prompt) + len(answer.tokens) == 20 - 4
        assert answer.finish_reason == "length"


def test_the_guard_ends_a_looping_answer_at_the_token_that_fires():
    target = HashTarget(max_length=99)
    target.logits = lambda hashes: torch.eye(9)[3].expand(*hashes.shape, 9)
    settings = DecodeSettings(4, max_new_tokens=60, batch_size=2)
    classes = [TokenClass.other] * 9
    repeat = StatelessProposer(lambda _, k: [3] * k)
    requests = ragged_requests(3)
    for answer in decode(target, repeat, requests, settings, token_classes=classes):
        assert answer.finish_reason == "repetition"
        assert answer.tokens == [3] * 8
        assert answer.loop_start == 0


@pytest.mark.parametrize(
    ("kind", "temperature", "top_p"),
    [
        ("none", 0.7, 0.75),
        ("point_mass", 1.0, 1.0),
        ("point_mass", 0.7, 0.75),
        ("distribution", 1.0, 1.0),
        ("distribution", 0.7, 1.0),
        ("distribution", 1.0, 0.75),
    ],
)
def test_sampled_answers_have_the_targets_distribution(kind, temperature, top_p):
    target = HashTarget(vocab_size=3, num_slots=100, eos_ids=(), peak=1.0)
    drafter = drafter_over_three(kind)
    num = 1200
    requests = [Request(f"r{i}", [1, 2], temperature) for i in range(num)]
    settings = DecodeSettings(2, max_new_tokens=4, batch_size=100, top_p=top_p)
    counts = Counter(tuple(a.tokens) for a in decode(target, drafter, requests, settings))
    probs = exact_distribution(target, [1, 2], 4, temperature, top_p)
    assert sum(counts[o] for o, p in probs.items() if p == 0) == 0
    assert chi_square_p_value(counts, {o: num * p for o, p in probs.items()}) > 1e-3


@pytest.mark.parametrize("kind", ["right_until", "distribution"])
def test_a_requests_draws_do_not_depend_on_who_shares_the_batch(kind):
    target = HashTarget()
    requests = ragged_requests(9, temperature=1.0)
    drafter = SamplingProposer(torch.full((9,), 1 / 9)) if kind == "distribution" else None

    def tokens(batch_size, order):
        settings = DecodeSettings(4, max_new_tokens=13, batch_size=batch_size)
        answers = decode(target, drafter or proposer(kind, target), order, settings)
        return {a.id: a.tokens for a in answers}

    alone = tokens(1, requests)
    assert tokens(5, requests) == alone
    assert tokens(3, requests[::-1]) == alone


class Clock:
    """Seconds that only the target and the proposer let pass."""

    now = 0.0

    def passes(self, function, seconds):
        def slow(*args, **kwargs):
            self.now += seconds
            return function(*args, **kwargs)

        return slow


def test_time_is_the_targets_or_the_drafts(monkeypatch):
    clock, target, drafter = Clock(), HashTarget(eos_ids=()), NoProposer()
    monkeypatch.setattr("specfit_serve.decode.perf_counter", lambda: clock.now)
    target.forward = clock.passes(target.forward, 1)
    for name, seconds in (("start", 10), ("propose", 100), ("observe", 1000)):
        setattr(drafter, name, clock.passes(getattr(drafter, name), seconds))
    requests = [Request(f"r{i}", [1, 2, 3], 0.0) for i in range(2)]
    for answer in decode(target, drafter, requests, DecodeSettings(2, 3, batch_size=2)):
        # Two rounds, of both.
        assert (answer.prefill_seconds, answer.target_seconds) == (11, 1)
        assert answer.draft_seconds == 1100


def test_another_seed_gives_other_answers():
    target = HashTarget()
    requests = ragged_requests(5, temperature=1.0)
    answers = [
        [a.tokens for a in decode(target, NoProposer(), requests, DecodeSettings(0, 9, 1, seed=s))]
        for s in (0, 1)
    ]
    assert answers[0] != answers[1]


def test_progress_counts_every_token_of_prompts_and_answers():
    target = HashTarget()
    settings = DecodeSettings(4, max_new_tokens=13, batch_size=3)
    progress, requests = [], ragged_requests(9)
    answers = decode(
        target, proposer("right", target), requests, settings, on_progress=progress.append
    )
    num_answered = sum(len(a.tokens) for a in answers)
    assert sum(len(r.prompt) for r in requests) + num_answered == sum(progress)


def test_answers_come_as_they_finish():
    target = HashTarget()
    requests = ragged_requests(9)
    settings = DecodeSettings(4, max_new_tokens=13, batch_size=2)
    first = next(decode(target, NoProposer(), requests, settings))
    assert first.id in {"r0", "r1"}


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request("long", [1] * 44, 0.0), "request long: the prompt must have 1 to 43 tokens"),
        (Request("empty", [], 0.0), "request empty: the prompt must have 1 to 43 tokens"),
        (Request("foreign", [1, 9], 0.0), r"request foreign: prompt tokens must lie in \[0, 9\)"),
        (Request("cold", [1], -1.0), "request cold: temperature must be at least 0"),
        (Request("r0", [1], 0.0), "request r0: ids must be distinct"),
    ],
)
def test_a_request_that_cannot_be_answered_is_named_before_anything_runs(request_, message):
    requests = [*ragged_requests(2), request_]
    with pytest.raises(ValueError, match=message):
        decode(HashTarget(), NoProposer(), requests, DecodeSettings(4, 13, 2))


def test_a_batch_larger_than_the_targets_slots_is_refused():
    with pytest.raises(ValueError, match="batch_size must be at most the target's 5 slots, got 6"):
        decode(HashTarget(), NoProposer(), ragged_requests(2), DecodeSettings(4, 13, 6))
