"""What the decode loop asks of a target and of a proposer.

One idea carries the package: *a token's position is its column in the KV cache*. The cache has
`num_slots` slots, each holds one sequence, and a pass over some slots writes keys and values at
columns start..start+seq-1 of each and attends to the columns up to and including a token's own.
Taking back rejected tokens is then nothing but passing a smaller start next time: the stale
columns are written again before any token can see them. For the same reason rows may be padded on
the right with any token.

Active sequences always occupy slots 0..n-1, so a pass is over a slice of the cache, never a gather.
A sequence of L tokens has its first L-1 in the cache: the newest token goes in with the next pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True)
class TargetOutput:
    """What one pass returns."""

    logits: Float[Tensor, "rows seq vocab"]  # of the last position alone under `last_only`: seq = 1
    features: Float[Tensor, "rows tokens width"] | None  # of every token that went in


@dataclass(frozen=True)
class Draft:
    """What is proposed in one round. Entries at or past a row's length are ignored."""

    tokens: Int[Tensor, "rows k"]  # ids of the target's vocabulary
    lengths: Int[Tensor, " rows"]  # 0..k
    # The distribution over the target's vocabulary that each token was sampled from, 0 outside the
    # draft vocabulary. None: a point mass on each token, as greedy heads and n-grams have it.
    probs: Float[Tensor, "rows k vocab"] | None = None


@runtime_checkable
class DecodeTarget(Protocol):
    """A frozen model with a KV cache of slots and columns.

    Attributes are read-only here; an adapter may hold them as plain attributes.
    """

    @property
    def vocab_size(self) -> int:
        """Columns of the logits."""

    @property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end an answer."""

    @property
    def num_slots(self) -> int:
        """Sequences that can be in flight at once."""

    @property
    def max_length(self) -> int:
        """Columns of a slot; no pass reaches past them.

        `decode` keeps `num_draft_tokens` of them free for the padding of short drafts: a sequence
        has at most max_length - num_draft_tokens tokens, the prompt included.
        """

    @property
    def num_columns(self) -> int:
        """Columns of all slots together; a sequence that is alone may have them all."""

    @property
    def device(self) -> torch.device:
        """Where tokens go in and logits come out."""

    def forward(
        self,
        tokens: Int[Tensor, "rows seq"],
        starts: Int[Tensor, " rows"],
        first_slot: int,
        last_only: bool = False,
    ) -> TargetOutput:
        """Runs tokens[r] at columns starts[r].. of slot first_slot + r, for every row r.

        Everything before starts[r] is already in that slot. `tokens` and `starts` are int64 on
        `device`. With `last_only`, logits are computed for the last position alone (a prefill needs
        no more); features are of all positions either way.
        """

    def reserve(self, slot: int, length: int) -> bool:
        """Sees to it that `slot` has `length` columns; False, and nothing happens, without room."""

    def release(self, slot: int) -> None:
        """The sequence of `slot` has ended; its columns may serve others."""

    def move(self, source: int, to: int) -> None:
        """Copies slot `source` over `to`, another; `source` is not read before it is refilled."""


@runtime_checkable
class Proposer(Protocol):
    """Whatever drafts. Its state, if any, is per slot and follows the target's slots."""

    @property
    def name(self) -> str:
        """As it stands in acceptance.json."""

    def start(
        self, slot: int, tokens: Sequence[int], features: Float[Tensor, "prompt width"] | None
    ) -> None:
        """A sequence enters `slot`, after its prefill.

        `tokens` is the prompt and the first own token, or more, if the sequence was put back and
        enters again. `features` are of all tokens but the last.
        """

    def propose(
        self,
        sequences: Sequence[Sequence[int]],
        num_draft_tokens: int,
        temperatures: Float[Tensor, " rows"],
        uniforms: Float[Tensor, "rows k"],
    ) -> Draft:
        """Drafts for slots 0..n-1, whose tokens so far are `sequences`, the own token last.

        At most `num_draft_tokens` a row, of which `decode` may cut some; with an adaptive draft
        length it is another number each round, 0 among them. `temperatures` are those
        at which the target is sampled, 0 where it is greedy. Whoever samples takes
        `sample(probs, uniforms[:, i])` at position i (`verify.sample`) and nothing else random: a
        request's draws then depend on its own seed only, not on who shares the batch.
        Both tensors are on the target's device; the draft may be on any.
        """

    def observe(
        self, features: Float[Tensor, "rows seq width"] | None, num_kept: Int[Tensor, " rows"]
    ) -> None:
        """What a verification showed, for slots 0..n-1 as in the `propose` before it.

        `features` are of the tokens that went in, the own token and the draft (seq may be shorter
        than num_draft_tokens + 1, when no row drafted that many); in row r the first
        num_kept[r] + 1 are valid, the rest belongs to rejected tokens and padding. The next
        `sequences[r]` is longer by num_kept[r] + 1, or the slot has been started or moved anew.
        """

    def move(self, source: int, to: int) -> None:
        """The sequence of slot `source` continues in slot `to`."""


@runtime_checkable
class GradedProposer(Proposer, Protocol):
    """A proposer that knows what a draft is worth before it makes it."""

    def grades(self, sequences: Sequence[Sequence[int]], num_draft_tokens: int) -> Sequence[int]:
        """Of each row's draft, called before `propose` with the most it may be asked for.

        Drafts of one grade are alike, so acceptance is measured by grade. Those of grade 0 may cost
        time for each token, others are free.
        """


@runtime_checkable
class DraftLength(Protocol):
    """Whatever decides, round by round, how many tokens are drafted."""

    def choose(self, ids: Sequence[str], grades: Sequence[int], limit: int) -> int:
        """The number for the next round, 0..limit, of the requests `ids`.

        `grades` are those of a `GradedProposer`; drafts of others are of grade 0.
        """

    def record(
        self,
        *,
        num_asked: Sequence[int],
        num_drafted: Sequence[int],
        num_kept: Sequence[int],
        draft_seconds: float,
        verify_seconds: float,
    ) -> None:
        """What became of the round that `choose` was last called for, row by row.

        A row that is close to its limit is asked for fewer tokens than chosen, and a proposer may
        draft fewer than it is asked for. The pass was over max(num_drafted) + 1 tokens a row.
        """
