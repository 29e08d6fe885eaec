"""Attention and acceptance compiled for GPUs that are not here: what instructions they become.

What they compute is tested in interpreted_attention.py and interpreted_sampling.py.
"""

import re
from collections.abc import Callable
from functools import cache
from unittest.mock import MagicMock, patch

import pytest
import torch
from triton_harness import SHARED_KIB, Compiled, compiled, count

from specfit_kernels import attention, linear_twins, rejection, sampling
from specfit_kernels.attention_twins import AttentionPartials
from specfit_kernels.kv_pages import KVPages, Places
from specfit_kernels.sampling_twins import Acceptance

META = torch.device("meta")
NUM_KV_HEADS, VOCAB_SIZE, NUM_ROWS = 8, 128256, 4


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def places(num_sequences: int, each: int) -> Places:
    positions, sequences = (empty(num_sequences * each, dtype=torch.int32) for _ in range(2))
    return Places(positions, sequences, empty(num_sequences, 128, dtype=torch.int32))


def verify(
    group: int,
    dim: int,
    *,
    is_tree: bool = False,
    each: int = 5,
    num_sequences: int = 4,
    pdl: bool = False,
) -> Callable[[], None]:
    num_tokens, num_heads = num_sequences * each, group * NUM_KV_HEADS
    arguments = (
        empty(num_tokens, num_heads * dim),
        places(num_sequences, each),
        KVPages.empty(1024, NUM_KV_HEADS, dim, META),
        AttentionPartials.empty(num_tokens, num_heads, dim, 8192, META),
        each,
    )
    tree = empty(num_tokens, dtype=torch.int64) if is_tree else None
    return lambda: attention.attn_verify(*arguments, tree=tree, pdl=pdl)


def combine(form: str, dim: int) -> Callable[[], None]:
    num_tokens, num_heads, columns = 20, 32, 32 * dim
    partials = AttentionPartials.empty(num_tokens, num_heads, dim, 8192, META)
    out = {
        "floats": empty(num_tokens, columns),
        "halves": linear_twins.Halves.empty(num_tokens, columns, META),
        "terms": linear_twins.Terms.empty(num_tokens, columns, 3, META),
    }[form]
    return lambda: attention.attn_combine(partials, places(4, 5), out, 5)


def acceptance(k: int) -> Acceptance:
    return Acceptance.empty(NUM_ROWS, k, VOCAB_SIZE, META)


def drafted(k: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, lengths = empty(NUM_ROWS, k, dtype=torch.int64), empty(NUM_ROWS, dtype=torch.int64)
    return tokens, lengths


def rejecting(only: str, *, has_probs: bool, k: int = 4) -> Callable[[], None]:
    """One of the three launches."""

    def launch() -> None:
        others = {"_softmax_partials", "_masses", "_draw"} - {only}
        with patch.multiple(rejection, **{name: MagicMock() for name in others}):
            rejection.accept_sampled(
                empty(NUM_ROWS * (k + 1), VOCAB_SIZE),
                *drafted(k),
                empty(NUM_ROWS, k, VOCAB_SIZE) if has_probs else None,
                empty(NUM_ROWS),
                empty(NUM_ROWS, k + 1, dtype=torch.float64),
                acceptance(k),
            )

    return launch


LAUNCHES = {
    "verify 16x64": verify(3, 64),
    "verify 16x128": verify(1, 128),
    "verify 32x64": verify(4, 64),
    "verify 32x64 tree": verify(4, 64, is_tree=True),
    "verify 32x128": verify(4, 128),
    "verify 32x128 tree": verify(8, 128, is_tree=True),
    "combine floats": combine("floats", 128),
    "combine halves": combine("halves", 64),
    "combine terms": combine("terms", 128),
    "argmax_partials": lambda: sampling.argmax_partials(
        empty(5, VOCAB_SIZE), acceptance(4).best[:5]
    ),
    "argmax": lambda: sampling.argmax(acceptance(0).best, empty(NUM_ROWS, dtype=torch.int64)),
    "accept": lambda: sampling.accept(*drafted(4), acceptance(4)),
    "softmax": rejecting("_softmax_partials", has_probs=False),
    "masses": rejecting("_masses", has_probs=True),
    "draw": rejecting("_draw", has_probs=True),
    "masses without probs": rejecting("_masses", has_probs=False),
    "draw without probs": rejecting("_draw", has_probs=False),
}
# With the instructions that an element of keys or values takes in the loop: at full memory speed
# there is time for 12 on an H200, 8.7 on a B200 and more on sm_120.
VERIFY = [
    ("verify 16x64", 90, 4.7),
    ("verify 16x64", 120, 4.7),
    ("verify 16x128", 90, 3.5),
    ("verify 16x128", 100, 3.3),
    ("verify 32x64", 90, 7.3),
    ("verify 32x64", 100, 6.9),
    ("verify 32x64 tree", 100, 8.7),
    ("verify 32x128", 90, 7.7),
    ("verify 32x128", 103, 7.3),
    ("verify 32x128 tree", 90, 9.5),
    ("verify 32x128 tree", 100, 9.3),
    ("verify 32x128 tree", 120, 9.5),
]
OTHERS = [
    ("combine floats", 90),
    ("combine halves", 90),
    ("combine terms", 100),
    ("combine terms", 120),
    ("argmax_partials", 90),
    ("argmax_partials", 100),
    ("argmax", 90),
    ("accept", 90),
    ("accept", 120),
    ("softmax", 90),
    ("softmax", 100),
    ("masses", 90),
    ("draw", 90),
    ("masses without probs", 103),
    ("draw without probs", 100),
    ("draw without probs", 120),
]


@cache
def kernel(name: str, arch: int) -> Compiled:
    return compiled(LAUNCHES[name], arch)


@pytest.mark.parametrize(("name", "arch"), [*((name, arch) for name, arch, _ in VERIFY), *OTHERS])
def test_nothing_is_spilled_and_a_processor_has_room_for_two(name, arch):
    found = kernel(name, arch)
    assert found.spills == 0
    assert found.shared_bytes <= SHARED_KIB[arch] * 1024
    # While one program waits for memory, another must be able to run.
    assert 2 * found.registers * 32 * found.num_warps <= 65536


def step_and_dim(name: str) -> tuple[int, int]:
    dim = int(name.split()[1].split("x")[1])
    return 32 if name.startswith("verify 32x128") else 64, dim


@pytest.mark.parametrize(("name", "arch", "most"), VERIFY)
def test_an_element_takes_no_more_instructions_than_it_did(name, arch, most):
    found = kernel(name, arch)
    step, dim = step_and_dim(name)
    assert len(found.hot_loop) * 32 * found.num_warps / (2 * step * dim) <= most


@pytest.mark.parametrize(("name", "arch"), [(name, arch) for name, arch, _ in VERIFY])
def test_keys_and_values_are_fetched_ahead_and_multiplied_as_they_are(name, arch):
    found = kernel(name, arch)
    products = set(re.findall(r"mma\.sync\S+", found.ptx))
    assert products == {"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"}
    assert not re.search(r"wgmma|tcgen05", found.ptx)
    # Each of 16 bytes a thread, but the number of the page; and none that is waited for.
    loads = [one for one in found.hot_loop if count([one], "LDGSTS")]
    step, dim = step_and_dim(name)
    assert sum(".128" in one for one in loads) == 2 * step * dim * 2 // (16 * 32 * found.num_warps)
    assert sum(".128" not in one for one in loads) == 1
    assert count(found.hot_loop, "LDG") == 0


@pytest.mark.parametrize(
    ("name", "arch"),
    [
        ("combine floats", 90),
        ("combine terms", 100),
        ("argmax_partials", 90),
        ("softmax", 100),
        ("masses", 90),
    ],
)
def test_what_is_read_in_bulk_is_read_by_16_bytes(name, arch):
    loads = [one for one in kernel(name, arch).instructions if count([one], "LDG")]
    # A thread has 16 floats of a program's 2048, or of 16 splits of a head; or of both, and of a
    # token that is quantized, 8 at a time.
    wanted = {"masses": 8, "combine terms": 6}.get(name, 4)
    assert sum(".128" in one for one in loads) == wanted


def test_one_kernel_serves_any_draft_and_any_number_of_sequences():
    # Were there one for 1 and one for multiples of 16, nobody could say that their bits are equal.
    shapes = [(1, 1), (5, 4), (16, 1), (1, 16)]
    launches = [verify(3, 64, each=each, num_sequences=num) for each, num in shapes]
    assert len({compiled(launch, 90).ptx for launch in launches}) == 1


def test_a_dependent_launch_waits_before_it_reads():
    ptx = compiled(verify(3, 64, pdl=True), 90).ptx
    waits = ptx.index("griddepcontrol.wait")
    assert ptx.index("griddepcontrol.launch_dependents") < waits < ptx.index("ld.global")
    assert "griddepcontrol" not in kernel("verify 16x64", 90).ptx


def test_what_a_program_wrote_is_counted_after_it_and_read_past_the_own_cache():
    ptx = kernel("combine terms", 100).ptx
    counted = re.search(r"atom\S*acq_rel\S*\.add", ptx)
    assert counted is not None
    assert ptx.index("bar.sync") < counted.start() < ptx.index("ld.global.cg")


@pytest.mark.parametrize("name", LAUNCHES)
def test_a_device_that_cannot_run_a_kernel_is_refused(name):
    message = r"^the device of (attention|sampling) must be one of sm_90, .*, got meta; use "
    with pytest.raises(ValueError, match=message):
        LAUNCHES[name]()
