"""The latency model: its arithmetic, that no input helps in the wrong direction, and the fit."""

import dataclasses
import random

import pytest

from specfit.latency.config import Format
from specfit.prediction.config import (
    AcceptanceConfig,
    Constant,
    FlopsConfig,
    HardwareConfig,
    ModelConfig,
    PartConfig,
    PredictConfig,
)
from specfit.prediction.measured import Pass, fit, modelled
from specfit.prediction.model import (
    LatencyModel,
    Length,
    Load,
    Traffic,
    configured,
    described,
    mixed,
    prefill_share,
    slowdown,
    token_seconds,
)

SMALL = LatencyModel(
    num_layers=10,
    weight_bytes=1e9,
    expert_bytes=8e9,
    active_share=0.25,
    kv_bytes_per_token=1e5,
    token_compute_seconds=1e-3,
    head_compute_seconds=1e-4,
    context_compute_seconds=1e-7,
    num_devices=2,
    bytes_per_second=1e12,
    seconds_per_layer=1e-5,
    communication_seconds_per_layer=2e-5,
    draft_cost=0.1,
)
RATES = ("bytes_per_second", "num_devices", "overlap")  # more is quicker; of the others less is


def chat(lengths: tuple[float, ...] = (1.0, 1.8, 2.2), **changes: object) -> Traffic:
    traffic = Traffic("chat", tuple(map(Length, lengths)), 100.0, 1000.0, 100.0)
    return dataclasses.replace(traffic, **changes)


def test_what_the_longer_does_not_hide_is_added():
    model = dataclasses.replace(SMALL, overlap=0.25)
    for batch, width in ((1, 1), (4, 3)):
        whole = SMALL.pass_split(batch, width, 1000.0, width)
        reading = whole.weights + whole.kv
        computing = batch * width * (1e-3 + (1000 + width / 2) * 1e-7 + 1e-4) / 2
        split = model.pass_split(batch, width, 1000.0, width)
        assert split.weights + split.kv == reading
        longer, shorter = max(reading, computing), min(reading, computing)
        assert reading + split.compute == pytest.approx(longer + 0.75 * shorter)


def test_a_pass_reads_or_computes_whichever_takes_longer():
    split = SMALL.pass_split(1, 1, 1000.0, 1)
    read = (1e9 + 0.25 * 8e9) / 2e12
    assert split.weights == pytest.approx(read)
    assert split.kv == pytest.approx(1001 * 1e5 / 2e12)
    assert split.compute == 0
    wide = SMALL.pass_split(4, 3, 1000.0, 3)
    computed = 12 * (1e-3 + 1001.5 * 1e-7 + 1e-4) / 2
    assert wide.weights + wide.kv + wide.compute == pytest.approx(computed)
    assert wide.layers + wide.communication == pytest.approx(10 * 3e-5)
    assert wide.total == pytest.approx(computed + 3e-4)


@pytest.mark.parametrize(("num_tokens", "experts"), [(1, 8.0), (2, 15.75), (4, 30.531)])
def test_tokens_share_experts_by_chance(num_tokens, experts):
    model = dataclasses.replace(SMALL, weight_bytes=0.0, expert_bytes=256.0, active_share=8 / 256)
    assert model.weight_bytes_read(num_tokens) == pytest.approx(experts, abs=1e-3)


def test_a_round_is_a_pass_and_its_drafts():
    split = SMALL.round_split(2, 3, 500.0)
    assert split.total == pytest.approx(SMALL.step_seconds(2, 4, 500.0) + split.drafting)
    assert split.drafting == pytest.approx(3 * 0.1 * SMALL.step_seconds(2, 1, 0.0))
    assert SMALL.draft_seconds(2, 0) == 0


def test_a_prompt_takes_one_pass_with_logits_of_its_last_token():
    computed = 1000 * (1e-3 + 2500 * 1e-7) + 1e-4
    assert SMALL.prefill_seconds(1000, 2000) == pytest.approx(computed / 2 + 3e-4)
    assert SMALL.prefill_seconds(0, 2000) == 0


@pytest.mark.parametrize(("load", "hit_rate", "gain"), [(0.5, 0.0, 2.0), (0.5, 0.9, 1.05)])
def test_disaggregation_is_worth_what_prompts_take(load, hit_rate, gain):
    assert slowdown(load, hit_rate) == pytest.approx(gain, abs=5e-3)


def test_prompts_that_take_all_the_time_are_refused():
    with pytest.raises(ValueError, match=r"the share of prefill must lie in \[0, 1\), got 1"):
        slowdown(1.0)


def test_the_share_of_prefill_is_that_of_littles_law():
    load = Load(8)
    alone = SMALL.round_split(8, 1, 1050.0).total / 1.8
    share = prefill_share(SMALL, chat(), load, alone)
    seconds = token_seconds(SMALL, chat(), load, 1, 1.8)
    requests_per_second = 8 / (100 * seconds)
    assert share == pytest.approx(requests_per_second * SMALL.prefill_seconds(1000, 0))
    assert seconds == pytest.approx(alone / (1 - share))
    apart = Load(8, disaggregated=True)
    assert token_seconds(SMALL, chat(), apart, 1, 1.8) == pytest.approx(alone)


def random_model(generator: random.Random) -> LatencyModel:
    def scaled(value: float) -> float:
        return value * 10 ** generator.uniform(-2, 2)

    values = {name: scaled(value) for name, value in vars(SMALL).items()}
    whole = {"num_layers": generator.randint(1, 99), "num_devices": generator.randint(1, 9)}
    shares = {"active_share": generator.uniform(0.01, 1), "overlap": generator.random()}
    return LatencyModel(**values | whole | shares)


def worse(generator: random.Random, name: str, value: float) -> float:
    if isinstance(value, int):
        return max(1, value - 1) if name in RATES else value + 1
    if name == "active_share":
        return value + (1 - value) * generator.random()
    factor = generator.uniform(1, 3)
    return value / factor if name in RATES else value * factor


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(LatencyModel)])
def test_no_constant_helps_in_the_wrong_direction(name):
    generator = random.Random(name)
    for _ in range(200):
        model = random_model(generator)
        changed = worse(generator, name, getattr(model, name))
        other = dataclasses.replace(model, **{name: changed})
        load = Load(generator.randint(1, 64), generator.random(), generator.random() < 0.5)
        k = generator.randint(0, 2)
        times = [token_seconds(m, chat(), load, k, 1.5) for m in (model, other)]
        assert times[1] >= times[0] * (1 - 1e-12), (model, changed)


@pytest.mark.parametrize("what", ["length", "context", "concurrency", "hit_rate", "disaggregated"])
def test_no_traffic_helps_in_the_wrong_direction(what):
    generator = random.Random(what)
    for _ in range(200):
        model = random_model(generator)
        traffic, load, length = chat(), Load(generator.randint(1, 64)), generator.uniform(1, 3)
        before = token_seconds(model, traffic, load, 2, length)
        match what:
            case "length":
                length /= generator.uniform(1, 3)
            case "context":
                traffic = chat(prompt_tokens=1000.0 * generator.uniform(1, 9))
            case "concurrency":
                load = dataclasses.replace(load, concurrency=load.concurrency + 1)
            case "hit_rate":
                before = token_seconds(model, traffic, Load(load.concurrency, 0.5), 2, length)
            case "disaggregated":
                apart = dataclasses.replace(load, disaggregated=True)
                before = token_seconds(model, traffic, apart, 2, length)
        assert token_seconds(model, traffic, load, 2, length) >= before * (1 - 1e-12)


def test_a_mix_is_tokens_over_rounds_and_its_interval_adds_in_squares():
    code = chat((1.0, 3.0), name="code", tokens_per_request=300.0)
    code = dataclasses.replace(code, lengths=(Length(1.0, 1.0, 1.0), Length(3.0, 2.9, 3.2)))
    talk = chat((1.0, 1.5), name="talk", tokens_per_request=60.0, prompt_tokens=400.0)
    talk = dataclasses.replace(talk, lengths=(Length(1.0, 1.0, 1.0), Length(1.5, 1.4, 1.6)))
    mix = mixed([code, talk], {"code": 0.5, "talk": 0.5}, "all")
    assert mix.lengths[1].value == pytest.approx(360 / (300 / 3 + 60 / 1.5))
    # 100 of 140 rounds are of code: a change of its length counts 2.571 * (100/140) / 3.
    slopes = (360 / 140 * (100 / 140) / 3, 360 / 140 * (40 / 140) / 1.5)
    below = ((slopes[0] * 0.1) ** 2 + (slopes[1] * 0.1) ** 2) ** 0.5
    assert mix.lengths[1].low == pytest.approx(360 / 140 - below)
    assert mix.lengths[0] == Length(1.0, 1.0, 1.0)
    assert mix.prompt_tokens == 700
    assert mixed([code], {"code": 0.2}, "all").lengths[1].high == pytest.approx(3.2)


def shapes() -> list[tuple[int, int, int]]:
    return [(b, m, c) for b in (1, 4, 8) for m in (1, 2, 3, 5) for c in (64, 500)]


def taken(model: LatencyModel, batch: int, width: int, context: int) -> float:
    return model.step_seconds(batch, width, float(context))


@pytest.mark.parametrize("overlap", [1.0, 0.25, 0.0])
def test_the_fit_finds_the_constants_that_passes_were_made_with(overlap):
    unit = dataclasses.replace(
        SMALL,
        num_devices=1,
        bytes_per_second=1.0,
        seconds_per_layer=1.0,
        communication_seconds_per_layer=0.0,
        token_compute_seconds=2e9,
        head_compute_seconds=1e8,
        context_compute_seconds=1e6,
    )
    true = dataclasses.replace(
        unit,
        bytes_per_second=5e9,
        token_compute_seconds=0.3,
        head_compute_seconds=0.015,
        context_compute_seconds=2e-4,
        seconds_per_layer=0.01,
        overlap=overlap,
    )
    passes = [Pass(*s, s[1], taken(true, *s)) for s in shapes()]
    roofline = dataclasses.replace(true, overlap=1.0)
    computing = {roofline.pass_split(b, m, float(c), m).compute > 0 for b, m, c in shapes()}
    assert computing == {True, False}
    found = fit(passes, unit, memory_bytes_per_second=2e10)
    for name, value in vars(true).items():
        assert getattr(found, name) == pytest.approx(value, rel=1e-6), name


def test_the_fit_reads_no_quicker_than_memory_is_read_and_stays_near_noisy_passes():
    generator = random.Random(0)
    true = dataclasses.replace(SMALL, num_devices=1, communication_seconds_per_layer=0.0)
    passes = [Pass(*s, s[1], generator.uniform(0.95, 1.05) * taken(true, *s)) for s in shapes()]
    unit = dataclasses.replace(true, bytes_per_second=1.0, seconds_per_layer=1.0)
    found = fit(passes, unit, memory_bytes_per_second=1e12)
    assert found.bytes_per_second <= 1e12 * (1 + 1e-9)
    assert max(abs(modelled(found, p) / p.seconds - 1) for p in passes) < 0.1
    slow = fit(passes, unit, memory_bytes_per_second=1e10)
    assert slow.bytes_per_second <= 1e10 * (1 + 1e-9)


def machine(**changes: object) -> HardwareConfig:
    one = Constant(0.5, "here")
    values = dict.fromkeys(("achieved_bandwidth", "achieved_compute", "draft_cost"), one)
    values |= dict.fromkeys(("seconds_per_layer", "communication_seconds_per_layer"), one)
    values |= {n: Constant(1e12, "here") for n in ("memory_bytes", "memory_bytes_per_second")}
    flops = FlopsConfig(*(Constant(x * 1e12, "here") for x in (1, 2, 4)))
    return HardwareConfig(**{"name": "mine", "flops": flops} | values | changes)


def sizes(**changes: object) -> ModelConfig:
    values = {
        "name": "m",
        "source": "here",
        "num_layers": 2,
        "attention": PartConfig(1e9),
        "shared": PartConfig(2e9, Format.nvfp4),
        "head": PartConfig(1e8),
        "experts": PartConfig(8e9, Format.fp8),
        "num_experts": 8,
        "num_active_experts": 2,
        "kv_values_per_token": 1e3,
        "context_flops": 1e4,
    }
    return ModelConfig(**values | changes)


def test_a_description_becomes_bytes_and_seconds():
    model = configured(sizes(), machine())
    assert model.weight_bytes == 2e9 + 2e9 * 4.5 / 8 + 2e8
    assert model.expert_bytes == 8e9
    assert model.active_share == 0.25
    assert model.kv_bytes_per_token == 2e3
    compute = 2 * (1e9 / 0.5e12 + 2e9 / 2e12 + 0.25 * 8e9 / 1e12)
    assert model.token_compute_seconds == pytest.approx(compute)
    assert model.communication_seconds_per_layer == 0  # one device
    assert configured(sizes(), machine(num_devices=2)).communication_seconds_per_layer == 0.5


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "qwen3_moe"])
def test_a_targets_description_counts_all_its_parameters_and_the_active_ones(architecture):
    from tiny_heads import make_target

    target = make_target(architecture)
    info = target.info
    found = described(info, None)
    embeddings = (0 if info.tied_embeddings else 1) * info.vocab_size * info.hidden_size
    parts = [p.parameters for p in (found.attention, found.shared, found.head, found.experts)]
    # Norms are in `shared`.
    assert sum(parts) + embeddings == info.num_parameters
    if architecture == "qwen3_moe":
        assert found.num_active_experts / found.num_experts == pytest.approx(2 / 4)
        assert found.experts.parameters == 6 * 4 * 3 * 32 * 24
    assert found.attention.format is Format.fp32
    assert described(info, Format.nvfp4).attention.format is Format.nvfp4


def test_a_target_of_an_unknown_format_asks_for_one():
    from tiny_heads import make_target

    info = dataclasses.replace(make_target().info, quantization="awq:4")
    with pytest.raises(ValueError, match=r"predict\.format must be one of .*nvfp4 .*awq:4"):
        described(info, None)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: machine(draft_cost=Constant(0.0, "x")),
            r"hardware\.draft_cost\.value must be pos",
        ),
        (lambda: machine(memory_bytes=Constant(-1.0, "x")), r"hardware\.memory_bytes\.value must"),
        (
            lambda: machine(achieved_compute=Constant(1.1, "x")),
            r"achieved_compute\.value must be at",
        ),
        (lambda: machine(draft_cost=Constant(1.0, "")), r"hardware\.draft_cost\.source must say"),
        (
            lambda: machine(draft_cost=Constant(None, "x")),
            r"hardware must have all values, or null",
        ),
        (lambda: machine(num_devices=0), r"hardware\.num_devices must be at least 1"),
        (
            lambda: sizes(num_active_experts=9),
            r"predict\.model\.num_active_experts must be at most",
        ),
        (
            lambda: sizes(attention=PartConfig(0.0)),
            r"predict\.model\.attention\.parameters must be",
        ),
        (lambda: sizes(context_flops=0.0), r"predict\.model\.context_flops must be positive"),
        (lambda: PredictConfig(concurrencies=[0]), r"predict\.concurrencies must be distinct"),
        (lambda: PredictConfig(hit_rate=1.5), r"predict\.hit_rate must lie in \[0, 1\]"),
        (
            lambda: AcceptanceConfig("c", [2.1], "x"),
            r"predict\.acceptance\[\]\.lengths must lie in",
        ),
        (
            lambda: AcceptanceConfig("c", [0.9], "x"),
            r"predict\.acceptance\[\]\.lengths must lie in",
        ),
        (lambda: AcceptanceConfig("c", [1.9, 1.8], "x"), r"must not fall as more is drafted"),
        (
            lambda: configured(sizes(), machine(memory_bytes=Constant(1e9, "x"))),
            r"hardware\.num_devices must hold 11 GB of weights at 1 GB a device, got 1",
        ),
        (
            lambda: configured(sizes(head=PartConfig(1e8, Format.fp32)), machine()),
            r"predict\.format .* must be bf16, fp8 or nvfp4 on .*, got fp32",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_its_key(make, message):
    with pytest.raises(ValueError, match=message):
        make()
