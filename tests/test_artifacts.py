"""An artifact is there if and only if it is complete, and is read as it was written."""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from enum import Enum
from pathlib import Path

import pytest

from specfit import artifacts
from specfit.artifacts import ArtifactStore, CorruptArtifact, Recipe
from specfit.files import DiskFull

RECIPE = Recipe("train", 1, {"lr": 0.1, "steps": 3}, {"states": "0123456789abcdef"})
# What another process runs: make the artifact of RECIPE under argv[1], slowly, a line an event.
MAKE = """
import logging, os, sys, time
from pathlib import Path
from specfit.artifacts import ArtifactStore, Recipe
logging.basicConfig(level="INFO", stream=sys.stdout, format="%(message)s")
def make(folder):
    with (folder / "makers").open("a") as file:
        file.write(f"{os.getpid()}\\n")
    sys.stdout.write("making\\n"); sys.stdout.flush()
    time.sleep(float(sys.argv[2]))
recipe = Recipe("train", 1, {"lr": 0.1, "steps": 3}, {"states": "0123456789abcdef"})
ArtifactStore(Path(sys.argv[1])).get_or_make(recipe, make)
"""


class Loss(Enum):
    kl = 1


def make(folder: Path) -> None:
    (folder / "weights").write_bytes(b"0123456789")
    (folder / "more").mkdir(exist_ok=True)
    (folder / "more" / "log.jsonl").write_text("{}\n")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def never(_folder: Path) -> None:
    raise AssertionError("it was made again")


def start_making(root: Path, seconds: float) -> subprocess.Popen[str]:
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", MAKE, str(root), str(seconds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)


def wait_until_making(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    while (line := process.stdout.readline()) != "making\n":
        assert line, "it ended without making anything"


@pytest.fixture
def store(tmp_path) -> ArtifactStore:
    return ArtifactStore(tmp_path)


def test_a_key_is_sixteen_hexadecimal_digits():
    assert len(RECIPE.key) == 16
    assert set(RECIPE.key) <= set("0123456789abcdef")


@pytest.mark.parametrize(
    "change",
    [
        {"stage": "x"},
        {"version": 2},
        {"params": {"lr": 0.2, "steps": 3}},
        {"inputs": {"states": "1"}},
    ],
)
def test_every_part_of_a_recipe_decides_its_key(change):
    assert replace(RECIPE, **change).key != RECIPE.key


def test_the_order_of_parameters_does_not_decide_the_key():
    assert replace(RECIPE, params={"steps": 3, "lr": 0.1}).key == RECIPE.key


def test_an_enum_counts_by_its_name():
    by_member = replace(RECIPE, params={"loss": Loss.kl})
    assert by_member.key == replace(RECIPE, params={"loss": "kl"}).key


def test_a_key_is_the_same_in_every_process():
    code = f"import sys; from specfit.artifacts import Recipe; sys.stdout.write({RECIPE!r}.key)"
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": "7"}
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True, env=env)
    assert done.stdout.decode() == RECIPE.key


@pytest.mark.parametrize(("value", "error"), [(float("inf"), ValueError), (Path("x"), TypeError)])
def test_a_parameter_that_json_cannot_say_is_refused(value, error):
    with pytest.raises(error):
        assert replace(RECIPE, params={"x": value}).key


def test_an_artifact_is_made_once(store):
    made = store.get_or_make(RECIPE, make)
    assert made.path == store.root / "train" / RECIPE.key
    assert store.get_or_make(RECIPE, never) == made


def test_the_manifest_says_what_it_was_made_from_and_with(store):
    manifest = store.get_or_make(RECIPE, make).manifest
    assert manifest["stage"] == "train"
    assert manifest["key"] == RECIPE.key
    assert manifest["version"] == 1
    assert manifest["params"] == RECIPE.params
    assert manifest["inputs"] == RECIPE.inputs
    assert manifest["packages"]["torch"].startswith("2.")
    assert manifest["files"]["weights"] == {
        "bytes": 10,
        "sha256": "84d89877f0d4041efb6bf91a16f0248f2fd573e6af05c19f96bedb9f882f7882",
    }


def test_files_are_named_relative_to_the_artifact(store):
    artifact = store.get_or_make(RECIPE, make)
    assert artifact.files() == ["more/log.jsonl", "weights"]
    assert artifact.file("more/log.jsonl").read_text() == "{}\n"
    assert artifact.folder() == artifact.path


def test_a_stage_that_fails_gets_its_folder_back(store):
    def fail(folder: Path) -> None:
        (folder / "step").write_text("7")
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        store.get_or_make(RECIPE, fail)
    assert store.find(RECIPE) is None
    seen = []
    artifact = store.get_or_make(RECIPE, lambda folder: seen.append((folder / "step").read_text()))
    assert seen == ["7"]
    assert artifact.manifest["resumed"]
    assert not artifact.path.with_suffix(".partial").exists()


def test_a_stage_that_is_killed_gets_its_folder_back(store):
    process = start_making(store.root, 60)
    wait_until_making(process)
    process.kill()
    process.wait()
    assert store.find(RECIPE) is None
    seen = []
    store.get_or_make(RECIPE, lambda folder: seen.append((folder / "makers").read_text()))
    assert seen == [f"{process.pid}\n"]


def test_the_folder_of_an_older_key_is_never_handed_out(store):
    def fail(folder: Path) -> None:
        (folder / "step").write_text("7")
        raise RuntimeError

    with pytest.raises(RuntimeError):
        store.get_or_make(RECIPE, fail)
    artifact = store.get_or_make(replace(RECIPE, version=2), make)
    assert artifact.files() == ["more/log.jsonl", "weights"]


def test_processes_that_ask_at_once_make_an_artifact_once(store):
    first = start_making(store.root, 1.0)
    wait_until_making(first)
    others = [start_making(store.root, 0) for _ in range(3)]
    outputs = [process.communicate(timeout=60)[0] for process in others]
    assert first.wait(timeout=60) == 0
    assert [process.returncode for process in others] == [0, 0, 0]
    assert [output.count("another process makes this artifact") for output in outputs] == [1, 1, 1]
    artifact = store.get_or_make(RECIPE, never)
    assert artifact.file("makers").read_text() == f"{first.pid}\n"


def test_a_finished_artifact_needs_no_lock(store):
    store.get_or_make(RECIPE, make)
    (store.root / "train" / f"{RECIPE.key}.lock").unlink()
    store.get_or_make(RECIPE, never)
    assert names(store.root / "train") == [RECIPE.key]


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda path: path.write_bytes(b"0123456788"), "altered"),
        (lambda path: path.write_bytes(b"012345678"), "9 bytes where 10"),
        (lambda path: path.unlink(), "missing"),
    ],
    ids=["flipped", "truncated", "missing"],
)
def test_a_damaged_file_is_named_with_the_way_out(store, damage, reason):
    artifact = store.get_or_make(RECIPE, make)
    damage(artifact.path / "weights")
    assert artifact.file("more/log.jsonl").exists()
    with pytest.raises(CorruptArtifact, match=rf"weights .*{reason}.*delete .* and run again"):
        artifact.file("weights")
    with pytest.raises(CorruptArtifact):
        artifact.folder()


def test_a_file_is_read_once_to_verify_it(store, monkeypatch):
    artifact = store.get_or_make(RECIPE, make)
    artifact.file("weights")
    monkeypatch.setattr(artifacts, "_sha256", never)
    assert store.get_or_make(RECIPE, never).file("weights").exists()


def test_a_file_that_was_never_there_is_not_found(store):
    with pytest.raises(FileNotFoundError, match=r"has no nothing; it has more/log\.jsonl, weights"):
        store.get_or_make(RECIPE, make).file("nothing")


def test_a_folder_without_its_manifest_is_refused_before_any_work(store):
    (store.get_or_make(RECIPE, make).path / "artifact.json").unlink()
    with pytest.raises(CorruptArtifact, match=r"artifact\.json is missing; delete"):
        store.get_or_make(RECIPE, never)


def test_an_unreadable_manifest_is_refused(store):
    artifact = store.get_or_make(RECIPE, make)
    (artifact.path / "artifact.json").write_text('{"files"')
    with pytest.raises(CorruptArtifact, match=r"artifact\.json cannot be read"):
        assert store.get_or_make(RECIPE, never).files()


def test_what_a_kill_left_of_a_write_is_no_file_of_the_artifact(store):
    artifact = store.get_or_make(RECIPE, lambda folder: (folder / ".a.json.tmp").write_text("{"))
    assert artifact.files() == []
    assert names(artifact.path) == ["artifact.json"]


def test_a_kill_before_the_rename_leaves_no_second_manifest(store):
    partial = (store.root / "train" / RECIPE.key).with_suffix(".partial")
    partial.mkdir(parents=True)
    (partial / "artifact.json").write_text('{"files": {}}')
    assert store.find(RECIPE) is None
    assert store.get_or_make(RECIPE, make).files() == ["more/log.jsonl", "weights"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_disk_that_fills_up_keeps_what_was_made(store):
    def fill(folder: Path) -> None:
        (folder / "shard-0").write_text("x")
        Path("/dev/full").write_text("x")

    with pytest.raises(DiskFull, match=r"\.partial is kept"):
        store.get_or_make(RECIPE, fill)
    artifact = store.get_or_make(RECIPE, lambda _folder: None)
    assert artifact.files() == ["shard-0"]


def test_nothing_is_started_on_a_disk_with_too_little_space(tmp_path):
    store = ArtifactStore(tmp_path, min_free_bytes=1 << 60)
    with pytest.raises(DiskFull, match="stage train needs"):
        store.get_or_make(RECIPE, never)


def test_what_is_made_is_found_on_a_full_disk(store):
    store.get_or_make(RECIPE, make)
    ArtifactStore(store.root, min_free_bytes=1 << 60).get_or_make(RECIPE, never)


def test_status_tells_made_partial_and_missing_apart(store):
    def fail(folder: Path) -> None:
        (folder / "step").write_text("123")
        raise RuntimeError

    store.get_or_make(RECIPE, make)
    half = replace(RECIPE, stage="half")
    with pytest.raises(RuntimeError):
        store.get_or_make(half, fail)
    recipes = {"train": RECIPE, "half": half, "none": replace(RECIPE, stage="none")}
    rows = artifacts.status(store, recipes)
    assert [(row.stage, row.state, row.num_bytes) for row in rows] == [
        ("train", "made", 13),
        ("half", "partial", 3),
        ("none", "missing", 0),
    ]
    assert [row.key for row in rows] == [recipe.key for recipe in recipes.values()]
    ages = [time.time() - row.when.timestamp() for row in rows if row.when]
    assert len(ages) == 2
    assert all(-1 < age < 60 for age in ages)


def test_status_creates_nothing(tmp_path):
    artifacts.status(ArtifactStore(tmp_path / "artifacts"), {"train": RECIPE})
    assert names(tmp_path) == []


def test_the_manifest_is_json_that_a_person_can_read(store):
    text = (store.get_or_make(RECIPE, make).path / "artifact.json").read_text()
    assert json.loads(text)
    assert text.count("\n") > 10


def test_a_prepared_folder_is_what_its_stage_finds(tmp_path):
    store = ArtifactStore(tmp_path)
    with store.prepared(RECIPE) as folder:
        assert folder is not None
        (folder / "ahead").write_text("1")
        assert artifacts.status(store, {"train": RECIPE})[0].state == "partial"
    made = store.get_or_make(RECIPE, make)
    assert made.file("ahead").read_text() == "1"
    with store.prepared(RECIPE) as folder:
        assert folder is None
    assert made.folder() == made.path


def test_nobody_makes_what_another_process_prepares(tmp_path):
    with ArtifactStore(tmp_path).prepared(RECIPE):
        process = start_making(tmp_path, 0)
        assert process.stdout is not None
        assert "another process makes" in process.stdout.readline()
    assert process.wait(timeout=60) == 0
    assert ArtifactStore(tmp_path).find(RECIPE) is not None
