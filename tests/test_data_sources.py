import csv
import gzip
import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
import yaml
from pyarrow import parquet

from specfit_data.conversations import Conversation
from specfit_data.sources import Format, Rejected, Source, local_file, read, read_rows

CONF = Path(__file__).parent.parent / "conf" / "data" / "source"
CHAT = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]}


def source(path: Path | str, **fields: object) -> Source:
    return Source(**{"path": str(path), "format": Format.messages, "licence": "MIT", **fields})


def lines(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_importing_the_schema_brings_nothing_heavy():
    code = "import sys, specfit_data.sources; print(*sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "transformers", "datasets", "pyarrow"} & set(shown.stdout.split())


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".json", ".csv", ".parquet"])
def test_every_kind_of_file_gives_the_same_rows(tmp_path, suffix):
    rows = [
        {"question": "What, ünder?\nA new line", "answer": "2"},
        {"question": "b", "answer": "c"},
    ]
    path = tmp_path / f"rows{suffix}"
    match suffix:
        case ".jsonl":
            lines(path, *rows)
        case ".jsonl.gz":
            path.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
        case ".json":
            path.write_text(json.dumps(rows, indent=1))
        case ".csv":
            with path.open("w", newline="") as file:
                writer = csv.DictWriter(file, fieldnames=["question", "answer"])
                writer.writeheader()
                writer.writerows(rows)
        case ".parquet":
            parquet.write_table(pa.Table.from_pylist(rows), path)
    assert [row for _, row in read_rows(source(path), "mine")] == rows


def test_a_json_file_of_lines_is_read_as_lines(tmp_path):
    path = lines(tmp_path / "rows.json", {"a": 1}, {"a": 2})
    assert [row for _, row in read_rows(source(path), "mine")] == [{"a": 1}, {"a": 2}]


def test_a_broken_line_is_an_error_that_names_file_and_line(tmp_path):
    path = lines(tmp_path / "log.jsonl", CHAT)
    path.write_text(path.read_text() + '\n{"messages": [\n')
    with pytest.raises(ValueError, match=r"log\.jsonl:3: not JSON"):
        list(read("mine", source(path)))


def test_a_line_that_is_no_object_is_an_error(tmp_path):
    path = lines(tmp_path / "log.jsonl", CHAT, 7)
    with pytest.raises(ValueError, match=r"log\.jsonl:2: a row must be an object, got int"):
        list(read("mine", source(path)))


def test_an_empty_file_is_an_error(tmp_path):
    path = lines(tmp_path / "log.jsonl")
    with pytest.raises(ValueError, match=r"data\.sources\.mine\.path must hold rows"):
        list(read("mine", source(path)))


def test_a_missing_file_is_an_error_that_names_key_and_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"data\.sources\.mine\.path.*log\.jsonl"):
        list(read("mine", source(tmp_path / "log.jsonl")))


def test_another_suffix_is_an_error(tmp_path):
    path = tmp_path / "log.txt"
    path.write_text("{}")
    with pytest.raises(ValueError, match=r"must end in \.jsonl"):
        list(read("mine", source(path)))


def test_a_missing_sample_is_an_error_that_names_the_samples():
    with pytest.raises(
        FileNotFoundError, match="samples: bfcl, bfcl_multi_turn, codeio, documents,"
    ):
        list(read("mine", source("sample:nothing")))


def test_a_missing_package_is_an_error_that_says_how_to_install_it():
    with pytest.raises(ModuleNotFoundError, match="pip install --no-deps no-such-package"):
        list(read("mine", source("package:no-such-package/rows.jsonl")))


def test_a_missing_file_in_a_package_is_an_error():
    with pytest.raises(FileNotFoundError, match=r"rows\.jsonl is in 0 places"):
        list(read("mine", source("package:pytest/rows.jsonl")))


def test_an_unknown_licence_has_to_be_accepted(tmp_path):
    path = lines(tmp_path / "log.jsonl", CHAT)
    with pytest.raises(ValueError, match=r"data\.sources\.mine\.accept_licence must be true"):
        list(read("mine", source(path, opt_in=True, licence="unknown")))
    assert len(list(read("mine", source(path, opt_in=True, accept_licence=True)))) == 1


def test_no_more_rows_than_the_limit_are_read(tmp_path):
    path = lines(tmp_path / "log.jsonl", CHAT, CHAT, CHAT)
    assert len(list(read("mine", source(path, limit=2)))) == 2


def test_a_limit_below_one_is_an_error():
    with pytest.raises(ValueError, match="limit must be at least 1, got 0"):
        source("sample:codeio", limit=0)


# ModelOpt#1293: `conversations` and `messages` confused, and the data is empty.
def test_a_column_that_is_not_there_is_an_error_that_names_those_that_are(tmp_path):
    path = lines(tmp_path / "log.jsonl", {"id": 1, "conversations": CHAT["messages"]})
    match = r"columns\.messages must name a column, got messages; .*has id, conversations"
    with pytest.raises(ValueError, match=match):
        list(read("mine", source(path)))


def test_a_column_for_an_unknown_field_is_an_error(tmp_path):
    path = lines(tmp_path / "log.jsonl", CHAT)
    with pytest.raises(ValueError, match=r"columns\.massages must be one of messages, tools"):
        list(read("mine", source(path, columns={"massages": "messages"})))


def test_an_instruction_that_names_no_column_is_an_error(tmp_path):
    path = lines(tmp_path / "log.jsonl", {"question": "Why?"})
    for instruction in ("", "Answer: {query}"):
        with pytest.raises(ValueError, match=r"data\.sources\.mine\.instruction .*has question"):
            list(read("mine", source(path, format=Format.prompt, instruction=instruction)))


def test_a_row_that_is_no_conversation_is_rejected_with_its_place_and_reason(tmp_path):
    path = lines(tmp_path / "log.jsonl", CHAT, {"messages": [{"role": "narrator", "content": "x"}]})
    chat, rejected = read("mine", source(path))
    assert rejected == Rejected(f"{path}:2", "turn 0: unknown role narrator")
    assert (chat.source, chat.licence) == ("mine", "MIT")


def test_a_hub_set_out_of_reach_is_an_error_of_one_line(monkeypatch):
    def unreachable(*_: object, **__: object) -> None:
        raise ConnectionError("Couldn't reach it.\nTry later.")

    monkeypatch.setattr("datasets.load_dataset", unreachable)
    with pytest.raises(FileNotFoundError, match=r"hub:a/b .*: Couldn't reach it\. Try later\.$"):
        list(read("mine", source("hub:a/b")))


def test_a_hub_set_is_streamed_with_its_subset_split_and_revision(monkeypatch):
    asked = []

    def load(*args: object, **kwargs: object) -> list[dict]:
        asked.append((args, kwargs))
        return [CHAT]

    monkeypatch.setattr("datasets.load_dataset", load)
    fields = {"subset": "s", "split": "train_sft", "revision": "abc"}
    assert len(list(read("mine", source("hub:a/b", **fields)))) == 1
    kwargs = {"split": "train_sft", "revision": "abc", "streaming": True}
    assert asked == [(("a/b", "s"), kwargs)]


def test_one_file_of_a_hub_set_is_downloaded_and_read(monkeypatch, tmp_path):
    path = lines(tmp_path / "part.jsonl", CHAT)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *_, **__: str(path))
    assert len(list(read("mine", source("hub:a/b/data/part.jsonl")))) == 1


SAMPLES = {
    "codeio": 900,
    "humaneval": 164,
    "bfcl": 900,
    "bfcl_multi_turn": 119,
    "writing": 270,
    "documents": 90,
    "mt_bench": 80,
    "issues": 200,
    "tooltalk": 78,
}


@pytest.mark.parametrize(("name", "count"), SAMPLES.items())
def test_the_samples_are_whole(name, count):
    assert len(list(read_rows(source(f"sample:{name}"), name))) == count


def configured(name: str) -> Source:
    """The source that ships under `name`."""
    fields = yaml.safe_load((CONF / f"{name}.yaml").read_text())
    return Source(**{**fields, "format": Format[fields["format"]]})


def chats(name: str) -> list[Conversation]:
    found = list(read(name, configured(name)))
    assert all(isinstance(chat, Conversation) for chat in found)
    return found


# What is trained on and what is measured on stays what it was: ids decide it.
@pytest.mark.parametrize(
    ("name", "digest"),
    [
        ("codeio", "b369c0182deea293"),
        ("codeio_complete", "53ec64eaebadb829"),
        ("humaneval", "f5c64b6ea4962f00"),
        ("bfcl", "06ad30a14a319cfd"),
    ],
)
def test_the_ids_of_the_first_samples_never_change(name, digest):
    ids = " ".join(chat.id for chat in chats(name))
    assert hashlib.sha256(ids.encode()).hexdigest()[:16] == digest


@pytest.mark.parametrize("name", SAMPLES)
def test_no_question_of_a_sample_is_asked_twice(name):
    ids = {chat.id for chat in chats(name)}
    # But for one of codeio, which the set itself has twice.
    assert SAMPLES[name] - len(ids) == (name == "codeio")


@pytest.mark.parametrize("name", SAMPLES)
def test_the_sets_that_others_measure_on_are_held_out(name):
    assert configured(name).held_out == (name in ("humaneval", "mt_bench", "tooltalk"))


def test_a_document_is_longer_than_any_writing_task():
    asked = [[len(chat.messages[0].content) for chat in chats(n)] for n in ("writing", "documents")]
    assert max(asked[0]) <= 4000 < min(asked[1])
    assert max(asked[1]) <= 16_000


def test_mt_bench_has_two_turns_and_bfcl_up_to_seven():
    assert {1 + len(chat.follow_ups) for chat in chats("mt_bench")} == {2}
    assert {1 + len(chat.follow_ups) for chat in chats("bfcl_multi_turn")} == {1, 2, 3, 4, 5, 6, 7}


def test_issues_have_line_ends_and_no_word_of_the_guidelines():
    for chat in chats("issues"):
        [asked] = chat.messages
        assert "contributing guidelines]" not in asked.content
        assert "\n" in asked.content
        assert r"\n" not in asked.content


def test_every_call_of_tooltalk_is_of_an_offered_function_and_has_a_result():
    for chat in chats("tooltalk"):
        offered = {tool["function"]["name"] for tool in chat.tools}
        following = zip(chat.messages, chat.messages[1:], strict=False)
        for message, following_one in following:
            assert {call.name for call in message.tool_calls} <= offered
            assert bool(message.tool_calls) == (following_one.role == "tool")


def test_a_source_on_this_machine_has_a_file_and_a_hub_set_has_none(tmp_path):
    path = lines(tmp_path / "log.jsonl", CHAT)
    assert local_file(source(path), "mine") == path
    assert local_file(source("hub:a/b"), "mine") is None


def test_two_sources_can_share_a_file_without_sharing_a_row(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"q{i}"}) + "\n" for i in range(10)))

    def rows(**limits):
        source = Source(str(path), Format.prompt, "own", instruction="{prompt}", **limits)
        return [row["prompt"] for _, row in read_rows(source, "mine")]

    assert rows(limit=4) == ["q0", "q1", "q2", "q3"]
    assert rows(skip=4) == ["q4", "q5", "q6", "q7", "q8", "q9"]
    assert rows(skip=8, limit=4) == ["q8", "q9"]
    with pytest.raises(ValueError, match="is empty after 10 rows"):
        rows(skip=10)
    with pytest.raises(ValueError, match=r"skip must be at least 0, got -1"):
        rows(skip=-1)
