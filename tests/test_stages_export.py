"""`export` as the path runs it, and heads that come from elsewhere."""

import shutil
from dataclasses import replace

import pytest
import tiny_exports
import tiny_runs
import tiny_targets
import torch
from safetensors.torch import load_file, save_file

from specfit.draft_vocab import DraftVocab
from specfit.export import vllm
from specfit.export.config import EngineName, ExportConfig


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    folder = tmp_path_factory.mktemp("export")
    target = tiny_targets.write_target(folder / "target")
    data = tiny_targets.write_conversations(folder / "data.jsonl", 60)
    return tiny_runs.overrides(folder / "root", target, data, "generate.on_policy=false")


@pytest.fixture(scope="module")
def made(words):
    return tiny_runs.run(words, "stage=export")


def test_every_engine_that_can_serve_the_head_has_a_folder(made):
    manifest = tiny_runs.read_json(made, "manifest.json")
    engines = ["vllm", "speculators", "sglang", "tensorrt_llm", "openvino"]
    assert [row["engine"] for row in manifest["engines"]] == engines
    for row in manifest["engines"]:
        assert set(row["files"]) <= set(made.files())
        command = made.file(f"{row['engine']}/SERVE.md").read_text()
        assert len([line for line in command.splitlines() if line]) == 3
        assert "TARGET" in command
    assert set(manifest["refused"]) == {"llama_cpp"}
    assert "export.target_gguf must name the target's GGUF" in manifest["refused"]["llama_cpp"]


def test_every_folder_drafts_as_the_trained_head_on_held_out_text(made):
    rows = tiny_runs.read_json(made, "parity.json")["rows"]
    assert len(rows) == 5
    for row in rows:
        assert row["num_drafted_tokens"] > 100
        assert row["drafted_tokens_equal"] == 1.0
        assert row["max_logit_difference"] < 1e-3 * row["max_logit"]


def test_with_the_targets_gguf_llama_cpp_has_its_file_too(words, tmp_path):
    gguf = tiny_exports.target_gguf(tmp_path / "t.gguf")
    found = tiny_runs.run(
        words, "stage=export", f"export.target_gguf={gguf}", "export.engines=[llama_cpp]"
    )
    (row,) = tiny_runs.read_json(found, "parity.json")["rows"]
    assert (row["engine"], row["drafted_tokens_equal"]) == ("llama_cpp", 1.0)
    assert found.file("llama_cpp/head.gguf").stat().st_size > 1000


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["export.engines=[llama_cpp]"], r"export\.target_gguf must name the target's GGUF file"),
        (["export.target_gguf=nowhere.gguf"], r"export\.target_gguf must be a GGUF file"),
        (
            ["export.engines=[sglang]", "speculator.norm_before_residual=true"],
            r"speculator\.norm_before_residual must be false for sglang",
        ),
    ],
)
def test_what_cannot_be_exported_is_an_error_that_names_the_setting(words, options, named):
    with pytest.raises(ValueError, match=named):
        tiny_runs.run(words, "stage=export", *options)


def test_a_tokenizer_of_another_size_is_refused(words, tmp_path):
    gguf = tiny_exports.target_gguf(tmp_path / "t.gguf", num_tokens=300)
    with pytest.raises(ValueError, match=r"must hold the target's 320 tokens, got 300"):
        tiny_runs.run(words, "stage=export", f"export.target_gguf={gguf}")


def test_a_folder_that_drafts_otherwise_than_the_trained_head_is_an_error(words, monkeypatch):
    read = vllm.twin

    def altered(folder, served):
        twin = read(folder, served)
        weight = -twin.tensors["lm_head.weight"]
        return replace(twin, tensors={**twin.tensors, "lm_head.weight": weight})

    monkeypatch.setattr(vllm, "twin", altered)
    with pytest.raises(ValueError, match="vllm: the exported head must draft as the trained one"):
        tiny_runs.run(words, "stage=export", "export.num_tokens=50")
    assert tiny_runs.artifacts(words, "export.num_tokens=50")["export"] is None


@pytest.mark.parametrize(
    ("engines", "named"),
    [
        ([], "name at least one"),
        ([EngineName.auto, EngineName.vllm], "be auto, or a list without auto"),
        ([EngineName.vllm, EngineName.vllm], "name each once"),
    ],
)
def test_lists_of_engines_that_say_nothing_are_refused(engines, named):
    with pytest.raises(ValueError, match=rf"export\.engines must {named}"):
        ExportConfig(engines)


def test_a_head_that_comes_back_is_measured_as_it_was_and_can_be_trained_on(words, made):
    measured = tiny_runs.run(words, "stage=measure")
    folder = made.file("sglang/config.json").parent
    back = [f"speculator.from_checkpoint={folder}", "speculator.draft_vocab_size=64"]
    tiny_runs.run(words, *back, "train.epochs=0", "stage=report")
    artifacts = tiny_runs.artifacts(words, *back, "train.epochs=0")
    both = (measured, artifacts["measure"])
    rows = [tiny_runs.read_json(one, "acceptance.json")["rows"] for one in both]
    for before, after in zip(*rows, strict=True):
        for name in ("proposer", "num_rounds", "num_tokens", "acceptance_length"):
            assert before[name] == after[name]
    assert tiny_runs.read_json(artifacts["train"], "train.json")["num_steps"] == 0
    (evaluation,) = tiny_runs.read_lines(artifacts["train"], "evals.jsonl")
    assert evaluation["step"] == 0
    assert evaluation["kept"]
    again = tiny_runs.run(words, *back, "stage=train")
    assert tiny_runs.read_lines(again, "evals.jsonl")[0]["step"] == 0
    assert tiny_runs.read_json(again, "train.json")["num_steps"] > 0
    config = tiny_runs.read_json(again, "config.json")
    assert config["draft_vocab_size"] == 128
    assert tiny_runs.keys(words, *back) == tiny_runs.keys(words, back[0])


def test_coverage_is_of_the_heads_own_draft_vocabulary(words, made, tmp_path):
    folder = tmp_path / "theirs"
    shutil.copytree(made.file("vllm/config.json").parent, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["d2t"] = torch.arange(len(tensors["d2t"]), dtype=torch.int64)  # every other token
    save_file(tensors, folder / "model.safetensors")
    fitted = tiny_runs.run(words, f"speculator.from_checkpoint={folder}", "stage=fit")
    vocab = DraftVocab.load(fitted.file("draft_vocab.safetensors"))
    assert vocab.target_ids.tolist() == list(range(0, 256, 2))


def test_no_epochs_are_an_error_without_a_head(words):
    with pytest.raises(ValueError, match=r"train\.epochs must be at least 1 without speculator"):
        tiny_runs.run(words, "train.epochs=0", "stage=train")
