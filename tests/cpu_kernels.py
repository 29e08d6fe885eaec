"""Matrices in the formats of the CPU kernels, for their tests."""

import torch
from torch import Tensor

from specfit_kernels import fp8, int8, nvfp4
from specfit_kernels.cpu_weights import Activations, CpuWeight, Matrix, pack
from specfit_kernels.rules import ScaleRule

EPSILON = 2.0**-24  # half a unit in the last place of float32, relative
FORMATS = ["nvfp4", "nvfp4_multiplies", "int8", "fp8", "fp8_blocks", "bf16", "fp32"]
KINDS = [
    *((name, Activations.fp32) for name in FORMATS),
    ("nvfp4", Activations.int8),
    ("int8", Activations.int8),
]


def normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator)


def quantized(name: str, weight: Tensor) -> Matrix:
    match name:
        case "nvfp4":
            return nvfp4.quantize(weight, ScaleRule.amax)
        case "nvfp4_multiplies":
            return nvfp4.quantize(weight, ScaleRule.amax, divides=False)
        case "int8":
            return int8.quantize(weight)
        case "fp8":
            return fp8.quantize_tensor(weight)
        case "fp8_blocks":
            return fp8.quantize_blocks(weight)
        case "bf16":
            return weight.bfloat16()
    return weight


def packed(name: str, weight: Tensor, activations: Activations = Activations.fp32) -> CpuWeight:
    return pack([quantized(name, weight)], activations=activations)
