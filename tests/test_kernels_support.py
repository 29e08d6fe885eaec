"""What a device runs, and what is said of one that does not."""

import importlib
import re

import pytest
import torch

from specfit_kernels import support
from specfit_kernels.support import Kernel, require, runnable

GPU = torch.device("cuda", 0)
# A function of files with several kernels.
PARTS = {
    Kernel.linear_tokens: "quantize_tokens",
    Kernel.norm_quant: "rmsnorm_quant",
    Kernel.silu_mul: "silu_mul_quant",
    Kernel.attention: "attn_verify",
    Kernel.sampling: "accept",
}


@pytest.fixture
def device_of(monkeypatch):
    """Makes cuda:0 a GPU of a compute capability."""

    def set_to(major: int, minor: int, name: str) -> None:
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (major, minor))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    return set_to


@pytest.mark.parametrize(
    ("major", "minor", "block_scaled"),
    [(9, 0, False), (10, 0, True), (10, 3, True), (12, 0, True)],
)
def test_nvfp4_products_need_block_scaled_tensor_cores(device_of, major, minor, block_scaled):
    device_of(major, minor, "a GPU")
    need_them = {Kernel.skinny_w4a4, Kernel.gemm_w4a4}
    assert runnable(GPU) == (set(Kernel) if block_scaled else set(Kernel) - need_them)
    assert support.architecture(GPU) == 10 * major + minor


@pytest.mark.parametrize(
    ("kernel", "instead"),
    [(Kernel.skinny_w4a4, "gemv_w4a16"), (Kernel.gemm_w4a4, "gemm_w4a16")],
)
def test_a_hopper_is_told_which_kernel_to_use(device_of, kernel, instead):
    device_of(9, 0, "NVIDIA H200")
    message = (
        f"^the device of {kernel.value} must be one of sm_100, sm_103, sm_120, "
        rf"got NVIDIA H200 \(sm_90\); use {instead} there$"
    )
    with pytest.raises(ValueError, match=message):
        require(kernel, GPU)
    require(Kernel[instead], GPU)


def test_an_older_gpu_is_told_to_use_torch(device_of):
    device_of(8, 0, "NVIDIA A100")
    assert runnable(GPU) == frozenset()
    message = r"got NVIDIA A100 \(sm_80\); use (specfit_kernels\.\w+_twins) there$"
    for kernel in Kernel:
        with pytest.raises(ValueError, match=message) as refused:
            require(kernel, GPU)
        # It does that kernel's work.
        twins = importlib.import_module(re.search(message, str(refused.value))[1])
        assert hasattr(twins, PARTS.get(kernel, kernel.value))


def test_a_cpu_is_told_of_the_kernels_that_it_has(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match=r"got cpu; use specfit_kernels.cpu there$"):
        require(Kernel.gemv_w4a16, torch.device("cpu"))


def test_the_interpreter_runs_all_on_a_cpu(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for kernel in Kernel:
        require(kernel, torch.device("cpu"))


def test_a_gpu_of_another_maker_runs_none(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    assert runnable(GPU) == frozenset()
