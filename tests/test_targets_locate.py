"""A target is found where `target.path` says, or the message says why not."""

import json
import os
import shutil
from pathlib import Path

import pytest

from specfit.config import TargetConfig
from specfit.targets.locate import Location, file_digest, locate

MIB = 1 << 20


def find(path: Path | str, digests: Path | None = None, **config: object) -> Location:
    return locate(TargetConfig(path=str(path), **config), digests=digests)


@pytest.fixture
def folder(tmp_path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(2 * MIB))
    return folder


@pytest.fixture
def package(tmp_path, monkeypatch) -> Path:
    """An installed package with a file in it, whose code cannot be imported."""
    package = tmp_path / "site" / "a_target_in_a_package"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('this was imported')\n")
    (package / "model.gguf").write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(package.parent)
    return package


def touch(path: Path) -> None:
    later = path.stat().st_mtime_ns + 10**9
    os.utime(path, ns=(later, later))


def change(path: Path) -> None:
    """Another byte, at another time, in as many bytes."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    stat = path.stat()
    path.write_bytes(data)
    os.utime(path, ns=(stat.st_mtime_ns, stat.st_mtime_ns + 10**9))


def test_a_file_in_a_package_is_found_without_importing_it(package):
    location = find("package:a_target_in_a_package/model.gguf")
    assert (location.folder, location.gguf_file) == (package, "model.gguf")


def test_a_package_that_is_missing_is_named_with_what_to_install():
    with pytest.raises(
        ModuleNotFoundError, match=r"^target\.path: package llm_nobody .*pip install.* llm-nobody$"
    ):
        find("package:llm_nobody/model.gguf")


@pytest.mark.usefixtures("package")
def test_a_file_that_the_package_lacks_is_named():
    with pytest.raises(FileNotFoundError, match=r"target\.path: .*a_target_in_a_package/no\.gguf"):
        find("package:a_target_in_a_package/no.gguf")


@pytest.mark.parametrize(
    "path", ["/nowhere/model", "./nowhere", "../nowhere", "~/nowhere", "a/b/c"]
)
def test_a_folder_that_is_missing_is_not_taken_for_a_hub_id(path):
    with pytest.raises(FileNotFoundError, match=rf"^target\.path: no such file or folder: {path}$"):
        find(path)


def test_a_gguf_file_that_is_missing_is_named():
    with pytest.raises(FileNotFoundError, match=r"target\.path: .*/nowhere/model\.gguf"):
        find("/nowhere/model.gguf")


def test_the_home_folder_is_expanded(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder.parent))
    assert find("~/model").folder == folder


def test_a_folder_without_config_json_is_refused(folder):
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match=r"target\.path: .*model holds no config\.json"):
        find(folder)


def test_a_folder_of_pickled_weights_is_refused(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"target\.path: .*no \.safetensors file; pickled"):
        find(folder)


def test_a_gguf_file_of_a_folder_is_chosen_by_name(folder):
    for name in ("one.gguf", "two.gguf"):
        (folder / name).write_text(name)
    location = find(folder, gguf_file="two.gguf")
    assert location == find(folder / "two.gguf")
    assert location.identity != find(folder, gguf_file="one.gguf").identity


@pytest.mark.parametrize("path", ["nobody/has-this-model", "nobody-has-this-model"])
def test_a_hub_that_cannot_be_reached_is_one_line(path):
    with pytest.raises(
        ValueError, match=rf"^target\.path: {path} .*the hub did not give"
    ) as caught:
        find(path)
    assert "\n" not in str(caught.value)


def test_only_the_first_line_of_what_the_hub_says_is_passed_on(monkeypatch):
    def refuse(*_args: object, **_options: object) -> None:
        raise OSError("401 Client Error.\n\nRepository Not Found for url")

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    with pytest.raises(ValueError, match=r"did not give it \(401 Client Error\.\)$"):
        find("nobody/has-this-model")


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_identity_changes_with_what_is_read(folder, tmp_path, name):
    before = find(folder, tmp_path / "digests.json").identity
    change(folder / name)
    assert find(folder, tmp_path / "digests.json").identity != before


@pytest.mark.parametrize("name", ["README.md", "optimizer.pt"])
def test_identity_does_not_change_with_what_is_not_read(folder, name):
    before = find(folder).identity
    (folder / name).write_text("anything")
    assert find(folder).identity == before


def test_code_of_a_checkpoint_is_part_of_its_identity_where_it_is_run(folder):
    def identity(*, trusted: bool) -> str:
        return find(folder, trust_remote_code=trusted).identity

    (folder / "modeling.py").write_text("")
    before = {trusted: identity(trusted=trusted) for trusted in (False, True)}
    change_to = "import os\n"
    (folder / "modeling.py").write_text(change_to)
    assert identity(trusted=False) == before[False]
    assert identity(trusted=True) != before[True]


def test_identity_does_not_change_with_times_or_places(folder, tmp_path):
    digests = tmp_path / "digests.json"
    before = find(folder, digests).identity
    for path in folder.iterdir():
        touch(path)
    assert find(folder, digests).identity == before
    assert find(shutil.copytree(folder, tmp_path / "copy"), digests).identity == before


def test_identity_of_a_gguf_file_follows_its_bytes(tmp_path):
    path, digests = tmp_path / "model.gguf", tmp_path / "digests.json"
    path.write_bytes(bytes(2 * MIB))
    before = find(path, digests).identity
    touch(path)
    assert find(path, digests).identity == before
    change(path)
    assert find(path, digests).identity != before


def test_a_large_file_is_read_once_for_its_digest(tmp_path):
    path, digests = tmp_path / "model.gguf", tmp_path / "digests.json"
    path.write_bytes(bytes(2 * MIB))
    digest = file_digest(path, digests)
    (stamp,) = json.loads(digests.read_text())
    assert json.loads(digests.read_text()) == {stamp: digest}
    digests.write_text(json.dumps({stamp: "remembered"}))
    assert file_digest(path, digests) == "remembered"
