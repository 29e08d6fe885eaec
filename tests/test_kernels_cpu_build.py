"""How the CPU kernels are compiled and found again, and what is refused before they run."""

import logging
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
import torch

from specfit_kernels import cpu, cpu_build, cpu_twins, fp8, int8, nvfp4
from specfit_kernels.cpu_build import CpuPath, forced
from specfit_kernels.cpu_layers import DecoderLayer, LayerStack, PagedKV, Rope, Rows
from specfit_kernels.cpu_weights import Activations, pack

pytest_plugins = ["cpu_fixtures"]


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """As in a new process whose folder of compiled extensions is empty."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    for function in (cpu_build.paths, cpu_build._library):
        monkeypatch.setattr(cpu_build, function.__name__, cache(function.__wrapped__))
    return tmp_path


def small_weight(activations: Activations = Activations.fp32):
    return pack([nvfp4.quantize(torch.ones(16, 64))], activations=activations)


@pytest.mark.skipif(
    not Path("/proc/cpuinfo").exists(), reason="what the processor has is read from /proc"
)
def test_the_fastest_path_of_this_processor_is_taken():
    if cpu_build.paths() == [CpuPath.torch]:
        pytest.skip("there is no compiler")
    flags = Path("/proc/cpuinfo").read_text()
    fastest = [CpuPath.portable, CpuPath.avx2, CpuPath.avx512vnni]
    expected = fastest[("avx2" in flags) + ("avx512_vnni" in flags)]
    assert cpu_build.paths()[0] is expected
    assert cpu_build.native().__name__.split(".")[-1] == expected.value


@pytest.mark.usefixtures("fresh")
def test_without_a_compiler_torch_runs_and_it_is_said_once(monkeypatch, caplog):
    monkeypatch.setenv("CXX", "no-such-compiler")
    x, weight = torch.randn(2, 64), small_weight()
    with caplog.at_level(logging.WARNING, logger="specfit_kernels"):
        outputs = [cpu.linear(x, weight) for _ in range(2)]
    assert cpu_build.paths() == [CpuPath.torch]
    assert all(torch.equal(y, cpu_twins.linear(x, weight)) for y in outputs)
    [record] = [r for r in caplog.records if r.name.startswith("specfit_kernels")]
    assert "torch runs instead" in record.getMessage()
    assert "no-such-compiler" in record.getMessage()


def test_a_lock_that_a_killed_build_left_holds_nobody_up(fresh, monkeypatch):
    folders = []

    def killed(_, folder: Path):
        folders.append(folder)
        assert not (folder / "lock").exists()
        (folder / "lock").touch()  # torch's
        raise RuntimeError

    monkeypatch.setattr(cpu_build, "_compiled", killed)
    for _ in range(2):
        with pytest.raises(RuntimeError):
            cpu_build._load()
    assert folders == 2 * list(fresh.iterdir())


def test_what_was_compiled_is_found_again(monkeypatch):
    if cpu_build.paths() == [CpuPath.torch]:
        pytest.skip("there is no compiler")
    monkeypatch.setattr(cpu_build, "_compiled", lambda *_: pytest.fail("compiled again"))
    assert cpu_build._load().paths == cpu_build.library().paths


def compiler(path: Path, version: str) -> str:
    """A command that only says its version."""
    path.write_text(f"#!/bin/sh\necho {version}\n")
    path.chmod(0o755)
    return str(path)


def test_other_flags_or_another_compiler_are_another_library(fresh, tmp_path, monkeypatch):
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(fresh / "extensions"))
    monkeypatch.setattr(cpu_build, "_compiled", lambda name, _: ModuleType(name))
    monkeypatch.setenv("CXX", compiler(bin_ / "one", "1.0"))
    names = [cpu_build._load().__name__]
    monkeypatch.setenv("CXX", compiler(bin_ / "other", "1.0"))
    names.append(cpu_build._load().__name__)
    compiler(bin_ / "other", "1.1")
    names.append(cpu_build._load().__name__)
    monkeypatch.setattr(cpu_build, "FLAGS", [*cpu_build.FLAGS, "-g"])
    names.append(cpu_build._load().__name__)
    assert len(set(names)) == 4
    assert set(names) == {folder.name for folder in (fresh / "extensions").iterdir()}


@pytest.mark.parametrize("value", ["", " "])
def test_an_empty_compiler_is_none_given(monkeypatch, value):
    monkeypatch.delenv("CXX", raising=False)
    assert cpu_build._compiler() == "c++"
    monkeypatch.setenv("CXX", value)
    assert cpu_build._compiler() == "c++"
    # torch reads the variable itself.
    with cpu_build._environment(CXX=cpu_build._compiler(), SPECFIT_TEST="1"):
        assert os.environ["CXX"] == "c++"
        assert os.environ["SPECFIT_TEST"] == "1"
    assert os.environ["CXX"] == value
    assert "SPECFIT_TEST" not in os.environ


@pytest.mark.parametrize("content", [None, b"", b"no library"])
@pytest.mark.usefixtures("fresh")
def test_a_library_that_cannot_be_loaded_is_compiled_again_once(monkeypatch, caplog, content):
    folders = []

    def compiled(name: str, folder: Path) -> ModuleType:
        assert {left.name for left in folder.iterdir()} <= {"building"}
        folders.append(folder)
        (folder / "cpu.o").touch()
        if content is not None:
            (folder / f"{name}.so").write_bytes(content)
        return ModuleType(name)

    monkeypatch.setattr(cpu_build, "_compiled", compiled)
    cpu_build._load()
    with caplog.at_level(logging.WARNING, logger="specfit_kernels"):
        cpu_build._load()
    assert len(folders) == 2
    [record] = caplog.records
    assert "compiled again" in record.getMessage()
    assert (folders[0] / "complete").exists()


@pytest.mark.usefixtures("fresh")
def test_of_two_that_need_it_at_once_one_compiles_and_the_other_waits(monkeypatch):
    at_work, may_end = threading.Event(), threading.Event()
    names = []

    def compiled(name: str, _: Path) -> ModuleType:
        names.append(name)
        at_work.set()
        assert may_end.wait(60)
        return ModuleType(name)

    monkeypatch.setattr(cpu_build, "_compiled", compiled)
    monkeypatch.setattr(cpu_build, "_imported", lambda name, _: ModuleType(f"found {name}"))
    # Locks of two threads keep each other out as those of two processes do.
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(cpu_build._load)
        assert at_work.wait(60)
        second = pool.submit(cpu_build._load)
        with pytest.raises(TimeoutError):
            second.result(timeout=0.3)
        may_end.set()
        assert first.result(60).__name__ == names[0]
        assert second.result(60).__name__ == f"found {names[0]}"
    assert len(names) == 1


@pytest.mark.usefixtures("fresh")
def test_the_path_is_said_once(monkeypatch, caplog):
    monkeypatch.setattr(cpu_build, "_load", lambda: (_ for _ in ()).throw(OSError("read-only")))
    with caplog.at_level(logging.INFO, logger="specfit_kernels"):
        assert [cpu_build.paths() for _ in range(2)] == 2 * [[CpuPath.torch]]
    said = [r.getMessage() for r in caplog.records if r.levelno == logging.INFO]
    assert said == ["cpu kernels: path=torch"]


@pytest.mark.usefixtures("fresh")
def test_a_path_that_is_not_there_cannot_be_forced(monkeypatch):
    monkeypatch.setattr(cpu_build, "_load", lambda: (_ for _ in ()).throw(OSError("read-only")))
    with (
        pytest.raises(ValueError, match=r"path must be one of \['torch'\], got avx2"),
        forced(CpuPath.avx2),
    ):
        pass


# --- refusals ---


def nan_scales():
    matrix = nvfp4.quantize(torch.ones(16, 64))
    matrix.block_scales.view(torch.uint8)[3, 2] = 0x7F
    return matrix


def global_scale(value: float, *, divides: bool):
    matrix = nvfp4.quantize(torch.ones(16, 64), divides=divides)
    return replace(matrix, global_scale=torch.tensor(value))


def nan_values():
    matrix = fp8.quantize_tensor(torch.ones(16, 64))
    matrix.values.view(torch.uint8)[3, 2] = 0xFF
    return matrix


REFUSED = {
    r"weight must have columns that are a multiple of 16, got \[40\]": lambda: pack(
        [torch.ones(16, 40)]
    ),
    r"weight must have columns that are a multiple of 16, got \[32, 64\]": lambda: pack(
        [torch.ones(16, 64), torch.ones(16, 32)]
    ),
    r"weight must have parts of one format, got \['fp32', 'nvfp4'\]": lambda: pack(
        [nvfp4.quantize(torch.ones(16, 64)), torch.ones(16, 64)]
    ),
    "weight must be bfloat16 or float32, got torch.float16": lambda: pack(
        [torch.ones(2, 16).half()]
    ),
    "lm_head must have finite scales": lambda: pack([nan_scales()], name="lm_head"),
    "weight must have finite values": lambda: pack([nan_values()]),
    **{
        rf"o must have positive, finite global scales, got \[1.0, {value}\]": (
            lambda value=value, divides=divides: pack(
                [global_scale(1.0, divides=divides), global_scale(value, divides=divides)],
                name="o",
            )
        )
        for value, divides in (
            (0.0, True),
            (-0.0, False),
            (torch.nan, True),
            (torch.inf, True),
            (-torch.inf, False),
            (-2.5, True),
        )
    },
    "weight must have codes of -127 to 127, got -128": lambda: pack(
        [int8.Int8Tensor(torch.full((1, 32), -128, dtype=torch.int8), torch.ones(1, 1).half())]
    ),
    "bias must have the 16 rows of weight, got 3": lambda: pack(
        [torch.ones(16, 64)], bias=torch.ones(3)
    ),
    "activations must be fp32 for weights in fp32, got int8": lambda: pack(
        [torch.ones(16, 64)], activations=Activations.int8
    ),
    "kv must have a head_dim of 8, 16 .. 256, got 12": lambda: PagedKV.empty(1, 1, 12),
    "kv.keys must be float32 or bfloat16": lambda: PagedKV.empty(1, 1, 8, torch.float16),
    "kv.values must be torch.float32, got torch.bfloat16": lambda: PagedKV(
        torch.ones(2, 1, 8, 64), torch.ones(2, 1, 64, 8).bfloat16()
    ),
    "x must have the shape .any, 64., got .2, 32.": lambda: cpu.linear(
        torch.ones(2, 32), small_weight()
    ),
    "x must be contiguous": lambda: cpu.linear(torch.ones(64, 2).T, small_weight()),
    "gate_up must have columns that are a multiple of 32, got 48": lambda: cpu.silu_mul(
        torch.ones(1, 48)
    ),
    "x must have columns, got 0": lambda: cpu.argmax(torch.ones(1, 0)),
    "qkv must hold a multiple of 2 heads of 8 for queries, got 8": lambda: append(width=40),
    "rope must have 4 angles a position, got 8": lambda: append(half=8),
    "positions must be within the block table and the RoPE table, below 100, got 100": lambda: (
        append(position=100)
    ),
    "positions must be .* below 128, got -1": lambda: append(position=-1, num_angles=1000),
    "sequences must be within the block table, below 1, got 1": lambda: append(sequence=1),
    "block_table must name pages below 4, got 4": lambda: append(position=70, page=4),
    "queries must hold a multiple of 2 heads of 8": lambda: cpu.attention(
        torch.ones(1, 8), rows_at(3), PagedKV.empty(4, 2, 8)
    ),
    "kvs must be as many as layers, one or more, got 0 of 1": lambda: forward(num_kvs=0),
    r"capture must be within 0..1, got \[2\]": lambda: forward(capture=[2]),
    "qkv must have 64 rows, got 48": lambda: forward(qkv_rows=48),
    r"stream must have the shape \[1, 32\], got \[2, 32\]": lambda: forward(num_rows=2),
}


def rows_at(position: int, sequence: int = 0, page: int = 2) -> Rows:
    return Rows(torch.tensor([position]), torch.tensor([sequence]), torch.tensor([[1, page]]))


def append(width=48, half=4, num_angles=100, **place):
    rope = Rope(torch.ones(num_angles, half), torch.ones(num_angles, half))
    rows = rows_at(place.pop("position", 3), **place)
    return cpu.rope_append(torch.ones(1, width), rows, PagedKV.empty(4, 2, 8), rope)


def forward(num_rows=1, num_kvs=1, capture=(), qkv_rows=64):
    layer = DecoderLayer(
        qkv=pack([torch.ones(qkv_rows, 32)]),
        o=pack([torch.ones(32, 32)]),
        gate_up=pack([torch.ones(32, 32)]),
        down=pack([torch.ones(32, 16)]),
        input_norm=torch.ones(32),
        post_attention_norm=torch.ones(32),
        eps=1e-5,
    )
    kvs = [PagedKV.empty(4, 2, 8)] * num_kvs
    rope = Rope(torch.ones(100, 4), torch.ones(100, 4))
    stack = LayerStack([layer], kvs, rope)
    return cpu.forward_layers(torch.ones(num_rows, 32), stack, rows_at(3), capture)


@pytest.mark.parametrize("message", REFUSED)
@pytest.mark.parametrize("kind", ["fastest", "torch"])
def test_what_does_not_fit_is_refused_by_name(kind, message):
    with (
        forced(cpu_build.paths()[0] if kind == "fastest" else CpuPath.torch),
        pytest.raises(ValueError, match=message),
    ):
        REFUSED[message]()
