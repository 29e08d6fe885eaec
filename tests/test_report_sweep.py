import json

import pytest

from specfit.report.figures import Estimate
from specfit.report.sweep import SweepRow, read_sweep, sweep_table, write_sweep


def write_job(sweep, name, overrides, length, half=0.02):
    job = {
        "overrides": overrides,
        "stage": "measure",
        "artifact": f"m{name}",
        "keys": {"train": f"t{name}", "measure": f"m{name}"},
        "root": str(sweep.parent / "artifacts"),
    }
    (sweep / name).mkdir(parents=True)
    (sweep / name / "job.json").write_text(json.dumps(job))
    if length is None:
        return
    for stage in ("train", "measure"):
        (sweep.parent / "artifacts" / stage / f"{stage[0]}{name}").mkdir(parents=True)
    rows = [
        {
            "component": component,
            "proposer": "eagle3",
            "temperature": 0.0,
            "num_draft_tokens": 4,
            "acceptance_length": value,
            "acceptance_length_low": value - half,
            "acceptance_length_high": value + half,
            "acceptance_by_position": [value - 1],
            "tokens_per_second": 20 * value,
            "tokens_per_second_low": 19 * value,
            "tokens_per_second_high": 21 * value,
        }
        for component, value in (("chat", length - 0.11), ("all", length), ("edit", length + 0.13))
    ]
    artifacts = sweep.parent / "artifacts"
    (artifacts / "measure" / f"m{name}" / "acceptance.json").write_text(json.dumps({"rows": rows}))
    (artifacts / "train" / f"t{name}" / "train.json").write_text(json.dumps({"seconds": 300.0}))


@pytest.fixture
def sweep(tmp_path):
    sweep = tmp_path / "multirun"
    write_job(sweep, "0", ["train.ttt_steps=2", "train.lr=0.001", "seed=1"], 1.50)
    write_job(sweep, "1", ["train.ttt_steps=4", "train.lr=0.001", "seed=1"], 1.62)
    write_job(sweep, "2", ["train.ttt_steps=6", "seed=1"], 1.64)
    write_job(sweep, "3", ["train.ttt_steps=8", "train.lr=0.001", "seed=1"], None)
    (sweep / "4").mkdir()
    (sweep / ".submitit").mkdir()
    (sweep / "multirun.yaml").write_text("")
    return sweep


def test_only_overrides_that_differ_are_columns(sweep):
    head = sweep_table(read_sweep(sweep)).splitlines()[0]
    assert [cell.strip() for cell in head.strip("|").split("|")] == [
        "job",
        "train.ttt_steps",
        "train.lr",
        "k",
        "acceptance length, all",
        "acceptance length, chat",
        "acceptance length, edit",
        "tokens/s",
        "training",
        "verdict",
    ]


def test_jobs_are_sorted_by_the_mix_and_failed_ones_come_last(sweep):
    rows = read_sweep(sweep)
    assert [row.job for row in rows] == ["2", "1", "0", "3", "4"]
    assert [row.failed for row in rows] == [False, False, False, False, True]
    assert "failed" in sweep_table(rows).splitlines()[-1]


def test_a_row_holds_its_figures_with_intervals(sweep):
    best = sweep_table(read_sweep(sweep)).splitlines()[2]
    for figure in ("1.64 (1.62–1.66)", "32.8 (31.2–34.4)", "5.0 min", "default"):  # noqa: RUF001
        assert f" {figure} " in best


def test_a_job_that_was_not_measured_says_so(sweep):
    assert "not measured" in sweep_table(read_sweep(sweep)).splitlines()[-2]


def test_the_best_is_marked_only_apart_from_every_other(sweep):
    assert [row.verdict for row in read_sweep(sweep)] == [
        "within the interval of job 1",
        "within the interval of job 2",
        "",
        "",
        "",
    ]
    write_job(sweep, "5", ["train.ttt_steps=9", "train.lr=0.001"], 1.9)
    assert [row.verdict for row in read_sweep(sweep)] == ["best", "", "", "", "", ""]


def test_a_wide_interval_further_down_still_denies_the_best(sweep):
    write_job(sweep, "5", ["train.ttt_steps=9", "train.lr=0.001"], 1.9)
    write_job(sweep, "6", ["train.ttt_steps=1", "train.lr=0.001"], 1.55, half=0.5)
    assert read_sweep(sweep)[0].verdict == "within the interval of job 6"


def test_a_sweep_is_written_as_page_markdown_record_and_plot(sweep, tmp_path):
    write_sweep(tmp_path, sweep)
    html = (tmp_path / "sweep.html").read_text(encoding="utf-8")
    text = (tmp_path / "sweep.md").read_text(encoding="utf-8")
    assert "data:image/png;base64," in html
    assert "](sweep.png)" in text
    assert "not told apart from job 1." in html
    assert sweep_table(read_sweep(sweep)) in text
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")
    record = json.loads((tmp_path / "sweep.json").read_text(encoding="utf-8"))
    assert record["rows"][0]["acceptance_length"]["all"] == {
        "value": 1.64,
        "low": pytest.approx(1.62),
        "high": pytest.approx(1.66),
    }


def test_a_sweep_where_every_job_failed_is_still_a_table(tmp_path):
    (tmp_path / "multirun" / "0").mkdir(parents=True)
    write_sweep(tmp_path, tmp_path / "multirun")
    assert "No job was measured." in (tmp_path / "sweep.md").read_text(encoding="utf-8")
    assert not (tmp_path / "sweep.png").exists()


def test_a_folder_without_jobs_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"report\.sweep must be a multirun folder"):
        read_sweep(tmp_path)


def test_a_single_component_stands_for_the_mix():
    assert SweepRow("0", acceptance_length={"chat": Estimate(1.5)}).length == Estimate(1.5)
