"""What a quantized target is held against: other sets and scales, other budgets, other heads."""

import pytest
import tiny_quantized
import tiny_runs
import torch

MEASURED = "measured.jsonl"
PROPOSERS = ["isolated", "gram", "additive", "coverage"]


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    return tiny_quantized.overrides(tmp_path_factory.mktemp("quantize"))


@pytest.fixture(scope="module")
def made(words):
    return tiny_runs.run(words)


def test_what_was_chosen_is_compared_on_the_report_text(made):
    recipe, figures = (tiny_runs.read_json(made, f"{n}.json") for n in ("recipe", "fidelity"))
    measured = dict(tiny_runs.read_lines(made, "measured.jsonl"))

    def kl(ids, rule=""):
        return torch.tensor(measured[" ".join(["report", *rule.split(), *map(str, ids)])])

    own = kl(recipe["chosen"])
    assert own.mean() == pytest.approx(figures["rows"][-1]["kl_mean_nats"], rel=1e-4)
    found = {row["against"]: row for row in figures["comparisons"]}
    assert list(found) == [*PROPOSERS, "blend", "random", "amax"]
    drawn = [row["chosen"] for row in recipe["rows"] if row["proposer"] == "random"]
    assert found["random"]["num_sets"] == len(drawn) == 2
    for against, other in (
        ("random", (kl(drawn[0]) + kl(drawn[1])) / 2),
        ("isolated", kl(recipe["rows"][0]["chosen"])),
        ("amax", kl(recipe["chosen"], "amax")),
    ):
        row = found[against]
        assert row["kl_mean_nats"] == pytest.approx(float(other.mean()))
        assert row["kl_ratio"] == pytest.approx(float(own.mean() / other.mean()))
        assert row["kl_ratio_low"] <= row["kl_ratio"] <= row["kl_ratio_high"]
    assert found["amax"]["kl_ratio"] != 1


def test_a_curve_says_what_other_budgets_cost(words, made):
    recipe = tiny_runs.read_json(made, "recipe.json")
    sizes, alone = recipe["num_weights"], recipe["isolated_kl_nats"]
    order = sorted(range(len(sizes)), key=lambda i: alone[i] / sizes[i])
    measured = dict(tiny_runs.read_lines(tiny_runs.run(words, "stage=sensitivity"), MEASURED))
    assert [point["share"] >= i / 4 for i, point in enumerate(recipe["curve"], 1)] == [True] * 4
    for point in recipe["curve"]:
        ids = order[: point["num_units"]]
        assert point["share"] == pytest.approx(sum(sizes[i] for i in ids) / sum(sizes))
        kl = measured[" ".join(["selection", *map(str, sorted(ids))])]
        assert point["kl_mean_nats"] == pytest.approx(sum(kl) / len(kl))
    assert recipe["curve"][-1]["share"] == 1


@pytest.mark.slow
def test_a_given_head_is_measured_before_and_after(words):
    plainly = tiny_runs.run(words, "quantize.budget=null", "stage=measure")
    head = tiny_runs.artifacts(words, "quantize.budget=null")["train"]
    made = tiny_runs.run(words, f"quantize.speculator={head.path}", "quantize.budget=1")
    (row,) = tiny_runs.read_json(made, "fidelity.json")["acceptance"]
    (before,) = [
        row
        for row in tiny_runs.read_json(plainly, "acceptance.json")["rows"]
        if (row["proposer"], row["component"]) == ("eagle3", "mine")
    ]
    assert row["acceptance_length_before"] == pytest.approx(before["acceptance_length"])
    assert (row["num_draft_tokens"], row["num_prompts"]) == (2, 3)
    change = row["acceptance_length_after"] / row["acceptance_length_before"] - 1
    assert row["acceptance_length_change"] == pytest.approx(change)
    assert "Acceptance length of the given speculator" in made.file("quantization.md").read_text()


def test_a_head_of_the_target_before_it_was_quantized_is_measured_beside(words):
    asked = [*words, "stage=report", "measure.full_precision_head=true"]
    report = tiny_runs.run(asked)
    before = tiny_runs.artifacts(words, "quantize.budget=null")["train"]
    given = tiny_runs.run(words, "stage=measure", f"+measure.speculators.other={before.path}")
    found = tiny_runs.read_json(tiny_runs.artifacts(asked)["measure"], "acceptance.json")
    by_path = tiny_runs.read_json(given, "acceptance.json")
    (row,) = found["heads"]
    assert (row["proposer"], row["instead_of"]) == ("eagle3", "full_precision")
    assert by_path["heads"] == [row | {"instead_of": "other"}]
    for name, side in (("eagle3", "after"), ("full_precision", "before")):
        (own,) = [r for r in found["rows"] if (r["proposer"], r["component"]) == (name, "mine")]
        assert own["acceptance_length"] == pytest.approx(row[f"acceptance_length_{side}"])
    assert "## Fitted head and other heads" in report.file("report.md").read_text()


def test_a_head_of_full_precision_needs_a_target_that_is_quantized(words):
    asked = ["quantize.budget=null", "measure.full_precision_head=true", "stage=measure"]
    with pytest.raises(ValueError, match=r"measure\.full_precision_head must be false without"):
        tiny_runs.run(words, *asked)
