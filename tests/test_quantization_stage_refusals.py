"""What cannot be quantized as asked is refused before anything is answered, or left as it is."""

import json
import shutil
from pathlib import Path

import pytest
import tiny_quantized
import tiny_runs
import tiny_targets
import torch
from safetensors.torch import load_file, save_file
from sharded_targets import tensors, write_sharded

from specfit.files import DiskFull

QUICK = ["quantize.selector=isolated", "quantize.granularity=layer"]  # measures a handful of sets


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    return tiny_quantized.overrides(tmp_path_factory.mktemp("quantize"))


@pytest.fixture(scope="module")
def stored_in_bf16(words, tmp_path_factory):
    """The target with weights in bfloat16, and code that transformers does not need."""
    folder = tmp_path_factory.mktemp("bf16") / "target"
    path = next(w.partition("=")[2] for w in words if w.startswith("target.path="))
    shutil.copytree(path, folder)
    weights = load_file(folder / "model.safetensors")
    weights = {name: weight.bfloat16() for name, weight in weights.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= {"dtype": "bfloat16", "auto_map": {"AutoModel": "modeling_tiny.TinyModel"}}
    (folder / "config.json").write_text(json.dumps(config))
    return [*words, *QUICK, f"target.path={folder}"]


@pytest.mark.slow
def test_a_target_that_is_computed_in_a_wider_type_is_quantized_as_it_is_stored(stored_in_bf16):
    asked = [*stored_in_bf16, "quantize.budget_in=bits", "quantize.budget=12"]
    made = tiny_runs.run(asked)
    assert tiny_runs.read_json(made, "fidelity.json")["not_as_measured"] == []
    assert 9 < tiny_runs.read_json(made, "recipe.json")["bits_per_weight"] <= 12
    assert "auto_map" not in json.loads((made.path / "model" / "config.json").read_text())


def refused(words, message, error=ValueError):
    """Before anything was answered."""
    with pytest.raises(error, match=message):
        tiny_runs.run(words, "stage=sensitivity")
    folder = tiny_runs.composed(words).runtime.root
    assert not list(Path(folder).glob("sensitivity/*.partial/answers.jsonl"))


def test_a_target_with_code_of_its_own_is_refused(stored_in_bf16):
    message = r"must be null for a target with code of its own"
    refused([*stored_in_bf16, "target.trust_remote_code=true"], message)


def test_a_type_that_does_not_hold_what_is_stored_is_refused(words):
    message = r"target\.dtype must hold .* float32, got torch\.bfloat16; set target\.dtype=float32"
    refused([*words, "target.dtype=bfloat16"], message)


def test_more_bits_than_are_stored_are_refused(words):
    asked = [*words, "quantize.curve_points=2", "quantize.budget_in=bits", "quantize.budget=32"]
    refused(asked, r"quantize\.budget must be below 32 bits a weight, which this target has with")
    message = r"quantize\.budget must be below 8\.\d+ bits a weight"
    refused([*asked, "quantize.budget=9", "quantize.rest=fp8"], message)


def test_a_disk_that_is_too_small_is_named_before_anything_is_answered(words, monkeypatch):
    free = shutil._ntuple_diskusage(1 << 30, 0, 50_000)
    asked = [*words, "quantize.curve_points=2"]
    tiny_runs.run(asked, "stage=prompts")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free)
    refused(asked, "the quantized checkpoint needs", DiskFull)


@pytest.mark.parametrize("more", ["quantize.cotune=true", "quantize.activations=nvfp4"])
def test_experts_in_one_parameter_are_refused_what_only_linear_layers_can(words, tmp_path, more):
    write_sharded(tmp_path / "target", "qwen3_moe")
    there = [*words, f"target.path={tmp_path / 'target'}", more]
    refused(there, rf"{more.split('=')[0]} must be (none|false) for .*experts\.down_proj")


def test_a_width_that_nvfp4_cannot_hold_stays_as_it_is(words, tmp_path, caplog):
    target = tiny_targets.write_target(tmp_path / "target", "qwen3_moe")  # experts 24 wide
    made = tiny_runs.run(words, *QUICK, f"target.path={target}", "quantize.rest=fp8")
    (line,) = {r.message for r in caplog.records if "stay as they are" in r.message}
    assert line.startswith("quantize: 6 of 18 units stay as they are: ")
    assert "multiple of 16 columns" in line
    found = tiny_runs.read_json(made, "recipe.json")["plan"]["precision"]
    assert set(found) == {f"layers.{i}.{name}" for i in range(6) for name in ("qkv", "o")}
    before, after = tensors(target), tensors(made.path / "model")
    experts = [name for name in before if ".experts." in name]
    assert len(experts) == 6 * 4 * 3
    assert all(torch.equal(before[name], after[name]) for name in experts)


def test_more_text_than_there_are_answers_is_refused(words):
    with pytest.raises(ValueError, match=r"quantize\.num_passages, .*mine has \d+ of 64"):
        tiny_runs.run(words, "quantize.num_passages=20")


@pytest.mark.parametrize(
    ("words_", "message"),
    [
        (["quantize.budget=1.5"], r"quantize\.budget must be a share in \(0, 1\], got 1\.5"),
        (["quantize.budget=0"], r"quantize\.budget must be a share"),
        (
            ["quantize.budget=4", "quantize.budget_in=bits"],
            r"must be at least 4\.5 bits a weight, got 4",
        ),
        (["quantize.budget=-1", "quantize.budget_in=kl_nats"], r"must be a KL above 0"),
        (["quantize.num_passages=1"], r"quantize\.num_passages must be at least 2"),
        (["quantize.counted_tokens=0"], r"quantize\.counted_tokens must be at least 1"),
    ],
)
def test_settings_that_make_no_sense_are_named(words, words_, message):
    with pytest.raises(ValueError, match=message):
        tiny_runs.composed([*words, *words_])


def test_a_stage_without_a_budget_says_what_to_set(words):
    with pytest.raises(ValueError, match=r"quantize\.budget must be set for stage=quantize"):
        tiny_runs.run(words, "quantize.budget=null")
