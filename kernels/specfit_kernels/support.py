"""What a device can run. Nothing here falls back: who asks for what a device lacks is told.

Each kernel is compiled ahead of time, in tests, for the architectures that stand beside it.
"""

import os
from enum import Enum

import torch


class Kernel(Enum):
    """Kernels, or files of them that run in the same places."""

    linear_tokens = "linear_tokens"
    skinny_w4a4 = "skinny_w4a4"
    gemm_w4a4 = "gemm_w4a4"
    gemv_w4a16 = "gemv_w4a16"
    gemm_w4a16 = "gemm_w4a16"
    norm_quant = "norm_quant"
    silu_mul = "silu_mul"
    rope_append = "rope_append"
    skinny_bf16 = "skinny_bf16"
    attention = "attention"
    sampling = "sampling"


_ALL = (90, 100, 103, 120)
# Without block-scaled tensor cores Triton multiplies in bfloat16, and says nothing.
_BLOCK_SCALED = (100, 103, 120)
ARCHITECTURES = {
    Kernel.linear_tokens: _ALL,
    Kernel.skinny_w4a4: _BLOCK_SCALED,
    Kernel.gemm_w4a4: _BLOCK_SCALED,
    Kernel.gemv_w4a16: _ALL,
    Kernel.gemm_w4a16: _ALL,
    Kernel.norm_quant: _ALL,
    Kernel.silu_mul: _ALL,
    Kernel.rope_append: _ALL,
    Kernel.skinny_bf16: _ALL,
    Kernel.attention: _ALL,
    Kernel.sampling: _ALL,
}
# Where the torch twin of a kernel is.
_TWINS = {
    "linear_twins": (
        Kernel.linear_tokens,
        Kernel.skinny_w4a4,
        Kernel.gemm_w4a4,
        Kernel.gemv_w4a16,
        Kernel.gemm_w4a16,
    ),
    "layer_twins": (Kernel.norm_quant, Kernel.silu_mul, Kernel.rope_append, Kernel.skinny_bf16),
    "attention_twins": (Kernel.attention,),
    "sampling_twins": (Kernel.sampling,),
}
_INSTEAD = {Kernel.skinny_w4a4: Kernel.gemv_w4a16, Kernel.gemm_w4a4: Kernel.gemm_w4a16}


def architecture(device: torch.device) -> int | None:
    """The compute capability, 90 for 9.0; None for what is not a GPU of NVIDIA's."""
    if device.type != "cuda" or torch.version.cuda is None:
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def runnable(device: torch.device) -> frozenset[Kernel]:
    """The kernels that a device runs; on a CPU all of them in Triton's interpreter, or none."""
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1":
        return frozenset(Kernel)
    arch = architecture(device)
    return frozenset(kernel for kernel, runs_on in ARCHITECTURES.items() if arch in runs_on)


def require(kernel: Kernel, device: torch.device) -> None:
    """Returns when the device runs the kernel.

    Raises:
        ValueError: It does not; the message says what would.
    """
    can = runnable(device)
    if kernel in can:
        return
    arch = architecture(device)
    got = f"{device}" if arch is None else f"{torch.cuda.get_device_name(device)} (sm_{arch})"
    known = ", ".join(f"sm_{number}" for number in ARCHITECTURES[kernel])
    if device.type == "cpu":
        hint = "use specfit_kernels.cpu there"
    elif _INSTEAD.get(kernel) in can:
        hint = f"use {_INSTEAD[kernel].value} there"
    else:
        module = next(name for name, kernels in _TWINS.items() if kernel in kernels)
        hint = f"use specfit_kernels.{module} there"
    raise ValueError(f"the device of {kernel.value} must be one of {known}, got {got}; {hint}")
