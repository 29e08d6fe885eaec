"""The latency model: what a round takes, and what a token then takes.

A pass reads weights and keys and values, and computes; the longer of the two hides a share
`overlap` of the other, all of it on a GPU. And each layer takes a while whatever it does:

    t_pass = max(t_mem, t_cmp) + (1 - overlap) min(t_mem, t_cmp)
             + layers (t_layer + t_communication)
    t_mem = (weights + experts (1 - (1 - a)^n) + batch (context + m) kv) / (devices bandwidth)
    t_cmp = n (products + (context + m / 2) attention) / (devices compute)

for m tokens of each sequence, n in all, each routed to a share `a` of the experts. A round is one
pass over k + 1 tokens of each sequence, and k drafted tokens at `draft_cost` plain passes each. A
token takes

    t_round / AL / (1 - rho)

where rho is the share of the time in which the devices read prompts instead.

Source: our notes on latency; with an overlap of 1 the first formula is the usual roofline. What a
CPU hides is fitted: it computes on what it has read, and little else is under way meanwhile.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt

from specfit.checks import require
from specfit.latency.config import Format
from specfit.prediction.config import HardwareConfig, ModelConfig, PartConfig
from specfit.targets.info import TargetInfo

_DTYPES = {"float32": Format.fp32, "float16": Format.bf16, "bfloat16": Format.bf16}


@dataclass(frozen=True)
class Split:
    """Seconds, by what takes them."""

    weights: float
    kv: float
    compute: float  # that reading does not hide
    layers: float
    communication: float
    drafting: float = 0.0

    @property
    def total(self) -> float:
        """All of them."""
        return float(sum(vars(self).values()))


@dataclass(frozen=True)
class LatencyModel:
    """A model on a machine. Bytes and compute are of the whole model, rates of one device."""

    num_layers: int
    weight_bytes: float  # that every pass reads
    expert_bytes: float  # of all experts that tokens are routed to
    active_share: float  # of those, for one token
    kv_bytes_per_token: float
    token_compute_seconds: float  # of one token's products in the layers
    head_compute_seconds: float  # of one token's logits
    context_compute_seconds: float  # of attention between a token and one of its context
    num_devices: int
    bytes_per_second: float  # achieved
    seconds_per_layer: float
    communication_seconds_per_layer: float
    draft_cost: float
    overlap: float = 1.0  # share of the shorter of reading and computing that the longer hides

    def weight_bytes_read(self, num_tokens: int) -> float:
        """By a pass over so many tokens, whose experts are drawn evenly."""
        return self.weight_bytes + (1 - (1 - self.active_share) ** num_tokens) * self.expert_bytes

    def kv_bytes_read(self, batch: int, tokens_per_sequence: int, context_tokens: float) -> float:
        """By a pass behind `context_tokens`: those, and its own."""
        return batch * (context_tokens + tokens_per_sequence) * self.kv_bytes_per_token

    def pass_split(
        self, batch: int, tokens_per_sequence: int, context_tokens: float, num_logits: int
    ) -> Split:
        """One pass behind `context_tokens`; `num_logits` are of each sequence."""
        n = batch * tokens_per_sequence
        rate = self.num_devices * self.bytes_per_second
        weights = self.weight_bytes_read(n) / rate
        kv = self.kv_bytes_read(batch, tokens_per_sequence, context_tokens) / rate
        seen = context_tokens + tokens_per_sequence / 2  # by the mean token
        compute = n * (self.token_compute_seconds + seen * self.context_compute_seconds)
        compute += batch * num_logits * self.head_compute_seconds
        compute /= self.num_devices
        return Split(
            weights=weights,
            kv=kv,
            compute=compute - self.overlap * min(weights + kv, compute),
            layers=self.num_layers * self.seconds_per_layer,
            communication=self.num_layers * self.communication_seconds_per_layer,
        )

    def step_seconds(self, batch: int, tokens_per_sequence: int, context_tokens: float) -> float:
        """One target pass, with all of a round that is not drafting."""
        m = tokens_per_sequence
        return self.pass_split(batch, m, context_tokens, m).total

    def draft_seconds(self, batch: int, num_draft_tokens: int) -> float:
        """All drafted tokens of a round."""
        return self.draft_cost * num_draft_tokens * self.step_seconds(batch, 1, 0.0)

    def prefill_seconds(self, num_tokens: int, context_tokens: int) -> float:
        """Reads `num_tokens` of one prompt behind `context_tokens` that are cached."""
        if num_tokens == 0:
            return 0.0
        return self.pass_split(1, num_tokens, float(context_tokens), 1).total

    def round_split(self, batch: int, num_draft_tokens: int, context_tokens: float) -> Split:
        """One round."""
        width = num_draft_tokens + 1
        split = self.pass_split(batch, width, context_tokens, width)
        drafting = self.draft_seconds(batch, num_draft_tokens)
        return Split(**{**vars(split), "drafting": drafting})


@dataclass(frozen=True)
class Length:
    """An acceptance length between the ends of its interval, where it has one."""

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Traffic:
    """Requests of one kind, or of a mix."""

    name: str
    lengths: tuple[Length, ...]  # at 0, 1, ... drafted tokens
    tokens_per_request: float  # by which a component counts in a mix
    prompt_tokens: float
    output_tokens: float

    @property
    def context_tokens(self) -> float:
        """Before the mean token of an answer."""
        return self.prompt_tokens + self.output_tokens / 2


def mixed(parts: Sequence[Traffic], weights: Mapping[str, float], name: str) -> Traffic:
    """A mix by shares of the requests: tokens over rounds, never a mean of lengths.

    Intervals: components are measured on prompts of their own, so what each interval's ends
    change in the mix is added in squares; there is none where a component has none. Prompts count
    by requests, as whoever reads them meets them.
    """
    total = sum(weights[p.name] for p in parts)
    requests = {p.name: weights[p.name] / total for p in parts}
    tokens = {p.name: requests[p.name] * p.tokens_per_request for p in parts}

    def length(k: int) -> Length:
        rounds = {p.name: tokens[p.name] / p.lengths[k].value for p in parts}
        value = sum(tokens.values()) / sum(rounds.values())
        # d value / d length of a component
        slopes = [value * rounds[p.name] / sum(rounds.values()) / p.lengths[k].value for p in parts]
        own = [p.lengths[k] for p in parts]
        if any(x.low is None or x.high is None for x in own):
            return Length(value)
        down = [s * (x.value - (x.low or 0)) for s, x in zip(slopes, own, strict=True)]
        up = [s * ((x.high or 0) - x.value) for s, x in zip(slopes, own, strict=True)]
        low, high = (sqrt(sum(d * d for d in ends)) for ends in (down, up))
        return Length(value, max(1.0, value - low), value + high)

    return Traffic(
        name=name,
        lengths=tuple(length(k) for k in range(min(len(p.lengths) for p in parts))),
        tokens_per_request=sum(tokens.values()),
        prompt_tokens=sum(requests[p.name] * p.prompt_tokens for p in parts),
        output_tokens=sum(requests[p.name] * p.output_tokens for p in parts),
    )


@dataclass(frozen=True)
class Load:
    """How many requests are in flight, and where their prompts are read."""

    concurrency: int
    hit_rate: float = 0.0  # share of the prompts' tokens that need not be read
    disaggregated: bool = False


def slowdown(prefill_load: float, hit_rate: float = 0.0) -> float:
    """How many times as long a token takes where prompts are read on the same devices.

    That is 1 / (1 - rho), rho = prefill_load (1 - hit_rate): what moving prefill away is worth.

    Args:
        prefill_load: share of the time that reading all prompts takes: requests a second, times
            tokens a prompt, over prompt tokens a second.
        hit_rate: share of those tokens that a prefix cache has.

    Raises:
        ValueError: nothing is left for decoding.
    """
    rho = prefill_load * (1 - hit_rate)
    require(0 <= rho < 1, "the share of prefill", "lie in [0, 1)", f"{rho:g}")
    return 1 / (1 - rho)


def prefill_share(model: LatencyModel, traffic: Traffic, load: Load, round_token: float) -> float:
    """Of the time, with `concurrency` requests in flight, each followed by the next.

    `round_token` are the seconds of a token without it. By Little's law there are
    concurrency / (output t) requests a second, t = round_token / (1 - rho); so rho / (1 - rho) is
    what `concurrency` prompts take over what one answer takes.
    """
    if load.disaggregated:
        return 0.0
    new = round(traffic.prompt_tokens * (1 - load.hit_rate))
    seconds = model.prefill_seconds(new, round(traffic.prompt_tokens) - new)
    ratio = load.concurrency * seconds / (traffic.output_tokens * round_token)
    return ratio / (1 + ratio)


def token_seconds(
    model: LatencyModel, traffic: Traffic, load: Load, num_draft_tokens: int, length: float
) -> float:
    """Of one token of one user, at an acceptance length."""
    split = model.round_split(load.concurrency, num_draft_tokens, traffic.context_tokens)
    alone = split.total / length
    return alone * slowdown(prefill_share(model, traffic, load, alone))


def configured(model: ModelConfig, hardware: HardwareConfig) -> LatencyModel:
    """From descriptions.

    Raises:
        ValueError: the weights do not fit on the devices, or are in a format the machine lacks.
    """
    parts = (model.attention, model.shared, model.head, model.experts)
    stored = float(sum(part.num_bytes for part in parts))
    room = hardware.memory_bytes.known
    require(
        stored <= room * hardware.num_devices,
        "hardware.num_devices",
        f"hold {stored / 1e9:.0f} GB of weights at {room / 1e9:.0f} GB a device",
        hardware.num_devices,
    )
    share = model.num_active_experts / model.num_experts
    compute = hardware.achieved_compute.known

    def seconds(part: PartConfig) -> float:
        constant = getattr(hardware.flops, part.format.name, None)
        known = constant is not None or part.parameters == 0
        keys = "predict.format (or predict.model's formats)"
        require(known, keys, f"be bf16, fp8 or nvfp4 on {hardware.name}", part.format.name)
        return 0.0 if constant is None else 2 * part.parameters / (compute * constant.known)

    several = hardware.num_devices > 1
    return LatencyModel(
        num_layers=model.num_layers,
        weight_bytes=stored - model.experts.num_bytes,
        expert_bytes=model.experts.num_bytes,
        active_share=share,
        kv_bytes_per_token=PartConfig(model.kv_values_per_token, model.kv_format).num_bytes,
        token_compute_seconds=seconds(model.attention)
        + seconds(model.shared)
        + share * seconds(model.experts),
        head_compute_seconds=seconds(model.head),
        context_compute_seconds=model.context_flops / (compute * hardware.flops.bf16.known),
        num_devices=hardware.num_devices,
        bytes_per_second=hardware.memory_bytes_per_second.known * hardware.achieved_bandwidth.known,
        seconds_per_layer=hardware.seconds_per_layer.known,
        communication_seconds_per_layer=hardware.communication_seconds_per_layer.known
        if several
        else 0.0,
        draft_cost=hardware.draft_cost.known,
    )


def described(info: TargetInfo, form: Format | None) -> ModelConfig:
    """A target's description from its checkpoint; experts are those of all layers.

    Args:
        info: the target.
        form: of the layers' weights; None: as they are stored. The head and the cache are in the
            type of the computation; where that is fp32, as on a CPU, and the layers are to be in
            another, in bf16.

    Raises:
        ValueError: `form` is None and the checkpoint's format is none of ours.
    """
    plain = _DTYPES[info.dtype]
    layers = plain if form is None and info.quantization is None else form or _stored(info)
    if plain is Format.fp32 and form not in (None, Format.fp32):
        plain = Format.bf16
    width = info.num_heads * info.head_dim
    kv_width = info.num_kv_heads * info.head_dim
    attention = info.num_layers * info.hidden_size * 2 * (width + kv_width)
    head = info.vocab_size * info.hidden_size
    # Of experts a share `a` is active: inactive = (1 - a) experts, and a experts are the active
    # feed-forward layers, all of them.
    inactive = info.num_parameters - info.num_active_parameters
    active = 3 * info.num_layers * info.hidden_size * info.intermediate_size if inactive else 0
    embeddings = head * (1 if info.tied_embeddings else 2)
    shared = max(0, info.num_active_parameters - embeddings - attention - active)
    experts = inactive + active
    return ModelConfig(
        name=info.name,
        source="the checkpoint",
        num_layers=info.num_layers,
        attention=PartConfig(float(attention), layers),
        shared=PartConfig(float(shared), layers),
        head=PartConfig(float(head), plain),
        experts=PartConfig(float(experts), layers),
        # Only their quotient counts.
        num_experts=max(1, experts),
        num_active_experts=max(1, active),
        kv_values_per_token=2.0 * info.num_layers * kv_width,
        kv_format=plain,
        context_flops=4.0 * info.num_layers * width,
    )


def _stored(info: TargetInfo) -> Format:
    scheme = (info.quantization or "").lower()
    if scheme.startswith("gguf:"):
        return _DTYPES[info.dtype]  # dequantized
    if "nvfp4" in scheme:
        return Format.nvfp4
    if "fp8" in scheme or scheme.endswith(":float-quantized"):
        return Format.fp8
    known = ", ".join(form.name for form in Format)
    raise ValueError(f"predict.format must be one of {known} for a target in {info.quantization}")
