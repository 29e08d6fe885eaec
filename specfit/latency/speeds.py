"""Answers timed one at a time: ways of decoding, in turns on the same prompts."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter
from typing import Any

from tqdm import tqdm

from specfit.latency.costs import PassCosts
from specfit_serve.adaptive import AdaptiveDraftLength, Costs
from specfit_serve.decode import DecodeSettings, Request, decode
from specfit_serve.protocols import DecodeTarget, Proposer
from specfit_serve.stats import Round

ALL = "all"  # the components together, as many prompts of each


@dataclass(frozen=True)
class Prompt:
    """What is answered."""

    id: str
    component: str
    tokens: list[int]


@dataclass(frozen=True)
class Answer:
    """How it was answered, and how long the tokens after the first took."""

    tokens: list[int]
    seconds: float
    rounds: list[Round] = field(default_factory=list)
    draft_seconds: float = 0.0  # of these


@dataclass(frozen=True)
class Way:
    """A way of decoding, by what stands in its row."""

    format: str
    proposer: str
    num_draft_tokens: int  # the most, if `adaptive`
    adaptive: bool = False
    plain: "Way | None" = None  # of a way that drafts: the one without

    # Who answers one prompt; made anew for each repetition, so that nobody remembers the answers.
    open: Callable[[], Callable[[Prompt], Answer]] = field(compare=False, default=lambda: _nobody)


@dataclass
class Timed:
    """What one way took for the prompts of one component, by repetition."""

    seconds: list[float]
    num_tokens: list[int]
    answers: list[Answer]  # of the latest repetition

    @property
    def tokens_per_second(self) -> list[float]:
        """Of each repetition."""
        return [n / s for n, s in zip(self.num_tokens, self.seconds, strict=True)]


def looped(
    target: DecodeTarget,
    make: Callable[[], Proposer],
    *,
    num_draft_tokens: int,
    max_new_tokens: int,
    costs: tuple[PassCosts, float] | None,
) -> Callable[[], Callable[[Prompt], Answer]]:
    """Opens our loop; with `costs`, of passes and of a drafted token, it chooses k as it goes."""
    settings = DecodeSettings(
        num_draft_tokens=num_draft_tokens, max_new_tokens=max_new_tokens, batch_size=1
    )

    def opened() -> Callable[[Prompt], Answer]:
        proposer, length = make(), None
        if costs is not None:
            table = {1: costs[0].table(num_draft_tokens + 1)}
            length = AdaptiveDraftLength(Costs(table, costs[1], fixed=False))

        def answer(prompt: Prompt) -> Answer:
            request = Request(prompt.id, prompt.tokens, 0.0)
            began = perf_counter()
            (found,) = decode(target, proposer, [request], settings, draft_length=length)
            seconds = perf_counter() - began - found.prefill_seconds
            return Answer(found.tokens, seconds, found.rounds, found.draft_seconds)

        return answer

    return opened


def time_all(
    ways: Sequence[Way], prompts: Sequence[Prompt], repetitions: int
) -> dict[Way, dict[str, Timed]]:
    """All ways on one prompt before the next, so that what else the machine does meets them alike.

    Seconds are of the tokens after the first: without the prompt.
    """
    components = list(dict.fromkeys(prompt.component for prompt in prompts))
    found = {way: {name: Timed([], [], []) for name in components} for way in ways}
    turns = repetitions * len(prompts) * len(ways)
    with tqdm(total=turns, unit="answer", desc="bench") as bar:
        for _ in range(repetitions):
            opened = {way: way.open() for way in ways}
            for of_way in found.values():
                for timed in of_way.values():
                    timed.seconds.append(0.0)
                    timed.num_tokens.append(0)
                    timed.answers = []
            for prompt in prompts:
                for way in ways:
                    timed, answer = found[way][prompt.component], opened[way](prompt)
                    timed.seconds[-1] += answer.seconds
                    timed.num_tokens[-1] += max(0, len(answer.tokens) - 1)
                    timed.answers.append(answer)
                    bar.update()
    return found


def spread(values: Sequence[float], name: str) -> dict[str, float]:
    """The median of the repetitions, and the least and the largest of them."""
    return {name: median(values), f"{name}_low": min(values), f"{name}_high": max(values)}


def over(way: Timed, other: Timed, name: str) -> dict[str, float]:
    """How many times as fast one way is as another, repetition by repetition."""
    pairs = zip(way.tokens_per_second, other.tokens_per_second, strict=True)
    return spread([a / b for a, b in pairs], name)


def predicted(timed: Timed, costs: PassCosts, widest: int) -> float:
    """How many times as fast as plain decoding its rounds make it.

    Passes take what passes of their width took beforehand, and drafts what these drafts took.
    """
    table = costs.table(widest + 1)
    rounds = [r for answer in timed.answers for r in answer.rounds]
    spent = sum(table[r.num_drafted] for r in rounds)
    spent += sum(answer.draft_seconds for answer in timed.answers)
    return sum(r.num_kept + 1 for r in rounds) * table[0] / spent


def acceptance_length(timed: Timed) -> float:
    """Tokens a round."""
    rounds = [r for answer in timed.answers for r in answer.rounds]
    return sum(r.num_kept + 1 for r in rounds) / len(rounds)


def rows(
    found: Mapping[Way, Mapping[str, Timed]], peers: Mapping[str, Way]
) -> Iterator[dict[str, Any]]:
    """A row a way and component, and one of all together.

    Args:
        found: what `time_all` measured.
        peers: other programs among the ways, by the name that a ratio to them gets.
    """
    for way, by_component in found.items():
        for component in [*by_component, ALL]:
            timed = of_component(by_component, component)
            row: dict[str, Any] = {
                "kind": "decode",
                "format": way.format,
                "proposer": way.proposer,
                "num_draft_tokens": way.num_draft_tokens,
                "adaptive": way.adaptive,
                "component": component,
                "num_prompts": len(timed.answers),
                "num_tokens": timed.num_tokens[-1],
            }
            row |= spread(timed.tokens_per_second, "tokens_per_second")
            row["ms_per_token"] = 1e3 / row["tokens_per_second"]
            if way.plain is not None:
                plain = of_component(found[way.plain], component)
                row["acceptance_length"] = acceptance_length(timed)
                row["outputs_equal_plain"] = all(
                    a.tokens == b.tokens for a, b in zip(timed.answers, plain.answers, strict=True)
                )
                row |= over(timed, plain, "speculative_over_plain")
            elif way not in peers.values():
                for name, peer in peers.items():
                    row |= over(timed, of_component(found[peer], component), f"plain_over_{name}")
            yield row


def of_component(by_component: Mapping[str, Timed], component: str) -> Timed:
    """What a way took for one component, or for all together."""
    if component != ALL:
        return by_component[component]
    parts = by_component.values()
    return Timed(
        [sum(s) for s in zip(*(p.seconds for p in parts), strict=True)],
        [sum(n) for n in zip(*(p.num_tokens for p in parts), strict=True)],
        [answer for p in parts for answer in p.answers],
    )


def _nobody(prompt: Prompt) -> Answer:
    raise AssertionError(f"nobody answers {prompt.id}")
