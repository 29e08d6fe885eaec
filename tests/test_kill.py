"""A run that is killed again and again ends as one that is not."""

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_targets

ROOT = Path(__file__).parents[1]
NUM_KILLS = 5


def _command(target: Path, data: Path, root: Path, runs: Path) -> list[str]:
    return [
        *(sys.executable, "-m", "specfit", f"target.path={target}", f"runtime.root={root}"),
        *("data=local", f"data.sources.mine.path={data}", "data.sources.mine.format=messages"),
        *("profile=local", "data.num_train=24", "data.num_validation=2", "data.num_test=4"),
        *("generate.max_new_tokens=24", "generate.batch_size=2", "speculator.draft_vocab_size=128"),
        *("train.epochs=20", "train.pack_tokens=64", "train.save_every_s=0.2", "train.evals=4"),
        *("measure.max_new_tokens=16", "measure.num_draft_tokens=[2]", "measure.num_bootstrap=50"),
        *("runtime.num_threads=1", "runtime.min_free_gb=0.01", f"hydra.run.dir={runs}"),
    ]


def _environment() -> dict[str, str]:
    path = os.pathsep.join(str(ROOT / folder) for folder in (".", "kernels", "serve", "data"))
    return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def _finish(command: list[str]) -> Path:
    done = subprocess.run(command, capture_output=True, text=True, env=_environment(), check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return Path(done.stdout.splitlines()[-1])


def _losses(report: Path) -> list[float]:
    (folder,) = (report.parents[1] / "train").glob("*/train_log.jsonl")
    return [json.loads(line)["loss"] for line in folder.read_text().splitlines()]


def _keys(root: Path) -> set[str]:
    return {f"{p.parent.parent.name}/{p.parent.name}" for p in root.glob("*/*/artifact.json")}


@pytest.mark.slow
def test_a_run_killed_at_random_moments_ends_with_the_same_keys_and_losses(tmp_path: Path) -> None:
    target = tiny_targets.write_target(tmp_path / "target")
    data = tiny_targets.write_conversations(tmp_path / "data.jsonl", num=80)
    calm, killed = tmp_path / "calm", tmp_path / "killed"
    report = _finish(_command(target, data, calm, tmp_path / "runs"))
    command = _command(target, data, killed, tmp_path / "runs")
    moments = random.Random(0)
    for _ in range(NUM_KILLS):
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=_environment()
        )
        try:
            process.wait(timeout=moments.uniform(6, 20))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
    assert _finish(command).name == report.name
    assert _keys(killed) == _keys(calm)
    assert _losses(killed / "report" / report.name) == _losses(report)
    assert not list(killed.glob("*/*.partial"))
