"""The whole path on tiny targets: what each stage leaves, what is made again, and what is not."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_runs
import tiny_targets

from specfit import artifacts, pipeline
from specfit_data.sources import Format, Source

STAGES = [
    *("target", "prompts", "generate", "fit", "extract", "train"),
    *("measure", "predict", "export", "report"),
]


@pytest.fixture(
    scope="module", params=["llama", pytest.param("qwen3", marks=pytest.mark.slow), "qwen3_moe"]
)
def words(request, tmp_path_factory):
    """Of a run that was made as far as the report."""
    folder = tmp_path_factory.mktemp(request.param)
    target = tiny_targets.write_target(folder / "target", request.param)
    data = tiny_targets.write_conversations(folder / "data.jsonl", 60)
    words = tiny_runs.overrides(folder / "root", target, data)
    tiny_runs.run(words)
    return words


@pytest.fixture(scope="module")
def made(words):
    """The artifacts of `words`, by stage."""
    return tiny_runs.artifacts(words)


def test_every_stage_is_made_and_whole(made):
    assert list(made) == STAGES
    for artifact in made.values():
        assert artifact.folder().is_dir()  # which verifies every file


def test_the_report_is_a_page_its_twin_a_record_and_plots(made):
    files = made["report"].files()
    assert {"report.html", "report.md", "report.json", "survival.png"} <= set(files)


def test_the_report_says_what_it_was_made_from(words, made):
    provenance = tiny_runs.read_json(made["report"], "report.json")["provenance"]
    assert provenance["keys"] == tiny_runs.keys(words)
    assert provenance["config"]["train"]["ttt_steps"] == 2
    assert provenance["config"]["extract"]["dtype"] == "bf16"
    assert "torch" in provenance["versions"]


def test_the_report_counts_the_export_as_one_that_drafts_the_same(made):
    page = made["report"].file("report.md").read_text()
    assert "**Exports that draft the same tokens: 5 of 5.**" in page


def test_greedy_answers_of_every_proposer_are_the_plain_ones(made):
    rows = tiny_runs.read_lines(made["measure"], "requests.jsonl")
    plain = {row["id"]: row["tokens"] for row in rows if row["proposer"] == "none"}
    assert len(plain) == 3
    for row in rows:
        assert row["tokens"] == plain[row["id"]]
    figures = tiny_runs.read_json(made["measure"], "acceptance.json")
    assert figures["differences"] == []
    assert all(r["outputs_equal_plain"] for r in figures["rows"] if r["proposer"] != "none")


def test_acceptance_length_is_one_and_the_sum_of_survival(made):
    rows = tiny_runs.read_json(made["measure"], "acceptance.json")["rows"]
    of_drafts = [r for r in rows if r["component"] != "all" and r["proposer"] != "none"]
    assert {r["proposer"] for r in of_drafts} == {"ngram", "eagle3"}
    for row in of_drafts:
        assert 1 <= row["acceptance_length"] <= 3
        assert row["acceptance_length"] == pytest.approx(1 + sum(row["acceptance_by_position"]))
        assert row["acceptance_length"] == row["num_tokens"] / row["num_rounds"]


def test_the_mix_of_one_component_is_that_component(made):
    rows = tiny_runs.read_json(made["measure"], "acceptance.json")["rows"]
    for own, mix in zip(rows[::2], rows[1::2], strict=True):
        assert (own["component"], mix["component"]) == ("mine", "all")
        for name in ("acceptance_length", "num_tokens", "outputs_equal_plain", "temperature"):
            assert mix[name] == pytest.approx(own[name])


def test_the_export_drafts_as_the_trained_head_does(made):
    rows = tiny_runs.read_json(made["export"], "parity.json")["rows"]
    assert {row["drafted_tokens_equal"] for row in rows} == {1.0}
    assert "vllm/config.json" in made["export"].files()


def train_log(artifact):
    rows = tiny_runs.read_lines(artifact, "train_log.jsonl")
    return [{k: v for k, v in row.items() if k != "seconds"} for row in rows]


def test_states_made_while_training_give_the_losses_of_the_store(words, made, tmp_path):
    there = [*words, f"runtime.root={tmp_path}", "stage=train"]
    stored = tiny_runs.run(there, "extract.while_generating=false")
    assert stored.key == made["train"].key
    online = tiny_runs.run(there, "extract.mode=online")
    assert online.key != stored.key
    assert len(train_log(online)) > 1
    assert train_log(online) == train_log(stored)


def test_states_kept_while_generating_are_those_of_a_pass(words, made, tmp_path):
    store = tiny_runs.read_json(made["extract"], "store.json")
    assert store["num_kept_tokens"] == store["num_tokens"] > 0
    there = [*words, f"runtime.root={tmp_path}", "stage=train"]
    passed = tiny_runs.run(there, "extract.while_generating=false")
    for a, b in zip(train_log(made["train"]), train_log(passed), strict=True):
        assert a["tokens"] == b["tokens"]
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-3)


def test_a_second_run_makes_nothing(words, made, monkeypatch):
    def refuse(recipe, *_):
        raise AssertionError(f"{recipe.stage} is made again")

    def times():
        root = made["train"].path.parents[1]
        return {path: path.stat().st_mtime_ns for path in root.rglob("*.json*")}

    before = times()
    monkeypatch.setattr(artifacts, "_make", refuse)
    assert tiny_runs.run(words).path == made["report"].path
    assert times() == before


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """The words of a llama run, nothing made."""
    folder = tmp_path_factory.mktemp("small")
    target = tiny_targets.write_target(folder / "target")
    data = tiny_targets.write_conversations(folder / "data.jsonl", 60)
    return tiny_runs.overrides(folder / "root", target, data)


def changed(words, *more):
    """The stages whose keys `more` changes."""
    before, after = tiny_runs.keys(words), tiny_runs.keys(words, *more)
    return [stage for stage in STAGES if before[stage] != after[stage]]


@pytest.mark.parametrize(
    ("override", "first"),
    [
        ("train.lr=0.5", "train"),
        ("train.loss=lk", "train"),
        ("measure.num_draft_tokens=[3]", "measure"),
        ("speculator.norm_output=true", "train"),
        ("generate.max_new_tokens=17", "generate"),
        ("data.num_train=11", "prompts"),
        ("data.loss_on=last_turn", "prompts"),
        ("target.dtype=bfloat16", "target"),
        ("seed=1", "prompts"),
    ],
)
def test_a_change_makes_anew_from_the_first_stage_that_it_touches(small, override, first):
    assert changed(small, override)[0] == first


def test_a_replay_counts_by_what_its_file_holds(small, tmp_path):
    times, same = tmp_path / "times.jsonl", tmp_path / "same.jsonl"
    for path in (times, same):
        path.write_text('{"timestamp": 1}\n')

    def key(path):
        arrival = ["profile.arrival.kind=replay", f"profile.arrival.file={path}"]
        return tiny_runs.keys(small, *arrival)["predict"]

    before = key(times)
    assert key(same) == before
    times.write_text('{"timestamp": 1}\n{"timestamp": 2}\n')
    assert key(times) != before


def test_a_change_of_training_leaves_what_comes_before(small):
    assert changed(small, "train.lr=0.5") == ["train", "measure", "predict", "export", "report"]


def test_a_draft_vocabulary_changes_no_states(small):
    of_vocab = changed(small, "speculator.draft_vocab_size=64")
    assert of_vocab == ["fit", "train", "measure", "predict", "export", "report"]


def test_where_it_runs_changes_nothing(small, tmp_path):
    runtime = [
        f"runtime.root={tmp_path}",
        "runtime.num_threads=2",
        "runtime.num_processes=2",
        "runtime.wandb=true",
        "runtime.min_free_gb=2",
        "train.packs_per_step=2",
    ]
    assert changed([*small, "train.packs_per_step=2"], *runtime) == []


def test_how_often_a_checkpoint_is_saved_changes_nothing(small):
    assert changed(small, "train.save_every_s=1") == []


def test_a_local_file_counts_by_its_content_and_not_by_its_name(small, tmp_path):
    data = next(Path(w.partition("=")[2]) for w in small if w.startswith("data.sources.mine.path"))
    same = shutil.copy(data, tmp_path / "other.jsonl")
    assert changed(small, f"data.sources.mine.path={same}") == []
    same.write_text(data.read_text().replace("number 0 ", "number 99 "))
    assert changed(small, f"data.sources.mine.path={same}")[0] == "prompts"


def test_weights_of_the_target_change_everything(small, tmp_path):
    other = tiny_targets.write_target(tmp_path / "other", seed=1)
    assert changed(small, f"target.path={other}") == STAGES


def test_weights_of_the_profile_change_the_fit(small):
    cfg = tiny_runs.composed(small)
    before = pipeline.recipes(cfg)
    cfg.profile.components[0].weight = 2.0
    after = pipeline.recipes(cfg)
    assert before["fit"].params["components"] != after["fit"].params["components"]
    assert before["fit"].key != after["fit"].key
    assert before["target"].key == after["target"].key


def test_a_source_that_the_profile_does_not_name_changes_nothing(small, tmp_path):
    cfg = tiny_runs.composed(small)
    before = pipeline.recipes(cfg)
    cfg.data.sources["other"] = Source(str(tmp_path / "none.jsonl"), Format.messages, "own")
    assert pipeline.recipes(cfg) == before


def test_status_makes_nothing(small):
    rows = pipeline.status(tiny_runs.composed(small))
    assert [(row.stage, row.state) for row in rows] == [(stage, "missing") for stage in STAGES]
    root = next(Path(w.partition("=")[2]) for w in small if w.startswith("runtime.root="))
    assert not root.exists()


@pytest.mark.slow
def test_a_sweep_shares_what_its_jobs_have_in_common_and_is_compared_in_one_table(
    small, tmp_path, monkeypatch
):
    root = tmp_path / "root"
    words = [*small, f"runtime.root={root}", f"hydra.sweep.dir={tmp_path / 'sweep'}"]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "specfit",
            "-m",
            *words,
            "stage=measure",
            "train.ttt_steps=1,2",
            "measure.max_new_tokens=4",
        ],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert len(list((root / "generate").glob("*/artifact.json"))) == 1
    assert len(list((root / "train").glob("*/artifact.json"))) == 2
    jobs = [json.loads(p.read_text()) for p in sorted((tmp_path / "sweep").glob("*/job.json"))]
    assert [job["artifact"] for job in jobs] == done.stdout.split()

    monkeypatch.chdir(tmp_path)
    report = tiny_runs.run(small, f"runtime.root={root}", f"report.sweep={tmp_path / 'sweep'}")
    table = report.file("sweep.md").read_text()
    header = next(line for line in table.splitlines() if line.startswith("|"))
    assert "train.ttt_steps" in header
    column = header.split("|").index(" train.ttt_steps ")
    rows = [line.split("|")[column].strip() for line in table.splitlines() if line.startswith("| ")]
    assert sorted(rows[1:])[-2:] == ["1", "2"]
