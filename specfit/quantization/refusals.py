"""What cannot be quantized, or not within its budget: known before anything is answered."""

import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from specfit.checks import require
from specfit.files import require_free
from specfit.quantization.checkpoint import quantized_size
from specfit.quantization.config import Activations, BudgetIn, QuantizeConfig
from specfit.quantization.layout import unfit_units, unit_sizes
from specfit.quantization.plan import QuantizationPlan
from specfit.quantization.reading import scheme_of
from specfit.quantization.safetensors_stream import read_shards
from specfit.quantization.units import Unit, unit_of, units_of_target
from specfit.targets.target import Target

log = logging.getLogger(__name__)


def units_to_choose_from(config: QuantizeConfig, source: Path, target: Target) -> list[Unit]:
    """In order of the layers. What NVFP4 cannot hold is left out, stays as it is, and is logged.

    Args:
        config: what is asked for.
        source: the checkpoint's folder.
        target: the same, loaded.

    Raises:
        ValueError: the target is quantized already, is computed in a type that does not hold what
            is stored, or has no unit that NVFP4 can hold; its experts cannot be quantized as asked;
            or the budget is beyond what it has.
    """
    scheme = scheme_of(source)
    if scheme is not None:
        raise ValueError(
            f"quantize.budget must be null for a target that is quantized already, got {scheme}; "
            "specfit fits to it as it is"
        )
    tensors, unfit = units_of_target(target), unfit_units(source)
    units = [unit for unit in tensors if unit not in unfit]
    if not units:
        raise ValueError(f"target.path: {target.info.architecture} has no matrix to quantize")
    if len(units) < len(tensors):
        unit = min(unfit.keys() & tensors.keys())
        log.warning(
            "quantize: %d of %d units stay as they are: %s",
            *(len(tensors) - len(units), len(tensors), unfit[unit]),
        )
    _check_dtype(source, target.model.dtype, units)
    check_linear(config, (name for unit in units for name in tensors[unit]))
    quantized_size(source, _plan(config, units, units))
    min_share(config, source, units)
    return units


def min_share(
    config: QuantizeConfig,
    source: Path,
    units: Collection[Unit],
    input_amax: Mapping[str, float] | None = None,
) -> float | None:
    """The least share of the weights that becomes NVFP4; None under a ceiling of KL.

    Where units differ in bits a weight, as if all had those of the one that has most.

    Raises:
        ValueError: the budget is of more bits than the target has without NVFP4.
    """
    if config.budget is None or config.budget_in is BudgetIn.kl_nats:
        return None
    if config.budget_in is BudgetIn.share:
        return config.budget
    plans = [_plan(config, units, chosen, input_amax) for chosen in (units, [])]
    sizes = [unit_sizes(source, plan) for plan in plans]
    least, most = (max(size[unit].bits_per_weight for unit in units) for size in sizes)
    words = f"be below {most:.4g} bits a weight, which this target has without NVFP4"
    require(config.budget < most, "quantize.budget", words, config.budget)
    return min(1.0, (most - config.budget) / (most - least))


def check_disk(config: QuantizeConfig, source: Path, units: Collection[Unit], folder: Path) -> None:
    """Whether the checkpoint that a budget allows fits beside `folder`; under a ceiling, the least.

    Raises:
        DiskFull: less is free.
    """
    share = min_share(config, source, units)
    share = 1.0 if share is None else share
    least, most = (quantized_size(source, _plan(config, units, some)) for some in (units, []))
    size = round(share * least + (1 - share) * most)
    require_free(folder, size, "the quantized checkpoint")


def check_linear(config: QuantizeConfig, tensors: Iterable[str]) -> None:
    """Whether co-tuning and W4A4, which work on linear layers, can have these parameters.

    Raises:
        ValueError: one is asked for, and a parameter holds all experts of a layer.
    """
    for name in tensors:
        if name.endswith(".weight"):
            continue
        if config.cotune:
            raise ValueError(f"quantize.cotune must be false for {name}: it is no linear layer")
        if config.activations is not Activations.none:
            raise ValueError(
                f"quantize.activations must be none for {name}: its inputs are not those of a "
                "linear layer"
            )


def _plan(
    config: QuantizeConfig,
    units: Collection[Unit],
    chosen: Collection[Unit],
    input_amax: Mapping[str, float] | None = None,
) -> QuantizationPlan:
    """Without the scales of inputs, 32 bits a matrix, as long as their sizes are not known."""
    if input_amax is None:
        config = replace(config, activations=Activations.none)
    return QuantizationPlan.of(config, units, chosen, input_amax=input_amax)


def _check_dtype(source: Path, dtype: torch.dtype, units: Collection[Unit]) -> None:
    """What is measured is made of the loaded weights, what is written of the stored ones."""
    for shard in read_shards(source):
        for name, stored in shard.tensors.items():
            if unit_of(name) in units and torch.promote_types(stored.dtype, dtype) != dtype:
                own = str(stored.dtype).removeprefix("torch.")
                raise ValueError(
                    f"target.dtype must hold {name} as it is stored, in {own}, got {dtype}; set "
                    f"target.dtype={own}"
                )
