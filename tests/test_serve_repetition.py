import itertools

import pytest
import torch

from specfit_serve.repetition import (
    MAX_PERIOD,
    MIN_CYCLE_TOKENS,
    MIN_PLAIN_CYCLE_TOKENS,
    RUN_LIMITS,
    RepetitionGuard,
    TokenClass,
    classify_tokens,
)

OTHER = range(100, 1000)  # token ids
CLASSES = [
    TokenClass.special,
    TokenClass.space,
    TokenClass.digit,
    TokenClass.punctuation,
    *[TokenClass.other] * 996,
]
SPACE, DIGIT, PUNCTUATION = 1, 2, 3


def first_firing(tokens):
    """The number of tokens looked at and the start of the loop, or None."""
    guard = RepetitionGuard(CLASSES)
    for count, token in enumerate(tokens, 1):
        if (start := guard.push(token)) is not None:
            return count, start
    return None


def brute_force_start(tokens):
    """The loop that `tokens` ends in, by the definition, of the shortest period."""
    for period in range(1, MAX_PERIOD + 1):
        length = period
        while length < len(tokens) and tokens[-length - 1] == tokens[-length - 1 + period]:
            length += 1
        classes = {CLASSES[t] for t in tokens[-period:]}
        if period == 1:
            limit = RUN_LIMITS[CLASSES[tokens[-1]]]
        elif classes & {TokenClass.other, TokenClass.special}:
            limit = max(MIN_CYCLE_TOKENS, 4 * period)
        else:
            limit = max(MIN_PLAIN_CYCLE_TOKENS, 4 * period)
        if length >= limit:
            return len(tokens) - length
    return None


@pytest.mark.parametrize("token", [0, SPACE, DIGIT, PUNCTUATION, 100])
def test_a_run_fires_at_its_classs_limit_and_starts_at_its_first_token(token):
    limit = RUN_LIMITS[CLASSES[token]]
    before = [500, 501, 502]
    assert first_firing(before + [token] * (limit - 1) + [503]) is None
    assert first_firing(before + [token] * limit) == (len(before) + limit, len(before))


@pytest.mark.parametrize("period", range(2, MAX_PERIOD + 1))
def test_a_cycle_fires_with_its_fourth_copy_and_at_least_48_tokens(period):
    before = [800, 801, 802]
    cycle = list(OTHER[:period])
    length = max(4 * period, MIN_CYCLE_TOKENS)
    tokens = before + (cycle * 48)[:length]
    assert first_firing(tokens[:-1]) is None
    assert first_firing(tokens) == (len(tokens), len(before))


def test_a_cycle_longer_than_64_tokens_is_none():
    assert first_firing(list(OTHER[: MAX_PERIOD + 1]) * 10) is None


@pytest.mark.parametrize("period", [2, 7, 30])
def test_copies_that_differ_in_one_token_are_no_cycle(period):
    copies = [[*OTHER[: period - 1], OTHER[200 + i]] for i in range(300 // period)]
    assert first_firing(itertools.chain(*copies)) is None


def test_an_array_of_zeros_is_no_loop_until_it_is_long():
    zeros = [DIGIT, PUNCTUATION, SPACE]
    assert first_firing(zeros * 60) is None
    assert first_firing(zeros * 100) == (MIN_PLAIN_CYCLE_TOKENS, 0)


def test_code_that_repeats_its_form_does_not_fire():
    # `    assert f(x_i) == 0` for i = 0..: one name changes from line to line.
    lines = [[SPACE, 100, 101, 102, 300 + i, 103, SPACE, 104, SPACE, DIGIT, 105] for i in range(80)]
    assert first_firing(itertools.chain(*lines)) is None


@pytest.mark.parametrize("seed", range(30))
def test_the_guard_fires_when_the_definition_does(seed):
    rng = torch.Generator().manual_seed(seed)
    guard = RepetitionGuard(CLASSES)
    tokens = []
    while len(tokens) < 150:
        # Noise from few tokens, then copies of a piece of it.
        vocab = torch.tensor([SPACE, DIGIT, 100, 101])[: 2 + seed % 3]
        noise = vocab[torch.randint(len(vocab), (1 + seed % 12,), generator=rng)].tolist()
        for token in noise * int(torch.randint(1, 9, (), generator=rng)):
            tokens.append(token)
            assert guard.push(token) == brute_force_start(tokens)


def test_tokens_are_classified_by_their_text():
    texts = [
        "<eos>",
        " ",
        "\n\t",
        b"  ",
        "7",
        " 42",
        "--",
        b"\xe2\x94\x80",
        "}\n",
        "a",
        "x1",
        "1.5",
    ]
    classes = classify_tokens(texts, special_ids=[0])
    assert [c.name for c in classes] == [
        *["special", "space", "space", "space", "digit", "digit"],
        *["punctuation", "punctuation", "punctuation", "other", "other", "other"],
    ]


def test_a_part_of_a_character_is_other():
    assert classify_tokens([b"\xe2\x94"], special_ids=[]) == (TokenClass.other,)
