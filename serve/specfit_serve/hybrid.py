"""Two proposers in one: what was said before where that is likely to go on, a head elsewhere."""

from collections.abc import Sequence
from itertools import takewhile

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from specfit_serve.adaptive import Survival
from specfit_serve.protocols import Draft, Proposer
from specfit_serve.suffix import Lookup, SuffixProposer

MEMORY = 100.0  # rounds that the measured acceptance of either remembers
# That a suffix's token is right, by grade: of SmolLM2-135M's answers to coding and tool prompts.
FIRST_GUESSES = (0.0, 0.3, 0.6, 0.75, 0.85, 0.95)
MAX_MISSED = 64  # rounds that a head may sit out, one after another


class LateHead:
    """A proposer with states of its own, that may sit rounds out.

    Such a proposer takes in what a verification showed when it next drafts, so every `observe` must
    be followed by a `propose`. In a round of 0 draft tokens it is not called; what it misses is
    kept, and shown to it as one verification before it drafts again. It takes part in a sequence's
    first round even if nothing is asked for, and again after MAX_MISSED rounds.
    """

    def __init__(self, head: Proposer) -> None:
        self._head = head
        self._unseen: dict[int, list[Tensor]] = {}  # by slot: features of kept tokens
        self._must_draft = False

    @property
    def name(self) -> str:
        """The head's."""
        return self._head.name

    def start(
        self, slot: int, tokens: Sequence[int], features: Float[Tensor, "prompt width"] | None
    ) -> None:
        """See `Proposer.start`."""
        self._catch_up()  # first, since it is about what was in `slot` before
        self._head.start(slot, tokens, features)
        self._must_draft = True

    def propose(
        self,
        sequences: Sequence[Sequence[int]],
        num_draft_tokens: int,
        temperatures: Float[Tensor, " rows"],
        uniforms: Float[Tensor, "rows k"],
    ) -> Draft:
        """See `Proposer.propose`."""
        rows = len(sequences)
        if num_draft_tokens > 0 or self._must_draft:
            self._catch_up()
            self._must_draft = False
            if num_draft_tokens > 0:
                return self._head.propose(sequences, num_draft_tokens, temperatures, uniforms)
            self._head.propose(sequences, 1, torch.zeros(rows), torch.zeros(rows, 1))
        return Draft(torch.zeros(rows, 0, dtype=torch.long), torch.zeros(rows, dtype=torch.long))

    def observe(
        self, features: Float[Tensor, "rows seq width"] | None, num_kept: Int[Tensor, " rows"]
    ) -> None:
        """See `Proposer.observe`."""
        assert features is not None
        for slot, kept in enumerate(num_kept.tolist()):
            # A copy: a target may write its next features where these are.
            self._unseen.setdefault(slot, []).append(features[slot, : kept + 1].clone())
            if len(self._unseen[slot]) > MAX_MISSED:
                self._must_draft = True

    def move(self, source: int, to: int) -> None:
        """See `Proposer.move`."""
        self._catch_up()
        self._head.move(source, to)

    def _catch_up(self) -> None:
        """To be followed by a draft, as every `observe`."""
        if self._unseen:
            features = [torch.cat(self._unseen[slot]) for slot in sorted(self._unseen)]
            num_kept = torch.tensor([len(f) - 1 for f in features], device=features[0].device)
            self._head.observe(pad_sequence(features, batch_first=True), num_kept)
            self._unseen = {}
            self._must_draft = True


class HybridProposer:
    """Drafts of a suffix where they promise more kept tokens than the head's, row by row.

    Both promises are measured. The head's: how many of its tokens were kept, by position. The
    suffix's, by grade: how many of its tokens turned out right, whether it drafted or not, since
    the tokens that came show it either way. A round in which no row takes the head's draft does
    without the head. On what other requests can change, and on repeats, which need another seed or
    a new proposer, see `SuffixProposer`.
    """

    name = "hybrid"

    def __init__(self, suffix: SuffixProposer, head: Proposer) -> None:
        self._suffix = suffix
        self._head = LateHead(head)
        self._head_kept = Survival(MEMORY)
        self._suffix_kept = [Survival(MEMORY, first_guess=guess) for guess in FIRST_GUESSES]
        self._looked_up: dict[int, tuple[int, Lookup]] = {}  # by slot, and at which length
        self._num_head_tokens = 0  # asked of the head in this round
        self._chosen: list[Lookup | None] | None = None  # by row; None: the head drafts

    def start(
        self, slot: int, tokens: Sequence[int], features: Float[Tensor, "prompt width"] | None
    ) -> None:
        """See `Proposer.start`."""
        self._suffix.start(slot, tokens, features)
        self._head.start(slot, tokens, features)
        self._looked_up.pop(slot, None)

    def grades(self, sequences: Sequence[Sequence[int]], num_draft_tokens: int) -> list[int]:
        """See `GradedProposer.grades`: 0 for rows that the head drafts for."""
        self._chosen = self._choose(sequences, num_draft_tokens)
        return [0 if lookup is None else lookup.grade for lookup in self._chosen]

    def propose(
        self,
        sequences: Sequence[Sequence[int]],
        num_draft_tokens: int,
        temperatures: Float[Tensor, " rows"],
        uniforms: Float[Tensor, "rows k"],
    ) -> Draft:
        """Suffixes are point masses, also beside a head that samples."""
        if self._chosen is None:
            self._chosen = self._choose(sequences, num_draft_tokens)
        self._num_head_tokens = num_draft_tokens if None in self._chosen else 0
        draft = self._head.propose(sequences, self._num_head_tokens, temperatures, uniforms)
        missing = num_draft_tokens - draft.tokens.shape[1]
        tokens, lengths = functional.pad(draft.tokens, (0, missing)), draft.lengths.clone()
        probs = None if draft.probs is None else functional.pad(draft.probs, (0, 0, 0, missing))
        for row, lookup in enumerate(self._chosen):
            if lookup is not None:
                found = tokens.new_tensor(lookup.tokens[:num_draft_tokens])
                lengths[row] = len(found)
                tokens[row, : len(found)] = found
                if probs is not None:
                    probs[row] = 0
                    probs[row, range(len(found)), found] = 1
        return Draft(tokens, lengths, probs)

    def observe(
        self, features: Float[Tensor, "rows seq width"] | None, num_kept: Int[Tensor, " rows"]
    ) -> None:
        """See `Proposer.observe`."""
        self._head.observe(features, num_kept)
        assert features is not None
        assert self._chosen is not None
        # Close to the end of an answer, fewer tokens than were drafted went in.
        num_asked = min(self._num_head_tokens, features.shape[1] - 1)
        for lookup, kept in zip(self._chosen, num_kept.tolist(), strict=True):
            if lookup is None:
                self._head_kept.record(num_asked, kept)
        self._chosen = None

    def move(self, source: int, to: int) -> None:
        """See `Proposer.move`."""
        self._suffix.move(source, to)
        self._head.move(source, to)
        self._looked_up.pop(to, None)
        if source in self._looked_up:
            self._looked_up[to] = self._looked_up.pop(source)

    def _choose(
        self, sequences: Sequence[Sequence[int]], num_draft_tokens: int
    ) -> list[Lookup | None]:
        self._compare(sequences)
        promised_by_head = sum(self._head_kept.curve(num_draft_tokens))
        chosen: list[Lookup | None] = []
        for slot, sequence in enumerate(sequences):
            lookup = self._suffix.look_up(slot, sequence)
            self._looked_up[slot] = len(sequence), lookup
            num_tokens = min(len(lookup.tokens), num_draft_tokens)
            promised = sum(self._suffix_kept[lookup.grade].curve(num_tokens))
            chosen.append(lookup if promised > promised_by_head else None)
        return chosen

    def _compare(self, sequences: Sequence[Sequence[int]]) -> None:
        """Takes in how many of the tokens looked up last are those that came."""
        for slot, sequence in enumerate(sequences):
            if slot in self._looked_up:
                start, lookup = self._looked_up[slot]
                num_asked = min(len(lookup.tokens), len(sequence) - start)
                pairs = zip(lookup.tokens, sequence[start:], strict=False)
                num_true = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
                self._suffix_kept[lookup.grade].record(num_asked, num_true)
