"""The configuration of `predict`: a machine, a model, and a stack of changes to both."""

import math
from dataclasses import dataclass, field, fields

from specfit.checks import MISSING, require, require_positive
from specfit.latency.config import Format
from specfit.prediction.server import ServerConfig

# Bits a weight. FP8 in blocks of 128 x 128 has a scale that does not count; NVFP4 has one of 8 bits
# for 16 weights.
BITS = {Format.fp32: 32.0, Format.bf16: 16.0, Format.fp8: 8.0, Format.nvfp4: 4.5}
SHARES = ("achieved_bandwidth", "achieved_compute")


@dataclass
class Constant:
    """A number, and who says so; null where the stage measures it."""

    value: float | None = MISSING
    source: str = MISSING

    def check(self, key: str, least: float = 0.0, most: float = math.inf) -> None:
        """Refuses what cannot be: values up to 0, or below a `least` that is not 0.

        Raises:
            ValueError: it is one, or has no source.
        """
        value = 1.0 if self.value is None else self.value
        require(math.isfinite(value), f"{key}.value", "be finite", value)
        require(value > 0 or least < 0 == value, f"{key}.value", "be positive", value)
        require(value <= most, f"{key}.value", f"be at most {most:g}", value)
        require(bool(self.source), f"{key}.source", "say where the value is from", "nothing")

    @property
    def known(self) -> float:
        """The value of one that is not to be measured."""
        assert self.value is not None
        return self.value


@dataclass
class FlopsConfig:
    """Dense operations a second of one device, by the format of the weights."""

    bf16: Constant = MISSING
    fp8: Constant = MISSING
    nvfp4: Constant = MISSING


@dataclass
class HardwareConfig:
    """A machine, by what the latency model asks of it. All values, or null for all of them."""

    name: str = MISSING
    num_devices: int = 1  # that share every layer
    memory_bytes: Constant = MISSING  # of one device
    memory_bytes_per_second: Constant = MISSING  # of one device, as its data sheet has it
    achieved_bandwidth: Constant = MISSING  # share of that
    flops: FlopsConfig = MISSING
    achieved_compute: Constant = MISSING  # share of those
    seconds_per_layer: Constant = MISSING  # that a pass takes for each, whatever it reads
    communication_seconds_per_layer: Constant = MISSING  # what several devices add to that
    draft_cost: Constant = MISSING  # of a drafted token, over a plain pass

    def __post_init__(self) -> None:
        require_positive(self, "hardware", "num_devices")
        values = [constant.value for constant in self.constants().values()]
        unknown = [name for name, c in self.constants().items() if c.value is None]
        all_or_none = not unknown or len(unknown) == len(values)
        require(all_or_none, "hardware", "have all values, or null for all", f"null {unknown}")
        for name, constant in self.constants().items():
            least = -1.0 if name == "communication_seconds_per_layer" else 0.0  # none is fine there
            constant.check(f"hardware.{name}", least, 1.0 if name in SHARES else math.inf)
        one = not self.measured or self.num_devices == 1
        require(one, "hardware.num_devices", "be 1 where constants are measured", self.num_devices)

    @property
    def measured(self) -> bool:
        """Whether the stage measures the constants, on the machine at hand."""
        return self.memory_bytes.value is None

    def constants(self) -> dict[str, Constant]:
        """All of them by their keys."""
        own = {f.name: getattr(self, f.name) for f in fields(self)}
        flops = {f"flops.{f.name}": getattr(self.flops, f.name) for f in fields(self.flops)}
        return {name: c for name, c in (own | flops).items() if isinstance(c, Constant)}


@dataclass
class PartConfig:
    """Weights of one format."""

    parameters: float = 0.0  # in all layers together
    format: Format = Format.bf16

    @property
    def num_bytes(self) -> float:
        """Stored."""
        return self.parameters * BITS[self.format] / 8


@dataclass
class ModelConfig:
    """A model, by what the latency model asks of it."""

    name: str = MISSING
    source: str = MISSING  # of the sizes
    num_layers: int = MISSING
    attention: PartConfig = MISSING
    shared: PartConfig = MISSING  # what else every token runs through: dense layers, routers
    head: PartConfig = MISSING  # the embedding, which is one row a token, is not read
    experts: PartConfig = field(default_factory=PartConfig)  # all that tokens are routed to
    num_experts: int = 1  # in a layer
    num_active_experts: int = 1  # that a token is routed to
    kv_values_per_token: float = MISSING  # in all layers
    kv_format: Format = Format.bf16
    context_flops: float = MISSING  # between a token and one of its context, in all layers

    def __post_init__(self) -> None:
        key = "predict.model"
        require_positive(self, key, "num_layers", "num_experts", "num_active_experts")
        for name in ("attention", "head"):
            value = getattr(self, name).parameters
            require(0 < value < math.inf, f"{key}.{name}.parameters", "be positive", value)
        for name in ("shared", "experts"):
            value = getattr(self, name).parameters
            require(0 <= value < math.inf, f"{key}.{name}.parameters", "be at least 0", value)
        for name in ("kv_values_per_token", "context_flops"):
            value = getattr(self, name)
            require(0 < value < math.inf, f"{key}.{name}", "be positive", value)
        few = self.num_active_experts <= self.num_experts
        require(few, f"{key}.num_active_experts", "be at most num_experts", self.num_active_experts)


@dataclass
class AcceptanceConfig:
    """Acceptance lengths that are given instead of measured."""

    component: str = MISSING  # of the profile
    lengths: list[float] = MISSING  # at 1, 2, ... drafted tokens
    source: str = MISSING

    def __post_init__(self) -> None:
        key = "predict.acceptance[].lengths"
        require(len(self.lengths) > 0, key, "not be empty", self.lengths)
        for k, length in enumerate(self.lengths, start=1):
            require(1 <= length <= k + 1, key, f"lie in [1, {k + 1}] at {k} tokens", length)
        ordered = sorted(self.lengths) == list(self.lengths)
        require(ordered, key, "not fall as more is drafted", self.lengths)


@dataclass
class ChangeConfig:
    """What is other than before; null stays as it was."""

    format: Format | None = None  # of attention, shared and expert weights, and what they run in
    num_draft_tokens: int | None = None
    disaggregated: bool | None = None
    achieved_bandwidth: Constant | None = None
    seconds_per_layer: Constant | None = None
    communication_seconds_per_layer: Constant | None = None


@dataclass
class FactorConfig:
    """One change of a stack, and what is said of it."""

    name: str = MISSING
    change: ChangeConfig = MISSING
    expected_low: float = MISSING  # what others say the factor is
    expected_high: float = MISSING
    limit: str = MISSING  # where it cannot hold, in a sentence
    # Where that is, as a load: null as the stack's own.
    limit_concurrency: int | None = None
    limit_hit_rate: float | None = None
    adds_devices: bool = False  # other devices take work over

    def __post_init__(self) -> None:
        ordered = 0 < self.expected_low <= self.expected_high
        got = f"{self.expected_low:g} and {self.expected_high:g}"
        key = "predict.stack.factors[].expected_low"
        require(ordered, key, "be positive and at most expected_high", got)
        at = self.limit_concurrency
        require(
            at is None or at >= 1, "predict.stack.factors[].limit_concurrency", "be at least 1", at
        )
        check_hit_rate("predict.stack.factors[].limit_hit_rate", self.limit_hit_rate)


@dataclass
class StackConfig:
    """Changes one after the other, each multiplying what the ones before it made."""

    concurrency: int = MISSING
    start_name: str = MISSING
    start: ChangeConfig = MISSING  # from `predict.model` and `hardware` to where the stack begins
    factors: list[FactorConfig] = MISSING
    expected_source: str = MISSING  # of what is expected
    # Tokens a second of one user before and after, and what the same devices gain, as expected.
    expected_start: list[float] = MISSING
    expected_end: list[float] = MISSING
    expected_same_devices: list[float] = MISSING

    def __post_init__(self) -> None:
        require_positive(self, "predict.stack", "concurrency")
        require(len(self.factors) > 0, "predict.stack.factors", "not be empty", self.factors)
        for name in ("expected_start", "expected_end", "expected_same_devices"):
            pair = getattr(self, name)
            ordered = len(pair) == 2 and 0 < pair[0] <= pair[1]
            require(ordered, f"predict.stack.{name}", "be [low, high], positive", pair)


@dataclass
class PredictConfig:
    """Latency of a model on a machine under the profile's traffic."""

    model: ModelConfig | None = None  # null: the target
    # Of that target's layers; null: as its checkpoint has them.
    format: Format | None = None
    proposer: str = "eagle3"  # whose measured acceptance counts
    acceptance: list[AcceptanceConfig] | None = None  # null: as measured
    concurrencies: list[int] = field(default_factory=lambda: [1, 2, 4, 8, 16, 32, 64])
    # Lengths of requests of components that have none in the profile; and where their answers were
    # not measured either, of answers.
    prompt_tokens: int = 512
    output_tokens: int = 256
    hit_rate: float = 0.0  # share of the prompts' tokens that a prefix cache has
    disaggregated: bool = False  # prompts are read on other devices
    # The profile's arrivals, simulated: sessions a second (null: 1/4, 1/2, 1, 2 and 4 times the
    # profile's), sessions at each, and the server that they meet.
    rates: list[float] | None = None
    num_sessions: int = 300
    server: ServerConfig = field(default_factory=ServerConfig)
    stack: StackConfig | None = None

    def __post_init__(self) -> None:
        require_positive(self, "predict", "prompt_tokens", "output_tokens", "num_sessions")
        rates = self.rates is None or (len(self.rates) > 0 and min(self.rates) > 0)
        require(rates, "predict.rates", "be positive numbers, or null", self.rates)
        loads = self.concurrencies
        distinct = len(set(loads)) == len(loads) > 0 and min(loads) >= 1
        require(distinct, "predict.concurrencies", "be distinct numbers from 1 on", loads)
        check_hit_rate("predict.hit_rate", self.hit_rate)
        whole = self.stack is None or (self.model is not None and self.acceptance is not None)
        require(whole, "predict.stack", "be null without predict.model and .acceptance", "a stack")
        names = [a.component for a in self.acceptance or []]
        require(len(set(names)) == len(names), "predict.acceptance", "name each once", names)


def check_hit_rate(key: str, value: float | None) -> None:
    """Raises ValueError unless it is a share, or None."""
    require(value is None or 0 <= value <= 1, key, "lie in [0, 1]", value)
