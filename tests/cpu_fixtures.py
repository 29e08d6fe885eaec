"""Fixtures of the tests of the CPU kernels, as a pytest plugin: paths, seeds, poison, threads."""

import secrets
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
import torch

from specfit_kernels import cpu_build
from specfit_kernels.cpu_build import CpuPath, forced


@pytest.fixture(params=CpuPath, ids=[path.value for path in CpuPath])
def path(request: pytest.FixtureRequest) -> Iterator[CpuPath]:
    """What is called runs on each path that this machine has."""
    if request.param not in cpu_build.paths():
        pytest.skip(f"this machine has no path {request.param.value}")
    with forced(request.param):
        yield request.param


@pytest.fixture
def generator() -> torch.Generator:
    """Other inputs in each run; pytest shows the seed of a test that fails."""
    seed = secrets.randbits(32)
    sys.stdout.write(f"seed {seed}\n")
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel does not write is NaN, or 77."""
    empty = torch.empty

    def poisoned(*size: int, **options: object) -> torch.Tensor:
        tensor = empty(*size, **options)
        return tensor.fill_(torch.nan if tensor.is_floating_point() else 77)

    monkeypatch.setattr(torch, "empty", poisoned)


@pytest.fixture
def two_threads() -> Callable[[], AbstractContextManager[None]]:
    """Two threads within, where the tests have one."""

    @contextmanager
    def threads() -> Iterator[None]:
        torch.set_num_threads(2)
        try:
            yield
        finally:
            torch.set_num_threads(1)

    return threads
