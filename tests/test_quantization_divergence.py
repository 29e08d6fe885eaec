"""Units are quantized in place and put back, and what that does to a target is measured exactly."""

from copy import deepcopy

import pytest
import torch
from tiny_architectures import random_tokens, tiny
from torch import nn

from specfit.quantization.config import Precision
from specfit.quantization.digests import digests
from specfit.quantization.divergence import ModelDivergence, Passages
from specfit.quantization.measured import Divergence, Text, UnitsAlone
from specfit.quantization.switch import UnitSwitch
from specfit.quantization.units import Unit, unit_of
from specfit.targets.target import Target
from specfit_kernels import fp8
from specfit_kernels.nvfp4 import fake_quantize_activations, quantize, shared_global_scale
from specfit_kernels.rules import ScaleRule

ARCHITECTURES = ["llama", "qwen3_moe", "gemma2", "gpt_oss", "gemma3"]


def own(architecture):
    """A target that a test may change."""
    shared = tiny(architecture)
    return Target(deepcopy(shared.model), shared.tokenizer, shared.info)


def weights(target):
    return {name: p.detach().clone() for name, p in target.model.named_parameters()}


def passages(num=5, context=6, counted=7):
    lengths = [context + 3, 2, context, 1, 4]  # prompts longer than the context, and shorter
    conversations = [
        (random_tokens(lengths[i % 5], seed=i).tolist(), random_tokens(9, seed=50 + i).tolist())
        for i in range(num)
    ]
    return conversations, Passages.of(conversations, context, counted)


def measuring(target, batch_size=2, **settings):
    switch = UnitSwitch(target, rule=ScaleRule.search, **settings)
    texts = {
        Text.units: passages()[1],
        Text.calibration: passages()[1],
        Text.selection: passages(3)[1],
    }
    groups = [[unit] for unit in switch.units]
    return ModelDivergence(target, switch, texts, groups=groups, batch_size=batch_size)


def mask(divergence, *units):
    return torch.tensor([unit in units for unit in divergence.switch.units])


@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe"])
def test_a_unit_is_quantized_and_put_back(architecture):
    target = own(architecture)
    before = weights(target)
    switch = UnitSwitch(target, rule=ScaleRule.amax)
    for unit in switch.units:
        switch.choose([unit])
        changed = {n for n, w in weights(target).items() if not torch.equal(w, before[n])}
        assert changed
        assert {name for name in changed if f"layers.{unit.layer}." in name} == changed
        assert sum(before[name].numel() for name in changed) == switch.num_weights(unit)
    switch.choose([])
    assert all(torch.equal(w, before[n]) for n, w in weights(target).items())


def test_fused_matrices_share_a_global_scale():
    target = own("llama")
    before = weights(target)
    switch = UnitSwitch(target, rule=ScaleRule.search)
    switch.choose([Unit(2, "qkv")])
    names = [f"model.layers.2.self_attn.{leaf}_proj.weight" for leaf in "qkv"]
    scale = shared_global_scale([before[name] for name in names])
    alone = 0
    for name in names:
        assert torch.equal(
            weights(target)[name], quantize(before[name], global_scale=scale).dequantize()
        )
        alone += torch.equal(weights(target)[name], quantize(before[name]).dequantize())
    assert alone < 3


def test_each_expert_of_one_parameter_has_its_own_global_scale():
    target = own("qwen3_moe")
    name = "model.layers.1.mlp.experts.down_proj"
    plain = weights(target)[name]
    UnitSwitch(target, rule=ScaleRule.amax).choose([Unit(1, "experts")])
    for expert, found in zip(plain, weights(target)[name], strict=True):
        assert torch.equal(found, quantize(expert, ScaleRule.amax).dequantize())


def test_activations_are_quantized_where_their_unit_is():
    target = own("llama")
    scales = {
        name: torch.tensor(100.0)
        for name, module in target.model.named_modules()
        if isinstance(module, nn.Linear)
    }
    switch = UnitSwitch(target, rule=ScaleRule.amax, input_scales=scales)
    module = target.model.model.layers[1].mlp.down_proj
    x = torch.randn(3, module.in_features)
    plain = module(x)
    switch.choose([Unit(0, "down"), Unit(1, "qkv")])
    assert torch.equal(module(x), plain)
    switch.choose([Unit(1, "down")])
    expected = fake_quantize_activations(x, torch.tensor(100.0)) @ module.weight.T
    torch.testing.assert_close(module(x), expected)
    assert not torch.allclose(module(x), x @ module.weight.T, rtol=1e-3)


def test_inputs_of_experts_in_one_parameter_are_refused():
    with pytest.raises(ValueError, match=r"quantize\.activations must be none for .*experts"):
        UnitSwitch(own("qwen3_moe"), rule=ScaleRule.amax, input_scales=scales_of("qwen3_moe"))


def scales_of(architecture):
    modules = tiny(architecture).model.named_modules()
    return {n: torch.tensor(1.0) for n, m in modules if isinstance(m, nn.Linear)}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("layer", [0, 1, 3, 5, 6])
def test_a_pass_from_a_layer_is_the_pass_from_the_start(architecture, layer):
    target = own(architecture)
    _, text = passages()
    aux, last = target.states(text.input_ids, text.valid, list(range(6)))
    entering = [*aux.unbind(2), last][layer]
    found = target.states_from(layer, entering, text.input_ids, text.valid)
    assert len(found) == 7 - layer
    for states, expected in zip(found, [*aux.unbind(2), last][layer:], strict=True):
        assert torch.equal(states[text.valid], expected[text.valid])
    again, _ = target.states(text.input_ids, text.valid, [layer])  # all layers are as they were
    assert torch.equal(again[text.valid][:, 0], entering[text.valid])


@pytest.mark.parametrize("architecture", ARCHITECTURES[:3])
def test_kl_is_that_of_two_whole_models(architecture):
    target = own(architecture)
    divergence = measuring(target)
    assert isinstance(divergence, Divergence)
    units = divergence.switch.units
    chosen = {units[6], units[9], units[-1]}
    conversations, _ = passages(3)
    logits = {}
    for name, some in (("plain", []), ("quantized", chosen)):
        divergence.switch.choose(some)
        logits[name] = [
            target.model(torch.tensor([prompt[-6:] + answer[:7]]))
            .logits[0]
            .double()
            .log_softmax(-1)
            for prompt, answer in conversations
        ]
    found = divergence.kl(mask(divergence, *chosen), Text.selection)
    for kl, p, q in zip(found, logits["plain"], logits["quantized"], strict=True):
        expected = (p.exp() * (p - q)).sum(-1)[-8:-1].mean()
        assert float(kl) == pytest.approx(float(expected), rel=1e-3, abs=1e-7)
    assert min(found) > 1e-5


def test_nothing_chosen_diverges_by_nothing():
    divergence = measuring(own("llama"))
    assert not divergence.kl(mask(divergence), Text.calibration).any()


@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_the_batch_does_not_change_a_divergence(batch_size):
    target = own("qwen3_moe")
    whole, parts = measuring(target, 5), measuring(target, batch_size)
    chosen = mask(whole, *whole.switch.units[::3])
    torch.testing.assert_close(
        parts.kl(chosen, Text.calibration), whole.kl(chosen, Text.calibration), rtol=1e-3, atol=1e-7
    )


def alone(divergence):
    """All parts of the text of units, which is the calibration text again."""
    return UnitsAlone.joined([divergence.alone(i) for i in range(divergence.num_parts)])


@pytest.mark.parametrize("batch_size", [1, 2, 3])
def test_gram_is_the_covariance_of_logit_changes_whatever_the_batch(batch_size):
    target = own("llama")
    divergence = measuring(target, batch_size)
    half_a, half_b = alone(divergence).gram_halves
    conversations, _ = passages()
    units = divergence.switch.units
    sums = torch.zeros(2, len(units), len(units), dtype=torch.float64)
    counts = [0, 0]
    for i, (prompt, answer) in enumerate(conversations):
        ids = torch.tensor([prompt[-6:] + answer[:7]])
        with torch.no_grad():
            divergence.switch.choose([])
            plain = target.model(ids).logits[0, -8:-1].double()
            p = plain.softmax(-1)
            changes = []
            for unit in units:
                divergence.switch.choose([unit])
                changes.append(target.model(ids).logits[0, -8:-1].double() - plain)
        d = torch.stack(changes)
        centred = d - (p * d).sum(-1, keepdim=True)
        sums[i % 2] += torch.einsum("tv,itv,jtv->ij", p, centred, centred)
        counts[i % 2] += 7
    for found, total, count in zip((half_a, half_b), sums, counts, strict=True):
        scale = (total / count).diagonal().max()
        torch.testing.assert_close(found, total / count, rtol=1e-3, atol=float(scale) * 1e-4)


def test_one_units_gram_is_twice_its_divergence():
    divergence = measuring(own("llama"))
    found = alone(divergence)
    assert found.num_tokens == (21, 14)  # of three sequences of five, and of two
    mean = found.gram_sums.sum(0) / 35
    for i, unit in enumerate(divergence.switch.units[:4]):
        kl = divergence.kl(mask(divergence, unit), Text.calibration)
        torch.testing.assert_close(found.kl_nats[i], kl.double(), rtol=1e-3, atol=1e-7)
        assert float(mean[i, i]) / 2 == pytest.approx(float(kl.mean()), rel=0.1)


def test_a_part_of_a_text_is_as_wide_as_its_longest_sequence():
    conversations, text = passages()
    for part, (prompt, answer) in zip(text.split(1), conversations, strict=True):
        assert part.input_ids.tolist() == [prompt[-6:] + answer[:7]]
        assert part.valid.all()
    assert [part.input_ids.shape for part in text.split(2)] == [(2, 13), (2, 13), (1, 11)]


@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("rest", [Precision.fp8, Precision.fp8_block])
def test_the_rest_has_its_format_wherever_a_pass_begins(architecture, rest):
    target = own(architecture)
    before = weights(target)
    divergence = measuring(target, rest=rest)
    plain = measuring(own(architecture)).kl(mask(divergence), Text.selection)
    units = divergence.switch.units
    assert not plain.any()
    assert divergence.kl(mask(divergence), Text.selection).min() > 0
    for chosen in ([units[-1]], [units[-1], units[3]], [], [units[3]], units):
        found = divergence.kl(mask(divergence, *chosen), Text.selection)
        fresh = measuring(own(architecture), rest=rest)
        assert torch.equal(found, fresh.kl(mask(fresh, *chosen), Text.selection))
    assert all(torch.equal(w, before[n]) for n, w in weights(target).items())


@pytest.mark.parametrize(
    ("rest", "quantized"),
    [(Precision.fp8, fp8.quantize_tensor), (Precision.fp8_block, fp8.quantize_blocks)],
)
def test_fp8_experts_of_one_parameter_have_scales_of_their_own_for_gate_and_up(rest, quantized):
    target = own("qwen3_moe")
    prefix = "model.layers.1.mlp.experts"
    plain = weights(target)
    UnitSwitch(target, rule=ScaleRule.amax, rest=rest).choose([])
    for i in range(4):
        gate_up, down = (plain[f"{prefix}.{x}_proj"][i] for x in ("gate_up", "down"))
        parts = [quantized(part).dequantized(torch.float32) for part in gate_up.chunk(2)]
        now = weights(target)
        assert torch.equal(now[f"{prefix}.gate_up_proj"][i], torch.cat(parts))
        assert torch.equal(
            now[f"{prefix}.down_proj"][i], quantized(down).dequantized(torch.float32)
        )


def test_units_that_are_left_out_stay_as_they_came():
    target = own("llama")
    before = weights(target)
    units = [Unit(1, "down"), Unit(4, "qkv")]
    switch = UnitSwitch(target, rule=ScaleRule.amax, rest=Precision.fp8, units=units)
    assert switch.units == units
    switch.choose(units[:1])
    changed = {n for n, w in weights(target).items() if not torch.equal(w, before[n])}
    assert {str(unit_of(name)) for name in changed} == {"layers.1.down", "layers.4.qkv"}


def test_digests_differ_where_a_bit_does():
    target = own("llama")
    switch = UnitSwitch(target, rule=ScaleRule.amax)
    whole, part = (switch.digests(units) for units in (switch.units, switch.units[1:]))
    assert digests(target.model) == switch.digests([])
    assert {str(unit_of(name)) for name in whole if whole[name] != part[name]} == {"layers.0.down"}
    weight = target.model.model.norm.weight.data
    before = digests(target.model)
    weight[3] = torch.nextafter(weight[3], torch.tensor(9.0))
    changed = digests(target.model)
    assert [name for name in before if before[name] != changed[name]] == ["model.norm.weight"]


def test_groups_of_units_are_chosen_together():
    target = own("llama")
    apart = measuring(target)
    layers = [[u for u in apart.switch.units if u.layer == i] for i in range(6)]
    together = ModelDivergence(
        target, apart.switch, {Text.selection: passages(3)[1]}, groups=layers, batch_size=2
    )
    assert together.costs.sum() == apart.costs.sum()
    assert len(set(together.costs.tolist())) == 1
    chosen = torch.tensor([False, True, False, False, True, False])
    units = torch.tensor([unit.layer in (1, 4) for unit in apart.switch.units])
    assert torch.equal(together.kl(chosen, Text.selection), apart.kl(units, Text.selection))


def test_what_was_measured_before_does_not_change_a_divergence():
    target = own("qwen3")
    divergence, fresh = measuring(target), measuring(own("qwen3"))
    generator = torch.Generator().manual_seed(0)
    for _ in range(12):
        chosen = torch.rand(len(divergence.groups), generator=generator) < 0.4
        once = ModelDivergence(
            fresh.target,
            fresh.switch,
            {Text.selection: passages(3)[1]},
            groups=fresh.groups,
            batch_size=2,
        )
        expected = once.kl(chosen, Text.selection)
        assert torch.equal(divergence.kl(chosen, Text.selection), expected)
        assert torch.equal(divergence.kl(chosen, Text.selection), expected)


def test_rescaled_weights_are_not_taken_for_those_before():
    divergence = measuring(own("llama"))
    units = divergence.switch.units
    chosen = mask(divergence, units[0], units[-1])
    before = divergence.kl(chosen, Text.selection)
    names = [name for group in divergence.switch.groups([units[0]]) for name in group]
    divergence.requantize(divergence.switch.rule, dict.fromkeys(names, 1.3))
    assert not torch.allclose(divergence.kl(chosen, Text.selection), before, rtol=1e-3)
    divergence.requantize(divergence.switch.rule, {})
    assert torch.equal(divergence.kl(chosen, Text.selection), before)
