"""Co-tuning finds scales that were set wrong, and keeps nothing that does not help."""

from copy import deepcopy

import pytest
import torch
from tiny_architectures import random_tokens, tiny

from specfit.quantization import cotune as cotuning
from specfit.quantization.cotune import cotune
from specfit.quantization.divergence import ModelDivergence, Passages
from specfit.quantization.measured import Text
from specfit.quantization.switch import UnitSwitch
from specfit.quantization.units import Unit
from specfit.targets.target import Target
from specfit_kernels.rules import ScaleRule

UNITS = [Unit(1, "gate_up"), Unit(3, "qkv"), Unit(4, "down")]


def measuring(architecture="llama", input_scales=None):
    shared = tiny(architecture)
    target = Target(deepcopy(shared.model), shared.tokenizer, shared.info)
    switch = UnitSwitch(target, rule=ScaleRule.search, input_scales=input_scales)

    def passages(seed):
        conversations = [
            (
                random_tokens(4, seed=seed + i).tolist(),
                random_tokens(16, seed=seed + 50 + i).tolist(),
            )
            for i in range(12)
        ]
        return Passages.of(conversations, 4, 16)

    texts = {Text.calibration: passages(0), Text.selection: passages(100)}
    groups = [[unit] for unit in switch.units]
    divergence = ModelDivergence(target, switch, texts, groups=groups, batch_size=4)
    return divergence, torch.tensor([unit in UNITS for unit in switch.units])


def kl(divergence, chosen):
    return float(divergence.kl(chosen, Text.selection).mean())


def test_a_gradient_is_the_slope_of_the_divergence():
    divergence, _ = measuring()
    groups = divergence.switch.groups(UNITS)
    factors = torch.zeros(len(groups), requires_grad=True)
    model = divergence.target.model
    with cotuning._scaled(model, groups, factors):
        divergence.loss(UNITS, Text.calibration, 0).backward()
    slope = factors.grad.clone()
    assert slope.abs().min() > 0
    for i, group in enumerate(groups):
        ends = []
        for step in (0.002, -0.002):
            divergence.requantize(
                divergence.switch.rule, {name: float(torch.tensor(step).exp()) for name in group}
            )
            ends.append(float(divergence.loss(UNITS, Text.calibration, 0)))
            divergence.requantize(divergence.switch.rule, {})
        assert (ends[0] - ends[1]) / 0.004 == pytest.approx(float(slope[i]), rel=0.05, abs=1e-6)


@pytest.fixture
def spoiled(monkeypatch):
    """A divergence whose quantized weights are 15 % too large, and its KL without that."""
    monkeypatch.setattr(cotuning, "LR", 0.02)
    divergence, chosen = measuring()
    right, together = kl(divergence, chosen), UnitSwitch._together

    def enlarged(self, names, matrices):
        return [matrix * 1.15 for matrix in together(self, names, matrices)]

    monkeypatch.setattr(UnitSwitch, "_together", enlarged)
    divergence.requantize(divergence.switch.rule, {})
    return divergence, chosen, right


def test_scales_that_are_wrong_are_found(spoiled):
    divergence, chosen, right = spoiled
    before = kl(divergence, chosen)
    factors = cotune(divergence, chosen)
    assert all(factor < 0.97 for factor in factors.values())
    divergence.requantize(divergence.switch.rule, factors)
    assert before > 2 * right
    assert kl(divergence, chosen) < (before + right) / 2


def test_matrices_that_are_fused_have_one_factor(spoiled):
    divergence, chosen, _ = spoiled
    factors = cotune(divergence, chosen)
    groups = divergence.switch.groups(UNITS)
    assert set(factors) == {name for group in groups for name in group}
    assert [len({factors[name] for name in group}) for group in groups] == [1, 1, 1]
    assert len(set(factors.values())) == 3


def test_what_does_not_lower_the_divergence_is_not_kept(monkeypatch):
    monkeypatch.setattr(cotuning, "LR", 3.0)
    divergence, chosen = measuring()
    before = kl(divergence, chosen)
    assert cotune(divergence, chosen) == {}
    assert kl(divergence, chosen) == before


def test_every_factor_has_a_gradient_where_activations_are_quantized():
    shared = tiny("llama")
    names = [n for n, m in shared.model.named_modules() if isinstance(m, torch.nn.Linear)]
    scales = dict.fromkeys(names, torch.tensor(300.0))
    divergence, _ = measuring(input_scales=scales)
    units = [Unit(5, name) for name in ("qkv", "o", "gate_up", "down")]
    groups = divergence.switch.groups(units)
    factors = torch.zeros(len(groups), requires_grad=True)
    with cotuning._scaled(divergence.target.model, groups, factors):
        divergence.loss(units, Text.calibration, 0).backward()
    assert factors.grad.abs().min() > 0
