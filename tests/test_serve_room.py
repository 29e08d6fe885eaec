"""A cache that has too few columns for everyone: answers wait, and lose nothing by it."""

from itertools import count

import pytest
from hash_target import (
    HashTarget,
    WitnessProposer,
    proposer,
    ragged_requests,
)

from specfit_serve.adaptive import AdaptiveDraftLength, Costs
from specfit_serve.decode import DecodeSettings, Request, decode
from specfit_serve.ngram import NgramProposer, NoProposer
from specfit_serve.suffix import SuffixProposer

K = 2
LONG = 12  # tokens of an answer


class Started(NgramProposer):
    """Keeps how long each sequence was when it entered a slot."""

    def __init__(self):
        super().__init__(1, 2)
        self.lengths = []

    def start(self, slot, tokens, features):
        self.lengths.append(len(tokens))
        super().start(slot, tokens, features)


def answers(num_columns, lengths, batch_size=3, k=K, **options):
    """By id: the number of tokens and how they ended; no token ends an answer."""
    target = HashTarget(eos_ids=(), num_slots=batch_size, num_columns=num_columns)
    requests = [Request(f"r{i}", [1 + i] * n, 0.0) for i, n in enumerate(lengths)]
    settings = DecodeSettings(k, max_new_tokens=LONG, batch_size=batch_size)
    drafter = options.pop("drafter", None) or NgramProposer(1, 2)
    found = {}
    for a in decode(target, drafter, requests, settings, **options):
        prompt = next(r.prompt for r in requests if r.id == a.id)
        assert a.tokens == target.answer(prompt, LONG)[: len(a.tokens)]
        found[a.id] = (len(a.tokens), a.finish_reason)
    assert target.held == {}
    return found


def whole(num):
    return {f"r{i}": (LONG, "length") for i in range(num)}


def test_with_room_for_all_every_answer_has_its_length():
    assert answers(1000, [4, 5, 6, 7]) == whole(4)


def test_a_prompt_without_room_waits_for_an_answer_to_end():
    started = Started()
    assert answers(20 + LONG, [20, 19, 18], drafter=started) == whole(3)
    assert started.lengths == [21, 20, 19]


@pytest.mark.parametrize("k", [0, 2, 4, 6])
def test_an_answer_has_its_length_if_it_has_room_for_itself_whatever_is_drafted(k):
    assert answers(10 + LONG, [10], k=k) == whole(1)
    assert answers(10 + LONG, [10, 3], k=k, batch_size=2) == whole(2)


@pytest.mark.parametrize("k", [0, 2, 4, 6])
def test_an_answer_that_fills_the_cache_ends_there_whatever_is_drafted(k):
    assert answers(20, [10, 4], k=k) == {"r0": (10, "length"), "r1": (LONG, "length")}


def test_a_sequence_that_others_leave_no_room_waits_and_goes_on():
    started = Started()
    # Both prompts fit with a token each, and not both answers.
    assert answers(2 * 10 + LONG, [10, 10], batch_size=2, drafter=started) == whole(2)
    assert started.lengths[:2] == [11, 11]
    assert len(started.lengths) == 3
    assert started.lengths[2] > 11


def test_what_is_put_back_enters_before_what_has_waited():
    started = Started()
    # In 23 columns the second gives way with 12 tokens. Beside the first there is room for the
    # third from then on, but the second comes first.
    assert answers(23, [10, 10, 1], batch_size=2, k=0, drafter=started) == whole(3)
    assert started.lengths[:4] == [11, 11, 12, 2]


@pytest.mark.parametrize("num_columns", [23, 30, 41, 55])
@pytest.mark.parametrize("k", [0, 1, 5])
@pytest.mark.parametrize("kind", ["none", "right", "wrong", "right_until", "ngram", "witness"])
def test_greedy_output_is_the_targets_own_however_few_columns_there_are(num_columns, k, kind):
    target = HashTarget(num_columns=num_columns)
    drafter = proposer(kind, target)
    if kind == "witness":
        drafter = WitnessProposer(target, proposer("right_until", target).draft_row)
    requests, progress = ragged_requests(12), []
    settings = DecodeSettings(k, max_new_tokens=LONG, batch_size=5)
    found = list(decode(target, drafter, requests, settings, on_progress=progress.append))
    expected = {r.id: target.answer(r.prompt, LONG) for r in requests}
    assert {a.id: a.tokens for a in found} == expected
    num_tokens = sum(len(r.prompt) + len(expected[r.id]) for r in requests)
    assert sum(progress) == num_tokens
    assert target.held == {}
    for answer in found:
        assert sum(r.num_kept + 1 for r in answer.rounds) == len(answer.tokens) - 1


def test_an_adaptive_length_and_a_suffix_are_at_home_there():
    target = HashTarget(num_columns=30)
    requests = ragged_requests(12)
    settings = DecodeSettings(5, max_new_tokens=LONG, batch_size=5)
    drafter = SuffixProposer(max_answer_tokens=50)
    costs = Costs({5: [1 + 0.1 * m for m in range(6)]}, 0.0, fixed=True)
    found = decode(target, drafter, requests, settings, draft_length=AdaptiveDraftLength(costs))
    assert {a.id: a.tokens for a in found} == {
        r.id: target.answer(r.prompt, LONG) for r in requests
    }


@pytest.mark.parametrize("drafter", [NoProposer(), NgramProposer(1, 2)])
def test_a_sequence_that_was_put_back_draws_what_it_would_have_drawn(drafter):
    requests = ragged_requests(9, temperature=1.0)
    settings = DecodeSettings(0, max_new_tokens=LONG, batch_size=5)
    with_room, without = [
        {a.id: a.tokens for a in decode(HashTarget(num_columns=n), drafter, requests, settings)}
        for n in (1000, 30)
    ]
    assert without == with_room


def test_a_prompt_that_fits_nowhere_is_refused_before_anything_runs():
    target = HashTarget(num_columns=20)
    requests = [Request("r0", [1] * 5, 0.0), Request("r1", [2] * 20, 0.0)]
    message = r"request r1: the prompt must have 1 to 19 tokens, got 20 \(.* 20 in all"
    with pytest.raises(ValueError, match=message):
        decode(target, NoProposer(), requests, DecodeSettings(K, LONG, 3))
    assert target.held == {}


def test_what_is_left_unfinished_gives_its_columns_back():
    target = HashTarget(eos_ids=(), num_columns=60)
    settings = DecodeSettings(K, max_new_tokens=LONG, batch_size=3)
    found = decode(target, NoProposer(), ragged_requests(9), settings)
    next(found)
    assert sum(target.held.values()) > 0
    found.close()
    assert target.held == {}


@pytest.mark.parametrize("where", ["start", "propose", "observe"])
@pytest.mark.parametrize("call", [1, 4])
def test_a_proposer_that_fails_leaves_no_columns_taken(where, call):
    drafter, num_calls = NoProposer(), count(1)
    works = getattr(drafter, where)

    def fails(*arguments):
        if next(num_calls) == call:
            raise RuntimeError("out of ideas")
        return works(*arguments)

    setattr(drafter, where, fails)
    target = HashTarget(eos_ids=(), num_columns=60)
    settings = DecodeSettings(K, max_new_tokens=LONG, batch_size=3)
    with pytest.raises(RuntimeError, match="out of ideas"):
        list(decode(target, drafter, ragged_requests(9), settings))
    assert target.held == {}
