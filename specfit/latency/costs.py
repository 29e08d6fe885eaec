"""What a pass costs, by the number of tokens in it, and what a drafted token costs."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import torch

from specfit_serve.llama import LlamaTarget
from specfit_serve.protocols import DecodeTarget, Proposer


@dataclass(frozen=True)
class PassCosts:
    """Seconds of passes of one sequence, the head and its largest token included."""

    seconds: dict[int, float]  # by the number of tokens; medians
    context: int  # columns before the first of them
    num_bytes: int  # that a pass over one token reads: weights, keys and values

    def table(self, widest: int) -> list[float]:
        """Of 1, 2, ... `widest` tokens; between those that were timed, a straight line."""
        known = sorted(self.seconds)
        return [self._at(width, known) for width in range(1, widest + 1)]

    def _at(self, width: int, known: Sequence[int]) -> float:
        below = max(w for w in known if w <= width)
        above = min((w for w in known if w >= width), default=below)
        if above == below:
            return self.seconds[below]
        share = (width - below) / (above - below)
        return (1 - share) * self.seconds[below] + share * self.seconds[above]


def pass_costs(
    target: DecodeTarget, widths: Sequence[int], context: int, repetitions: int
) -> PassCosts:
    """Times passes after `context` tokens, all widths in turn before any is repeated.

    Args:
        target: with a free first slot.
        widths: tokens a pass, 1 among them.
        context: columns before them.
        repetitions: of each width.
    """
    generator = torch.Generator().manual_seed(0)
    length = context + max(widths)
    tokens = torch.randint(target.vocab_size, (1, length), generator=generator)
    target.forward(tokens[:, :context], torch.zeros(1, dtype=torch.long), 0, last_only=True)
    start = torch.tensor([context])

    def run(width: int) -> float:
        began = perf_counter()
        target.forward(tokens[:, context : context + width], start, 0).logits.argmax(-1)
        return perf_counter() - began

    times: dict[int, list[float]] = {width: [] for width in widths}
    for repetition in range(repetitions + 1):
        for width, found in times.items():
            taken = run(width)
            if repetition > 0:  # the first warms up
                found.append(taken)
    seconds = {width: median(found) for width, found in times.items()}
    target.release(0)
    return PassCosts(seconds, context, _bytes_read(target, context))


def draft_seconds(
    target: DecodeTarget, proposer: Proposer, num_draft_tokens: int, context: int, repetitions: int
) -> float:
    """Of one drafted token, with what a round's first one takes in shared out among them."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(target.vocab_size, (1, context + 1), generator=generator)
    start = torch.zeros(1, dtype=torch.long)
    features = target.forward(tokens[:, :context], start, 0, last_only=True).features
    sequence = tokens[0].tolist()
    proposer.start(0, sequence, None if features is None else features[0])
    one = None if features is None else features[:, -1:]
    times = []
    for _ in range(repetitions):
        began = perf_counter()
        proposer.propose([sequence], num_draft_tokens, torch.zeros(1), torch.zeros(1, 8))
        times.append(perf_counter() - began)
        proposer.observe(one, torch.zeros(1, dtype=torch.long))
        sequence = [*sequence, sequence[-1]]
    target.release(0)
    return median(times) / num_draft_tokens


def _bytes_read(target: DecodeTarget, context: int) -> int:
    assert isinstance(target, LlamaTarget)
    return target.weights.num_bytes + (context + 1) * target.column_bytes
