"""What a page says of a quantized target: its figures, its gates and how the units were chosen."""

import pytest

from specfit.report import quantization
from specfit.report.figures import DASH

INTERVALS = {
    "kl_mean_nats": (0.0213, 0.0187, 0.0244),
    "kl_median_nats": (0.0041, 0.0033, 0.0052),
    "kl_p95_nats": (0.101, 0.087, 0.119),
    "kl_p99_nats": (0.333, 0.251, 0.402),
    "top1_agreement": (0.951, 0.939, 0.962),
    "perplexity_change": (0.0062, -0.0011, 0.0141),
}


def figures(text, scale=1.0):
    row = {"text": text, "num_tokens": 2048, "num_sequences": 32, "kl_max_nats": 1.7}
    for name, (value, low, high) in INTERVALS.items():
        row |= {name: scale * value, f"{name}_low": scale * low, f"{name}_high": scale * high}
    return row


@pytest.fixture
def fidelity():
    noise = figures("report", 0.0)
    del noise["text"]
    return {
        "rows": [figures("calibration", 0.9), figures("selection", 0.95), figures("report")],
        "noise_floor": noise,
        "rollouts": {
            "num_rollouts": 32,
            "num_tokens": 64,
            "first_differing_tokens": [3, 20, 64],
            "num_equal": 1,
            "first_differing_token_median": 20,
        },
        "comparisons": [
            compared("isolated", 1, 0.0241, 0.884),
            compared("random", 8, 0.0391, 0.545),
            compared("amax", 1, 0.0288, 0.740),
        ],
        "acceptance": [],
        "max_kl_nats": None,
        "not_as_measured": [],
        "broken_limits": {
            "strict": ["kl_mean_nats must be at most 0.01, got 0.0244"],
            "production": [],
        },
    }


def compared(against, num_sets, kl, ratio):
    return {
        "against": against,
        "num_sets": num_sets,
        "kl_mean_nats": kl,
        "kl_ratio": ratio,
        "kl_ratio_low": ratio - 0.01,
        "kl_ratio_high": ratio + 0.01,
    }


def proposed(name, predicted, measured):
    return {
        "proposer": name,
        "chosen": [0, 3],
        "share": 0.6,
        "predicted_kl_nats": predicted,
        "measured_kl_nats": measured,
        "measured_kl_nats_low": measured - 0.001,
        "measured_kl_nats_high": measured + 0.001,
    }


@pytest.fixture
def recipe():
    kinds = ("qkv", "o", "gate_up", "down")
    return {
        "units": [f"layers.{i}.{kind}" for i in range(2) for kind in kinds],
        "num_weights": [100] * 8,
        "chosen": [0, 3],
        "share": 0.612,
        "bits_per_weight": 8.96,
        "rows": [
            proposed("isolated", 0.0201, 0.0312),
            proposed("random", None, 0.0477),
            proposed("portfolio", 0.0198, 0.0233),
        ],
        "isolated_kl_nats": [0.001 * (i + 1) for i in range(8)],
        "rho_reliability": 0.412,
        "cv_r2": {"additive": 0.9712, "coverage": 0.9801},
        "curve": [
            {
                "share": 0.25 * i,
                "num_units": 2 * i,
                "kl_mean_nats": 0.01 * i,
                "kl_mean_nats_low": 0.009 * i,
                "kl_mean_nats_high": 0.012 * i,
            }
            for i in range(1, 5)
        ],
        "moves": [{"kept": True}, {"kept": False}, {"kept": False}],
        "plan": {"precision": {"layers.0.qkv": "nvfp4", "layers.1.o": "fp8"}},
        "text": {"context_tokens": 512, "counted_tokens": 64},
    }


@pytest.fixture
def page(tmp_path, recipe, fidelity):
    quantization.write_page(tmp_path, "mine", recipe, fidelity)
    assert (tmp_path / "quantization.png").stat().st_size > 1000
    assert "data:image/png" in (tmp_path / "quantization.html").read_text()
    return (tmp_path / "quantization.md").read_text().replace(DASH, "-").replace("\\", "")


def test_the_page_opens_with_what_was_done_and_what_it_cost(page):
    assert "# mine in NVFP4" in page
    assert "61.2 % of the weights that may be quantized are in NVFP4, the rest in FP8" in page
    assert "8.96 bits" in page
    assert "0.0213 (0.0187-0.0244) nats" in page


def test_each_gate_has_its_verdict_and_the_reason(page):
    assert (
        "Gate strict: rejected, as kl_mean_nats must be at most 0.01, got 0.0244."
        in page.replace("\\", "")
    )
    assert "Gate production: passed." in page


def test_every_text_has_a_row_with_intervals(page):
    for text, kl in (("calibration", "0.0192"), ("selection", "0.0202"), ("report", "0.0213")):
        (line,) = [line for line in page.splitlines() if line.startswith(f"| {text} |")]
        assert kl in line
        assert line.count("(") == 6
    (noise,) = [line for line in page.splitlines() if line.startswith("| noise |")]
    assert "0.0000 (0.0000-0.0000)" in noise


def test_proposals_are_predicted_and_measured(page):
    (line,) = [line for line in page.splitlines() if line.startswith("| isolated | 2 |")]
    assert "0.0201" in line
    assert "0.0312 (0.0302-0.0322)" in line
    (line,) = [line for line in page.splitlines() if line.startswith("| random | 2 |")]
    assert "not measured" in line
    assert "additive 0.971, coverage 0.980" in page
    assert "tried from the best proposal: 3, kept: 1" in page


def test_rollouts_are_counted(page):
    assert "Of 32 greedy answers of 64 tokens, 1 are the same" in page
    assert "first differs at token 20" in page


def written(folder, recipe, fidelity):
    quantization.write_page(folder, "mine", recipe, fidelity)
    return (folder / "quantization.md").read_text().replace(DASH, "-").replace("\\", "")


def test_where_most_answers_are_the_same_none_differs(tmp_path, recipe, fidelity):
    fidelity["rollouts"] |= {"num_equal": 20, "first_differing_token_median": None}
    page = written(tmp_path, recipe, fidelity)
    assert "20 are the same as before quantizing; the median answer does not differ." in page
    assert "differs at" not in page


def test_the_page_says_what_the_text_is_and_what_it_leaves_out(page):
    assert "the first 64 tokens of each, read after up to 512 tokens of the prompt's end" in page
    assert "answers that end earlier, or repeat themselves, are left out" in page


def test_the_page_says_why_a_set_of_less_kl_may_not_be_chosen(page):
    assert "three where predictions disagree: less KL may be luck." in page
    assert "without what the rest loses in FP8" in page
    assert "on the report text, all before any co-tuning" in page


def test_a_ceiling_stands_beside_what_the_report_text_says(tmp_path, recipe, fidelity):
    assert "Budget:" not in written(tmp_path, recipe, fidelity)
    page = written(tmp_path, recipe, fidelity | {"max_kl_nats": 0.02})
    assert "Budget: a mean KL of at most 0.02 nats" in page
    assert "on the report text it is 0.0213 (0.0187-0.0244)." in page


def test_a_checkpoint_without_finite_figures_has_a_page(tmp_path, recipe, fidelity):
    row = fidelity["rows"][-1]
    row |= dict.fromkeys((f"kl_mean_nats{end}" for end in quantization.ENDS), None)
    page = written(tmp_path, recipe, fidelity)
    (line,) = [line for line in page.splitlines() if line.startswith("| report |")]
    assert line.split(" | ")[2] == "not finite"
    assert "text that nothing was chosen by: not finite nats." in page


def test_layers_that_are_chosen_whole_are_drawn_too(tmp_path, recipe, fidelity):
    kinds = ("qkv", "o", "gate_up", "down")
    units = [" ".join(f"layers.{i}.{kind}" for kind in kinds) for i in range(2)]
    recipe |= {"units": units, "isolated_kl_nats": [0.01, 0.02], "chosen": [1]}
    quantization.write_page(tmp_path, "mine", recipe, fidelity)
    assert (tmp_path / "quantization.png").exists()


def test_the_chosen_set_is_compared_with_others(page):
    (line,) = [line for line in page.splitlines() if line.startswith("| random | 8 |")]
    assert "0.0391 | 0.545 (0.535-0.555)" in line
    (line,) = [line for line in page.splitlines() if line.startswith("| amax | 1 |")]
    assert "0.0288" in line


def test_other_budgets_have_their_cost(page, tmp_path):
    table = page.partition("## What other budgets cost")[2]
    assert "| 75.0 % | 6 | 0.0300 (0.0270-0.0360) |" in table
    assert (tmp_path / "budgets.png").stat().st_size > 1000


def test_budgets_that_were_not_measured_are_said_to_be(tmp_path, recipe, fidelity):
    quantization.write_page(tmp_path, "mine", recipe | {"curve": []}, fidelity)
    assert "Other budgets: not measured." in (tmp_path / "quantization.md").read_text()


def test_a_given_speculator_has_its_change(tmp_path, recipe, fidelity):
    row = {
        "component": "coding",
        "num_draft_tokens": 4,
        "num_prompts": 30,
        "acceptance_length_before": 1.756,
        "acceptance_length_after": 1.701,
        "acceptance_length_change": -0.0313,
        "acceptance_length_change_low": -0.0489,
        "acceptance_length_change_high": 0.0021,
    }
    quantization.write_page(tmp_path, "mine", recipe, fidelity | {"acceptance": [row]})
    page = (tmp_path / "quantization.md").read_text()
    assert "| coding | 4 | 30 | 1.756 | 1.701 | -3.1 (-4.9 to +0.2) |" in page.replace("\\", "")
