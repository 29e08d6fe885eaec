"""A cache that has too few columns for everyone: answers wait, or end early, and others go on."""

import pytest
from hash_target import HashTarget

from specfit_serve.decode import DecodeSettings, Request, decode
from specfit_serve.ngram import NgramProposer

K = 2
LONG = 12  # tokens of an answer


def answers(num_columns, lengths, batch_size=3):
    """By id: the tokens and how they ended; no token ends an answer."""
    target = HashTarget(eos_ids=(), num_slots=batch_size, num_columns=num_columns)
    requests = [Request(f"r{i}", [1 + i] * n, 0.0) for i, n in enumerate(lengths)]
    settings = DecodeSettings(K, max_new_tokens=LONG, batch_size=batch_size)
    found = {}
    for a in decode(target, NgramProposer(1, 2), requests, settings):
        prompt = next(r.prompt for r in requests if r.id == a.id)
        assert a.tokens == target.answer(prompt, LONG)[: len(a.tokens)]
        found[a.id] = (len(a.tokens), a.finish_reason)
    assert target.held == {}
    return found


def test_with_room_for_all_every_answer_has_its_length():
    found = answers(1000, [4, 5, 6, 7])
    assert found == {f"r{i}": (LONG, "length") for i in range(4)}


def test_a_prompt_without_room_waits_for_an_answer_to_end():
    # One sequence at a time: 20 of the prompt, 12 of the answer, a draft.
    found = answers(20 + LONG + K, [20, 19, 18])
    assert found == {f"r{i}": (LONG, "length") for i in range(3)}


def test_an_answer_without_room_ends_and_the_others_go_on():
    # Both prompts fit with a round each, and not both answers.
    found = answers(2 * 10 + LONG, [10, 10], batch_size=2)
    assert found["r1"] == (LONG, "length")
    assert 1 <= found["r0"][0] < LONG
    assert found["r0"][1] == "length"


def test_a_prompt_that_fits_nowhere_is_refused():
    with pytest.raises(ValueError, match=r"request r1: .* room for 23 columns, for a prompt of 20"):
        answers(20, [5, 20])
