"""Triton kernels in its interpreter: each file of their tests in a process of its own."""

from pathlib import Path

import pytest
from triton_harness import TESTS, interpret


@pytest.mark.parametrize("file", sorted(TESTS.glob("interpreted_*.py")), ids=lambda file: file.stem)
def test_what_holds_in_the_interpreter(file: Path):
    interpret(file)


@pytest.mark.slow
def test_what_takes_longer_holds_in_the_interpreter():
    interpret(TESTS / "interpreted_gpu_target.py", "-m", "slow")
