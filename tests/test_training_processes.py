"""Two real processes against one."""

import pytest
import tiny_training
import torch
from safetensors.torch import load_file

from specfit.files import read_jsonl
from specfit.training.launch import launch


def test_two_processes_train_as_one_does_and_count_nothing_twice(tmp_path):
    # Five packs: two steps of two, and the epoch's tail of one, which one process has nothing of.
    changes = {"epochs": 1, "packs_per_step": 2, "evals": 1}
    one, two = tmp_path / "one", tmp_path / "two"
    tiny_training.run(one, **changes)
    launch(tiny_training.work, 2, two, changes)
    assert sorted(p.name for p in two.glob("rank-*")) == ["rank-0-of-2", "rank-1-of-2"]
    logs = [read_jsonl(folder / "train_log.jsonl") for folder in (one, two)]
    assert [len(log) for log in logs] == [3, 3]
    for alone, together in zip(*logs, strict=True):
        assert together["loss"] == pytest.approx(alone["loss"], abs=1e-5)
        assert together["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-4)
        for key in ("tokens", "accuracy", "expected_acceptance_length", "lr", "step"):
            assert together[key] == alone[key], key
    weights = [load_file(folder / "model.safetensors") for folder in (one, two)]
    for name, weight in weights[0].items():
        # One bf16 rounding step, where sums in another order fell on its two sides.
        torch.testing.assert_close(weights[1][name], weight, rtol=2**-7, atol=1e-4)
