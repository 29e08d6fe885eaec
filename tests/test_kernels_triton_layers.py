"""The kernels between the products, and that of a head, compiled for GPUs that are not here.

test_kernels_triton_interpreter.py runs interpreted_layers.py, which says what they compute.
"""

import re
from collections.abc import Callable
from functools import cache

import pytest
import torch
from triton_harness import ARCHITECTURES, SHARED_KIB, Compiled, compiled, count

from specfit_kernels import norm_quant, rope_append, silu_mul, skinny_bf16
from specfit_kernels.kv_pages import KVPages, Places
from specfit_kernels.layer_twins import HeadNorms, Rope
from specfit_kernels.linear_twins import Halves, Terms

META = torch.device("meta")
HIDDEN, INNER, VOCABULARY = 4096, 14336, 128256


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device=META)


def tokens(num_terms: int, num_tokens: int, columns: int) -> Terms | Halves:
    if num_terms == 0:
        return Halves.empty(num_tokens, columns, META)
    return Terms.empty(num_tokens, columns, num_terms, META)


def norm(
    num_terms: int = 2, num_tokens: int = 5, *, hidden: int = HIDDEN, pdl: bool = False
) -> Callable[[], None]:
    stream = empty(num_tokens, hidden)
    given = {
        "partials": empty(8, num_tokens, hidden),
        "normed": empty(num_tokens, hidden),
        "captured": empty(num_tokens, hidden, dtype=torch.bfloat16),
    }
    out = tokens(num_terms, num_tokens, hidden)
    return lambda: norm_quant.rmsnorm_quant(stream, empty(hidden), 1e-5, out, **given, pdl=pdl)


def silu(
    num_terms: int = 2, num_tokens: int = 5, *, inner: int = INNER, num_splits: int = 1, pdl=False
) -> Callable[[], None]:
    partials = empty(num_splits, num_tokens, 2 * inner)
    out = tokens(num_terms, num_tokens, inner)
    return lambda: silu_mul.silu_mul_quant(partials, out, pdl=pdl)


def rope(num_tokens: int = 5, *, head_dim: int = 128, pdl: bool = False) -> Callable[[], None]:
    kv = KVPages.empty(64, 8, head_dim, META)
    partials = empty(4, num_tokens, 48 * head_dim)
    numbers = [
        empty(*shape, dtype=torch.int32) for shape in ((num_tokens,), (num_tokens,), (4, 16))
    ]
    angles = Rope(empty(1024, head_dim // 2), empty(1024, head_dim // 2))
    given = {
        "bias": empty(48 * head_dim),
        "head_norms": HeadNorms(empty(head_dim), empty(head_dim), 1e-6),
    }
    queries, places = empty(num_tokens, 32 * head_dim), Places(*numbers)
    return lambda: rope_append.rope_append(partials, places, kv, angles, queries, **given, pdl=pdl)


def head(
    num_tokens: int = 5, *, dtype: torch.dtype = torch.float32, pdl: bool = False
) -> Callable[[], None]:
    weight = empty(VOCABULARY, HIDDEN, dtype=torch.bfloat16)
    x, out = empty(num_tokens, HIDDEN, dtype=dtype), empty(num_tokens, VOCABULARY)
    return lambda: skinny_bf16.skinny_bf16(weight, x, out, pdl=pdl)


LAUNCHES = {
    "norm": norm(),
    "norm of halves": norm(0),
    "norm of the most": norm(3, hidden=norm_quant.MOST_COLUMNS),
    "norm of 576": norm(2, hidden=576),
    "norm pdl": norm(pdl=True),
    "silu": silu(),
    "silu of two splits": silu(3, num_splits=2),
    "silu of 1536": silu(0, inner=1536, num_splits=3),
    "silu pdl": silu(pdl=True),
    "rope": rope(),
    "rope of 64": rope(head_dim=64),
    "rope pdl": rope(pdl=True),
    "head": head(),
    "head of bfloat16": head(dtype=torch.bfloat16),
    "head pdl": head(pdl=True),
}
EVERYWHERE = [
    *((name, arch) for name in ("norm", "silu") for arch in (90, 100, 120)),
    *(("rope", arch) for arch in (90, 100, 103)),
    *(("head", arch) for arch in ARCHITECTURES),
]
SOMEWHERE = [
    ("norm of halves", 90),
    ("norm of the most", 100),
    ("norm of 576", 100),
    ("silu of two splits", 120),
    ("silu of 1536", 90),
    ("rope of 64", 90),
    ("head of bfloat16", 90),
]
PDL = [("norm", 100), ("silu", 90), ("rope", 100), ("head", 100)]
ALL = [*EVERYWHERE, *SOMEWHERE, *((f"{name} pdl", arch) for name, arch in PDL)]


@cache
def kernel(name: str, arch: int) -> Compiled:
    return compiled(LAUNCHES[name], arch)


@pytest.mark.parametrize(("name", "arch"), ALL)
def test_nothing_is_spilled_and_a_processor_has_room(name, arch):
    found = kernel(name, arch)
    assert found.spills == 0
    assert found.shared_bytes <= SHARED_KIB[arch] * 1024
    # While one program of a head waits for memory, others must be able to run.
    programs = 2 if name.startswith("head") else 1
    assert found.registers * 32 * found.num_warps * programs <= 65536
    assert found.shared_bytes * programs <= SHARED_KIB[arch] * 1024


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_head_is_multiplied_in_tf32(arch):
    ptx = kernel("head", arch).ptx
    wanted = {
        90: r"wgmma\.mma_async\S*f32\.tf32\.tf32",
        100: r"tcgen05\.mma\S*kind::tf32",
        103: r"tcgen05\.mma\S*kind::tf32",
        120: r"mma\.sync\S*f32\.tf32\.tf32",
    }
    assert re.search(wanted[arch], ptx)
    products = re.findall(r"(?:wg)?mma\.\S+|tcgen05\.mma\.\S+", ptx)
    assert not [one for one in products if "f16" in one]


@pytest.mark.parametrize(
    ("name", "arch", "most"),
    [
        ("head", 90, 3.27),
        ("head", 100, 3.68),
        ("head", 103, 3.68),
        ("head", 120, 4.8),
        ("head of bfloat16", 90, 2.8),
    ],
)
def test_a_weight_takes_no_more_instructions_than_it_did(name, arch, most):
    # At full memory speed there is time for 12 on an H200 and 8.7 on a B200.
    found = kernel(name, arch)
    weights = skinny_bf16.ROWS * skinny_bf16.STEP / (32 * found.num_warps)
    assert len(found.hot_loop) / weights <= most


@pytest.mark.parametrize("arch", [90, 100, 120])
def test_the_largest_of_a_token_takes_no_more_instructions_than_it_did(arch):
    found = kernel("silu", arch)
    loop = found.loop_with("MUFU")
    assert len(loop) / (2048 / (32 * found.num_warps)) <= 23.3
    # Loads are ahead of their use.
    assert count(loop, "LDG") == 0


@pytest.mark.parametrize(
    ("name", "arch"), [*EVERYWHERE, ("norm of 576", 100), ("head of bfloat16", 90)]
)
def test_what_is_many_is_loaded_in_wide_parts(name, arch):
    instructions = kernel(name, arch).instructions
    loads = [one for one in instructions if count([one], "LDG", "LDGSTS")]
    # A warp with half a head of 128 has two values a thread; the numbers of a place are single.
    width, num_numbers = (".64", 3) if name == "rope" else (".128", 0)
    assert sum(width not in one for one in loads) <= num_numbers
    assert len(loads) > 0


def test_the_loop_of_a_head_waits_for_no_load():
    for arch in ARCHITECTURES:
        loop = kernel("head", arch).hot_loop
        assert count(loop, "LDG") == 0
        assert count(loop, "LDGSTS") > 0


@pytest.mark.parametrize(("name", "arch"), PDL)
def test_a_dependent_launch_reads_only_what_is_constant_before_it_waits(name, arch):
    ptx = kernel(f"{name} pdl", arch).ptx
    before, _, behind = ptx.partition("griddepcontrol.wait")
    assert "griddepcontrol.launch_dependents" in before
    # Of a norm that is its weight, 16 values a thread.
    assert before.count("ld.global") == (4 if name == "norm" else 0)
    assert before.count("prefetch.global.L2") == (4 if name == "head" else 0)
    assert "st.global" not in before
    assert "cp.async" not in before
    assert "st.global" in behind
    assert "griddepcontrol" not in kernel(name, arch).ptx


@pytest.mark.parametrize("launch", [norm, silu, rope, head])
def test_one_kernel_serves_any_number_of_tokens(launch):
    # Were there one for 1 and one for multiples of 16, nobody could say that their bits are equal.
    assert len({compiled(launch(num_tokens=n), 90).ptx for n in (1, 5, 16)}) == 1


@pytest.mark.parametrize("name", LAUNCHES)
def test_a_device_that_cannot_run_a_kernel_is_refused(name):
    with pytest.raises(ValueError, match=r"^the device of \w+ must be one of sm_90.*, got meta"):
        LAUNCHES[name]()
