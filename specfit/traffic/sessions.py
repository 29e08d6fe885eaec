"""Sessions put together from conversations, so that lengths and turns are as a profile wants."""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from specfit.traffic.config import ComponentConfig, ProfileConfig, Quantiles
from specfit.traffic.draw import scaled
from specfit.traffic.matching import (
    distance,
    nearest,
    quantiles_of,
    quantiles_wanted,
    wanted_lengths,
)
from specfit_data.conversations import Conversation
from specfit_data.sessions import Session, compose, session_of

SPARE = 4  # conversations that are looked at for each that is taken


@dataclass(frozen=True)
class Candidate:
    """A conversation that could be taken."""

    conversation: Conversation
    num_tokens: int  # of the prompt of its first request


@dataclass(frozen=True)
class Wanted:
    """What the sessions of one component and split should be like."""

    prompts: Quantiles | None
    new: Quantiles | None
    outputs: Quantiles | None
    turns: list[int]  # of each session
    whole: bool  # conversations are taken as they are: one request, with the history it has
    prefix_tokens: int  # that all sessions begin with

    @classmethod
    def of(
        cls, component: ComponentConfig, profile: ProfileConfig, num: int, seed: int
    ) -> "Wanted":
        """Of `num` sessions; turns lie as the lognormal does, in an order drawn by `seed`."""
        turns = [1] * num
        if component.turns is not None:
            most = math.inf if profile.max_turns is None else profile.max_turns
            turns = [int(min(max(1, round(t)), most)) for t in wanted_lengths(component.turns, num)]
            random.Random(f"{seed}/{component.name}").shuffle(turns)
        return cls(
            scaled(component.prompt_tokens, profile.scale),
            scaled(component.new_tokens_per_turn or component.prompt_tokens, profile.scale),
            component.output_tokens,  # an answer is as long as it is, whatever it answers
            turns,
            component.turns is None,
            prefix_of(component, profile),
        )

    @property
    def num_candidates(self) -> int:
        """Conversations to look at: no more than are taken where no length is asked for."""
        spare = 1 if self.prompts is None else SPARE
        return spare * sum(self.turns)


def put_together(wanted: Wanted, candidates: Sequence[Candidate]) -> list[Session]:
    """At most one session for each of `wanted.turns`; a conversation is in one of them.

    First requests are taken by the length of their prompts. Turns are the conversation's own, and
    then other conversations of the component. Where these run out, later sessions have fewer turns.
    """
    num = min(len(wanted.turns), len(candidates))
    firsts = list(range(num))
    if wanted.prompts is not None:
        lengths = [c.num_tokens for c in candidates]
        firsts = nearest(lengths, wanted_lengths(wanted.prompts, num))
        firsts.sort()  # as they were drawn: lengths and turns are then independent
    taken = [candidates[i].conversation for i in firsts]
    if wanted.whole:
        return [Session(conversation) for conversation in taken]
    begun = [session_of(conversation) for conversation in taken]
    left = [c for i, c in enumerate(candidates) if i not in set(firsts)]
    missing = [
        max(0, turns - 1 - len(session.follow_ups))
        for session, turns in zip(begun, wanted.turns, strict=False)
    ]
    others = _others(wanted, left, sum(missing))
    sessions = []
    for session, turns, number in zip(begun, wanted.turns, missing, strict=False):
        own = session.shortened(turns)
        more = [next(others, None) for _ in range(number)]
        sessions.append(compose(own, [c.conversation for c in more if c is not None]))
    return sessions


def _others(wanted: Wanted, left: Sequence[Candidate], num: int) -> Iterator[Candidate]:
    """Conversations to go on with, in an order that does not follow their lengths."""
    num = min(num, len(left))
    if wanted.new is None or num == 0:
        return iter(left[:num])
    chosen = nearest([c.num_tokens for c in left], wanted_lengths(wanted.new, num))
    return iter([left[i] for i in sorted(chosen)])


def output_limits(wanted: Wanted, num_turns: Sequence[int], seed: int) -> list[list[int] | None]:
    """The most tokens of each answer of each session; None where the profile does not say."""
    if wanted.outputs is None:
        return [None] * len(num_turns)
    lengths = [max(1, round(x)) for x in wanted_lengths(wanted.outputs, sum(num_turns))]
    random.Random(f"{seed}/outputs").shuffle(lengths)
    drawn = iter(lengths)
    return [[next(drawn) for _ in range(num)] for num in num_turns]


@dataclass
class Lengths:
    """What the sessions of one component and split came to have."""

    prompts: list[int] = field(default_factory=list)  # of first requests, after the prefix
    new: list[int] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)
    prefixes: list[int] = field(default_factory=list)

    def rows(self, wanted: Wanted, component: ComponentConfig) -> Iterator[dict[str, Any]]:
        """Beside what the profile wants: quantiles, and how far the two are apart."""
        lengths = {
            "prompt_tokens": (self.prompts, wanted.prompts),
            "new_tokens_per_turn": (self.new, wanted.new if component.turns else None),
        }
        for quantity, (values, quantiles) in lengths.items():
            if values:
                row = {"quantity": quantity, "num": len(values), "got": quantiles_of(values)}
                row["wanted"] = quantiles_wanted(quantiles) if quantiles else None
                yield row | {"distance": distance(values, quantiles) if quantiles else None}
        # Counts, not lognormal: turns are whole and cut, and a prefix has one length.
        counts = {
            "turns": (self.turns, wanted.turns if component.turns else None),
            "shared_prefix_tokens": (self.prefixes, [wanted.prefix_tokens]),
        }
        for quantity, (values, numbers) in counts.items():
            if values:
                row = {"quantity": quantity, "num": len(values), "got": quantiles_of(values)}
                row["wanted"] = quantiles_of(numbers) if numbers else None
                yield row | {"distance": None}


def prefix_of(component: ComponentConfig, profile: ProfileConfig) -> int:
    """Tokens of the prefix that the component's sessions share, on this scale."""
    return round(component.shared_prefix_tokens / profile.scale)
