"""Kills, disks and memory while a checkpoint is quantized."""

import itertools
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from big_checkpoint import memory_of_quantizing, write_big
from sharded_targets import (
    contents,
    copy_with,
    plan_of,
    tensors,
    w4a4,
    write_sharded,
    written,
)

from specfit.files import GIB, DiskFull
from specfit.quantization import checkpoint
from specfit.quantization.checkpoint import quantized_size, write_checkpoint
from specfit_kernels.rules import ScaleRule

DOWN = "model.layers.0.mlp.down_proj"


class Killed(BaseException):
    pass


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    write_sharded(folder)
    return folder


def test_progress_counts_what_is_read_up_to_all_of_it(source, tmp_path):
    calls = []
    write_checkpoint(
        source,
        tmp_path,
        plan_of(source),
        on_progress=lambda done, total: calls.append((done, total)),
    )
    fused = [name for name in tensors(source) if re.search(r"\.([qkv]|gate|up)_proj\.", name)]
    twice = sum(tensors(source)[name].nbytes for name in fused)
    total = twice + sum(tensor.nbytes for tensor in tensors(source).values())
    assert calls[-1] == (total, total)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)


def test_killed_anywhere_and_resumed_the_result_is_the_same(source, tmp_path):
    plan = w4a4(source, plan_of(source))
    expected = contents(written(source, tmp_path / "whole", plan))
    for num_steps in itertools.count(1):
        folder = tmp_path / str(num_steps)
        steps = iter(range(num_steps))

        def stop(_done: int, _total: int, steps=steps) -> None:
            if next(steps, None) is None:
                raise Killed

        try:
            write_checkpoint(source, folder, plan, on_progress=stop)
        except Killed:
            assert not (folder / "config.json").exists()
            assert contents(written(source, folder, plan)) == expected
            continue
        break
    assert num_steps > 25  # every tensor, and those that are read twice
    assert contents(folder) == expected


def test_a_process_killed_while_it_writes_is_resumed(tmp_path):
    sizes = {"layers_a_shard": 1, "hidden": 512, "inner": 1024, "vocab": 512}
    write_big(tmp_path / "source", num_shards=6, **sizes)
    plan = plan_of(tmp_path / "source", rule=ScaleRule.amax)
    expected = contents(written(tmp_path / "source", tmp_path / "whole", plan))
    folder = tmp_path / "killed"
    code = Path(__file__).with_name("big_checkpoint.py")
    process = subprocess.Popen([sys.executable, code, tmp_path / "source", folder, "amax"])
    second = folder / "model-00002-of-00006.safetensors"
    while not second.exists() and process.poll() is None:
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    done = second.stat().st_mtime_ns
    assert contents(written(tmp_path / "source", folder, plan)) == expected
    assert second.stat().st_mtime_ns == done


def test_a_resumed_run_repeats_no_shard_and_no_measuring(source, tmp_path, monkeypatch):
    plan = plan_of(source)

    def stop_at_the_end(done: int, total: int) -> None:
        if done == total:
            raise Killed

    with pytest.raises(Killed):
        write_checkpoint(source, tmp_path, plan, on_progress=stop_at_the_end)
    shards = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("*.safetensors")}
    assert len(shards) == len(list(source.glob("*.safetensors"))) - 1
    monkeypatch.setattr(checkpoint, "finite_amax", lambda *_: pytest.fail("measured again"))
    written(source, tmp_path, plan)
    assert {name: (tmp_path / name).stat().st_mtime_ns for name in shards} == shards


@pytest.mark.parametrize("changed", ["plan", "source"])
def test_shards_of_something_else_are_not_kept(source, tmp_path, changed):
    folder = copy_with(source, tmp_path / "source")
    plan = plan_of(folder, rule=ScaleRule.amax)

    def stop_late(done: int, total: int) -> None:
        if done > 0.9 * total:
            raise Killed

    with pytest.raises(Killed):
        write_checkpoint(folder, tmp_path / "a", plan, on_progress=stop_late)
    if changed == "plan":
        plan = plan_of(folder, rule=ScaleRule.search)
    else:
        folder = copy_with(source, tmp_path / "other", **{DOWN: torch.ones(32, 48)})
    assert contents(written(folder, tmp_path / "a", plan)) == contents(
        written(folder, tmp_path / "b", plan)
    )


@pytest.mark.slow
def test_memory_is_that_of_the_largest_matrix_not_of_a_shard(tmp_path):
    largest = write_big(
        tmp_path / "source", num_shards=4, layers_a_shard=2, hidden=1024, inner=3072, vocab=8192
    )
    memory = memory_of_quantizing(tmp_path / "source", tmp_path / "a", ScaleRule.amax)
    shard = min(path.stat().st_size for path in (tmp_path / "source").glob("*.safetensors"))
    assert memory < 3 * largest < 0.75 * shard


@pytest.mark.slow
def test_eight_gigabytes_are_quantized_in_less_than_three(tmp_path):
    if shutil.disk_usage(tmp_path).free < 20 * GIB:
        pytest.skip("needs 20 GiB of disk")
    write_big(
        tmp_path / "source", num_shards=4, layers_a_shard=4, hidden=4096, inner=14336, vocab=128256
    )
    assert memory_of_quantizing(tmp_path / "source", tmp_path / "a", ScaleRule.search) < 3 * GIB
    shutil.rmtree(tmp_path / "source")


def test_a_disk_that_is_too_small_is_refused_before_anything_is_written(
    source, tmp_path, monkeypatch
):
    size = quantized_size(source, plan_of(source))
    free = shutil._ntuple_diskusage(10 * size, 0, size - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free)
    with pytest.raises(DiskFull, match="the quantized checkpoint needs"):
        written(source, tmp_path, plan_of(source))
    assert list(tmp_path.glob("*.safetensors")) == []
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free._replace(free=size))
    written(source, tmp_path, plan_of(source))


def test_a_resumed_run_needs_room_for_what_is_missing_only(source, tmp_path, monkeypatch):
    plan = plan_of(source)

    def stop_late(done: int, total: int) -> None:
        if done > 0.9 * total:
            raise Killed

    with pytest.raises(Killed):
        write_checkpoint(source, tmp_path, plan, on_progress=stop_late)
    there = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    assert there > 0
    free = shutil._ntuple_diskusage(1, 0, quantized_size(source, plan) - there)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free)
    written(source, tmp_path, plan)
