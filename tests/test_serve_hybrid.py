from collections import Counter
from itertools import takewhile

import pytest
import tiny_heads
import torch
from hash_target import (
    HashTarget,
    SamplingProposer,
    StatelessProposer,
    chi_square_p_value,
    exact_distribution,
    ragged_requests,
)

from specfit.speculators.proposer import Eagle3Proposer
from specfit.targets.slots import SlotTarget
from specfit_serve.adaptive import AdaptiveDraftLength, Costs
from specfit_serve.decode import DecodeSettings, Request, decode
from specfit_serve.hybrid import MAX_MISSED, HybridProposer, LateHead
from specfit_serve.protocols import GradedProposer
from specfit_serve.suffix import SuffixProposer


class Head(StatelessProposer):
    """Has states as EAGLE-3 does: what was shown is taken in by the next draft, or lost.

    Compares them with what the sequences should have shown before every draft.
    """

    def __init__(self, target, draft_row):
        super().__init__(draft_row)
        self.target = target
        self.taken_in, self.pending = {}, {}
        self.num_asked = []

    def start(self, slot, tokens, features):
        assert len(features) == len(tokens) - 1
        self.taken_in[slot], self.pending[slot] = features[:-1], features[-1:]

    def propose(self, sequences, num_draft_tokens, temperatures, uniforms):
        assert num_draft_tokens > 0
        assert uniforms.shape == (len(sequences), num_draft_tokens)
        self.num_asked.append(num_draft_tokens)
        for slot, tokens in enumerate(sequences):
            self.taken_in[slot] = torch.cat([self.taken_in[slot], self.pending.pop(slot)])
            expected = self.target.hashes(torch.tensor([tokens[:-1]]))[0, :, None].float()
            assert torch.equal(self.taken_in[slot], expected)
        return super().propose(sequences, num_draft_tokens, temperatures, uniforms)

    def observe(self, features, num_kept):
        for slot, kept in enumerate(num_kept.tolist()):
            self.pending[slot] = features[slot, : kept + 1]

    def move(self, source, to):
        self.taken_in[to] = self.taken_in.pop(source)
        self.pending[to] = self.pending.pop(source)


class Given:
    """Draft lengths from a list, over and over."""

    def __init__(self, lengths):
        self.lengths, self.round = lengths, -1

    def choose(self, ids, grades, limit):  # noqa: ARG002
        self.round += 1
        return min(self.lengths[self.round % len(self.lengths)], limit)

    def record(self, **_):
        pass


def draft_length(most=4):
    table = {rows: [1 + 0.05 * rows * m for m in range(most + 1)] for rows in (1, 5)}
    return AdaptiveDraftLength(Costs(table, 0.02, fixed=True))


def right(target):
    return target.answer


def wrong(target):
    return lambda tokens, k: [(t + 1) % target.vocab_size for t in target.answer(tokens, k)]


def suffix(max_answer_tokens=50):
    return SuffixProposer(max_answer_tokens=max_answer_tokens)


@pytest.mark.parametrize("lengths", [[0], [3], [0, 0, 2], [0, 1, 0, 0, 0, 4, 3]])
@pytest.mark.parametrize("batch_size", [1, 3, 5])
def test_a_head_that_sits_rounds_out_misses_nothing(lengths, batch_size):
    target, requests = HashTarget(), ragged_requests(12)
    head = Head(target, right(target))
    settings = DecodeSettings(4, max_new_tokens=20, batch_size=batch_size)
    found = decode(target, LateHead(head), requests, settings, draft_length=Given(lengths))
    assert {a.id: a.tokens for a in found} == {r.id: target.answer(r.prompt, 20) for r in requests}
    assert len(head.num_asked) > 0


def test_a_head_is_not_called_while_nothing_is_asked():
    target = HashTarget(eos_ids=(), max_length=4 * MAX_MISSED)
    head = Head(target, right(target))
    settings = DecodeSettings(4, max_new_tokens=3 * MAX_MISSED, batch_size=1)
    (answer,) = decode(
        target, LateHead(head), ragged_requests(1), settings, draft_length=Given([0])
    )
    assert len(answer.rounds) == 3 * MAX_MISSED - 1
    # At the start, and whenever it has missed as many as it may.
    assert head.num_asked == [1, 1, 1]


def test_what_a_head_is_shown_late_is_not_the_targets_own_memory():
    target = HashTarget()
    late = LateHead(Head(target, right(target)))
    features = torch.ones(1, 1, 1)
    late.observe(features, torch.tensor([0]))
    features.zero_()
    late._catch_up()
    assert torch.equal(late._head.pending[0], torch.ones(1, 1))


class Overheard(Eagle3Proposer):
    """Keeps what was drafted after which tokens."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.heard = {}

    def propose(self, sequences, *args):
        draft = super().propose(sequences, *args)
        for sequence, row in zip(sequences, draft.tokens.tolist(), strict=True):
            self.heard[tuple(sequence)] = row
        return draft


def test_eagle3_drafts_the_same_whether_it_sat_rounds_out_or_not():
    speculator = tiny_heads.make_speculator(tiny_heads.make_target())
    requests = tiny_heads.greedy_requests(5)
    heard = []
    for lengths in ([3], [0, 0, 3, 0, 3, 3, 0, 0, 0]):
        slots = {"num_slots": 2, "max_length": 96}
        head = Overheard(speculator.head, speculator.vocab, speculator.embeddings, **slots)
        target = SlotTarget(
            speculator.target, **slots, aux_layers=list(speculator.head.config.aux_layers)
        )
        settings = DecodeSettings(3, max_new_tokens=24, batch_size=2)
        list(decode(target, LateHead(head), requests, settings, draft_length=Given(lengths)))
        heard.append(head.heard)
    always, sometimes = heard
    both = [tokens for tokens in sometimes if tokens in always and len(sometimes[tokens]) == 3]
    assert len(both) > 20
    assert all(sometimes[tokens] == always[tokens] for tokens in both)


@pytest.mark.parametrize("kind", ["right", "wrong"])
@pytest.mark.parametrize("num_draft_tokens", [1, 4])
@pytest.mark.parametrize("batch_size", [1, 3, 5])
@pytest.mark.parametrize("adaptive", [False, True])
def test_greedy_output_is_the_targets_own(kind, num_draft_tokens, batch_size, adaptive):
    target, requests = HashTarget(), ragged_requests(12)
    head = Head(target, right(target) if kind == "right" else wrong(target))
    settings = DecodeSettings(num_draft_tokens, max_new_tokens=20, batch_size=batch_size)
    chooser = draft_length() if adaptive else None
    proposer = HybridProposer(suffix(), head)
    found = decode(target, proposer, requests, settings, draft_length=chooser)
    assert {a.id: a.tokens for a in found} == {r.id: target.answer(r.prompt, 20) for r in requests}


def test_greedy_output_with_eagle3_is_the_targets_own():
    speculator = tiny_heads.make_speculator(tiny_heads.make_target())
    requests = tiny_heads.greedy_requests(5)
    settings = {"num_draft_tokens": 3, "max_new_tokens": 24, "batch_size": 2}
    plain = tiny_heads.answer(speculator, requests, **settings | {"num_draft_tokens": 0})
    found = tiny_heads.answer(
        speculator, requests, **settings, wrap=lambda head: HybridProposer(suffix(), head)
    )
    assert {i: a.tokens for i, a in found.items()} == {i: a.tokens for i, a in plain.items()}


@pytest.mark.parametrize("adaptive", [False, True])
def test_sampled_answers_have_the_targets_distribution(adaptive):
    target = HashTarget(vocab_size=3, num_slots=50, eos_ids=(), peak=1.0)
    num, prompt = 1000, [1, 2, 1, 2]
    requests = [Request(f"r{i}", prompt, 1.0) for i in range(num)]
    settings = DecodeSettings(2, max_new_tokens=4, batch_size=50)
    head = SamplingProposer(torch.tensor([0.1, 0.0, 0.9]))
    proposer = HybridProposer(suffix(1000), head)
    chooser = draft_length() if adaptive else None
    found = list(decode(target, proposer, requests, settings, draft_length=chooser))
    counts = Counter(tuple(a.tokens) for a in found)
    probs = exact_distribution(target, prompt, 4, 1.0, 1.0)
    assert chi_square_p_value(counts, {o: num * p for o, p in probs.items()}) > 1e-3
    assert sum(r.num_kept for a in found for r in a.rounds) > num // 4


class Scripted:
    """A hybrid in slots, whose target says what it is told to."""

    def __init__(self, sequences, head_row, probs=None):
        self.sequences = [list(tokens) for tokens in sequences]
        self.num_asked = []

        def draft_row(_, k):
            self.num_asked.append(k)
            return head_row[:k]

        head = StatelessProposer(draft_row) if probs is None else SamplingProposer(probs)
        self.hybrid = HybridProposer(suffix(0), head)
        for slot, tokens in enumerate(self.sequences):
            self.hybrid.start(slot, tokens, torch.zeros(len(tokens) - 1, 1))

    def propose(self, k, temperature=0.0):
        rows = len(self.sequences)
        return self.hybrid.propose(
            self.sequences, k, torch.full((rows,), temperature), torch.full((rows, k), 0.5)
        )

    def round(self, k, said):
        """`said` is what the target would say in each row; returns what was drafted."""
        draft = self.propose(k)
        drafted = [
            row[:n] for row, n in zip(draft.tokens.tolist(), draft.lengths.tolist(), strict=True)
        ]
        num_kept = []
        for sequence, row, tokens in zip(self.sequences, drafted, said, strict=True):
            pairs = zip(row, tokens, strict=False)
            num_kept.append(sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)))
            sequence.extend(tokens[: num_kept[-1] + 1])
        self.hybrid.observe(torch.zeros(len(said), k + 1, 1), torch.tensor(num_kept))
        return drafted


LONG_MATCH = [*range(10, 20), 5, *range(10, 16)]
NO_MATCH = [30, 31, 32]
HEAD_ROW = [7, 8, 9, 6]


def test_rows_take_the_draft_that_promises_more():
    script = Scripted([LONG_MATCH, NO_MATCH], HEAD_ROW)
    for new in range(33, 38):
        assert script.hybrid.grades(script.sequences, 4) == [3, 0]
        assert script.round(4, [[16, 17, 18, 19, 5], [new]]) == [[16, 17, 18, 19], HEAD_ROW]
        script.sequences[0][:] = LONG_MATCH
        script.hybrid.start(0, LONG_MATCH, torch.zeros(len(LONG_MATCH) - 1, 1))


def test_a_suffix_that_proves_wrong_gives_way_to_the_head():
    script = Scripted([LONG_MATCH], HEAD_ROW)
    drafted = []
    for i in range(100, 200, 10):
        # Twice in a row, so that the second time is a match; then something else follows.
        block = list(range(i, i + 8))
        script.sequences[0] += [*block, 5, *block]
        drafted += script.round(4, [HEAD_ROW])
    assert drafted[0] == [5, *range(100, 103)]
    assert drafted[-1] == HEAD_ROW


def test_the_head_rests_while_all_rows_have_a_suffix():
    script = Scripted([LONG_MATCH, LONG_MATCH], HEAD_ROW)
    script.round(4, [[16], [16]])
    num_asked = len(script.num_asked)  # a row each, since a sequence started
    assert num_asked == 2
    repeated = [*range(17, 20), 5, *range(10, 20), 5, *range(10, 20), 5]
    for at in (0, 5, 10):
        new = repeated[at : at + 5]
        assert script.round(4, [new, new]) == [new[:4]] * 2
    assert len(script.num_asked) == num_asked


def test_a_suffix_is_a_point_mass_beside_a_head_that_samples():
    probs = torch.tensor([0.0] * 38 + [0.5, 0.5])
    script = Scripted([LONG_MATCH, NO_MATCH], [], probs)
    draft = script.propose(8, temperature=1.0)
    assert draft.lengths.tolist() == [6, 8]
    assert draft.tokens[0, :6].tolist() == [16, 17, 18, 19, 5, 10]
    one_hot = torch.nn.functional.one_hot(draft.tokens[0, :6], len(probs)).float()
    assert torch.equal(draft.probs[0, :6], one_hot)
    assert torch.equal(draft.probs[1], probs.expand(8, -1))


def test_a_hybrid_grades_its_drafts_and_a_head_does_not():
    head = StatelessProposer(None)
    assert isinstance(HybridProposer(suffix(), head), GradedProposer)
    assert isinstance(suffix(), GradedProposer)
    assert not isinstance(LateHead(head), GradedProposer)
