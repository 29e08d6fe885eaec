"""What rounds, drafts and prefills of the decode loop take, measured through the loop itself.

Whatever the loop does beside its passes is in these figures, as it is in those of real load.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter
from typing import Any

import torch

from specfit.engine import DecodeEngine
from specfit_serve.decode import DecodeSettings, Request, decode
from specfit_serve.ngram import NoProposer
from specfit_serve.protocols import DecodeTarget, Draft, Proposer

ProposerFactory = Callable[[int, int], Proposer]  # of the number of slots and their length
Table = Mapping[int, Any]  # of numbers, or of tables of them
NUM_PREFILLS = 6  # lengths of prompts that are timed, each half of the next, and one token


def interpolated(table: Table, at: int | float, *rest: int | float) -> float:
    """Linear between what was measured, in each coordinate, the table's outermost first.

    Raises:
        ValueError: `at` lies beyond what was measured.
    """
    below = max((x for x in table if x <= at), default=None)
    above = min((x for x in table if x >= at), default=None)
    if below is None or above is None:
        raise ValueError(f"costs must be asked from {min(table)} to {max(table)}, got {at}")

    def value(x: int) -> float:
        return interpolated(table[x], *rest) if rest else float(table[x])

    if below == above:
        return value(below)
    share = (at - below) / (above - below)
    return (1 - share) * value(below) + share * value(above)


@dataclass(frozen=True)
class MeasuredCosts:
    """Costs as `simulate` asks for them; the tables are in seconds."""

    steps: Table  # by context, batch and tokens of a sequence
    drafts: Table  # by number of draft tokens and batch
    prefills: Table  # by length of the prompt, from 1

    def step_seconds(self, batch: int, tokens_per_sequence: int, context_tokens: float) -> float:
        """All of a round that is not drafting."""
        return interpolated(self.steps, context_tokens, batch, tokens_per_sequence)

    def draft_seconds(self, batch: int, num_draft_tokens: int) -> float:
        """With what the proposer makes of a verification."""
        return interpolated(self.drafts, num_draft_tokens, batch)

    def prefill_seconds(self, num_tokens: int, context_tokens: int) -> float:
        """After a context: what all of it takes, less what the context and one token do.

        To that comes a prompt of one token: what a pass takes however little is in it.
        """
        whole = interpolated(self.prefills, context_tokens + num_tokens)
        with_one = interpolated(self.prefills, context_tokens + 1)
        return whole - with_one + interpolated(self.prefills, 1)


def measure_costs(
    engine: DecodeEngine,
    proposer_factory: ProposerFactory,
    *,
    longest: int,
    num_draft_tokens: int,
    batch_size: int,
    repetitions: int = 12,
    aux_layers: list[int] | None = None,
) -> MeasuredCosts:
    """Times the loop at batches that double, on random tokens, which take as long as any others.

    Args:
        engine: makes the slots.
        proposer_factory: makes what drafts, of so many slots of such a length.
        longest: tokens of a sequence, its answer included; costs hold from 1 up to there.
        num_draft_tokens: the most of a round.
        batch_size: the largest batch.
        repetitions: of each round and prompt; medians are taken.
        aux_layers: whose states the proposer reads.
    """
    # The first of each width warms up.
    num_rounds = (num_draft_tokens + 1) * (repetitions + 1)
    num_new = num_rounds + 2 * num_draft_tokens + 2
    length = longest + num_new + num_draft_tokens
    timed = _Timed(
        engine.slots(num_slots=batch_size, max_length=length, aux_layers=aux_layers),
        proposer_factory,
        num_draft_tokens,
        length,
    )
    batches = sorted({min(2**i, batch_size) for i in range(batch_size.bit_length() + 1)})
    # Answers grow while they are timed; half of that is taken off the longest context. The
    # shortest is not as short as it says, which is little in any but the smallest of targets.
    short, long = (
        {b: timed.rounds(b, max(1, context), num_rounds, num_new) for b in batches}
        for context in (1, longest - num_rounds // 2)
    )
    drafts = {0: dict.fromkeys(batches, 0.0)}
    if num_draft_tokens:
        middle = max(1, longest // 2)
        drafts[num_draft_tokens] = {b: timed.drafts(b, middle, num_new) for b in batches}
    lengths = {1, *(max(1, longest >> i) for i in range(NUM_PREFILLS))}
    return MeasuredCosts(
        steps={1: short, longest: long},
        drafts=drafts,
        prefills={n: timed.prefill(n, repetitions) for n in sorted(lengths)},
    )


@dataclass(frozen=True)
class _Timed:
    """The loop, run for its time."""

    target: DecodeTarget
    proposer_factory: ProposerFactory
    num_draft_tokens: int
    length: int  # of slots

    def rounds(self, batch: int, context: int, num_rounds: int, num_new: int) -> dict[int, float]:
        """Seconds of a round without its draft, by tokens of a sequence."""
        filler = _Filler(self.target.vocab_size, num_rounds)
        asked = self._requests(batch, context, num_new)
        settings = self._settings(batch)
        list(decode(self.target, filler, asked, settings, on_progress=filler.pass_ended))
        found: dict[int, list[float]] = {}
        for i in range(self.num_draft_tokens + 1, num_rounds):
            size, width = filler.asked[i]
            if size == batch:  # an answer that was guessed ends early
                taken = filler.ended[batch + i] - filler.ended[batch + i - 1]
                found.setdefault(width, []).append(taken)
        return {width: median(seconds) for width, seconds in sorted(found.items())}

    def drafts(self, batch: int, context: int, num_new: int) -> float:
        """Seconds that a round's drafts take, on average."""
        proposer = self.proposer_factory(batch, self.length)
        asked = self._requests(batch, context, num_new)
        answers = list(decode(self.target, proposer, asked, self._settings(batch)))
        return sum(a.draft_seconds for a in answers) / max(len(a.rounds) for a in answers)

    def prefill(self, num_tokens: int, repetitions: int) -> float:
        """Seconds to a first token, that the proposer's start is in."""
        seconds = []
        for _ in range(repetitions + 1):
            proposer = self.proposer_factory(1, self.length)
            asked = self._requests(1, num_tokens, 1)
            began = perf_counter()
            list(decode(self.target, proposer, asked, self._settings(1)))
            seconds.append(perf_counter() - began)
        return median(seconds[1:])

    def _settings(self, batch: int) -> DecodeSettings:
        return DecodeSettings(self.num_draft_tokens, max_new_tokens=self.length, batch_size=batch)

    def _requests(self, num: int, num_tokens: int, num_new: int) -> list[Request]:
        generator = torch.Generator().manual_seed(num_tokens)
        size = (num, num_tokens)
        prompts = torch.randint(self.target.vocab_size, size, generator=generator).tolist()
        return [Request(str(i), p, 0.0, num_new, ignores_eos=True) for i, p in enumerate(prompts)]


@dataclass
class _Filler(NoProposer):
    """Drafts of every length in turn, made of nothing."""

    vocab_size: int
    num_rounds: int  # then no more drafts
    asked: list[tuple[int, int]] = field(default_factory=list)  # batch, tokens of a sequence
    ended: list[float] = field(default_factory=list)  # when passes did, the prefills first

    def propose(
        self, sequences: Sequence[Sequence[int]], num_draft_tokens: int, *_: object
    ) -> Draft:
        length = len(self.asked) % (num_draft_tokens + 1)
        if len(self.asked) >= self.num_rounds:
            length = 0
        self.asked.append((len(sequences), length + 1))
        newest = torch.tensor([s[-1] for s in sequences])
        tokens = (newest[:, None] + torch.arange(1, length + 1)) % self.vocab_size
        return Draft(tokens, torch.full((len(sequences),), length))

    def pass_ended(self, _num_tokens: int) -> None:
        """As `on_progress` of `decode`."""
        self.ended.append(perf_counter())
