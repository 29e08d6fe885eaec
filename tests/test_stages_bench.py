"""The stage `bench` on a tiny target: which rows there are, and the page."""

from pathlib import Path

import pytest
import tiny_runs
import tiny_targets

SHORT = [
    "bench.num_prompts=2",
    "bench.repetitions=2",
    "bench.max_new_tokens=8",
    "bench.max_draft_tokens=3",
    "bench.num_draft_tokens=[2]",
    "bench.max_prompt_tokens=150",
    "bench.formats=[fp32,nvfp4]",
]


@pytest.fixture(scope="module")
def words(tmp_path_factory) -> list[str]:
    folder: Path = tmp_path_factory.mktemp("bench")
    target = tiny_targets.write_target(folder / "target")
    data = tiny_targets.write_conversations(folder / "data.jsonl")
    return [*tiny_runs.overrides(folder / "root", target, data), *SHORT]


@pytest.fixture(scope="module")
def artifact(words):
    return tiny_runs.run(words, "stage=bench")


def test_there_is_a_row_for_each_way_and_kind_of_traffic(artifact):
    rows = tiny_runs.read_json(artifact, "bench.json")["rows"]
    decoded = [row for row in rows if row["kind"] == "decode"]
    found = {(r["format"], r["proposer"], r["num_draft_tokens"], r["adaptive"]) for r in decoded}
    assert found == {
        ("fp32", "none", 0, False),
        ("nvfp4", "none", 0, False),
        ("fp32", "transformers", 0, False),
        ("nvfp4", "eagle3", 2, False),
        *(("nvfp4", name, 3, True) for name in ("ngram", "suffix", "eagle3", "hybrid")),
    }
    assert {row["component"] for row in decoded} == {"mine", "edits", "all"}
    assert len(decoded) == 3 * len(found)
    for row in decoded:
        low, high = (row[f"tokens_per_second_{end}"] for end in ("low", "high"))
        assert 0 < low <= row["tokens_per_second"] <= high
        plain = row["proposer"] == "none"
        assert ("plain_over_transformers" in row) == plain
        assert ("speculative_over_plain" in row) == (row["num_draft_tokens"] > 0)


def test_speculation_changes_no_answer_and_formats_are_held_against_the_first(artifact):
    rows = tiny_runs.read_json(artifact, "bench.json")["rows"]
    assert all(row.get("outputs_equal_plain", True) for row in rows)
    kls = {r["format"]: r["kl_mean_nats"] for r in rows if "kl_mean_nats" in r}
    assert kls["fp32"] == 0 < kls["nvfp4"]


def test_passes_have_their_share_of_the_floor(artifact):
    rows = tiny_runs.read_json(artifact, "bench.json")["rows"]
    for row in (row for row in rows if row["kind"] == "pass"):
        assert row["bandwidth_share"] == pytest.approx(row["floor_ms"] / row["ms"])
        assert (row["over_one_token"] == 1) == (row["num_tokens"] == 1)


def test_the_page_and_the_report_show_it(artifact, words):
    page = artifact.file("bench.md").read_text()
    assert "hybrid, k up to 3" in page
    assert "Plain decoding, by the format" in page
    report = tiny_runs.run(words, "report.bench=true")
    assert "Latency on this machine" in report.file("report.md").read_text()
    assert report.file("latency.png").stat().st_size > 0
    without = tiny_runs.run(words)
    assert without.key != report.key
    assert "Latency on this machine" not in without.file("report.md").read_text()


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("bench.max_prompt_tokens=1", r"bench\.max_prompt_tokens must be at least"),
        ("bench.llama_cpp=/tmp", r"bench\.llama_cpp must be null for a target that is no GGUF"),
    ],
)
def test_what_cannot_be_timed_is_named(words, artifact, option, message):
    assert artifact
    with pytest.raises(ValueError, match=message):
        tiny_runs.run(words, "stage=bench", option)
