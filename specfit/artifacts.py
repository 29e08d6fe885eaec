"""What stages hand to each other: folders named by the hash of what they were made from.

artifacts/train/3f9a0c5d7e21b846/artifact.json    there if and only if the folder is complete
artifacts/train/3f9a0c5d7e21b846.partial/         in the making, or left by a kill
artifacts/train/3f9a0c5d7e21b846.lock             held by the process that makes it
"""

import functools
import hashlib
import json
import logging
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock, Timeout

from specfit.files import GIB, dumps, explain_disk_full, fsync, require_free, write_json

log = logging.getLogger(__name__)

MANIFEST = "artifact.json"
PACKAGES = ("specfit-llm", "torch", "transformers", "safetensors", "datasets", "hydra-core")


class CorruptArtifact(ValueError):  # noqa: N818
    """A finished artifact is not what was written; the message names the file and the way out."""


@dataclass(frozen=True)
class Recipe:
    """Everything that decides an artifact's contents: equal recipes, equal artifacts."""

    stage: str
    version: int  # the stage's VERSION: raised whenever the same parameters make something else
    params: Mapping[str, Any]  # JSON values; enums count by their name
    inputs: Mapping[str, str]  # role -> key of the artifact that plays it

    @property
    def key(self) -> str:
        """16 hexadecimal digits.

        Raises:
            TypeError: a parameter is not a JSON value.
            ValueError: a parameter is not a finite number.
        """
        text = dumps([self.stage, self.version, self.params, self.inputs])
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Artifact:
    """A finished folder. What is read from it goes through `file` or `folder`, which verify it."""

    stage: str
    key: str
    path: Path

    @functools.cached_property
    def manifest(self) -> dict[str, Any]:
        """`artifact.json`.

        Raises:
            CorruptArtifact: it cannot be read.
        """
        try:
            manifest = json.loads((self.path / MANIFEST).read_bytes())
        except (FileNotFoundError, ValueError) as error:
            raise _corrupt(self.path, MANIFEST, f"cannot be read ({error})") from error
        assert isinstance(manifest, dict)
        return manifest

    def files(self) -> list[str]:
        """Names relative to `path`, sorted; `artifact.json` is not among them."""
        return sorted(self.manifest["files"])

    def file(self, name: str) -> Path:
        """The path of one file, compared with its recorded size and checksum first.

        A file is read for this once in a process, and again when its size or time has changed.

        Raises:
            FileNotFoundError: the artifact never had such a file.
            CorruptArtifact: the file is missing, truncated or altered.
        """
        if name not in self.manifest["files"]:
            raise FileNotFoundError(f"{self.path} has no {name}; it has {', '.join(self.files())}")
        recorded = self.manifest["files"][name]
        path = self.path / name
        if not path.is_file():
            raise _corrupt(self.path, name, "is missing")
        stat = path.stat()
        if stat.st_size != recorded["bytes"]:
            reason = f"has {stat.st_size} bytes where {recorded['bytes']} were written"
            raise _corrupt(self.path, name, reason)
        if _sha256_once(path, stat.st_size, stat.st_mtime_ns) != recorded["sha256"]:
            raise _corrupt(self.path, name, "was altered: its checksum is not the recorded one")
        return path

    def folder(self) -> Path:
        """`path`, after every file in it was verified; raises what `file` raises."""
        for name in self.files():
            self.file(name)
        return self.path


def artifact_at(path: str, named_by: str) -> Artifact:
    """The finished artifact in the folder `path`, which the configuration key `named_by` names.

    Raises:
        FileNotFoundError: there is none.
    """
    folder = Path(path).expanduser().absolute()
    if not (folder / MANIFEST).is_file():
        raise FileNotFoundError(f"{named_by} must be the folder of an artifact, got {path}")
    manifest = json.loads((folder / MANIFEST).read_text())
    return Artifact(manifest["stage"], manifest["key"], folder)


@dataclass(frozen=True)
class StatusRow:
    """How one artifact stands."""

    stage: str
    key: str
    num_bytes: int
    state: Literal["made", "partial", "missing"]
    when: datetime | None  # finished, or last written to


class ArtifactStore:
    """Artifacts under one folder, shared by every run that can see it."""

    def __init__(self, root: Path | str, min_free_bytes: int = 0) -> None:
        """`min_free_bytes` must be free on the disk before an artifact is made."""
        self.root = Path(root).expanduser().absolute()
        self.min_free_bytes = min_free_bytes

    def find(self, recipe: Recipe) -> Artifact | None:
        """The artifact of `recipe`, if it is made.

        Raises:
            CorruptArtifact: its folder is there without its `artifact.json`.
        """
        path = self.root / recipe.stage / recipe.key
        if not path.exists():
            return None
        if not (path / MANIFEST).exists():
            raise _corrupt(path, MANIFEST, "is missing")
        return Artifact(recipe.stage, recipe.key, path)

    def get_or_make(self, recipe: Recipe, make: Callable[[Path], None]) -> Artifact:
        """The artifact of `recipe`; `make(folder)` makes it, unless it is there already.

        When `make` raises or is killed, its folder stays as `.partial`, and the next call hands
        that folder to it again: what to do with a half-made artifact is the stage's own business.
        Of several processes that ask for one artifact, one makes it and the others wait.

        Raises:
            DiskFull: less is free than `min_free_bytes`, or `make` ran out of space.
            CorruptArtifact: the folder is there without its `artifact.json`.
        """
        # A rename made it: what is found needs no lock, and may lie on a read-only disk.
        artifact = self.find(recipe)
        if artifact is None:
            path = self.root / recipe.stage / recipe.key
            path.parent.mkdir(parents=True, exist_ok=True)
            with _locked(path.with_suffix(".lock")):
                artifact = self.find(recipe)
                if artifact is None:
                    _make(recipe, path, make, self.min_free_bytes)
                    return Artifact(recipe.stage, recipe.key, path)
        log.info("found stage=%s key=%s", recipe.stage, recipe.key)
        return artifact

    @contextmanager
    def prepared(self, recipe: Recipe) -> Iterator[Path | None]:
        """The `.partial` folder of `recipe`, for another stage to put in what it comes by anyway.

        Its own stage finds it there, as after a kill. None when the artifact is made already.
        """
        path = self.root / recipe.stage / recipe.key
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.with_suffix(".lock")):
            if self.find(recipe) is not None:
                yield None
                return
            partial = path.with_suffix(".partial")
            partial.mkdir(exist_ok=True)
            yield partial


def status(store: ArtifactStore, recipes: Mapping[str, Recipe]) -> list[StatusRow]:
    """How the artifacts of `recipes` stand, in their order; nothing is made or created."""
    rows = []
    for recipe in recipes.values():
        artifact = store.find(recipe)
        partial = (store.root / recipe.stage / recipe.key).with_suffix(".partial")
        row = StatusRow(recipe.stage, recipe.key, 0, "missing", None)
        if artifact is not None:
            size = sum(entry["bytes"] for entry in artifact.manifest["files"].values())
            when = datetime.fromisoformat(artifact.manifest["created"])
            row = replace(row, num_bytes=size, state="made", when=when)
        elif partial.exists():
            size, when = _usage(partial)
            row = replace(row, num_bytes=size, state="partial", when=when)
        rows.append(row)
    return rows


def _make(recipe: Recipe, path: Path, make: Callable[[Path], None], min_free_bytes: int) -> None:
    partial = path.with_suffix(".partial")
    resumed = partial.exists()
    log.info("%s stage=%s key=%s", "resume" if resumed else "make", recipe.stage, recipe.key)
    require_free(path.parent, min_free_bytes, f"stage {recipe.stage}")
    partial.mkdir(exist_ok=True)
    (partial / MANIFEST).unlink(missing_ok=True)  # a kill came between this file and the rename
    start = time.monotonic()
    with explain_disk_full(partial):
        make(partial)
        seconds = time.monotonic() - start
        files = _seal(partial)
        manifest = {
            "stage": recipe.stage,
            "key": recipe.key,
            "version": recipe.version,
            "params": recipe.params,
            "inputs": recipe.inputs,
            "files": files,
            "packages": {name: _package_version(name) for name in PACKAGES},
            "git_revision": _git_revision(),
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "seconds": round(seconds, 3),  # of the last attempt, when there were several
            "resumed": resumed,
        }
        write_json(partial / MANIFEST, manifest)
    partial.rename(path)
    fsync(path.parent)
    size = sum(entry["bytes"] for entry in files.values())
    log.info(
        "made stage=%s key=%s seconds=%.1f files=%d bytes=%d",
        *(recipe.stage, recipe.key, seconds, len(files), size),
    )


def _seal(folder: Path) -> dict[str, dict[str, Any]]:
    """Puts all files on the disk for good; their sizes and checksums by name."""
    for leftover in folder.rglob(".*.tmp"):  # of a write_text() that was killed
        leftover.unlink()
    files = {}
    for path in sorted(folder.rglob("*")):
        fsync(path)
        if path.is_file():
            name = path.relative_to(folder).as_posix()
            files[name] = {"bytes": path.stat().st_size, "sha256": _sha256(path)}
    return files


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        log.info("wait lock=%s: another process makes this artifact", path)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _corrupt(folder: Path, name: str, reason: str) -> CorruptArtifact:
    return CorruptArtifact(f"{folder / name} {reason}; delete {folder} and run again")


def _usage(folder: Path) -> tuple[int, datetime]:
    """Bytes in `folder`, and when it was last written to; another process may be at work in it."""
    size, latest = 0, 0.0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                stat = Path(parent, name).stat()
                size, latest = size + stat.st_size, max(latest, stat.st_mtime)
    with suppress(FileNotFoundError):
        latest = max(latest, folder.stat().st_mtime)
    return size, datetime.fromtimestamp(latest, UTC)


@functools.cache
def _sha256_once(path: Path, num_bytes: int, mtime_ns: int) -> str:
    del num_bytes, mtime_ns  # they make a changed file another entry of the cache
    return _sha256(path)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    size = path.stat().st_size
    with path.open("rb") as file:
        done = 0
        while block := file.read(1 << 22):
            digest.update(block)
            if size > GIB and done // GIB != (done + len(block)) // GIB:
                log.info("checksum file=%s done=%.0f%%", path, 100 * (done + len(block)) / size)
            done += len(block)
    return digest.hexdigest()


def _package_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _git_revision() -> str | None:
    """The commit of the checkout that this file lies in, `-dirty` when changed; None in a wheel."""
    root = Path(__file__).parents[1]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        done = subprocess.run(
            [*command, "--exclude=*"], capture_output=True, text=True, check=True, timeout=10
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
