import random
from collections import Counter
from itertools import accumulate
from operator import mul

import numpy as np
import pytest
from hash_target import (
    HashTarget,
    chi_square_p_value,
    exact_distribution,
    proposer,
    ragged_requests,
)

from specfit_serve import adaptive
from specfit_serve.adaptive import AdaptiveDraftLength, Costs
from specfit_serve.decode import DecodeSettings, Request, decode
from specfit_serve.protocols import DraftLength


def passes(one, four, eight):
    """Of 1 to 8 tokens, relative to one, between those that were timed."""
    timed = np.interp(range(1, 9), [1, 4, 8], [one, four, eight]) / one
    return [float(seconds) for seconds in timed]


# A head of 49152 by 576 on a CPU thread, µs (nvfp4's last is extrapolated); DeepSeek-R1 on 8 B200.
TABLES = {
    "fp32": passes(9289, 21874, 23251),
    "bf16": passes(6478, 23820, 46383),
    "int8": passes(2633, 3450, 4636),
    "nvfp4": passes(1907, 4175, 7199),
    "b200": [1 + 0.0816 * m for m in range(8)],
    "flat": [1 + 0.01 * m for m in range(8)],
}
DRAFT_SECONDS = 0.05  # of a pass over one token
MOST = 7

HOSTILE = [0.0] * MOST
PREDICTABLE = [0.9] * MOST
FADING = [0.7, 0.65, 0.6, 0.55, 0.5, 0.45, 0.4]  # as heads do
EVEN = [0.5] * MOST


def num_expected(rates, k):
    return 1 + sum(accumulate(rates[:k], mul))


def seconds_per_token(table, rates, k):
    return (table[k] + k * DRAFT_SECONDS) / num_expected(rates, k)


def best_fixed(table, rates):
    return min(seconds_per_token(table, rates, k) for k in range(MOST + 1))


def record(length, asked, drafted, kept, verify_seconds=1.0):
    """What became of a round of as many rows as there are numbers."""
    length.record(
        num_asked=asked,
        num_drafted=drafted,
        num_kept=kept,
        draft_seconds=0.0,
        verify_seconds=verify_seconds,
    )


class Text:
    """One request, whose draft tokens are kept at `rates` by position."""

    def __init__(self, table, seed=0):
        self.table = table
        self.length = AdaptiveDraftLength(Costs({1: table}, DRAFT_SECONDS, fixed=True))
        self.rng = random.Random(seed)

    def round(self, rates, id_="r", grade=0):
        k = self.length.choose([id_], [grade], MOST)
        kept = 0
        while kept < k and self.rng.random() < rates[kept]:
            kept += 1
        record(self.length, [k], [k], [kept])
        return k, kept

    def seconds(self, k):
        return self.table[k] + k * DRAFT_SECONDS

    def decode(self, rates, num_tokens):
        """Seconds a token: those that the chosen numbers take and bring on average."""
        seconds = emitted = 0.0
        while emitted < num_tokens:
            k, _ = self.round(rates)
            seconds += self.seconds(k)
            emitted += num_expected(rates, k)
        return seconds / emitted


@pytest.mark.parametrize("table", TABLES)
def test_hostile_text_is_decoded_as_fast_as_plainly(table):
    assert 1 / Text(TABLES[table]).decode(HOSTILE, 500) > 0.97


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("seed", range(3))
def test_no_text_whatever_costs_more_than_its_bound(table, seed):
    text = Text(TABLES[table], seed)
    seconds = num_tokens = 0.0
    for i in range(400):
        k = text.length.choose(["r"], [0], MOST)
        # Keeps all for as long as it takes to be trusted, then nothing; or what chance says.
        kept = (k if i // 20 % 2 == 0 else 0) if seed == 0 else text.rng.choice([0, 0, 0, k])
        record(text.length, [k], [k], [kept])
        seconds += text.seconds(k)
        num_tokens += kept + 1
        bound = (1 + adaptive.MAX_LOSS) * num_tokens + adaptive.FIRST_LEAD
        assert seconds <= bound + 1e-9


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("rates", [PREDICTABLE, FADING, EVEN], ids=["most", "fading", "even"])
def test_steady_text_is_decoded_almost_as_fast_as_with_the_best_number(table, rates):
    text = Text(TABLES[table])
    start = text.decode(rates, 300)
    assert best_fixed(TABLES[table], rates) / start > 0.9
    assert best_fixed(TABLES[table], rates) / text.decode(rates, 1000) > 0.97


@pytest.mark.parametrize("table", ["int8", "flat"])
@pytest.mark.parametrize(
    ("before", "after"),
    [(HOSTILE, PREDICTABLE), (HOSTILE, FADING), (PREDICTABLE, HOSTILE), (PREDICTABLE, EVEN)],
    ids=["opens", "opens_a_little", "closes", "closes_a_little"],
)
def test_a_change_of_text_is_noticed(table, before, after):
    text = Text(TABLES[table])
    text.decode(before, 500)
    soon = text.decode(after, 500)
    assert best_fixed(TABLES[table], after) / soon > 0.93
    assert best_fixed(TABLES[table], after) / text.decode(after, 1000) > 0.97


@pytest.mark.parametrize("table", TABLES)
def test_hostile_text_is_tried_now_and_then_for_a_hundredth_of_the_time(table):
    text = Text(TABLES[table])
    text.decode(HOSTILE, 300)
    tried = [text.round(HOSTILE)[0] for _ in range(1000)]
    assert 0 < sum(text.seconds(k) - 1 for k in tried) <= 1000 * adaptive.EXPLORED + 1
    assert set(tried) == {0, 1}


def test_what_is_kept_is_tried_again_at_once():
    text = Text(TABLES["int8"])
    text.decode(HOSTILE, 300)
    while text.round(HOSTILE)[0] == 0:
        pass
    # The price of a token is saved up again; from the first that is kept on, there is no waiting.
    while text.round(PREDICTABLE)[1] == 0:
        pass
    assert sum(text.round([1.0] * MOST)[0] > 0 for _ in range(20)) == 20


def test_each_grade_has_its_own_number():
    text = Text(TABLES["int8"])
    for _ in range(200):
        text.round(HOSTILE, grade=1)
        text.round(PREDICTABLE, grade=2)
    assert max(text.round(HOSTILE, grade=1)[0] for _ in range(20)) <= 1
    assert sum(text.round(PREDICTABLE, grade=2)[0] for _ in range(20)) > 20 * 4


def test_a_request_starts_from_what_earlier_ones_showed():
    text = Text(TABLES["int8"])
    for i in range(20):
        for _ in range(10):
            text.round(HOSTILE, id_=f"bad{i}", grade=1)
            text.round(PREDICTABLE, id_=f"good{i}", grade=2)
    assert text.round(HOSTILE, id_="new", grade=1)[0] <= 1
    assert text.round(PREDICTABLE, id_="new", grade=2)[0] > 3


def test_drafts_that_are_rarely_made_but_kept_are_asked_for_in_full():
    text = Text(TABLES["nvfp4"])
    asked = []
    for i in range(300):
        k = text.length.choose(["r"], [1], MOST)
        length = k if i % 10 == 0 else 0
        record(text.length, [k], [length], [length])
        asked.append(k)
    assert asked[-100:] == [MOST] * 100


def two_rows(num_rounds, kept, table):
    """What a batch of two chooses each round; `kept` are the tokens kept of k and the round's."""
    length = AdaptiveDraftLength(Costs({2: table}, 0.0, fixed=True))
    for i in range(num_rounds):
        k = length.choose(["a", "b"], [0, 0], MOST)
        rows = [min(k, found) for found in kept(k, i)]
        record(length, [k, k], [k, k], rows)
        yield k, rows


def test_a_batch_drafts_for_those_who_keep_it():
    assert [k for k, _ in two_rows(100, lambda k, _: (1, k), TABLES["flat"])][-1] == MOST


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize(
    "kept",
    [lambda k, _: (0, k), lambda k, i: (k, 0) if i // 20 % 2 else (0, k), lambda _, __: (0, 0)],
    ids=["one_of_them", "by_turns", "nobody"],
)
def test_the_rows_of_a_batch_together_pay_no_more_than_the_bound(table, kept):
    seconds = num_tokens = 0.0
    for k, rows in two_rows(500, kept, TABLES[table]):
        seconds += TABLES[table][k]
        num_tokens += sum(rows) / 2 + 1
        bound = (1 + adaptive.MAX_LOSS) * num_tokens + adaptive.FIRST_LEAD
        assert seconds <= bound + 1e-9


def test_a_row_that_keeps_nothing_does_not_hold_back_the_others():
    speeds = []
    for kept in (lambda k, _: (k, k), lambda k, _: (0, k)):
        rounds = list(two_rows(300, kept, TABLES["flat"]))
        seconds = sum(TABLES["flat"][k] for k, _ in rounds)
        speeds.append(sum(sum(rows) / 2 + 1 for _, rows in rounds) / seconds)
    assert speeds[0] > speeds[1] > 2


def test_the_limit_is_kept():
    text = Text(TABLES["flat"])
    text.decode(PREDICTABLE, 200)
    assert text.length.choose(["r"], [0], 3) == 3
    assert text.length.choose(["r"], [0], 0) == 0
    assert text.length.choose(["r"], [0], 99) == MOST


def test_measured_costs_decide():
    # The table says that a column is for nothing; it takes a pass, and brings half of one.
    length = AdaptiveDraftLength(Costs({1: [1.0] * 5}, 0.0, fixed=False))
    chosen = []
    for _ in range(60):
        chosen.append(k := length.choose(["r"], [0], 4))
        record(length, [k], [k], [min(k, 1)], verify_seconds=1.0 + 2 * k)
    assert max(chosen[:20]) > 0
    assert sum(chosen[-40:]) <= 1


def test_plain_passes_are_timed_first_and_again_when_they_are_old():
    length = AdaptiveDraftLength(Costs({1: [1.0] * 5}, 0.0, fixed=False))
    plain = []
    for i in range(600):
        if (k := length.choose(["r"], [0], 4)) == 0:
            plain.append(i)
        record(length, [k], [k], [k])
    assert plain == [0, 1, 2, 257, 258, 259, 514, 515, 516]


def draft_length(fixed=True):
    table = {rows: [1 + 0.05 * rows * m for m in range(7)] for rows in (1, 5)}
    return AdaptiveDraftLength(Costs(table, 0.02, fixed=fixed))


@pytest.mark.parametrize("kind", ["none", "right", "wrong", "right_until", "ngram"])
@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("fixed", [True, False])
def test_greedy_output_is_the_targets_own_whatever_is_chosen(kind, batch_size, fixed):
    target, requests = HashTarget(), ragged_requests(9)
    settings = DecodeSettings(6, max_new_tokens=20, batch_size=batch_size)
    chooser: DraftLength = draft_length(fixed)
    found = decode(target, proposer(kind, target), requests, settings, draft_length=chooser)
    assert {a.id: a.tokens for a in found} == {r.id: target.answer(r.prompt, 20) for r in requests}


def test_the_loop_drafts_more_where_more_is_kept():
    target = HashTarget(eos_ids=(), max_length=99)
    settings = DecodeSettings(6, max_new_tokens=80, batch_size=1)
    drafted = {}
    for kind in ("right", "wrong"):
        (answer,) = decode(
            target,
            proposer(kind, target),
            ragged_requests(1),
            settings,
            draft_length=draft_length(),
        )
        drafted[kind] = [r.num_drafted for r in answer.rounds]
    assert min(drafted["right"][-5:-1]) == 6
    assert sum(drafted["wrong"][-20:]) <= 3


def test_fixed_costs_give_the_same_rounds_again():
    target, settings = HashTarget(), DecodeSettings(6, max_new_tokens=20, batch_size=3)
    first, second = [
        [
            (a.id, a.tokens, a.rounds)
            for a in decode(
                target,
                proposer("right_until", target),
                ragged_requests(9, temperature=1.0),
                settings,
                draft_length=draft_length(),
            )
        ]
        for _ in range(2)
    ]
    assert first == second


def test_sampled_answers_have_the_targets_distribution():
    target = HashTarget(vocab_size=3, num_slots=20, eos_ids=(), peak=1.0)
    num, prompt = 1000, [1, 2, 1, 0]
    requests = [Request(f"r{i}", prompt, 1.0) for i in range(num)]
    settings = DecodeSettings(3, max_new_tokens=4, batch_size=20)
    found = list(
        decode(target, proposer("ngram", target), requests, settings, draft_length=draft_length())
    )
    counts = Counter(tuple(a.tokens) for a in found)
    probs = exact_distribution(target, prompt, 4, 1.0, 1.0)
    assert chi_square_p_value(counts, {o: num * p for o, p in probs.items()}) > 1e-3
    assert sum(r.num_kept for a in found for r in a.rounds) > 50
