import random
from collections import Counter

import pytest
import torch
from hash_target import (
    HashTarget,
    chi_square_p_value,
    exact_distribution,
    ragged_requests,
)

from specfit_serve import suffix
from specfit_serve.decode import DecodeSettings, Request, decode
from specfit_serve.suffix import SEPARATOR, EarlierAnswers, Lookup, SuffixAutomaton, SuffixProposer


def followers(text, context):
    """How often each token followed `context`, and where it first did."""
    found = {}
    for end in range(len(context), len(text)):
        if text[end - len(context) : end] == context:
            count, first = found.get(text[end], (0, end))
            found[text[end]] = (count + 1, first)
    return found


def search(text, newest, draft_per_match, min_probability):
    """A draft after `newest` and the tokens that it promises, by looking everywhere in `text`."""
    length = next((n for n in range(len(newest), 0, -1) if followers(text, newest[-n:])), 0)
    context = newest[len(newest) - length :]
    tokens, expected, probability = [], 0.0, 1.0
    while len(tokens) < min(suffix.MAX_DRAFT, int(draft_per_match * length)):
        while not (found := followers(text, context)):
            context = context[1:]
        best = max(found, key=found.get)
        probability *= found[best][0] / sum(count for count, _ in found.values())
        if best == SEPARATOR or probability < min_probability:
            break
        tokens.append(best)
        expected += probability
        context = [*context, best]
    return Lookup(tokens, expected)


def texts(kind, seed):
    """A text over few tokens, and settings."""
    rng = random.Random(f"{kind}/{seed}")
    vocab = rng.choice([2, 3, 5])
    if kind == "random":
        text = [rng.randrange(vocab) for _ in range(60)]
    else:
        text = [rng.randrange(vocab) for _ in range(rng.randint(1, 9))] * 60
        text = [t if rng.random() < 0.95 else rng.randrange(vocab + 1) for t in text[:60]]
    return text, rng.choice([0.5, 1.0, 2.0]), rng.choice([0.0, 0.1, 0.5])


def propose(proposer, sequences, num_draft_tokens):
    rows = len(sequences)
    draft = proposer.propose(
        sequences, num_draft_tokens, torch.zeros(rows), torch.zeros(rows, num_draft_tokens)
    )
    return [row[:n] for row, n in zip(draft.tokens.tolist(), draft.lengths.tolist(), strict=True)]


@pytest.mark.parametrize("kind", ["random", "repetitive"])
@pytest.mark.parametrize("seed", range(12))
def test_a_request_is_continued_as_a_search_would(kind, seed):
    text, per_match, least = texts(kind, seed)
    proposer = SuffixProposer(max_answer_tokens=0, draft_per_match=per_match, min_probability=least)
    proposer.start(0, text[:3], None)
    for end in range(3, len(text)):
        found = proposer.look_up(0, text[:end])
        assert found == search(text[:end], text[:end], per_match, least)


@pytest.mark.parametrize("kind", ["random", "repetitive"])
@pytest.mark.parametrize("seed", range(12))
def test_earlier_answers_are_continued_as_a_search_would(kind, seed):
    text, per_match, least = texts(kind, seed)
    corpus = [*text[:20], SEPARATOR, *text[20:40], SEPARATOR]
    automaton = SuffixAutomaton()
    automaton.extend(corpus)
    for end in range(41, len(text)):
        newest = text[40:end]
        state, length = automaton.longest_match(newest)
        limit = min(suffix.MAX_DRAFT, int(per_match * length))
        assert Lookup(*automaton.continuation(state, limit, least)) == search(
            corpus, newest, per_match, least
        )


@pytest.mark.parametrize("seed", range(6))
def test_the_place_that_promises_most_drafts(seed):
    text, per_match, least = texts("random", seed)
    proposer = SuffixProposer(
        max_answer_tokens=200, draft_per_match=per_match, min_probability=least
    )
    proposer.start(0, text[:1], None)
    propose(proposer, [text[:40]], 4)
    proposer.start(0, text[20:22], None)
    for end in range(22, 60):
        own, sequence = text[20:end], text[20:end]
        earlier = [*text[:40], SEPARATOR]
        found = [search(place, sequence[-32:], per_match, least) for place in (own, earlier)]
        best = max(found, key=lambda lookup: lookup.expected_kept)
        assert proposer.look_up(0, sequence) == best


def test_a_tie_goes_to_the_token_that_came_up_last():
    proposer = SuffixProposer(max_answer_tokens=0)
    proposer.start(0, [1, 7, 1, 8, 1], None)
    assert propose(proposer, [[1, 7, 1, 8, 1]], 1) == [[8]]


def test_the_draft_grows_with_the_match():
    for length in range(1, 9):
        tokens = [*range(20), 99, *range(length)]
        proposer = SuffixProposer(max_answer_tokens=0, draft_per_match=1.5)
        proposer.start(0, tokens, None)
        expected = list(range(length, length + int(1.5 * length)))
        assert propose(proposer, [tokens], 16) == [expected]


def test_a_draft_ends_where_its_probability_falls_below_the_least():
    # Four 2s after [9, 1], one of them before a 3, a 4, a 5 and a 6 each: 1, then 1/4.
    tokens = [t for last in (3, 4, 5, 6) for t in (9, 1, 2, last)] + [9, 1]
    for least, expected in ((0.2, [[2, 6]]), (0.3, [[2]])):
        proposer = SuffixProposer(max_answer_tokens=0, min_probability=least)
        proposer.start(0, tokens, None)
        assert propose(proposer, [tokens], 8) == expected


def test_a_run_of_one_token_is_drafted_as_far_as_is_asked():
    proposer = SuffixProposer(max_answer_tokens=0)
    tokens = [7] * 3 * suffix.MAX_COUNTED
    proposer.start(0, tokens, None)
    assert propose(proposer, [tokens], 16) == [[7] * 16]


def test_there_are_fewer_than_two_states_a_token():
    for kind in ("random", "repetitive"):
        automaton = SuffixAutomaton()
        automaton.extend(text := texts(kind, 0)[0])
        assert len(automaton._next) <= 2 * len(text)


@pytest.mark.parametrize(
    ("expected_kept", "grade"), [(0.1, 1), (1.4, 1), (1.6, 2), (4.0, 3), (15.6, 5), (32.0, 5)]
)
def test_a_grade_is_a_doubling_of_the_promise(expected_kept, grade):
    assert Lookup([1], expected_kept).grade == grade
    assert Lookup([], 0.0).grade == 0


def knows(proposer, answer):
    """Whether another request that begins like `answer` is continued like it."""
    proposer.start(9, answer[:2], None)
    return proposer.look_up(9, answer[:2]).tokens == answer[2:4]


def test_the_oldest_answers_leave():
    earlier = EarlierAnswers(24)
    answers = [list(range(10 * i, 10 * i + 5)) for i in range(7)]  # with a separator, 6 tokens
    for i, answer in enumerate(answers):
        earlier.add(answer)
        known = [
            any(automaton.longest_match(a)[1] == 5 for automaton in earlier.automata)
            for a in answers
        ]
        oldest = max(0, i // 2 * 2 - 2)  # two fill a half
        assert known == [oldest <= j <= i for j in range(7)]


def test_the_end_of_a_long_answer_is_remembered():
    earlier = EarlierAnswers(20)
    earlier.add(list(range(50)))
    assert earlier.automata[0].num_tokens == 10
    assert earlier.automata[0].longest_match([40, 41, 42])[1] == 2
    assert earlier.automata[0].longest_match([48, 49])[1] == 2


def test_memory_of_no_tokens_remembers_nothing():
    proposer = SuffixProposer(max_answer_tokens=0)
    proposer.start(0, [1], None)
    proposer.look_up(0, [1, 2, 3, 4, 5])
    proposer.start(0, [1], None)
    assert not knows(proposer, [2, 3, 4, 5])


def test_answers_are_remembered_and_prompts_are_not():
    proposer = SuffixProposer(max_answer_tokens=100)
    proposer.start(0, [1, 2, 3, 4, 11], None)  # the last is the first of the answer
    proposer.look_up(0, [1, 2, 3, 4, 11, 12, 13, 14])
    proposer.start(1, [5, 6, 7, 8, 21], None)
    proposer.look_up(1, [5, 6, 7, 8, 21, 22, 23, 24])
    proposer.move(1, 0)  # the first is over
    assert knows(proposer, [11, 12, 13, 14])
    assert not knows(proposer, [21, 22, 23, 24])
    proposer.start(0, [1, 2], None)
    assert knows(proposer, [21, 22, 23, 24])
    assert not knows(proposer, [1, 2, 3, 4])
    assert not knows(proposer, [5, 6, 7, 8])


def test_a_draft_ends_with_the_answer_that_it_is_from():
    proposer = SuffixProposer(max_answer_tokens=100)
    for answer in ([11, 12, 13, 14], [21, 22, 23, 24]):
        proposer.start(0, [1, answer[0]], None)
        proposer.look_up(0, [1, *answer])
    proposer.start(0, [11, 12, 13], None)
    assert propose(proposer, [[11, 12, 13]], 4) == [[14]]


def test_rows_with_and_without_a_match_share_a_batch():
    proposer = SuffixProposer(max_answer_tokens=0)
    sequences = [[1, 2, 3, 4, 1, 2], [5, 6, 7], [8, 9, 8]]
    for slot, tokens in enumerate(sequences):
        proposer.start(slot, tokens, None)
    assert propose(proposer, sequences, 4) == [[3, 4], [], [9]]
    assert proposer.grades(sequences, 4) == [2, 0, 1]


def test_a_moved_sequence_keeps_its_index():
    proposer = SuffixProposer(max_answer_tokens=0)
    proposer.start(0, [5, 6], None)
    proposer.start(1, [1, 2, 1], None)
    proposer.move(1, 0)
    assert propose(proposer, [[1, 2, 1]], 2) == [[2]]


@pytest.mark.parametrize("num_draft_tokens", [1, 4])
@pytest.mark.parametrize("batch_size", [1, 3, 5])
def test_greedy_output_is_the_targets_own(num_draft_tokens, batch_size):
    target = HashTarget()
    requests = ragged_requests(12)
    settings = DecodeSettings(num_draft_tokens, max_new_tokens=20, batch_size=batch_size)
    proposer = SuffixProposer(max_answer_tokens=50, draft_per_match=2.0)
    found = list(decode(target, proposer, requests, settings))
    assert {a.id: a.tokens for a in found} == {r.id: target.answer(r.prompt, 20) for r in requests}
    assert sum(r.num_drafted for a in found for r in a.rounds) > 20


def test_the_same_requests_in_the_same_order_get_the_same_drafts():
    settings = DecodeSettings(4, max_new_tokens=20, batch_size=3)
    requests = ragged_requests(12, temperature=1.0)
    first, second = [
        [
            (a.id, a.tokens, a.rounds)
            for a in decode(HashTarget(), SuffixProposer(max_answer_tokens=50), requests, settings)
        ]
        for _ in range(2)
    ]
    assert first == second


@pytest.mark.parametrize(
    ("temperature", "top_p"), [pytest.param(1.0, 1.0, marks=pytest.mark.slow), (0.7, 0.75)]
)
def test_sampled_answers_have_the_targets_distribution(temperature, top_p):
    target = HashTarget(vocab_size=3, num_slots=100, eos_ids=(), peak=1.0)
    num, prompt = 1200, [1, 2, 1, 2]
    requests = [Request(f"r{i}", prompt, temperature) for i in range(num)]
    settings = DecodeSettings(2, max_new_tokens=4, batch_size=100, top_p=top_p)
    proposer = SuffixProposer(max_answer_tokens=1000, draft_per_match=2.0)
    found = list(decode(target, proposer, requests, settings))
    counts = Counter(tuple(a.tokens) for a in found)
    probs = exact_distribution(target, prompt, 4, temperature, top_p)
    assert sum(counts[o] for o, p in probs.items() if p == 0) == 0
    assert chi_square_p_value(counts, {o: num * p for o, p in probs.items()}) > 1e-3
    assert sum(r.num_kept for a in found for r in a.rounds) > num // 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_answer_tokens": -1}, "max_answer_tokens must be at least 0, got -1"),
        ({"draft_per_match": 0.0}, "draft_per_match must be positive, got 0.0"),
        ({"min_probability": 1.5}, r"min_probability must lie in \[0, 1\], got 1.5"),
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        SuffixProposer(**{"max_answer_tokens": 10} | settings)
