"""A target whose units are quantized and put back in memory: a checkpoint before it is written."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Float32
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from specfit.quantization.config import Precision
from specfit.quantization.digests import INPUT_SCALE, digest, digests
from specfit.quantization.units import Unit, fused, units_of_target
from specfit.targets.target import Target
from specfit_kernels import fp8
from specfit_kernels.nvfp4 import fake_quantize_activations, quantize, shared_global_scale
from specfit_kernels.rules import ScaleRule


class UnitSwitch:
    """Sets units of a target to NVFP4, the others to the rest's format, and all back, in place.

    All versions of a weight that were ever set are kept: switching again costs nothing. They are
    made on the CPU, where `write_checkpoint` makes them, so that their bits are the same.
    """

    def __init__(
        self,
        target: Target,
        *,
        rule: ScaleRule,
        rest: Precision | None = None,
        units: Collection[Unit] | None = None,
        input_scales: dict[str, Float32[Tensor, ""]] | None = None,
    ) -> None:
        """Every unit starts as it is.

        Args:
            target: loaded with plain weights.
            rule: of the block scales.
            rest: the format of units that are not chosen; None: they stay as they are.
            units: those that are switched; None: all.
            input_scales: what divides the activations that go into a module, by its name (W4A4);
                None: activations stay as they are (W4A16).

        Raises:
            ValueError: the target has no unit, or one without an input scale.
        """
        self.rule = rule
        self._rest = rest
        self._model: nn.Module = target.model
        self._parameters: dict[str, Tensor] = dict(target.model.named_parameters())
        found = units_of_target(target)
        self._tensors = {u: found[u] for u in found if units is None or u in units}
        if not self._tensors:
            raise ValueError(f"target.path: {target.info.architecture} has no matrix to quantize")
        self._plain: dict[Unit, list[Tensor]] = {}
        self._quantized: dict[tuple[Unit, Precision], list[Tensor]] = {}
        self._factors: dict[str, float] = {}
        self._now: frozenset[tuple[Unit, Precision]] = frozenset()
        self._handles: list[RemovableHandle] = []
        self._input_scales = input_scales or {}
        if input_scales is not None:
            self._hook_inputs(input_scales)

    @property
    def units(self) -> list[Unit]:
        """All units, in order of the layers."""
        return list(self._tensors)

    def num_weights(self, unit: Unit) -> int:
        """Values in the matrices of `unit`."""
        return sum(self._parameters[name].numel() for name in self._tensors[unit])

    def precisions(self, chosen: Collection[Unit]) -> frozenset[tuple[Unit, Precision]]:
        """What becomes of the units that do not stay as they came, with `chosen` in NVFP4."""
        found = {(unit, Precision.nvfp4) for unit in chosen}
        if self._rest is not None:
            found |= {(unit, self._rest) for unit in set(self.units) - set(chosen)}
        return frozenset(found)

    def choose(self, chosen: Collection[Unit]) -> None:
        """Quantizes `chosen` to NVFP4, and all others to the rest's format, if it has one."""
        self._change(self.precisions(chosen))

    def restore(self) -> None:
        """All units as they came."""
        self._change(frozenset())

    def digests(self, chosen: Collection[Unit]) -> dict[str, str]:
        """Of all that the target computes with, `chosen` in NVFP4; see `digests.digests`."""
        self.choose(chosen)
        found = digests(self._model)
        self.restore()
        for unit in chosen if self._input_scales else ():
            for name in self._tensors[unit]:
                module = name.removesuffix(".weight")
                found[f"{module}.{INPUT_SCALE}"] = digest(self._input_scales[module])
        return found

    def close(self) -> None:
        """Leaves the target as it came, and lets go of what was quantized."""
        self.restore()
        for handle in self._handles:
            handle.remove()
        self._plain.clear()
        self._quantized.clear()

    def groups(self, units: Collection[Unit]) -> list[list[str]]:
        """The tensors of `units` that share a global scale, group by group."""
        return [group for unit in sorted(units) for group in fused(self._tensors[unit])]

    def requantize(self, rule: ScaleRule, factors: Mapping[str, float]) -> None:
        """From now on NVFP4 is made by `rule`, times the tensor's factor: 1 unless named."""
        self.restore()
        self.rule = rule
        self._factors = dict(factors)
        for key in [key for key in self._quantized if key[1] is Precision.nvfp4]:
            del self._quantized[key]

    def _change(self, new: frozenset[tuple[Unit, Precision]]) -> None:
        precision = dict(new)
        for unit in sorted({unit for unit, _ in new ^ self._now}):
            names = self._tensors[unit]
            if unit not in self._plain:
                self._plain[unit] = [self._parameters[name].data for name in names]
            for name, value in zip(names, self._values(unit, precision.get(unit)), strict=True):
                self._parameters[name].data = value
        self._now = new

    def _values(self, unit: Unit, precision: Precision | None) -> list[Tensor]:
        if precision is None:
            return self._plain[unit]
        key = unit, precision
        if key not in self._quantized:
            plain = dict(zip(self._tensors[unit], self._plain[unit], strict=True))
            if precision is Precision.nvfp4:
                self._quantized[key] = self._in_nvfp4(plain)
            else:
                self._quantized[key] = [_in_fp8(n, value, precision) for n, value in plain.items()]
        return self._quantized[key]

    def _in_nvfp4(self, plain: Mapping[str, Tensor]) -> list[Tensor]:
        found: dict[str, Tensor] = {}
        for group in fused(plain):
            # The experts of one parameter are matrices of their own.
            stacks = [plain[name].reshape(-1, *plain[name].shape[-2:]) for name in group]
            parts = [
                self._together(group, [matrix.cpu() for matrix in matrices])
                for matrices in zip(*stacks, strict=True)
            ]
            for i, name in enumerate(group):
                stack = torch.stack([p[i] for p in parts])
                found[name] = stack.view_as(plain[name]).to(plain[name].device)
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

    def _hook_inputs(self, input_scales: dict[str, Tensor]) -> None:
        for unit, names in self._tensors.items():
            for name in names:
                module = name.removesuffix(".weight")
                if module not in input_scales:
                    raise ValueError(
                        f"quantize.activations must be none for {name}: its inputs are not those "
                        "of a linear layer"
                    )
                hook = partial(self._quantize_input, unit, input_scales[module])
                handle = self._model.get_submodule(module).register_forward_pre_hook(hook)
                self._handles.append(handle)

    def _quantize_input(
        self, unit: Unit, scale: Tensor, _module: nn.Module, args: tuple[Any, ...]
    ) -> tuple[Any, ...] | None:
        if (unit, Precision.nvfp4) not in self._now:
            return None
        x: Tensor = args[0]
        quantized = fake_quantize_activations(x, scale)
        if torch.is_grad_enabled():
            quantized = x + (quantized - x).detach()  # a gradient passes as if nothing had happened
        return (quantized, *args[1:])


def _in_fp8(name: str, values: Tensor, precision: Precision) -> Tensor:
    """Each matrix by itself, quantized and back."""
    quantize_ = fp8.quantize_blocks if precision is Precision.fp8_block else fp8.quantize_tensor
    matrices = values.reshape(-1, *values.shape[-2:])
    if values.ndim == 3 and name.endswith("gate_up_proj"):
        matrices = matrices.reshape(-1, values.shape[1] // 2, values.shape[2])  # written apart
    found = [quantize_(m.cpu(), name=name).dequantized(m.dtype) for m in matrices]
    return torch.stack(found).view_as(values).to(values.device)
