"""The compiled CPU kernels: built on first use, kept on disk, and which of their paths runs."""

import logging
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum
from functools import cache
from hashlib import sha256
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from time import perf_counter
from types import ModuleType

import torch
from filelock import FileLock

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("cpu.cpp")
# Sums are rounded where the source says so: no contraction to fma behind its back.
FLAGS = ("-O3", "-ffp-contract=off", "-fvisibility=hidden", "-Wno-psabi")
OPENMP = ("-fopenmp",) if sys.platform == "linux" else ()


class CpuPath(Enum):
    """One way to compute the same; all but the last are compiled from cpu.cpp."""

    avx512vnni = "avx512vnni"
    avx2 = "avx2"
    portable = "portable"
    torch = "torch"


_forced: ContextVar[CpuPath | None] = ContextVar("forced_path", default=None)


@cache
def paths() -> list[CpuPath]:
    """Those that this machine has, the fastest first."""
    module = _library()
    found = [*map(CpuPath, module.paths if module else ()), CpuPath.torch]
    logger.info("cpu kernels: path=%s", found[0].value)
    return found


@contextmanager
def forced(path: CpuPath) -> Iterator[None]:
    """Everything within runs on one path.

    Raises:
        ValueError: This machine does not have it.
    """
    if path not in paths():
        names = [path.value for path in paths()]
        raise ValueError(f"path must be one of {names}, got {path.value}")
    token = _forced.set(path)
    try:
        yield
    finally:
        _forced.reset(token)


def native() -> ModuleType | None:
    """The kernels of the path that runs; None where it is torch's twins."""
    path = _forced.get() or paths()[0]
    return None if path is CpuPath.torch else getattr(_library(), path.value)


def library() -> ModuleType:
    """The compiled module, when there is one."""
    module = _library()
    assert module is not None
    return module


@cache
def _library() -> ModuleType | None:
    try:
        return _load()
    except (ImportError, OSError, RuntimeError, subprocess.SubprocessError) as error:
        reasons = str(error).strip().splitlines() or [type(error).__name__]
        logger.warning("cpu kernels are not compiled, torch runs instead: %s", reasons[0])
        logger.debug("the whole reason: %s", error)
        return None


def _load() -> ModuleType:
    versions = [torch.__version__, sys.implementation.cache_tag, sysconfig.get_platform()]
    recipe = [SOURCE.read_text(), *FLAGS, *OPENMP, *versions, _compiler(), _compiler_version()]
    name = f"specfit_cpu_{sha256(repr(recipe).encode()).hexdigest()[:16]}"
    folder = _extensions_folder() / name
    folder.mkdir(parents=True, exist_ok=True)
    # The system releases this lock when its holder dies.
    lock = folder / "building"
    with FileLock(lock):
        complete = folder / "complete"
        if complete.exists():
            try:
                return _imported(name, folder / f"{name}.so")
            except ImportError as error:
                logger.warning("cpu kernels are compiled again: %s", error)
        # What a killed build left, torch's own lock among it, for which the next would wait.
        for left in folder.iterdir():
            if left != lock:
                left.unlink()
        module = _compiled(name, folder)
        complete.touch()
        return module


def _compiler() -> str:
    return os.environ.get("CXX", "").strip() or "c++"


def _compiler_version() -> str:
    command = _compiler().split()
    if shutil.which(command[0]) is None:
        raise FileNotFoundError(f"there is no C++ compiler {command[0]}")
    return subprocess.run(
        [*command, "--version"], check=True, capture_output=True, text=True
    ).stdout


def _compiled(name: str, folder: Path) -> ModuleType:
    from torch.utils import cpp_extension

    logger.info("compiling the cpu kernels, once, into %s", folder)
    start = perf_counter()
    # A virtual environment that nobody activated has its ninja there.
    path = os.pathsep.join([os.environ.get("PATH", ""), sysconfig.get_path("scripts")])
    with _environment(PATH=path, CXX=_compiler()):
        module: ModuleType = cpp_extension.load(
            name,
            [str(SOURCE)],
            extra_cflags=[*FLAGS, *OPENMP],
            extra_ldflags=[*OPENMP],  # torch adds to the list
            build_directory=str(folder),
        )
    logger.info("compiled the cpu kernels: seconds=%.1f", perf_counter() - start)
    return module


@contextmanager
def _environment(**variables: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _extensions_folder() -> Path:
    from torch.utils import cpp_extension

    return Path(os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root())


def _imported(name: str, path: Path) -> ModuleType:
    spec = spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
