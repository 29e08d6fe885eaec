"""The linear kernels compiled for GPUs that are not here: what instructions they become.

Triton says nothing when it has no instruction for a product and decodes to bfloat16 instead, or
when it spills registers; nor would any figure of a machine without such a GPU.
"""

import re
from collections.abc import Callable
from functools import cache

import pytest
import torch
from triton_harness import ARCHITECTURES, SHARED_KIB, Compiled, compiled, count

from specfit_kernels import gemm, gemv_w4a16, linear_tokens, skinny_w4a4
from specfit_kernels import linear_twins as twins

META = torch.device("meta")
ROWS, COLUMNS = 4096, 4096
STEP = 256


def tiled() -> twins.TiledWeight:
    codes = torch.empty(ROWS, COLUMNS // 2, dtype=torch.uint8, device=META)
    shape = (ROWS // 128, COLUMNS // 64, 512)
    scales = torch.empty(shape, dtype=torch.float8_e4m3fn, device=META)
    return twins.TiledWeight(codes, scales, torch.empty(ROWS, device=META), COLUMNS)


def worded() -> twins.WordWeight:
    words = torch.empty(ROWS, COLUMNS // 8, dtype=torch.int32, device=META)
    scales = torch.empty(ROWS, COLUMNS // 16, dtype=torch.uint8, device=META)
    return twins.WordWeight(words, scales, torch.empty(ROWS, device=META), COLUMNS)


def terms(num_tokens: int, num_terms: int) -> twins.Terms:
    return twins.Terms.empty(num_tokens, COLUMNS, num_terms, META)


def halves(num_tokens: int) -> twins.Halves:
    return twins.Halves.empty(num_tokens, COLUMNS, META)


def partials(weight: twins.TiledWeight | twins.WordWeight, num_tokens: int) -> torch.Tensor:
    return torch.empty(weight.splits.num, num_tokens, ROWS, device=META)


def bf16(num_tokens: int, columns: int) -> torch.Tensor:
    return torch.empty(num_tokens, columns, dtype=torch.bfloat16, device=META)


def skinny(num_terms: int, num_tokens: int = 5, *, pdl: bool = False) -> Callable[[], None]:
    weight = tiled()
    out = partials(weight, num_tokens)
    return lambda: skinny_w4a4.skinny_w4a4(weight, terms(num_tokens, num_terms), out, pdl=pdl)


def gemv(num_tokens: int = 5, *, pdl: bool = False) -> Callable[[], None]:
    weight = worded()
    out = partials(weight, num_tokens)
    return lambda: gemv_w4a16.gemv_w4a16(weight, halves(num_tokens), out, pdl=pdl)


LAUNCHES = {
    "skinny_w4a4 1": skinny(1),
    "skinny_w4a4 2": skinny(2),
    "skinny_w4a4 3": skinny(3),
    "skinny_w4a4 2 pdl": skinny(2, pdl=True),
    "gemm_w4a4 1": lambda: gemm.gemm_w4a4(tiled(), terms(512, 1), bf16(512, ROWS)),
    "gemm_w4a4 3": lambda: gemm.gemm_w4a4(tiled(), terms(512, 3), bf16(512, ROWS)),
    "gemv_w4a16": gemv(),
    "gemv_w4a16 pdl": gemv(pdl=True),
    "gemm_w4a16": lambda: gemm.gemm_w4a16(worded(), halves(512), bf16(512, ROWS)),
    "quantize_tokens": lambda: linear_tokens.quantize_tokens(bf16(5, COLUMNS), terms(5, 3)),
    "halve_tokens": lambda: linear_tokens.halve_tokens(bf16(5, COLUMNS), halves(5)),
    "sum_splits": lambda: linear_tokens.sum_splits(partials(tiled(), 5), bf16(5, ROWS)),
}
BLOCK_SCALED = [
    ("skinny_w4a4 1", 100),
    ("skinny_w4a4 2", 100),
    ("skinny_w4a4 3", 100),
    ("skinny_w4a4 2", 103),
    ("skinny_w4a4 1", 120),
    ("skinny_w4a4 2", 120),
    ("skinny_w4a4 3", 120),
    ("gemm_w4a4 1", 100),
    ("gemm_w4a4 3", 100),
    ("gemm_w4a4 3", 103),
    ("gemm_w4a4 1", 120),
    ("gemm_w4a4 3", 120),
]
DECODED = [(name, arch) for name in ("gemv_w4a16", "gemm_w4a16") for arch in ARCHITECTURES]
PDL = [("skinny_w4a4 2", 100), ("skinny_w4a4 2", 120), ("gemv_w4a16", 90)]
TOKENS = [
    (name, arch) for name in ("quantize_tokens", "halve_tokens", "sum_splits") for arch in (90, 100)
]
ALL = [*BLOCK_SCALED, *DECODED, *((f"{name} pdl", arch) for name, arch in PDL), *TOKENS]


@cache
def kernel(name: str, arch: int) -> Compiled:
    return compiled(LAUNCHES[name], arch)


@pytest.mark.parametrize(("name", "arch"), BLOCK_SCALED)
def test_nvfp4_is_multiplied_as_it_is(name, arch):
    ptx = kernel(name, arch).ptx
    wanted = {
        100: r"tcgen05\.mma\S*kind::mxf4nvf4\S*block_scale",
        103: r"tcgen05\.mma\S*kind::mxf4nvf4\S*block_scale",
        120: r"mma\.sync\S*m16n8k64\S*kind::mxf4nvf4\S*ue4m3",
    }
    assert re.search(wanted[arch], ptx)
    # Decoded to 16 bits, or with E4M3 scales given to an instruction that takes powers of two.
    products = re.findall(r"(?:wg)?mma\.\S+|tcgen05\.mma\.\S+", ptx)
    assert not [product for product in products if "mma" in product and "f16" in product]
    assert "kind::f16" not in ptx
    assert "mxf8f6f4" not in ptx


@pytest.mark.parametrize(("name", "arch"), DECODED)
def test_decoded_weights_are_multiplied_in_float16(name, arch):
    ptx = kernel(name, arch).ptx
    wanted = {
        90: r"wgmma\.mma_async\S*f32\.f16\.f16",
        100: r"tcgen05\.mma\S*kind::f16",
        103: r"tcgen05\.mma\S*kind::f16",
        120: r"mma\.sync\S*f32\.f16\.f16",
    }
    assert re.search(wanted[arch], ptx)


@pytest.mark.parametrize(("name", "arch"), ALL)
def test_nothing_is_spilled_and_a_processor_has_room(name, arch):
    found = kernel(name, arch)
    assert found.spills == 0
    assert found.shared_bytes <= SHARED_KIB[arch] * 1024
    # While one program of few tokens waits for memory, another must be able to run.
    programs = 2 if name.startswith(("skinny", "gemv")) else 1
    assert found.registers * 32 * found.num_warps * programs <= 65536


@pytest.mark.parametrize(
    ("name", "arch", "most"),
    [
        ("skinny_w4a4 1", 100, 0.58),
        ("skinny_w4a4 2", 100, 0.58),
        ("skinny_w4a4 3", 100, 0.62),
        ("skinny_w4a4 2", 103, 0.58),
        ("skinny_w4a4 1", 120, 0.56),
        ("skinny_w4a4 2", 120, 0.56),
        ("skinny_w4a4 3", 120, 0.75),
        ("gemv_w4a16", 90, 3.66),
        ("gemv_w4a16", 120, 4.45),
    ],
)
def test_a_weight_takes_no_more_instructions_than_it_did(name, arch, most):
    # At full memory speed there is time for 2.46 on a B200, 3.5 on an H200 and 18 on sm_120.
    found = kernel(name, arch)
    rows = 64 if name == "gemv_w4a16" else 128
    assert len(found.hot_loop) / (rows * STEP / (32 * found.num_warps)) <= most


@pytest.mark.parametrize(
    ("name", "arch"), [*BLOCK_SCALED, ("gemv_w4a16", 90), ("gemm_w4a16", 90), ("gemv_w4a16", 120)]
)
def test_a_loop_waits_for_no_load_and_only_scales_are_loaded_in_small_parts(name, arch):
    loop = kernel(name, arch).hot_loop
    # What takes the way through registers is not loaded ahead of its use.
    assert count(loop, "LDG") == 0
    assert count(loop, "UTMALDG") == (1 if (name, arch) in BLOCK_SCALED else 0)
    loads = [one for one in loop if count([one], "LDGSTS")]
    num_terms = 3 if name.endswith("3") else 1
    assert sum(".128" not in one for one in loads) <= 1 + num_terms


def test_on_hopper_decoded_weights_do_not_go_back_to_shared_memory():
    loop = kernel("gemv_w4a16", 90).hot_loop
    assert count(loop, "STS", "STSM") == 0
    assert count(loop, "HGMMA") > 0


@pytest.mark.parametrize(("name", "arch"), PDL)
def test_a_dependent_launch_fetches_weights_before_it_waits(name, arch):
    ptx = kernel(f"{name} pdl", arch).ptx
    fetches, waits = ptx.index("prefetch.global.L2"), ptx.index("griddepcontrol.wait")
    assert ptx.index("griddepcontrol.launch_dependents") < fetches < waits
    assert waits < ptx.index("mma")
    assert "griddepcontrol" not in kernel(name, arch).ptx


@pytest.mark.parametrize(("launch", "arch"), [(lambda n: skinny(2, n), 100), (gemv, 90)])
def test_one_kernel_serves_any_number_of_tokens(launch, arch):
    # Were there one for 1 and one for multiples of 16, nobody could say that their bits are equal.
    assert len({compiled(launch(n), arch).ptx for n in (1, 5, 16)}) == 1


@pytest.mark.parametrize("name", LAUNCHES)
def test_a_device_that_cannot_run_a_kernel_is_refused(name):
    message = r"^the device of \w+ must be one of sm_\d+.*, got meta; use .*linear_twins there$"
    with pytest.raises(ValueError, match=message):
        LAUNCHES[name]()
