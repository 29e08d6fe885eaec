"""The configuration of the traffic: what it is, and how it is learned from logs."""

from dataclasses import dataclass, field
from enum import Enum

from specfit.checks import MISSING, require, require_positive

WEIGHT_SLACK = 1e-3  # by which weights may miss a sum of 1


@dataclass
class Quantiles:
    """A lognormal distribution, by two of its quantiles."""

    median: float
    p90: float

    def check(self, key: str) -> None:
        """Refuses quantiles that no lognormal has.

        Raises:
            ValueError: they are not positive, in order and finite; `key` is their own.
        """
        ordered = 0 < self.median <= self.p90 < float("inf")
        got = f"median {self.median:g} and p90 {self.p90:g}"
        require(ordered, key, "have 0 < median <= p90", got)


@dataclass
class ComponentConfig:
    """One kind of traffic. Lengths are in the target's tokens; null: as the sources have them."""

    name: str = MISSING
    weight: float = 1.0  # share of the requests
    sources: list[str] = MISSING  # names in data.sources; held-out ones are only measured on
    temperature: float = 0.0  # at which this traffic is served
    prompt_tokens: Quantiles | None = None  # of a session's first request, after the shared prefix
    new_tokens_per_turn: Quantiles | None = None  # that a later turn adds before its answer
    output_tokens: Quantiles | None = None  # of an answer
    turns: Quantiles | None = None  # requests of a session; null: one, with the history it has
    think_seconds: Quantiles | None = None  # from an answer to the session's next request
    shared_prefix_tokens: int = 0  # system prompt and tools that every session begins with

    def check(self, key: str) -> None:
        """Refuses what cannot be.

        Raises:
            ValueError: a value is out of its range; `key` is the component's own.
        """
        require(self.weight > 0, f"{key}.weight", "be positive", self.weight)
        require(len(self.sources) > 0, f"{key}.sources", "not be empty", self.sources)
        require(self.temperature >= 0, f"{key}.temperature", "be at least 0", self.temperature)
        prefix = self.shared_prefix_tokens
        require(prefix >= 0, f"{key}.shared_prefix_tokens", "be at least 0", prefix)
        for name, value in vars(self).items():
            if isinstance(value, Quantiles):
                value.check(f"{key}.{name}")
        several = self.turns is not None and self.turns.p90 > 1
        for name in ("new_tokens_per_turn", "think_seconds"):
            given = getattr(self, name) is not None
            require(several or not given, f"{key}.{name}", "be null without turns", "quantiles")


class ArrivalKind(Enum):
    """How sessions begin."""

    gamma = 1  # intervals of a Gamma distribution, by rate and cv
    closed = 2  # as many at any time as `concurrency` says: one ends, another begins
    replay = 3  # at the times in `file`


@dataclass
class ArrivalConfig:
    """When sessions begin."""

    kind: ArrivalKind = ArrivalKind.gamma
    rate: float = 1.0  # sessions a second, of gamma
    cv: float = 1.0  # standard deviation over mean of the intervals, of gamma; 1: Poisson
    concurrency: int = 8  # sessions in flight, of closed
    file: str | None = None  # of replay: JSON lines with `timestamp`, in seconds

    def __post_init__(self) -> None:
        require_positive(self, "profile.arrival", "concurrency")
        for name in ("rate", "cv"):
            value = getattr(self, name)
            require(0 < value < float("inf"), f"profile.arrival.{name}", "be positive", value)
        given = (self.kind is ArrivalKind.replay) == (self.file is not None)
        require(
            given, "profile.arrival.file", "be given for kind=replay, and only there", self.file
        )


@dataclass
class SloConfig:
    """What a user is promised: a request counts to the goodput if it meets both."""

    ttft_ms: float = 1000.0  # to the first token
    itl_ms: float = 50.0  # between tokens: an answer's mean

    def __post_init__(self) -> None:
        for name in ("ttft_ms", "itl_ms"):
            value = getattr(self, name)
            require(value > 0, f"profile.slo.{name}", "be positive", value)


@dataclass
class ProfileConfig:
    """What the traffic is: a fixed list of weighted components, their lengths and arrivals."""

    name: str = MISSING
    components: list[ComponentConfig] = MISSING
    arrival: ArrivalConfig = field(default_factory=ArrivalConfig)
    slo: SloConfig = field(default_factory=SloConfig)
    # For a small machine: prompts, what turns add and prefixes are divided by this; answers are as
    # long as they are, since they are what is sped up. Turns after `max_turns` are cut. Reports say
    # both.
    scale: float = 1.0
    max_turns: int | None = None
    # Instead of the values above: fitted to a log or trace, or taken from a fingerprint's release.
    # Names, sources and temperatures stay.
    from_logs: str | None = None
    from_fingerprint: str | None = None

    def __post_init__(self) -> None:
        require(len(self.components) > 0, "profile.components", "not be empty", self.components)
        names = [c.name for c in self.components]
        require(len(set(names)) == len(names), "profile.components", "have distinct names", names)
        for i, c in enumerate(self.components):
            c.check(f"profile.components[{i}]")
        total = sum(c.weight for c in self.components)
        shares = ", ".join(f"{c.name} {c.weight / total:.4g}" for c in self.components)
        require(
            abs(total - 1) <= WEIGHT_SLACK,
            "profile.components[].weight",
            f"sum to 1 (as shares: {shares})",
            f"{total:g}",
        )
        require(0 < self.scale < float("inf"), "profile.scale", "be positive", self.scale)
        known = self.max_turns is None or self.max_turns >= 1
        require(known, "profile.max_turns", "be at least 1, or null", self.max_turns)
        one = self.from_logs is None or self.from_fingerprint is None
        require(one, "profile.from_logs", "be null beside profile.from_fingerprint", self.from_logs)


class Mixture(Enum):
    """What the share of each component in the training tokens comes from."""

    profile = 1  # its share of the profile's output tokens
    uniform = 2  # the same for each
    recoverable = 3  # its share of the latency that a better head could still save


@dataclass
class FitConfig:
    """The training mixture. A share is of the answer tokens that are learned from."""

    mixture: Mixture = Mixture.profile
    # This much of the mixture is shared out evenly: mixtures are more robust than specialists
    # (arXiv:2603.27027), and what nobody asked for yesterday is asked for tomorrow.
    floor: float = 0.1
    train_tokens: int | None = None  # answer tokens an epoch; null: as many as there are
    max_repeats: float = 2.0  # times that an epoch may show an answer of a scarce component
    # Of an earlier head: a `measure` artifact's folder. It decides k, and `recoverable`.
    measured: str | None = None
    # The acceptance lengths that specialists reach, by component, for `recoverable`; those that
    # are not given count as unbounded.
    ceilings: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require(0 <= self.floor <= 1, "fit.floor", "lie in [0, 1]", self.floor)
        some = self.train_tokens is None or self.train_tokens >= 1
        require(some, "fit.train_tokens", "be at least 1, or null", self.train_tokens)
        require(self.max_repeats >= 1, "fit.max_repeats", "be at least 1", self.max_repeats)
        needed = self.mixture is not Mixture.recoverable or self.measured is not None
        require(needed, "fit.measured", "be given for fit.mixture=recoverable", self.measured)
        for name, length in self.ceilings.items():
            require(length > 1, f"fit.ceilings.{name}", "be above 1", length)
