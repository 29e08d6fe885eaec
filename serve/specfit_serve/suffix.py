"""Drafts from what was said before, in the request and in earlier answers: no model runs.

One round: take the longest suffix of the request's tokens that occurred before, and continue it
with the token that followed most often, again and again. A long match is likely to go on, so the
draft may be `draft_per_match` tokens for each matched one; a token's share among those that
followed estimates how likely it is kept, and where the product of the shares falls below
`min_probability` the draft ends. Of several places to look, the one whose shares promise the most
kept tokens drafts.

Source: SuffixDecoding, Oliaro et al. 2024, arXiv:2411.04975; its MAX_SPEC is our
`draft_per_match` times the match, its D(N) our product of shares, its SCORE their sum. It keeps
suffix trees of bounded depth; a suffix automaton bounds neither the match nor the draft.
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specfit_serve.protocols import Draft

SEPARATOR = -1  # between answers: matches nothing, ends drafts
WINDOW = 32  # newest tokens that are looked for in earlier answers
MAX_DRAFT = 32
MAX_COUNTED = 64  # suffixes whose counts a token raises, the longest first
MAX_GRADE = 5  # of drafts that promise 16 tokens and more


class SuffixAutomaton:
    """All substrings of a growing sequence, how often each occurs, and what followed it.

    A state is a set of substrings that end at the same places, each a suffix of the next longer
    one; reading a substring from the start, state 0, leads to its state. A state's link is the
    state of its longest suffix that also ends elsewhere, so the links from the newest state lead
    through all suffixes of the sequence, longest first. There are fewer than two states a token,
    and adding one costs amortized constant time (Blumer et al. 1985). A token takes 370 to 390
    bytes (measured: 50000 random ones, and as many of source code).

    Counts are exact but for periodic text: only MAX_COUNTED states, those of the longest suffixes,
    count a token, or a run of one token would cost quadratic time. Beyond that they saturate.
    """

    def __init__(self) -> None:
        self.num_tokens = 0
        self._next: list[dict[int, int]] = [{}]  # token → state; tokens in the order they came up
        self._link = array("i", [-1])
        self._length = array("i", [0])  # of the longest substring of the state
        self._count = array("i", [0])
        self._newest = 0  # the state of the whole sequence

    def extend(self, tokens: Iterable[int]) -> None:
        """Appends `tokens`."""
        following, link, length, count = self._next, self._link, self._length, self._count
        for token in tokens:
            self.num_tokens += 1
            state, new = self._newest, len(following)
            following.append({})
            length.append(length[state] + 1)
            count.append(0)
            link.append(0)
            while state >= 0 and token not in following[state]:
                following[state][token] = new
                state = link[state]
            if state >= 0:
                link[new] = self._state_of_longest(state, token)
            self._newest = state = new
            for _ in range(MAX_COUNTED):
                if state == 0:
                    break
                count[state] += 1
                state = link[state]

    def _state_of_longest(self, state: int, token: int) -> int:
        """The state of the longest substring of `state` with `token` after it, made if need be.

        Longer substrings may lead to the same state until now. They do not end at the newest token,
        so they stay behind in it.
        """
        following, link, length = self._next, self._link, self._length
        shared = following[state][token]
        if length[shared] == length[state] + 1:
            return shared
        split = len(following)
        following.append(following[shared].copy())
        length.append(length[state] + 1)
        self._count.append(self._count[shared])
        link.append(link[shared])
        link[shared] = split
        while state >= 0 and following[state].get(token) == shared:
            following[state][token] = split
            state = link[state]
        return split

    def longest_repeat(self) -> tuple[int, int]:
        """State and length of the longest suffix of the sequence that occurred before."""
        state = max(self._link[self._newest], 0)
        return state, self._length[state]

    def longest_match(self, tokens: Iterable[int]) -> tuple[int, int]:
        """State and length of the longest suffix of `tokens` that is a substring."""
        state = length = 0
        for token in tokens:
            while state > 0 and token not in self._next[state]:
                state = self._link[state]
                length = self._length[state]
            if token in self._next[state]:
                state = self._next[state][token]
                length += 1
        return state, length

    def continuation(
        self, state: int, num_tokens: int, min_probability: float
    ) -> tuple[list[int], float]:
        """Up to `num_tokens` tokens from `state` on, and how many of them their shares promise.

        Each is the one that followed most often; ties go to the one that came up last. Costs a step
        for every different token that followed.
        """
        tokens: list[int] = []
        expected, probability = 0.0, 1.0
        while len(tokens) < num_tokens:
            # Nothing follows what only the end of the sequence says; its suffix was said before.
            while not self._next[state]:
                state = self._link[state]
            total = most = best = 0
            for token, reached in self._next[state].items():
                count = self._count[reached]
                total += count
                if count >= most:
                    most, best, state = count, token, reached
            probability *= most / total
            if best == SEPARATOR or probability < min_probability:
                break
            tokens.append(best)
            expected += probability
        return tokens, expected


class EarlierAnswers:
    """The latest answers of all requests, at most `max_tokens` and mostly more than half of that.

    Nothing can be taken out of an automaton, so there are two. When an answer no longer fits into
    the younger one's half, the older one leaves as a whole and an empty one begins.
    """

    def __init__(self, max_tokens: int) -> None:
        self._half = max_tokens // 2
        self.automata = [SuffixAutomaton(), SuffixAutomaton()]  # the younger one first

    def add(self, answer: Sequence[int]) -> None:
        """Takes in an answer, of a long one the end."""
        tokens = [*answer[max(0, len(answer) + 1 - self._half) :], SEPARATOR]
        if len(tokens) > self._half:
            return
        if self.automata[0].num_tokens + len(tokens) > self._half:
            self.automata = [SuffixAutomaton(), self.automata[0]]
        self.automata[0].extend(tokens)


@dataclass(frozen=True)
class Lookup:
    """What was found for one request."""

    tokens: list[int]
    expected_kept: float  # of `tokens`, by their shares

    @property
    def grade(self) -> int:
        """1 to MAX_GRADE, with each doubling of `expected_kept` one more; 0 for an empty draft."""
        promised = round(self.expected_kept)
        return min(max(promised.bit_length(), 1), MAX_GRADE) if self.tokens else 0


@dataclass
class _Request:
    automaton: SuffixAutomaton  # prompt and answer
    num_prompt_tokens: int
    answer: list[int] = field(default_factory=list)
    lookup: Lookup | None = None  # the latest


class SuffixProposer:
    """SuffixDecoding over the request itself and `max_answer_tokens` tokens of earlier answers.

    With 0 of them a request is kept to itself. Otherwise drafts depend on who came before; the same
    requests in the same order get the same ones. No greedy answer depends on that. A sampled one
    has the target's distribution whatever is drafted, as long as its uniforms are not those that
    what is drafted was drawn with: ids and seed must not recur while one proposer lives, so repeats
    need another seed or a new proposer. Which draw it is depends on the drafts, since they are what
    the uniforms are compared with.

    An answer is remembered when its slot is taken by another sequence, without what its last round
    emitted, which no proposer sees. Its tokens, and those of requests in flight, each take what a
    `SuffixAutomaton` says.

    Raises:
        ValueError: a setting is out of its range.
    """

    name = "suffix"

    def __init__(
        self,
        *,
        max_answer_tokens: int,
        draft_per_match: float = 1.0,
        min_probability: float = 0.1,
    ) -> None:
        if max_answer_tokens < 0:
            raise ValueError(f"max_answer_tokens must be at least 0, got {max_answer_tokens}")
        if draft_per_match <= 0:
            raise ValueError(f"draft_per_match must be positive, got {draft_per_match}")
        if not 0 <= min_probability <= 1:
            raise ValueError(f"min_probability must lie in [0, 1], got {min_probability}")
        self._draft_per_match = draft_per_match
        self._min_probability = min_probability
        self._earlier = EarlierAnswers(max_answer_tokens)
        self._requests: dict[int, _Request] = {}  # by slot

    def start(
        self,
        slot: int,
        tokens: Sequence[int],
        features: Float[Tensor, "prompt width"] | None,  # noqa: ARG002
    ) -> None:
        """Indexes the prompt; remembers the answer that was in `slot`."""
        self._remember(slot)
        self._requests[slot] = _Request(SuffixAutomaton(), len(tokens) - 1)
        self._index(slot, tokens)

    def grades(
        self,
        sequences: Sequence[Sequence[int]],
        num_draft_tokens: int,  # noqa: ARG002
    ) -> list[int]:
        """See `GradedProposer.grades`: the more tokens are promised, the higher."""
        return [self.look_up(slot, sequence).grade for slot, sequence in enumerate(sequences)]

    def propose(
        self,
        sequences: Sequence[Sequence[int]],
        num_draft_tokens: int,
        temperatures: Float[Tensor, " rows"],  # noqa: ARG002
        uniforms: Float[Tensor, "rows k"],  # noqa: ARG002
    ) -> Draft:
        """Point masses: the shares say where to stop, not what to sample."""
        found = [
            self.look_up(slot, sequence).tokens[:num_draft_tokens]
            for slot, sequence in enumerate(sequences)
        ]
        padded = [tokens + [0] * (num_draft_tokens - len(tokens)) for tokens in found]
        lengths = torch.tensor([len(tokens) for tokens in found])
        return Draft(torch.tensor(padded, dtype=torch.long), lengths)

    def look_up(self, slot: int, sequence: Sequence[int]) -> Lookup:
        """At most MAX_DRAFT tokens to follow `sequence`, which is in `slot`."""
        request = self._requests[slot]
        if request.lookup is not None and request.automaton.num_tokens == len(sequence):
            return request.lookup
        self._index(slot, sequence)
        own = request.automaton
        places = [(own, *own.longest_repeat())]
        newest = sequence[-WINDOW:]
        places += [(a, *a.longest_match(newest)) for a in self._earlier.automata]
        best = Lookup([], 0.0)
        for automaton, state, length in places:
            limit = min(MAX_DRAFT, int(self._draft_per_match * length))
            tokens, expected = automaton.continuation(state, limit, self._min_probability)
            if expected > best.expected_kept:
                best = Lookup(tokens, expected)
        request.lookup = best
        return best

    def observe(
        self, features: Float[Tensor, "rows seq width"] | None, num_kept: Int[Tensor, " rows"]
    ) -> None:
        """Nothing: the next `propose` sees the tokens."""

    def move(self, source: int, to: int) -> None:
        """The index is of the sequence, not of the slot; the answer that was in `to` is over."""
        self._remember(to)
        self._requests[to] = self._requests.pop(source)

    def _index(self, slot: int, sequence: Sequence[int]) -> None:
        request = self._requests[slot]
        new = sequence[request.automaton.num_tokens :]
        request.automaton.extend(new)
        start = len(sequence) - len(new)
        request.answer += new[max(0, request.num_prompt_tokens - start) :]

    def _remember(self, slot: int) -> None:
        if slot in self._requests:
            self._earlier.add(self._requests.pop(slot).answer)
