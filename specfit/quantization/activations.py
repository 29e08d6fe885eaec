"""What goes into matrices: its largest size, from which W4A4 takes its static scales."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float32
from torch import Tensor, nn

from specfit.quantization.divergence import Passages
from specfit.quantization.units import units_of_target
from specfit.targets.target import Target
from specfit_kernels.nvfp4 import shared_global_scale
from specfit_kernels.rules import ScaleRule


def input_amax(target: Target, batches: Sequence[Passages]) -> dict[str, float]:
    """By the name of each linear module of a unit, the largest size in its input."""
    found: dict[str, float] = {}
    for batch in batches:
        valid = batch.valid.to(target.device)
        with _watched(target, found, valid):
            target.states(batch.input_ids.to(target.device), valid, [])
    return found


def input_scales(amax: Mapping[str, float] | None) -> dict[str, Float32[Tensor, ""]] | None:
    """The global scales of inputs, which divide."""
    if amax is None:
        return None
    return {
        name: shared_global_scale([torch.tensor([[value]])], ScaleRule.amax)
        for name, value in amax.items()
    }


@contextmanager
def _watched(
    target: Target, found: dict[str, float], valid: Bool[Tensor, "batch seq"]
) -> Iterator[None]:
    tensors = units_of_target(target)
    names = {tensor.removesuffix(".weight") for unit in tensors.values() for tensor in unit}
    handles = [
        module.register_forward_pre_hook(partial(_note, found, name, valid))
        for name, module in target.model.named_modules()
        if name in names
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _note(
    found: dict[str, float],
    name: str,
    valid: Bool[Tensor, "batch seq"],
    _module: nn.Module,
    args: tuple[Any, ...],
) -> None:
    x: Tensor = args[0]  # batch seq channels; what is padded no engine sees
    if x.shape[:2] == valid.shape:
        x = x[valid]
    found[name] = max(found.get(name, 0.0), float(x.abs().max()))
