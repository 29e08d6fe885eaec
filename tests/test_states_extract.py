"""Extraction goes on at the shard where it was killed, and starts nothing that cannot fit."""

import json
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
from tiny_architectures import random_tokens, tiny

from specfit.artifacts import Artifact, ArtifactStore, Recipe
from specfit.config import ExtractConfig, StateDtype
from specfit.files import DiskFull, append_jsonl
from specfit.stages import extract
from specfit.states.codec import bytes_per_token

AUX = [1, 3, 5]
LENGTHS = [9, 4, 14, 4, 21, 12]
NUM_SHARDS = 4  # of at most 20 tokens: 4 + 4 + 9, 12, 14, 21
Usage = namedtuple("Usage", "total used free")


@pytest.fixture(scope="module")
def answers(tmp_path_factory) -> Artifact:
    rows = [
        {
            "id": f"d{i}",
            "component": "coding",
            "source": "s",
            "split": split,
            "input_ids": random_tokens(length, seed=i).tolist(),
            "loss_spans": [[length // 2, length]],
        }
        for i, length in enumerate(LENGTHS)
        for split in ("train", "test")
    ]
    return ArtifactStore(tmp_path_factory.mktemp("answers")).get_or_make(
        Recipe("generate", 1, {}, {}), lambda folder: append_jsonl(folder / "answers.jsonl", rows)
    )


@pytest.fixture(autouse=True)
def _no_measuring(monkeypatch):
    monkeypatch.setattr(extract, "speed", lambda **_: {})


def run(folder: Path, answers: Artifact, **config: object) -> Path:
    folder.mkdir(exist_ok=True)
    extract.run(
        folder,
        config=ExtractConfig(**{"shard_tokens": 20, "batch_size": 2} | config),
        aux_layers=AUX,
        answers=answers,
        target=tiny("qwen3"),
    )
    return folder


def files(folder: Path) -> dict[str, bytes]:
    """What must not depend on how often one was killed; store.json tells of time."""
    paths = [*folder.glob("*.safetensors"), folder / "documents.jsonl"]
    return {path.name: path.read_bytes() for path in paths}


def run_killed(folder: Path, answers: Artifact, *, after: int) -> Path:
    """Extraction that dies when it is about to write shard number `after`."""
    real, written = extract.write_shard, []

    def write_shard(path: Path, *rest: object) -> object:
        if len(written) == after:
            raise KeyboardInterrupt
        written.append(path)
        return real(path, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(extract, "write_shard", write_shard)
        with pytest.raises(KeyboardInterrupt):
            run(folder, answers)
    return folder


@pytest.mark.parametrize("num", [1, 3])
def test_a_killed_extraction_ends_as_one_that_was_not(tmp_path, answers, num):
    whole = files(run(tmp_path / "whole", answers))
    killed = run_killed(tmp_path / "killed", answers, after=num)
    assert not (killed / "documents.jsonl").exists()
    assert files(run(killed, answers)) == whole
    assert len(whole) == NUM_SHARDS + 1


def test_shards_before_a_kill_are_not_written_again(tmp_path, answers):
    killed = run_killed(tmp_path / "killed", answers, after=2)
    before = {p.name: p.stat().st_mtime_ns for p in killed.glob("*.safetensors")}
    assert sorted(before) == ["shard-00000.safetensors", "shard-00001.safetensors"]
    run(killed, answers)
    after = {p.name: p.stat().st_mtime_ns for p in killed.glob("*.safetensors")}
    assert {name: after[name] for name in before} == before


def test_a_shard_cut_short_by_a_kill_is_written_again(tmp_path, answers):
    whole = files(run(tmp_path / "whole", answers))
    killed = run_killed(tmp_path / "killed", answers, after=1)
    (killed / "shard-00001.tmp").write_bytes(b"half a shard")
    run(killed, answers)
    assert files(killed) == whole
    assert not list(killed.glob("*.tmp"))


def test_an_index_cut_short_by_a_kill_is_written_whole(tmp_path, answers):
    folder = run(tmp_path / "store", answers)
    whole = files(folder)
    lines = whole["documents.jsonl"].splitlines(keepends=True)
    (folder / "documents.jsonl").write_bytes(lines[0] + lines[1][:20])
    assert files(run(folder, answers)) == whole


def test_a_disk_too_small_is_refused_before_anything_is_written(tmp_path, monkeypatch, answers):
    needed = sum(LENGTHS) * bytes_per_token(len(AUX) + 1, 32, StateDtype.bf16)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(1 << 40, 0, needed - 1))
    with pytest.raises(DiskFull, match=f"states of {sum(LENGTHS)} tokens.*GiB free in"):
        run(tmp_path / "store", answers)
    assert list((tmp_path / "store").iterdir()) == []
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(1 << 40, 0, needed))
    run(tmp_path / "store", answers)


def test_what_is_there_already_needs_no_room(tmp_path, monkeypatch, answers):
    folder = run(tmp_path / "store", answers)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(1 << 40, 0, 0))
    run(folder, answers)


def test_answers_for_testing_are_not_extracted(tmp_path, answers):
    folder = run(tmp_path / "store", answers)
    lines = (folder / "documents.jsonl").read_text().splitlines()
    assert len(lines) == len(LENGTHS)
    assert {json.loads(line)["split"] for line in lines} == {"train"}


def test_the_store_says_how_many_tokens_it_holds(tmp_path, answers):
    folder = run(tmp_path / "store", answers, max_tokens=10)
    store = json.loads((folder / "store.json").read_text())
    assert store["num_tokens"] == 9 + 4 + 10 + 4 + 10  # the longest one's answer begins at 10
    assert store["num_documents"] == 5
    assert (store["dtype"], store["aux_layers"]) == ("bf16", AUX)


def test_answers_that_are_all_cut_off_are_refused(tmp_path, answers):
    with pytest.raises(ValueError, match=r"extract\.max_tokens must .*, got 2"):
        run(tmp_path / "store", answers, max_tokens=2)
    assert list((tmp_path / "store").iterdir()) == []
