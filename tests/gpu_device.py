"""The GPU that tests of it run on, and what they have in common."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch

from specfit_kernels import attention_twins, layer_twins, linear_twins, support
from specfit_kernels.support import Kernel

DEVICE = torch.device("cuda", 0)
HAS_GPU = torch.cuda.is_available() and Kernel.gemv_w4a16 in support.runnable(DEVICE)
IS_BLOCK_SCALED = HAS_GPU and Kernel.skinny_w4a4 in support.runnable(DEVICE)
MARKS = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HAS_GPU, reason="no CUDA device that runs the kernels"),
]
_NEEDS = pytest.mark.skipif(not IS_BLOCK_SCALED, reason="no tensor cores that multiply NVFP4")
# Tokens are multiplied in float16, or in so many terms of NVFP4.
IN_HALVES, *IN_TERMS = 0, *(pytest.param(n, marks=_NEEDS) for n in (1, 2, 3))


@contextmanager
def by_twins() -> Iterator[None]:
    """Has torch compute what a pass launches, on whatever device."""
    from specfit_serve import gpu, gpu_layers

    names = {
        attention_twins: ("attn_verify", "attn_combine"),
        layer_twins: ("rmsnorm_quant", "rope_append", "silu_mul_quant"),
        linear_twins: ("skinny_w4a4", "gemv_w4a16", "gemm_w4a4", "gemm_w4a16"),
    }
    twins = {name: getattr(module, name) for module, some in names.items() for name in some}
    with (
        patch.multiple(gpu_layers, **twins),
        patch.object(gpu, "skinny_bf16", layer_twins.skinny_bf16),
    ):
        yield
