"""A target whose units are quantized and put back in memory: a checkpoint before it is written."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Float32
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from specfit.quantization.units import Unit, fused, units_of
from specfit.targets.target import Target
from specfit_kernels.nvfp4 import fake_quantize_activations, quantize, shared_global_scale
from specfit_kernels.rules import ScaleRule


class UnitSwitch:
    """Sets units of a target to NVFP4, and back, in place.

    Both versions of a weight that was ever quantized are kept: switching again costs nothing.
    """

    def __init__(
        self,
        target: Target,
        *,
        rule: ScaleRule,
        input_scales: dict[str, Float32[Tensor, ""]] | None = None,
    ) -> None:
        """Every unit starts as it is.

        Args:
            target: loaded with plain weights.
            rule: of the block scales.
            input_scales: what divides the activations that go into a module, by its name (W4A4);
                None: activations stay as they are (W4A16).

        Raises:
            ValueError: the target has no unit, or one without an input scale.
        """
        self.rule = rule
        self._parameters: dict[str, Tensor] = dict(target.model.named_parameters())
        self._tensors = units_of(self._parameters)
        if not self._tensors:
            raise ValueError(f"target.path: {target.info.architecture} has no matrix to quantize")
        self._plain: dict[Unit, list[Tensor]] = {}
        self._quantized: dict[Unit, list[Tensor]] = {}
        self._factors: dict[str, float] = {}
        self._chosen: frozenset[Unit] = frozenset()
        self._handles: list[RemovableHandle] = []
        if input_scales is not None:
            self._hook_inputs(target.model, input_scales)

    @property
    def units(self) -> list[Unit]:
        """All units, in order of the layers."""
        return list(self._tensors)

    def num_weights(self, unit: Unit) -> int:
        """Values in the matrices of `unit`."""
        return sum(self._parameters[name].numel() for name in self._tensors[unit])

    def choose(self, chosen: Collection[Unit]) -> None:
        """Quantizes `chosen`, and nothing else."""
        new = frozenset(chosen)
        for unit in self._chosen - new:
            self._set(unit, self._plain[unit])
        for unit in sorted(new - self._chosen):
            if unit not in self._quantized:
                self._plain[unit] = [self._parameters[n].data for n in self._tensors[unit]]
                self._quantized[unit] = self._quantize(unit)
            self._set(unit, self._quantized[unit])
        self._chosen = new

    def close(self) -> None:
        """Leaves the target as it came, and lets go of what was quantized."""
        self.choose([])
        for handle in self._handles:
            handle.remove()
        self._plain.clear()
        self._quantized.clear()

    def groups(self, units: Collection[Unit]) -> list[list[str]]:
        """The tensors of `units` that share a global scale, group by group."""
        return [group for unit in sorted(units) for group in fused(self._tensors[unit])]

    def requantize(self, rule: ScaleRule, factors: Mapping[str, float]) -> None:
        """From now on tensors are quantized by `rule`, times their factor: 1 unless named."""
        self.choose([])
        self.rule = rule
        self._factors = dict(factors)
        self._quantized.clear()

    def _set(self, unit: Unit, values: list[Tensor]) -> None:
        for name, value in zip(self._tensors[unit], values, strict=True):
            self._parameters[name].data = value

    def _quantize(self, unit: Unit) -> list[Tensor]:
        plain = dict(zip(self._tensors[unit], self._plain[unit], strict=True))
        found: dict[str, Tensor] = {}
        for group in fused(plain):
            # The experts of one parameter are matrices of their own.
            stacks = [plain[name].reshape(-1, *plain[name].shape[-2:]) for name in group]
            parts = [
                self._together(group, list(matrices)) for matrices in zip(*stacks, strict=True)
            ]
            for i, name in enumerate(group):
                found[name] = torch.stack([p[i] for p in parts]).view_as(plain[name])
        return [found[name] for name in plain]

    def _together(self, names: list[str], matrices: list[Tensor]) -> list[Tensor]:
        """Matrices that share a global scale, quantized and back."""
        scale = shared_global_scale(matrices, self.rule)
        found = []
        for name, matrix in zip(names, matrices, strict=True):
            quantized = quantize(matrix, self.rule, global_scale=scale, name=name)
            # The codes stay: the factor goes into the scale that divides.
            factor = self._factors.get(name, 1.0)
            quantized = replace(quantized, global_scale=quantized.global_scale / factor)
            found.append(quantized.dequantize(matrix.dtype))
        return found

    def _hook_inputs(self, model: nn.Module, input_scales: dict[str, Tensor]) -> None:
        for unit, names in self._tensors.items():
            for name in names:
                module = name.removesuffix(".weight")
                if module not in input_scales:
                    raise ValueError(
                        f"quantize.activations must be none for {name}: its inputs are not those "
                        "of a linear layer"
                    )
                hook = partial(self._quantize_input, unit, input_scales[module])
                handle = model.get_submodule(module).register_forward_pre_hook(hook)
                self._handles.append(handle)

    def _quantize_input(
        self, unit: Unit, scale: Tensor, _module: nn.Module, args: tuple[Any, ...]
    ) -> tuple[Any, ...] | None:
        if unit not in self._chosen:
            return None
        x: Tensor = args[0]
        quantized = fake_quantize_activations(x, scale)
        if torch.is_grad_enabled():
            quantized = x + (quantized - x).detach()  # a gradient passes as if nothing had happened
        return (quantized, *args[1:])
