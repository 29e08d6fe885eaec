"""How Triton kernels are tested without a GPU: run in its interpreter, and compiled ahead of time.

Triton reads TRITON_INTERPRET when it is imported, so that the two need processes of their own.
pytest's compiles; `interpret` has a child run a file of tests, whose name is interpreted_*.py.
"""

import os
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from specfit_kernels import support

pytest.importorskip("triton", reason="Triton is made for Linux only")

TESTS = Path(__file__).parent
INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
ARCHITECTURES = [90, 100, 103, 120]
SHARED_KIB = {90: 227, 100: 227, 103: 227, 120: 99}  # that a block may have
# What SASS calls a product on tensor cores.
_PRODUCTS = ("HMMA", "HGMMA", "OMMA", "UTCOMMA", "UTCHMMA", "QMMA", "UTCQMMA")

# Inputs differ each run; a test that takes `seed` from here has it in its name, and with that in
# the environment it runs again.
SEED = int(os.environ.get("SEED") or random.randrange(1 << 16))


def interpret(file: Path, *options: str) -> None:
    """Runs the tests of a file in Triton's interpreter; what they say is said when one fails."""
    # The interpreter's products are NumPy's. OpenBLAS's kernels for Haswell and Zen sum the last
    # rows of a matrix in another order than the first, so that a row's bits are those of its place;
    # tensor cores do not, nor do its older kernels, which every x86-64 processor runs. Elsewhere
    # OpenBLAS does not know the name, and takes its own.
    environment = os.environ | {"TRITON_INTERPRET": "1", "OPENBLAS_CORETYPE": "Nehalem"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file), *options]
    child = subprocess.run(
        command, cwd=TESTS.parent, env=environment, capture_output=True, text=True, check=False
    )
    assert child.returncode == 0, child.stdout + child.stderr


@contextmanager
def mended_dot_scaled() -> Iterator[None]:
    """Has the interpreter's `tl.dot_scaled` read E4M3 scales, which it takes for powers of two."""
    import triton.language as tl
    from triton.runtime import interpreter

    as_powers = interpreter._dot_scaled_scale_to_f32

    def as_e4m3(scale: Any, compute_type: Any) -> Any:
        if scale.dtype.scalar != tl.float8e4nv:
            return as_powers(scale, compute_type)
        return torch.from_numpy(scale.data.copy()).view(torch.float8_e4m3fn).float().numpy()

    with patch.object(interpreter, "_dot_scaled_scale_to_f32", as_e4m3):
        yield


@dataclass(frozen=True)
class Compiled:
    """A kernel as a device would get it."""

    arch: int
    num_warps: int
    shared_bytes: int
    ptx: str
    cubin: bytes

    @cached_property
    def registers(self) -> int:
        """Of a thread."""
        found = re.search(r"REG:(\d+)", self._tool("cuobjdump", "-res-usage"))
        assert found is not None
        return int(found[1])

    @cached_property
    def instructions(self) -> list[str]:
        """SASS, an instruction each, labels between them."""
        code = self._tool("nvdisasm", "-c")
        found = re.findall(r"^(\.L_x_\d+):|/\*[0-9a-f]{4,}\*/\s+(.*?);", code, re.MULTILINE)
        return [label or instruction.strip() for label, instruction in found]

    @property
    def spills(self) -> int:
        """Instructions that bring registers to memory or back."""
        return sum(bool(re.search(r"\b(LDL|STL)\b", one)) for one in self.instructions)

    @property
    def hot_loop(self) -> list[str]:
        """The shortest loop with a product on tensor cores.

        Waiting loops and what is done before and after lie outside.
        """
        return self.loop_with(*_PRODUCTS)

    def loop_with(self, *names: str) -> list[str]:
        """The shortest loop with one of these instructions.

        A jump back without a condition comes from where a warp waited, into the middle of a loop;
        unless all are such: then the loop's condition stands at its head.
        """
        places = {one: i for i, one in enumerate(self.instructions) if one.startswith(".L_x_")}
        loops: dict[bool, list[list[str]]] = {True: [], False: []}
        for i, one in enumerate(self.instructions):
            jump = re.search(r"\bBRA\b.*`\((\.L_x_\d+)\)", one)
            if jump and places.get(jump[1], i) < i:
                loop = [x for x in self.instructions[places[jump[1]] : i + 1] if x[0] != "."]
                if count(loop, *names):
                    has_condition = one.startswith(("@", "BRA.U"))
                    loops[has_condition].append(loop)
        return min(loops[True] or loops[False], key=len)

    def _tool(self, name: str, *options: str) -> str:
        """What one of the disassemblers in Triton's wheel says."""
        import triton

        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            Path(file.name).write_bytes(self.cubin)
            command = [str(tool), *options, file.name]
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def count(instructions: list[str], *names: str) -> int:
    """How many instructions have one of the names; UTMALDG is that of UTMALDG.2D as well."""
    wanted = [re.compile(rf"(@!?U?P\w+ +)?{re.escape(name)}(\.|\s|$)") for name in names]
    return sum(any(one.match(x) for one in wanted) for x in instructions)


def compiled(launch: Callable[[], None], arch: int) -> Compiled:
    """Compiles what a launcher launches: the kernel, specialized for the arguments it is given.

    They are tensors on the device `meta`, of the shapes of a real model.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend
    from triton.runtime.jit import JITFunction, create_function_from_signature

    assert not INTERPRETING, "kernels compile in another process than they are interpreted in"
    launches: list[tuple[JITFunction, tuple[Any, ...], dict[str, Any]]] = []

    def record(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        del grid, warmup
        launches.append((kernel, args, options))

    with (
        patch.object(JITFunction, "run", record),
        patch.object(support, "require"),
        patch.object(support, "architecture", return_value=arch),
    ):
        launch()
    [(kernel, args, options)] = launches
    target = GPUTarget("cuda", arch, 32)
    backend = make_backend(target)
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, _ = bind(*args, **options)
    parsed, signature, constants, attributes = kernel._pack_args(
        backend, options, bound, specialization, None
    )
    source = ASTSource(kernel, signature, constants, attributes)
    result = triton.compile(source, target=target, options=parsed.__dict__)
    metadata = result.metadata
    ptx, cubin = result.asm["ptx"], result.asm["cubin"]
    return Compiled(arch, metadata.num_warps, metadata.shared, ptx, cubin)
