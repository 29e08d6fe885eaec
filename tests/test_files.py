"""Files stay whole, whatever happens while they are written."""

import errno
import json
import os
import shutil
from enum import Enum
from pathlib import Path

import pytest

from specfit import files
from specfit.files import DiskFull


class Colour(Enum):
    red = 1


def test_a_write_that_fails_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    files.write_json(path, {"a": 1})

    def fail(_descriptor: int) -> None:
        raise OSError(errno.EIO, "the disk went away")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="went away"):
        files.write_json(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 1}


def test_a_write_leaves_nothing_beside_the_file(tmp_path):
    files.write_json(tmp_path / "a.json", {"a": 1})
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_enums_are_written_by_name(tmp_path):
    files.write_json(tmp_path / "a.json", {"colour": Colour.red})
    assert json.loads((tmp_path / "a.json").read_text()) == {"colour": "red"}


@pytest.mark.parametrize(("value", "error"), [(float("nan"), ValueError), ({1, 2}, TypeError)])
def test_what_json_cannot_say_is_refused(tmp_path, value, error):
    with pytest.raises(error):
        files.write_json(tmp_path / "a.json", [value])
    assert not (tmp_path / "a.json").exists()


def test_appended_rows_are_read_back(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = [{"text": "two\nlines \u2028 and \x85"}, {"text": "\ud83d, half a character"}, [1.5]]
    files.append_jsonl(path, rows[:1])
    files.append_jsonl(path, rows[1:])
    assert files.read_jsonl(path) == rows


def test_an_empty_file_has_no_rows(tmp_path):
    files.append_jsonl(tmp_path / "rows.jsonl", [])
    assert files.read_jsonl(tmp_path / "rows.jsonl") == []


@pytest.mark.parametrize("num_bytes", range(1, 9))
def test_a_row_cut_anywhere_is_left_out_and_overwritten(tmp_path, num_bytes):
    path = tmp_path / "rows.jsonl"
    files.append_jsonl(path, [{"a": 1}])
    with path.open("ab") as file:
        file.write(b'{"a": 2}\n'[:num_bytes])
    assert files.read_jsonl(path, tolerate_truncated_tail=True) == [{"a": 1}]
    files.append_jsonl(path, [{"a": 3}])
    assert files.read_jsonl(path) == [{"a": 1}, {"a": 3}]


def test_the_only_row_cut_short_leaves_no_rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"a"')
    assert files.read_jsonl(path, tolerate_truncated_tail=True) == []
    files.append_jsonl(path, [1])
    assert files.read_jsonl(path) == [1]


def test_a_cut_row_is_an_error_that_names_the_line_unless_it_is_expected(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"a": 1}\n{"a"')
    with pytest.raises(ValueError, match=r"rows\.jsonl, line 2 must be JSON"):
        files.read_jsonl(path)


def test_a_broken_row_in_the_middle_is_never_left_out(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"a"\n{"a": 2}\n')
    with pytest.raises(ValueError, match="line 1 must"):
        files.read_jsonl(path, tolerate_truncated_tail=True)


def test_too_little_space_is_refused_with_the_folder_and_both_sizes(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(9, 8, 1 << 30))
    files.require_free(tmp_path, 1 << 30, "the store")
    with pytest.raises(DiskFull, match=r"the store needs 2\.50 GiB .*which has 1\.00 GiB") as error:
        files.require_free(tmp_path / "not" / "yet", int(2.5 * (1 << 30)), "the store")
    assert str(tmp_path) in str(error.value)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_disk_is_explained(tmp_path):
    with pytest.raises(DiskFull, match="run again to resume"), files.explain_disk_full(tmp_path):
        Path("/dev/full").write_text("x")


def test_a_full_disk_is_explained_when_only_the_words_say_so(tmp_path):
    with pytest.raises(DiskFull), files.explain_disk_full(tmp_path):
        raise RuntimeError(
            "Error while serializing: I/O error: No space left on device (os error 28)"
        )


def test_other_errors_pass_as_they_are(tmp_path):
    with pytest.raises(PermissionError), files.explain_disk_full(tmp_path):
        raise PermissionError(errno.EACCES, "no")
