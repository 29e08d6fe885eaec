"""Safetensors files a tensor at a time, in the memory that one tensor needs.

8 bytes   length of the header, little-endian
header    JSON, padded with spaces: type, shape and place of each tensor
tensors   those of wide types first, so that each lies at a multiple of its type's size

The library maps whole files into memory to read them, and takes all tensors at once to write them.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from specfit.files import fsync

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
COPY_BYTES = 1 << 22
_DTYPES = {
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F32": torch.float32,
    "I32": torch.int32,
    "U32": torch.uint32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True)
class TensorSpec:
    """All of a tensor but its values."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class StoredTensor(TensorSpec):
    """A tensor in a file."""

    path: Path
    start: int  # of its first byte in the file

    def read(self) -> Tensor:
        """The values, in memory of their own."""
        data = bytearray(self.num_bytes)
        if not data:
            return torch.empty(self.shape, dtype=self.dtype)
        with self.path.open("rb") as file:
            file.seek(self.start)
            _require(file.readinto(data) == len(data), self.path, "a file that shrinks")
        return torch.frombuffer(data, dtype=self.dtype).view(self.shape)

    def part(self, start: int, stop: int) -> "StoredTensor":
        """`self[start:stop]`."""
        size = self.num_bytes // self.shape[0]
        shape = (stop - start, *self.shape[1:])
        return replace(self, shape=shape, start=self.start + start * size)

    def __getitem__(self, index: int) -> "StoredTensor":
        """Without the first axis."""
        part = self.part(index, index + 1)
        return replace(part, shape=part.shape[1:])

    def chunks(self) -> Iterator[bytes]:
        """The bytes, a few at a time."""
        with self.path.open("rb") as file:
            file.seek(self.start)
            for done in range(0, self.num_bytes, COPY_BYTES):
                size = min(COPY_BYTES, self.num_bytes - done)
                data = file.read(size)
                _require(len(data) == size, self.path, "a file that shrinks")
                yield data


@dataclass(frozen=True)
class Shard:
    """What the header of a file tells."""

    path: Path
    tensors: dict[str, StoredTensor]
    metadata: dict[str, str]


def read_shards(folder: Path) -> list[Shard]:
    """The shards of a checkpoint, in order of their names; only their headers are read.

    Raises:
        ValueError: there are none, one is missing or truncated, or is not what the index says.
    """
    weight_map: dict[str, str] = {}
    if (folder / INDEX).is_file():
        weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    paths = [folder / name for name in sorted(set(weight_map.values()) or {SINGLE})]
    for path in paths:
        if not path.is_file():
            raise ValueError(
                f"target.path: {path} must be there, got no such file; copy or download it again"
            )
    shards = [read_shard(path) for path in paths]
    found = {name: shard.path.name for shard in shards for name in shard.tensors}
    for name, file in weight_map.items():
        if found.get(name) != file:
            raise ValueError(
                f"target.path: {folder / file} must hold {name}, as {INDEX} says, got it in "
                f"{found.get(name, 'no file')}; copy or download both again"
            )
    return shards


def read_shard(path: Path) -> Shard:
    """The header of a file.

    Raises:
        ValueError: the file is truncated, is no safetensors file, or holds unknown types.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        _require(8 + length <= size, path, f"{size} bytes, less than its header")
        try:
            header = json.loads(file.read(length))
            metadata = header.pop("__metadata__", {})
            tensors = {name: _stored(path, 8 + length, entry) for name, entry in header.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise _broken(path, f"a header that cannot be read ({error!r})") from error
    end = max((t.start + t.num_bytes for t in tensors.values()), default=8 + length)
    _require(size == end, path, f"{size} bytes where its header tells of {end}")
    return Shard(path, tensors, metadata)


def _stored(path: Path, data_start: int, entry: dict[str, Any]) -> StoredTensor:
    start, stop = entry["data_offsets"]
    stored = StoredTensor(_DTYPES[entry["dtype"]], tuple(entry["shape"]), path, data_start + start)
    if not 0 <= start <= stop or stop - start != stored.num_bytes:
        raise ValueError(entry)
    return stored


@dataclass(frozen=True)
class Arrangement:
    """A file that is not written yet, but for its tensors' values."""

    header: bytes  # with its length before it
    tensors: dict[str, TensorSpec]
    starts: dict[str, int]
    num_bytes: int


def arrange(tensors: Mapping[str, TensorSpec], metadata: Mapping[str, str]) -> Arrangement:
    """Where each tensor will lie."""
    order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset, offsets = 0, {}
    for name in order:
        spec = tensors[name]
        offsets[name] = offset
        offset += spec.num_bytes
        entries[name] = {
            "dtype": _NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [offsets[name], offset],
        }
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    starts = {name: len(header) + offsets[name] for name in order}
    return Arrangement(header, dict(tensors), starts, len(header) + offset)


def write_shard(
    path: Path, arrangement: Arrangement, tensors: Iterable[tuple[str, Tensor | StoredTensor]]
) -> None:
    """Writes a file; it is there whole or not at all.

    Args:
        path: the file.
        arrangement: its tensors without their values.
        tensors: each of them once, in any order; one is held in memory at a time.
    """
    partial = path.with_name(f".{path.name}.tmp")
    missing = set(arrangement.tensors)
    with partial.open("wb") as file:
        file.write(arrangement.header)
        file.truncate(arrangement.num_bytes)
        for name, tensor in tensors:
            missing.remove(name)
            spec = arrangement.tensors[name]
            assert (tensor.dtype, tuple(tensor.shape)) == (spec.dtype, spec.shape), name
            file.seek(arrangement.starts[name])
            _write_values(file, tensor)
        assert not missing, missing
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    fsync(path.parent)


def is_written(path: Path, arrangement: Arrangement) -> bool:
    """Whether a file that `write_shard` may have written is there, by its header and size."""
    if not path.is_file() or path.stat().st_size != arrangement.num_bytes:
        return False
    with path.open("rb") as file:
        return file.read(len(arrangement.header)) == arrangement.header


def _write_values(file: BinaryIO, tensor: Tensor | StoredTensor) -> None:
    if isinstance(tensor, StoredTensor):
        for chunk in tensor.chunks():
            file.write(chunk)
    elif tensor.numel():
        file.write(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)


def _require(whole: bool, path: Path, got: str) -> None:
    if not whole:
        raise _broken(path, got)


def _broken(path: Path, got: str) -> ValueError:
    return ValueError(
        f"target.path: {path} must be a whole safetensors file, got {got}; copy or download it "
        "again"
    )
