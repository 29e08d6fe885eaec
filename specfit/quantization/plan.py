"""What a checkpoint's matrices become."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from specfit.quantization.config import Activations, Precision, QuantizeConfig, Rest
from specfit.quantization.units import Unit
from specfit_kernels.rules import ScaleRule


@dataclass(frozen=True)
class QuantizationPlan:
    """Which units become what; all other tensors stay as they are.

    A module or tensor is named as in the result: experts that the source has fused have one each.
    """

    precision: Mapping[Unit, Precision]
    rule: ScaleRule = ScaleRule.search  # of NVFP4 weights
    activations: Activations = Activations.none
    # By module: the largest size in its input. W4A4 needs it of every NVFP4 matrix; more are fine.
    input_amax: Mapping[str, float] = field(default_factory=dict)
    # By tensor: what its dequantized values are multiplied with, the codes staying; default 1.
    scale_factors: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, values in (
            ("input_amax", self.input_amax),
            ("scale_factors", self.scale_factors),
        ):
            for key, value in values.items():
                if not (value > 0 and isfinite(value)):
                    raise ValueError(f"{name}[{key}] must be positive and finite, got {value}")

    @classmethod
    def of(
        cls,
        config: QuantizeConfig,
        units: Collection[Unit],
        chosen: Collection[Unit],
        *,
        input_amax: Mapping[str, float] | None = None,
        scale_factors: Mapping[str, float] | None = None,
    ) -> "QuantizationPlan":
        """`chosen` in NVFP4, the others of `units` in the rest's format."""
        precision = dict.fromkeys(chosen, Precision.nvfp4)
        rest = rest_of(config)
        if rest is not None:
            precision |= {unit: rest for unit in units if unit not in precision}
        return cls(
            precision={unit: precision[unit] for unit in sorted(precision)},
            rule=config.rule,
            activations=config.activations,
            input_amax=input_amax or {},
            scale_factors=scale_factors or {},
        )

    def to_json(self) -> dict[str, Any]:
        """As JSON values; equal plans, equal values."""
        return {
            "precision": {str(unit): value.name for unit, value in self.precision.items()},
            "rule": self.rule.name,
            "activations": self.activations.name,
            "input_amax": dict(self.input_amax),
            "scale_factors": dict(self.scale_factors),
        }


def rest_of(config: QuantizeConfig) -> Precision | None:
    """The format of the units that are not NVFP4; None: as they are."""
    return None if config.rest is Rest.none else Precision[config.rest.name]
