"""Files that a kill, a crash or a full disk leaves whole."""

import errno
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Any

GIB = 1 << 30


class DiskFull(OSError):  # noqa: N818
    """The disk holds too little; what was made so far is kept as `.partial`."""


def write_text(path: Path, text: str) -> None:
    """Writes a file that readers, and a kill, find either as it was or as it will be."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w", encoding="utf-8", newline="\n") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    fsync(path.parent)


def write_json(path: Path, value: object) -> None:
    """Like `write_text`; enums become their names.

    Raises:
        TypeError: something in `value` is not a JSON value.
        ValueError: a number in `value` is not finite.
    """
    write_text(path, dumps(value, indent=2) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """An object that `write_json` wrote."""
    found = json.loads(path.read_text(encoding="utf-8"))
    assert isinstance(found, dict)
    return found


def append_jsonl(path: Path, rows: Iterable[object]) -> None:
    """Appends a line for each of `rows`, on the disk when this returns.

    A last line that a kill cut short is dropped first, so that it does not spoil the next one.
    """
    lines = _lines(rows)
    with path.open("a+b") as file:
        if file.tell() > 0:
            file.seek(-1, os.SEEK_END)
            if file.read() != b"\n":
                file.truncate(path.read_bytes().rfind(b"\n") + 1)
        file.write(lines.encode())
        file.flush()
        os.fsync(file.fileno())


def write_jsonl(path: Path, rows: Iterable[object]) -> None:
    """Like `write_text`, a line for each of `rows`."""
    write_text(path, _lines(rows))


def read_jsonl(path: Path, *, tolerate_truncated_tail: bool = False) -> list[Any]:
    """The rows of a file that `append_jsonl` wrote.

    Args:
        path: the file.
        tolerate_truncated_tail: leave out a last line without its newline, which a kill cut short.

    Raises:
        ValueError: a line is not JSON; the message names it.
    """
    data = path.read_bytes()
    if tolerate_truncated_tail:
        data = data[: data.rfind(b"\n") + 1]
    lines = data.removesuffix(b"\n").split(b"\n") if data else []
    return [_parsed(line, f"{path}, line {i}") for i, line in enumerate(lines, start=1)]


def dumps(value: object, indent: int | None = None) -> str:
    """JSON with sorted keys and enums by name: equal values, equal text.

    Raises:
        TypeError: something in `value` is not a JSON value.
        ValueError: a number in `value` is not finite.
    """
    return json.dumps(value, indent=indent, sort_keys=True, allow_nan=False, default=_enum_name)


def require_free(folder: Path, bytes_needed: int, what: str) -> None:
    """Refuses early what would fill the disk.

    Args:
        folder: where it will be written; it need not be there yet.
        bytes_needed: that must be free.
        what: will be written, for the message.

    Raises:
        DiskFull: less is free; the message names the folder and both sizes.
    """
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < bytes_needed:
        raise DiskFull(
            f"{what} needs {bytes_needed / GIB:.2f} GiB free in {folder}, which has "
            f"{free / GIB:.2f} GiB; free some space, or set runtime.root to a larger disk"
        )


@contextmanager
def explain_disk_full(partial: Path) -> Iterator[None]:
    """Turns the errors of a full disk into one that says that `partial` is kept.

    Raises:
        DiskFull: what runs inside found no space left.
    """
    try:
        yield
    except Exception as error:
        # safetensors and other Rust code raise errors of their own, with the system's words.
        full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
        if not full and "No space left on device" not in str(error):
            raise
        free = shutil.disk_usage(partial).free
        raise DiskFull(
            f"the disk is full ({error}); {partial} is kept, with {free / GIB:.2f} GiB free "
            "there; free some space and run again to resume"
        ) from error


def fsync(path: Path) -> None:
    """Returns when a file, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _lines(rows: Iterable[object]) -> str:
    return "".join(dumps(row) + "\n" for row in rows)


def _enum_name(value: object) -> str:
    if isinstance(value, Enum):
        return value.name
    raise TypeError(f"must be a JSON value, got {value!r}")


def _parsed(line: bytes, where: str) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where} must be JSON: {error}") from error
