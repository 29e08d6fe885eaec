"""A multirun over budgets becomes one table and one curve, rejected jobs among them."""

import json

import pytest

from specfit.report.sweep import write_sweep


def figures(kl):
    row = {"text": "report", "num_tokens": 2048}
    for name, value in (
        ("kl_mean_nats", kl),
        ("top1_agreement", 1 - kl),
        ("perplexity_change", kl / 3),
    ):
        row |= {name: value, f"{name}_low": 0.9 * value, f"{name}_high": 1.1 * value}
    return row


def write_job(sweep, root, number, selector, share, kl, *, rejected):
    folder = sweep / str(number)
    folder.mkdir(parents=True)
    job = {
        "overrides": [f"quantize.selector={selector}", f"quantize.budget={share}"],
        "stage": "quantize",
        "artifact": None if rejected else f"q{number}",
        "keys": {"quantize": f"q{number}"},
        "root": str(root),
    }
    (folder / "job.json").write_text(json.dumps(job))
    artifact = root / "quantize" / f"q{number}"
    artifact.mkdir(parents=True)
    recipe = {
        "rows": [{"proposer": selector}],
        "share": share,
        "bits_per_weight": 16 - 11.5 * share,
    }
    (artifact / "recipe.json").write_text(json.dumps(recipe))
    broken = ["kl_mean_nats must be at most 0.06"] if rejected else []
    fidelity = {
        "rows": [{"text": "calibration"}, {"text": "selection"}, figures(kl)],
        "broken_limits": {"strict": ["kl"], "production": broken},
        "comparisons": [
            {"against": against, "kl_ratio": ratio, "kl_ratio_low": ratio, "kl_ratio_high": ratio}
            for against, ratio in (("isolated", 0.91), ("random", 0.62), ("amax", 0.83))
            if selector == "portfolio" or against == "amax"
        ],
    }
    (artifact / "fidelity.json").write_text(json.dumps(fidelity))


@pytest.fixture
def page(tmp_path):
    sweep, root = tmp_path / "sweep", tmp_path / "artifacts"
    write_job(sweep, root, 0, "isolated", 0.5, 0.041, rejected=False)
    write_job(sweep, root, 1, "isolated", 0.25, 0.013, rejected=False)
    write_job(sweep, root, 2, "portfolio", 0.5, 0.037, rejected=False)
    write_job(sweep, root, 3, "portfolio", 0.75, 0.092, rejected=True)
    (sweep / "4").mkdir()  # failed: no job.json
    out = tmp_path / "out"
    out.mkdir()
    write_sweep(out, sweep)
    assert (out / "quantize_sweep.png").stat().st_size > 1000
    assert (out / "sweep.html").read_text().count("data:image/png") == 1
    return (out / "sweep.md").read_text(), json.loads((out / "sweep.json").read_text())


def rows_of(markdown):
    """The lines of the table of quantized targets, by job."""
    table = markdown.partition("## Quantized targets")[2]
    return {line.split(" | ")[0][2:]: line for line in table.splitlines() if line[:3] > "| -"}


def test_jobs_stand_in_order_of_their_share_with_their_figures(page):
    markdown, record = page
    assert [(job["job"], job["share"]) for job in record["quantized"]] == [
        ("1", 0.25),
        ("0", 0.5),
        ("2", 0.5),
        ("3", 0.75),
    ]
    line = rows_of(markdown)["2"]
    assert "50.0 %" in line
    assert "10.25" in line
    assert "0.0370 (0.0333" in line


def test_jobs_are_held_against_other_sets_and_scales(page):
    markdown, _ = page
    cells = rows_of(markdown)["2"].split(" | ")
    assert [cell[:5] for cell in cells[-5:-2]] == ["0.910", "0.620", "0.830"]
    cells = rows_of(markdown)["0"].split(" | ")
    assert [cell[:5] for cell in cells[-5:-2]] == ["not m", "not m", "0.830"]


def test_gates_say_who_was_rejected(page):
    markdown, _ = page
    ends = [rows_of(markdown)[job].split(" | ")[-2:] for job in ("2", "3")]
    assert [[cell.strip(" |") for cell in end] for end in ends] == [
        ["rejected", "passed"],
        ["rejected", "rejected"],
    ]
