"""A deterministic target for the decode loop, proposers right and wrong, and statistics."""

import itertools
import math

import torch

from specfit_serve.decode import Request
from specfit_serve.ngram import NgramProposer, NoProposer
from specfit_serve.protocols import Draft, TargetOutput
from specfit_serve.verify import sample, target_distribution

EOS = 0
MODULUS = 7919


class HashTarget:
    """Logits and features are of a hash of everything in the slot up to the token's own column."""

    device = torch.device("cpu")

    def __init__(
        self,
        vocab_size=9,
        num_slots=5,
        max_length=48,
        eos_ids=(EOS,),
        peak=2.0,
        num_columns=10**6,  # of all slots together
    ):
        self.vocab_size = vocab_size
        self.num_slots = num_slots
        self.max_length = max_length
        self.eos_ids = frozenset(eos_ids)
        self.peak = peak  # scale of the logits
        self.cache = torch.full((num_slots, max_length), -1)
        self.num_columns = num_columns
        self.held = {}

    def hashes(self, tokens):
        """Of every prefix of `tokens`, `rows seq`."""
        weights = torch.arange(1, tokens.shape[1] + 1) ** 2 * 31 + 7
        return ((tokens + 1) * weights).cumsum(1) % MODULUS

    def logits(self, hashes):
        return self.peak * torch.sin(hashes[..., None] * (torch.arange(self.vocab_size) + 1.7))

    def forward(self, tokens, starts, first_slot, last_only=False):
        rows, seq = tokens.shape
        columns = starts[:, None] + torch.arange(seq)
        assert int(columns.max()) < self.max_length
        for row in range(rows):
            assert int(columns[row].max()) < self.held[first_slot + row]
        slots = first_slot + torch.arange(rows)
        self.cache[slots[:, None], columns] = tokens
        hashes = self.hashes(self.cache[slots]).gather(1, columns)
        logits = self.logits(hashes)
        return TargetOutput(logits[:, -1:] if last_only else logits, hashes[..., None].float())

    def reserve(self, slot, length):
        held = self.held | {slot: max(length, self.held.get(slot, 0))}
        if length > self.max_length or sum(held.values()) > self.num_columns:
            return False
        self.held = held
        return True

    def release(self, slot):
        self.held.pop(slot, None)

    def move(self, source, to):
        assert source != to
        self.cache[to] = self.cache[source]
        self.cache[source] = -1
        self.held[to] = self.held.pop(source, 0)

    def next_logits(self, tokens):
        return self.logits(self.hashes(torch.tensor([tokens])))[0, -1]

    def answer(self, prompt, max_new_tokens):
        """The greedy answer, from whole sequences and without a cache."""
        tokens = list(prompt)
        while len(tokens) < len(prompt) + max_new_tokens:
            tokens.append(int(self.next_logits(tokens).argmax()))
            if tokens[-1] in self.eos_ids:
                break
        return tokens[len(prompt) :]


class StatelessProposer(NoProposer):
    """`draft_row(tokens, num_draft_tokens)` gives a row's tokens."""

    name = "test"

    def __init__(self, draft_row):
        self.draft_row = draft_row

    def propose(self, sequences, num_draft_tokens, *_):
        rows = [self.draft_row(s, num_draft_tokens)[:num_draft_tokens] for s in sequences]
        tokens = torch.full((len(rows), num_draft_tokens), 10**6)  # what is ignored may be anything
        for out, row in zip(tokens, rows, strict=True):
            out[: len(row)] = torch.tensor(row, dtype=torch.long)
        return Draft(tokens, torch.tensor([len(row) for row in rows]))


class WitnessProposer(StatelessProposer):
    """Holds what a slot was told, as a head would, and compares it with the sequences."""

    def __init__(self, target, draft_row):
        super().__init__(draft_row)
        self.target = target
        self.slots = {}
        self.num_compared = 0

    def start(self, slot, tokens, features):
        assert len(features) == len(tokens) - 1
        self.slots[slot] = features

    def propose(self, sequences, num_draft_tokens, temperatures, uniforms):
        for slot, tokens in enumerate(sequences):
            expected = self.target.hashes(torch.tensor([tokens[:-1]]))[0, :, None].float()
            assert torch.equal(self.slots[slot], expected)
            self.num_compared += 1
        return super().propose(sequences, num_draft_tokens, temperatures, uniforms)

    def observe(self, features, num_kept):
        for slot, kept in enumerate(num_kept.tolist()):
            self.slots[slot] = torch.cat([self.slots[slot], features[slot, : kept + 1]])

    def move(self, source, to):
        self.slots[to] = self.slots.pop(source)


class SamplingProposer(NoProposer):
    """Samples every token from a distribution of its own, which is not the target's."""

    def __init__(self, probs):
        self.probs = probs

    def propose(self, sequences, num_draft_tokens, _, uniforms):
        rows = len(sequences)
        probs = self.probs.expand(rows, num_draft_tokens, -1)
        tokens = torch.zeros(rows, num_draft_tokens, dtype=torch.long)
        for i in range(num_draft_tokens):
            tokens[:, i] = sample(probs[:, i], uniforms[:, i])
        return Draft(tokens, torch.full((rows,), num_draft_tokens), probs)


def proposer(kind, target):
    def right(tokens, k):
        return target.answer(tokens, k)

    def wrong(tokens, k):
        return [(t + 1) % target.vocab_size for t in right(tokens, k)]

    def right_until(tokens, k):
        row = right(tokens, k)
        at = sum(tokens) % (k + 1)
        return [t if i < at else (t + 1) % target.vocab_size for i, t in enumerate(row)]

    rng = torch.Generator().manual_seed(0)

    def random(_, k):
        length = int(torch.randint(k + 1, (), generator=rng))
        return torch.randint(target.vocab_size, (length,), generator=rng).tolist()

    match kind:
        case "right":
            return StatelessProposer(right)
        case "right_until":
            return StatelessProposer(right_until)
        case "wrong":
            return StatelessProposer(wrong)
        case "eos":
            return StatelessProposer(lambda _, k: [EOS] * k)
        case "random":
            return StatelessProposer(random)
        case "ngram":
            return NgramProposer(1, 3)
    return NoProposer()


def ragged_requests(num, temperature=0.0, vocab_size=9):
    rng = torch.Generator().manual_seed(1)
    return [
        Request(
            id=f"r{i}",
            prompt=torch.randint(1, vocab_size, (1 + 5 * i % 11,), generator=rng).tolist(),
            temperature=temperature,
        )
        for i in range(num)
    ]


def chi_square_p_value(counts, expected):
    """Outcomes expected fewer than 5 times are counted as one, as the test demands."""
    rare = {o for o, e in expected.items() if e < 5}
    cells = [(counts[o], e) for o, e in expected.items() if o not in rare]
    cells.append((sum(counts[o] for o in rare), sum(expected[o] for o in rare)))
    statistic = sum((n - e) ** 2 / e for n, e in cells if e > 0)
    degrees = sum(e > 0 for _, e in cells) - 1
    return float(torch.special.gammaincc(torch.tensor(degrees / 2), torch.tensor(statistic / 2)))


def exact_distribution(target, prompt, length, temperature, top_p):
    """The probability of every answer of `length` tokens."""
    probs = {}
    for outcome in itertools.product(range(target.vocab_size), repeat=length):
        factors = [
            target_distribution(
                target.next_logits([*prompt, *outcome[:i]])[None, None],
                torch.tensor([temperature]),
                top_p,
            )[0, 0, outcome[i]]
            for i in range(length)
        ]
        probs[outcome] = math.prod(map(float, factors))
    return probs


def drafter_over_three(kind):
    """For a vocabulary of three: drafts nothing, one certain token, or a sample."""
    match kind:
        case "none":
            return NoProposer()
        case "point_mass":
            return StatelessProposer(lambda s, k: [(s[-1] + 1) % 3] * (len(s) % (k + 1)))
        case "distribution":
            return SamplingProposer(torch.tensor([0.1, 0.0, 0.9]))
