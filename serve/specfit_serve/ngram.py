"""Proposers that run no model: prompt lookup, and none at all."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specfit_serve.protocols import Draft


class NoProposer:
    """Drafts nothing: every round is one token of the target alone."""

    name = "none"

    def start(
        self, slot: int, tokens: Sequence[int], features: Float[Tensor, "prompt width"] | None
    ) -> None:
        """Nothing to keep."""

    def propose(
        self,
        sequences: Sequence[Sequence[int]],
        num_draft_tokens: int,  # noqa: ARG002
        temperatures: Float[Tensor, " rows"],  # noqa: ARG002
        uniforms: Float[Tensor, "rows k"],  # noqa: ARG002
    ) -> Draft:
        """An empty draft."""
        rows = len(sequences)
        return Draft(torch.empty(rows, 0, dtype=torch.long), torch.zeros(rows, dtype=torch.long))

    def observe(
        self, features: Float[Tensor, "rows seq width"] | None, num_kept: Int[Tensor, " rows"]
    ) -> None:
        """Nothing to learn."""

    def move(self, source: int, to: int) -> None:
        """Nothing to move."""


class NgramIndex:
    """Where each n-gram of one growing sequence was last followed by a token.

    Costs one dictionary entry per n-gram length for each token, and as many lookups a draft.
    """

    def __init__(self, tokens: Sequence[int], min_length: int, max_length: int) -> None:
        self._lengths = range(min_length, max_length + 1)
        self._ends: dict[tuple[int, ...], int] = {}  # n-gram → index after its latest occurrence
        self._num_indexed = 0
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Takes in what `tokens`, the whole sequence, has beyond what was seen before."""
        # An n-gram counts once a token has followed it, so the suffix itself never matches.
        for end in range(max(self._num_indexed, 1), len(tokens)):
            for length in self._lengths:
                if length > end:
                    break
                self._ends[tuple(tokens[end - length : end])] = end
        self._num_indexed = len(tokens)

    def continuation(self, tokens: Sequence[int], num_tokens: int) -> list[int]:
        """Up to `num_tokens` tokens that followed the longest suffix when it last occurred."""
        for length in reversed(self._lengths):
            if length < len(tokens):
                end = self._ends.get(tuple(tokens[len(tokens) - length :]))
                if end is not None:
                    return list(tokens[end : end + num_tokens])
        return []


class NgramProposer:
    """Prompt lookup: what followed the sequence's latest n-grams before, follows again.

    Takes the longest suffix of `max_length` down to `min_length` tokens that occurred before, at
    its most recent occurrence. Source: Saxena 2023, prompt-lookup-decoding.

    Raises:
        ValueError: the lengths are not 1 <= min_length <= max_length.
    """

    name = "ngram"

    def __init__(self, min_length: int, max_length: int) -> None:
        if not 1 <= min_length <= max_length:
            raise ValueError(
                f"n-gram lengths must be 1 <= min <= max, got min {min_length}, max {max_length}"
            )
        self._min_length = min_length
        self._max_length = max_length
        self._indices: dict[int, NgramIndex] = {}

    def start(
        self,
        slot: int,
        tokens: Sequence[int],
        features: Float[Tensor, "prompt width"] | None,  # noqa: ARG002
    ) -> None:
        """Indexes the prompt."""
        self._indices[slot] = NgramIndex(tokens, self._min_length, self._max_length)

    def propose(
        self,
        sequences: Sequence[Sequence[int]],
        num_draft_tokens: int,
        temperatures: Float[Tensor, " rows"],  # noqa: ARG002
        uniforms: Float[Tensor, "rows k"],  # noqa: ARG002
    ) -> Draft:
        """Point masses: a lookup has no distribution."""
        tokens = torch.zeros(len(sequences), num_draft_tokens, dtype=torch.long)
        lengths = torch.zeros(len(sequences), dtype=torch.long)
        for slot, sequence in enumerate(sequences):
            index = self._indices[slot]
            index.extend(sequence)
            found = index.continuation(sequence, num_draft_tokens)
            tokens[slot, : len(found)] = torch.tensor(found, dtype=torch.long)
            lengths[slot] = len(found)
        return Draft(tokens, lengths)

    def observe(
        self, features: Float[Tensor, "rows seq width"] | None, num_kept: Int[Tensor, " rows"]
    ) -> None:
        """Nothing: the next `propose` sees the tokens."""

    def move(self, source: int, to: int) -> None:
        """The index is of the sequence, not of the slot."""
        self._indices[to] = self._indices.pop(source)
