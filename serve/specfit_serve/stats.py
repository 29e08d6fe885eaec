"""Counts of draft-and-verify rounds, from which every acceptance figure is derived."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Round:
    """One draft and one verification; it emits num_kept + 1 tokens.

    Where an answer ends inside the draft (at its EOS), the last token counts as the own token and
    what was drafted from there on is not counted: it was never in question.
    """

    start: int  # index in the answer of the first token that the round emits
    num_drafted: int
    num_kept: int


@dataclass(frozen=True)
class DecodeStats:
    """What became of the drafts, by position; sums of rounds, so that stats can be added."""

    rounds_by_accepted: tuple[int, ...]  # [a]: rounds that kept a drafted tokens, a = 0..k
    tested_by_position: tuple[int, ...]  # [i]: rounds that drafted position i and kept all before
    kept_by_position: tuple[int, ...]  # [i]: rounds that kept position i

    @classmethod
    def from_rounds(cls, rounds: Sequence[Round], num_draft_tokens: int) -> "DecodeStats":
        """Counts `rounds`, of at most `num_draft_tokens` drafted tokens each."""
        rounds_by_accepted = [0] * (num_draft_tokens + 1)
        tested = [0] * num_draft_tokens
        kept = [0] * num_draft_tokens
        for r in rounds:
            rounds_by_accepted[r.num_kept] += 1
            for i in range(r.num_kept):
                kept[i] += 1
            for i in range(min(r.num_kept + 1, r.num_drafted)):
                tested[i] += 1
        return cls(tuple(rounds_by_accepted), tuple(tested), tuple(kept))

    def __add__(self, other: "DecodeStats") -> "DecodeStats":
        """The stats of both together.

        Raises:
            ValueError: they are of different numbers of draft tokens.
        """
        if len(self.kept_by_position) != len(other.kept_by_position):
            raise ValueError(
                "stats that are added must have one number of draft tokens, got "
                f"{len(self.kept_by_position)} and {len(other.kept_by_position)}"
            )
        return DecodeStats(
            _sum(self.rounds_by_accepted, other.rounds_by_accepted),
            _sum(self.tested_by_position, other.tested_by_position),
            _sum(self.kept_by_position, other.kept_by_position),
        )

    @property
    def num_rounds(self) -> int:
        """Target passes after the prefill."""
        return sum(self.rounds_by_accepted)

    @property
    def num_tokens(self) -> int:
        """Tokens that the rounds emitted; the answer's first token comes from the prefill."""
        return sum((a + 1) * n for a, n in enumerate(self.rounds_by_accepted))

    @property
    def acceptance_length(self) -> float:
        """Tokens emitted per round, the target's own included: 1..k+1; nan without rounds."""
        return self.num_tokens / self.num_rounds if self.num_rounds else float("nan")

    @property
    def acceptance_by_position(self) -> tuple[float, ...]:
        """Share of all rounds that kept position i; acceptance_length is 1 + their sum."""
        if self.num_rounds == 0:
            return (float("nan"),) * len(self.kept_by_position)
        return tuple(kept / self.num_rounds for kept in self.kept_by_position)

    @property
    def conditional_acceptance(self) -> tuple[float | None, ...]:
        """Share kept of the drafts at position i whose predecessors were kept; None: none such."""
        pairs = zip(self.kept_by_position, self.tested_by_position, strict=True)
        return tuple(kept / tested if tested else None for kept, tested in pairs)


def _sum(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(x + y for x, y in zip(a, b, strict=True))
