"""Sessions drawn from a profile: what arrives when, and how long it is."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from pathlib import Path
from statistics import NormalDist

import numpy as np

from specfit.traffic.config import (
    ArrivalConfig,
    ArrivalKind,
    ComponentConfig,
    ProfileConfig,
    Quantiles,
)

P90 = NormalDist().inv_cdf(0.9)  # of the standard normal
NO_LENGTH = Quantiles(1.0, 1.0)


@dataclass(frozen=True)
class Turn:
    """One request of a session and its answer."""

    new_tokens: int  # that the request adds to the context: of the first, all but the prefix
    output_tokens: int
    think_seconds: float  # since the answer before; 0 of the first


@dataclass(frozen=True)
class Session:
    """Requests that follow each other, each with all before it as its context."""

    component: str
    start_seconds: float  # of closed arrivals: 0
    prefix_tokens: int  # shared with every session of the component
    turns: tuple[Turn, ...]

    def prompts(self) -> list[int]:
        """Tokens of each request's prompt: the prefix, what came before, and what is new."""
        new = accumulate(turn.new_tokens for turn in self.turns)
        answered = accumulate((turn.output_tokens for turn in self.turns[:-1]), initial=0)
        return [self.prefix_tokens + n + a for n, a in zip(new, answered, strict=True)]


def lognormal(quantiles: Quantiles) -> tuple[float, float]:
    """Mean and standard deviation of the logarithm."""
    mu = math.log(quantiles.median)
    return mu, (math.log(quantiles.p90) - mu) / P90


def quantile(quantiles: Quantiles, share: float) -> float:
    """The value below which `share` of the lognormal lies, 0 < share < 1."""
    mu, sigma = lognormal(quantiles)
    return math.exp(mu + sigma * NormalDist().inv_cdf(share))


def mean(quantiles: Quantiles) -> float:
    """Of the lognormal; of counts, which are rounded and at least 1, about that."""
    mu, sigma = lognormal(quantiles)
    return math.exp(mu + sigma**2 / 2)


def scaled(quantiles: Quantiles | None, scale: float) -> Quantiles | None:
    """Lengths of contexts divided by `scale`; those of answers stay as they are."""
    if quantiles is None:
        return None
    return Quantiles(quantiles.median / scale, quantiles.p90 / scale)


def draw_counts(quantiles: Quantiles, num: int, generator: np.random.Generator) -> list[int]:
    """Of a lognormal, rounded, at least 1."""
    mu, sigma = lognormal(quantiles)
    return [max(1, round(x)) for x in np.exp(generator.normal(mu, sigma, num)).tolist()]


def draw_sessions(profile: ProfileConfig, num_sessions: int, seed: int) -> list[Session]:
    """Sessions in the order of their arrival; contexts are divided by `profile.scale`.

    Components are drawn so that their shares of the *requests* are the profile's weights: one whose
    sessions have many turns begins fewer of them.

    Raises:
        ValueError: a component has no lengths to draw from, or a replayed file is broken.
    """
    generator = np.random.default_rng(seed)
    shares = session_shares(profile)
    chosen = generator.choice(len(shares), num_sessions, p=shares)
    starts = islice(arrivals(profile.arrival, generator), num_sessions)
    return [
        _session(profile, profile.components[i], start, generator)
        for i, start in zip(chosen.tolist(), starts, strict=False)
    ]


def session_shares(profile: ProfileConfig) -> list[float]:
    """Of the sessions, by component."""
    per_turn = [c.weight / mean_turns(c, profile.max_turns) for c in profile.components]
    return [share / sum(per_turn) for share in per_turn]


def mean_turns(component: ComponentConfig, max_turns: int | None) -> float:
    """Requests of a session on average, those beyond `max_turns` cut."""
    if component.turns is None:
        return 1.0
    points = 2000
    turns = (quantile(component.turns, (i + 0.5) / points) for i in range(points))
    most = math.inf if max_turns is None else max_turns
    return sum(min(max(1, round(t)), most) for t in turns) / points


def arrivals(config: ArrivalConfig, generator: np.random.Generator) -> Iterator[float]:
    """Seconds at which sessions begin; without end, but for a replay."""
    match config.kind:
        case ArrivalKind.closed:
            while True:
                yield 0.0
        case ArrivalKind.replay:
            assert config.file is not None
            yield from replayed(Path(config.file))
        case ArrivalKind.gamma:
            shape = config.cv**-2
            now = 0.0
            while True:
                now += generator.gamma(shape, 1 / (shape * config.rate))
                yield now


def replayed(path: Path) -> Sequence[float]:
    """The `timestamp` of each line, in seconds from the first; they ascend.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a line has no timestamp, or one before the line above it; it names the line.
    """
    if not path.is_file():
        raise FileNotFoundError(f"profile.arrival.file must be a file, no {path}")
    times: list[float] = []
    for i, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            times.append(float(json.loads(line)["timestamp"]))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}:{i}: a line must have a timestamp in seconds") from error
        if times[-1] < times[max(0, len(times) - 2)] or not math.isfinite(times[-1]):
            raise ValueError(f"{path}:{i}: timestamps must ascend, got {times[-1]}")
    return [t - times[0] for t in times]


def _session(
    profile: ProfileConfig,
    component: ComponentConfig,
    start: float,
    generator: np.random.Generator,
) -> Session:
    for name in ("prompt_tokens", "output_tokens"):
        if getattr(component, name) is None:
            raise ValueError(
                f"profile.components.{component.name}.{name} must be given to draw traffic"
            )
    [num_turns] = draw_counts(component.turns or NO_LENGTH, 1, generator)
    num_turns = min(num_turns, profile.max_turns or num_turns)
    first = scaled(component.prompt_tokens, profile.scale)
    # What later turns add is like what the first one says, where nothing else is known.
    later = scaled(component.new_tokens_per_turn, profile.scale) or first
    assert first is not None
    assert later is not None
    assert component.output_tokens is not None
    new = draw_counts(first, 1, generator) + draw_counts(later, num_turns - 1, generator)
    outputs = draw_counts(component.output_tokens, num_turns, generator)
    think = [0.0] * num_turns
    if component.think_seconds is not None:
        mu, sigma = lognormal(component.think_seconds)
        think[1:] = np.exp(generator.normal(mu, sigma, num_turns - 1)).tolist()
    turns = tuple(Turn(*parts) for parts in zip(new, outputs, think, strict=True))
    prefix = round(component.shared_prefix_tokens / profile.scale)
    return Session(component.name, start, prefix, turns)
