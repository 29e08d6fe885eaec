"""What the decode loop tells while it runs, and what a request may ask of it."""

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hash_target import (
    HashTarget,
    chi_square_p_value,
    drafter_over_three,
    exact_distribution,
    proposer,
    ragged_requests,
)

from specfit_serve.arrivals import Revocable
from specfit_serve.decode import DecodeSettings, Request, decode
from specfit_serve.ngram import NoProposer
from specfit_serve.repetition import TokenClass
from specfit_serve.verify import target_distribution

KINDS = ["none", "right", "right_until", "wrong", "eos", "ngram"]


def emissions(target, drafter, requests, settings, **options):
    """What was told, by request, and the answers."""
    told = {}

    def tell(batch):
        for emitted in batch:
            told.setdefault(emitted.id, []).append(emitted)

    given = decode(target, drafter, requests, settings, on_emitted=tell, **options)
    return told, {a.id: a for a in given}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch_size", [1, 3, 5])
def test_what_is_told_adds_up_to_the_answers(kind, batch_size):
    target = HashTarget()
    settings = DecodeSettings(3, max_new_tokens=13, batch_size=batch_size)
    told, answers = emissions(target, proposer(kind, target), ragged_requests(9), settings)
    assert set(told) == set(answers)
    for id, answer in answers.items():
        assert [t for e in told[id] for t in e.tokens] == answer.tokens
        assert [e.round for e in told[id]] == [None, *answer.rounds]
        reasons = [e.finish_reason for e in told[id]]
        assert reasons == [None] * (len(reasons) - 1) + [answer.finish_reason]


def test_one_that_is_put_back_is_told_nothing_twice():
    target = HashTarget(eos_ids=(), num_columns=24)
    requests = [Request(name, [1] * 5, 0.0, 12) for name in "ab"]
    told, answers = emissions(target, NoProposer(), requests, DecodeSettings(0, 12, 2))
    for id, answer in answers.items():
        assert [t for e in told[id] for t in e.tokens] == answer.tokens


@pytest.mark.parametrize("kind", ["none", "right_until"])
@pytest.mark.parametrize("num_top", [0, 1, 3, 99])
def test_logprobs_are_of_the_targets_distribution_as_it_comes(kind, num_top):
    target = HashTarget()
    requests = [replace(r, num_logprobs=num_top, top_p=0.6) for r in ragged_requests(4, 0.7)]
    settings = DecodeSettings(3, max_new_tokens=9, batch_size=3)
    told, answers = emissions(target, proposer(kind, target), requests, settings)
    for request in requests:
        tokens = answers[request.id].tokens
        found = [one for e in told[request.id] for one in e.logprobs]
        assert len(found) == len(tokens)
        for i, (token, one) in enumerate(zip(tokens, found, strict=True)):
            own = torch.log_softmax(target.next_logits([*request.prompt, *tokens[:i]]), 0)
            assert one.logprob == pytest.approx(float(own[token]), abs=1e-5)
            assert one.top_ids == own.argsort(descending=True)[:num_top].tolist()
            assert one.top_logprobs == pytest.approx(own[one.top_ids].tolist(), abs=1e-5)


def test_who_asks_for_no_logprobs_gets_none():
    told, _ = emissions(HashTarget(), NoProposer(), ragged_requests(2), DecodeSettings(0, 5, 2))
    assert {e.logprobs for batch in told.values() for e in batch} == {None}


@pytest.mark.parametrize("kind", ["none", "point_mass", "distribution"])
def test_each_request_is_sampled_at_its_own_temperature_and_top_p(kind):
    target = HashTarget(vocab_size=3, num_slots=100, eos_ids=(), peak=1.0)
    drafter = drafter_over_three(kind)
    ways = [(0.7, 0.75), (1.0, None), (1.3, 0.9), (1.0, 1.0), (0.0, 0.5)]
    num = 300
    requests = [
        Request(f"{way}/{i}", [1, 2], ways[way][0], top_p=ways[way][1])
        for i in range(num)
        for way in range(len(ways))
    ]
    # The settings' are of those without one of their own.
    settings = DecodeSettings(2, max_new_tokens=3, batch_size=100, top_p=0.8)
    counts = [Counter() for _ in ways]
    for answer in decode(target, drafter, requests, settings):
        counts[int(answer.id.partition("/")[0])][tuple(answer.tokens)] += 1
    for (temperature, top_p), count in zip(ways, counts, strict=True):
        probs = exact_distribution(target, [1, 2], 3, temperature, 0.8 if top_p is None else top_p)
        assert sum(count[o] for o, p in probs.items() if p == 0) == 0
        if temperature:
            assert chi_square_p_value(count, {o: num * p for o, p in probs.items()}) > 1e-3


def test_a_nucleus_changes_no_bit_of_the_rows_that_have_none():
    logits = torch.randn(3, 2, 50, generator=torch.Generator().manual_seed(0))
    temperatures = torch.tensor([1.0, 0.7, 1.0])
    together = target_distribution(logits, temperatures, torch.tensor([1.0, 0.8, 0.3]))
    for row, top_p in enumerate([1.0, 0.8, 0.3]):
        alone = target_distribution(logits[row : row + 1], temperatures[row : row + 1], top_p)
        # 0.8 as float32 is not 0.8, and no cumulative sum lies between.
        assert torch.equal(together[row : row + 1], alone)


@pytest.mark.parametrize("kind", ["none", "right_until"])
def test_draws_depend_on_the_requests_own_seed_alone(kind):
    target = HashTarget()

    def tokens(requests, batch_size, seed):
        settings = DecodeSettings(3, max_new_tokens=13, batch_size=batch_size, seed=seed)
        return [
            a.tokens
            for a in sorted(
                decode(target, proposer(kind, target), requests, settings), key=lambda a: a.id
            )
        ]

    others = ragged_requests(5, temperature=1.0)
    (alone,) = tokens([Request("x", [1, 2, 3], 1.0, seed="7")], 1, 0)
    among = [*others, Request("z", [1, 2, 3], 1.0, seed="7")]
    assert tokens(among, 4, 1)[-1] == alone
    assert tokens([Request("z", [1, 2, 3], 1.0, seed="8")], 1, 0) != [alone]
    assert tokens([Request("x", [1, 2, 3], 1.0)], 1, 0) != [alone]


@pytest.mark.parametrize("ignores_eos", [False, True])
@pytest.mark.parametrize("stop", range(1, 9))
def test_a_stop_token_ends_the_answer_like_an_eos(stop, ignores_eos):
    target = HashTarget()
    settings = DecodeSettings(3, max_new_tokens=20, batch_size=3)
    requests = [
        replace(r, stop_ids=frozenset({stop}), ignores_eos=ignores_eos) for r in ragged_requests(6)
    ]
    other = HashTarget(eos_ids={stop} if ignores_eos else {stop, *target.eos_ids})
    for answer in decode(target, proposer("right", target), requests, settings):
        expected = other.answer(requests[int(answer.id[1:])].prompt, 20)
        assert answer.tokens == expected
        assert (answer.finish_reason == "stop") == (expected[-1] in other.eos_ids)


def test_the_guard_leaves_answers_of_a_known_length_alone():
    target = HashTarget(max_length=99)
    target.logits = lambda hashes: torch.eye(9)[3].expand(*hashes.shape, 9)
    request = Request("a", [1], 0.0, 40, ignores_eos=True)
    classes = [TokenClass.other] * 9
    settings = DecodeSettings(0, 40, 1)
    (answer,) = decode(target, NoProposer(), [request], settings, token_classes=classes)
    assert answer.finish_reason == "length"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"top_p": 0.0}, r"top_p must lie in \(0, 1\], got 0"),
        ({"top_p": 1.1}, r"top_p must lie in \(0, 1\], got 1\.1"),
        ({"top_p": math.nan}, r"top_p must lie in \(0, 1\], got nan"),
        ({"num_logprobs": -1}, "num_logprobs must be at least 0, got -1"),
    ],
)
def test_a_wrong_wish_is_named(change, message):
    request = replace(ragged_requests(1)[0], **change)
    with pytest.raises(ValueError, match=f"request r0: {message}"):
        decode(HashTarget(), NoProposer(), [request], DecodeSettings(0, 9, 1))


class Script:
    """Gives all requests at once; `revoked` is whom nobody wants any more."""

    def __init__(self, requests):
        self.requests, self.revoked, self.dropped = requests, set(), []

    def take(self):
        taken, self.requests = self.requests, []
        return taken

    def wait(self):
        return bool(self.requests)

    def close(self):
        pass

    def is_revoked(self, id):
        if id in self.revoked:
            self.revoked.remove(id)
            self.dropped.append(id)
            return True
        return False


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("after", [1, 2, 4, 7])
@pytest.mark.parametrize("victim", range(5))
def test_one_that_is_given_up_leaves_and_the_others_are_answered(kind, after, victim):
    target, requests = HashTarget(), ragged_requests(5)
    script, passes = Script(requests), []

    def tell(batch):
        passes.append(batch)
        if len(passes) == after:
            script.revoked.add(f"r{victim}")

    settings = DecodeSettings(3, max_new_tokens=13, batch_size=2)
    answers = decode(target, proposer(kind, target), script, settings, on_emitted=tell)
    expected = {r.id: target.answer(r.prompt, 13) for r in requests}
    assert {a.id: a.tokens for a in answers} | {f"r{victim}": expected[f"r{victim}"]} == expected
    told = [f"r{victim}" in [e.id for e in batch] for batch in passes[after:]]
    if script.dropped:
        # After a prefill the slots before it have their round first.
        assert sum(told) <= 1
    assert target.held == {}


def test_a_slot_that_is_given_up_is_filled_before_the_next_round():
    target = HashTarget(eos_ids=())
    script, seen = Script([Request(name, [1], 0.0, 9) for name in "abc"]), []

    def tell(batch):
        seen.append([e.id for e in batch])
        if len(seen) == 3:
            script.revoked.add("a")

    ids = [
        a.id for a in decode(target, NoProposer(), script, DecodeSettings(0, 9, 2), on_emitted=tell)
    ]
    # Prefills of a and b, a round of both; then c in the place of a.
    assert seen[:5] == [["a"], ["b"], ["a", "b"], ["c"], ["c", "b"]]
    assert sorted(ids) == ["b", "c"]
    assert script.dropped == ["a"]


def test_one_that_was_put_back_can_be_given_up():
    target = HashTarget(eos_ids=(), num_columns=24)
    script, num = Script([Request(name, [1] * 5, 0.0, 12) for name in "ab"]), []

    def tell(batch):
        num.append(len(batch))
        if num[-1] == 1 and len(num) > 2 and not script.dropped:
            script.revoked.add("b")  # a is alone: b was put back

    answers = decode(target, NoProposer(), script, DecodeSettings(0, 12, 2), on_emitted=tell)
    assert [a.id for a in answers] == ["a"]
    assert script.dropped == ["b"]


def test_an_id_that_was_given_up_is_free_again():
    script = Script([Request("a", [1], 0.0, 5)])
    script.revoked.add("a")
    again = [Request("a", [2], 0.0, 3)]

    def wait():
        script.requests, again[:] = list(again), []
        return bool(script.requests)

    script.wait = wait
    (answer,) = decode(HashTarget(eos_ids=()), NoProposer(), script, DecodeSettings(0, 9, 1))
    assert len(answer.tokens) == 3


def test_a_script_is_revocable():
    assert isinstance(Script([]), Revocable)
