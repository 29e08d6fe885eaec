"""The target is quantized within its budget, measured as it was written, and judged by a gate."""

import json

import pytest
import tiny_quantized
import tiny_runs
import torch
from sharded_targets import tensors

from specfit import artifacts
from specfit.checks import GateRejected
from specfit.quantization import problem
from specfit.quantization.measured import Text
from specfit.quantization.reading import read_quantized
from specfit.quantization.switch import UnitSwitch
from specfit.quantization.units import unit_of
from specfit.stages import quantize
from specfit.targets.load import load
from specfit.targets.locate import locate
from specfit_kernels.nvfp4 import FP4Tensor
from specfit_kernels.nvfp4 import quantize as nvfp4_quantize

QUICK = ["quantize.selector=isolated", "quantize.granularity=layer"]  # measures a handful of sets
FIGURES = ("kl_mean_nats", "kl_p99_nats", "top1_agreement", "perplexity_change")


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    return tiny_quantized.overrides(tmp_path_factory.mktemp("quantize"))


@pytest.fixture(scope="module")
def made(words):
    return tiny_runs.run(words)


def plain(words):
    cfg = tiny_runs.composed(words)
    return load(cfg.target, locate(cfg.target), torch.device("cpu"))


def test_the_share_of_nvfp4_meets_the_budget(made):
    recipe = tiny_runs.read_json(made, "recipe.json")
    quantized, total = 0, 0
    for name, weight in read_quantized(made.path / "model"):
        if unit_of(name) is not None:
            in_nvfp4 = isinstance(weight, FP4Tensor)
            assert in_nvfp4 == (str(unit_of(name)) in recipe["plan"]["precision"])
            size = weight.codes.numel() * 2 if in_nvfp4 else weight.numel()
            quantized, total = quantized + size * in_nvfp4, total + size
    assert total == sum(recipe["num_weights"])
    assert 0.5 <= quantized / total < 0.8
    assert recipe["share"] == pytest.approx(quantized / total)
    assert recipe["bits_per_weight"] == pytest.approx(bits_on_disk(made))
    # 32 as they are stored; a scale of 32 bits for each of the three or four matrices of a layer.
    assert recipe["bits_per_weight"] == pytest.approx(32 - 27.5 * quantized / total, abs=0.05)


def bits_on_disk(made):
    """A weight, of all that the units' matrices take in the checkpoint."""
    stored = tensors(made.path / "model")
    num_bytes = sum(
        tensor.nbytes
        for name, tensor in stored.items()
        if unit_of(f"{name.rpartition('.')[0]}.weight") is not None
    )
    return 8 * num_bytes / sum(tiny_runs.read_json(made, "recipe.json")["num_weights"])


def test_fidelity_has_a_row_for_each_text_with_intervals(made):
    figures = tiny_runs.read_json(made, "fidelity.json")
    assert [row["text"] for row in figures["rows"]] == ["calibration", "selection", "report"]
    for row in figures["rows"]:
        assert (row["num_sequences"], row["num_tokens"]) == (3, 18)
        for name in FIGURES:
            assert row[f"{name}_low"] <= row[name] <= row[f"{name}_high"]
        assert row["kl_mean_nats"] > 0
    assert figures["noise_floor"]["kl_mean_nats"] < 1e-8
    assert figures["noise_floor"]["top1_agreement"] == 1


def test_what_was_written_diverges_as_what_was_chosen(made):
    measured = tiny_runs.read_json(made, "recipe.json")["rows"][-1]
    assert measured["proposer"] == "portfolio"
    (row,) = [
        row
        for row in tiny_runs.read_json(made, "fidelity.json")["rows"]
        if row["text"] == "selection"
    ]
    assert row["kl_mean_nats"] == pytest.approx(measured["measured_kl_nats"], rel=1e-4)


def test_no_conversation_is_in_two_texts(words):
    rows = tiny_runs.read_lines(tiny_runs.run(words, "stage=sensitivity"), "texts.jsonl")
    assert len({row["id"] for row in rows}) == len(rows) == 4 + 3 * 3
    sizes = {text: 4 if text is Text.units else 3 for text in Text}
    assert [row["text"] for row in rows] == [t.name for t in Text for _ in range(sizes[t])]
    prompts = tiny_runs.read_lines(tiny_runs.run(words, "stage=prompts"), "conversations.jsonl")
    split = {row["id"]: row["split"] for row in prompts}
    assert {split[row["id"]] for row in rows} == {"train"}


def test_rollouts_differ_where_the_two_targets_do(made):
    rollouts = tiny_runs.read_json(made, "fidelity.json")["rollouts"]
    assert rollouts["num_rollouts"] == 3
    firsts = rollouts["first_differing_tokens"]
    assert all(0 <= first <= 6 for first in firsts)
    assert rollouts["num_equal"] == firsts.count(6)


def test_the_artifact_opens_as_what_it_holds(made, words):
    opened = quantize.open_quantized(made, torch.device("cpu"))
    weights = dict(opened.model.named_parameters())
    before = dict(plain(words).model.named_parameters())
    changed = 0
    for name, stored in read_quantized(made.path / "model"):
        if isinstance(stored, FP4Tensor):
            assert torch.equal(weights[name], stored.dequantize())
            assert not torch.equal(weights[name], before[name])
            changed += 1
        else:
            assert torch.equal(weights[name], before[name])
    assert changed > 3
    assert opened.info.quantization == "compressed-tensors:nvfp4-pack-quantized"
    assert opened.tokenizer.chat_template == plain(words).tokenizer.chat_template


def test_the_whole_path_is_fitted_to_the_quantized_target(words, made):
    report = tiny_runs.run(words, "stage=report")
    found = tiny_runs.artifacts(words, "stage=report")
    assert list(found)[:5] == ["target", "prompts", "sensitivity", "quantize", "generate"]
    assert found["quantize"].key == made.key
    assert found["generate"].manifest["inputs"]["quantize"] == made.key
    rows = tiny_runs.read_json(found["measure"], "acceptance.json")
    assert rows["differences"] == []
    assert "## Fidelity of the quantized target" in report.file("report.md").read_text()
    provenance = tiny_runs.read_json(report, "report.json")["provenance"]
    assert provenance["target"]["quantization"].endswith("nvfp4-pack-quantized")
    full = tiny_runs.keys(words, "quantize.budget=null")
    kept = tiny_runs.keys(words)
    assert [s for s in full if full[s] == kept[s]] == ["target", "prompts"]


@pytest.mark.parametrize(
    ("stage", "num_lines", "torn"),
    [("sensitivity", 4, True), pytest.param("quantize", 9, False, marks=pytest.mark.slow)],
)
def test_a_killed_run_measures_nothing_twice_and_ends_the_same(
    words, tmp_path, monkeypatch, stage, num_lines, torn
):
    made = tiny_runs.run(words, f"stage={stage}")
    there = [*words, f"runtime.root={tmp_path}"]
    if stage == "quantize":
        tiny_runs.run(there, "stage=sensitivity")
    append, left = problem.append_jsonl, [num_lines]

    def append_or_die(path, rows):
        if left[0] == 0:
            raise KeyboardInterrupt
        left[0] -= 1
        append(path, rows)

    with monkeypatch.context() as patch:
        patch.setattr(problem, "append_jsonl", append_or_die)
        with pytest.raises(KeyboardInterrupt):
            tiny_runs.run(there)
    (journal,) = tmp_path.glob(f"{stage}/*.partial/measured.jsonl")
    if torn:
        journal.write_bytes(journal.read_bytes()[:-9])
    kept = len(problem.read_jsonl(journal, tolerate_truncated_tail=True))
    assert kept == num_lines - torn
    resumed = tiny_runs.run(there, f"stage={stage}")
    assert resumed.key == made.key
    for name in resumed.files():
        assert resumed.file(name).read_bytes() == made.file(name).read_bytes()


def test_a_gate_rejects_and_keeps_what_was_made(words, monkeypatch):
    asked = [*words, *QUICK, "quantize.budget=1"]
    with pytest.raises(GateRejected, match=r"quantize\.gate=strict rejects .*kl_mean_nats must be"):
        tiny_runs.run(asked, "quantize.gate=strict")
    kept = tiny_runs.artifacts(asked)["quantize"]
    broken = tiny_runs.read_json(kept, "fidelity.json")["broken_limits"]["production"]
    # A dozen and a half of tokens say nothing, whatever the figures are.
    assert broken[0] == "num_sequences must be at least 16, got 3"
    assert broken[1] == "num_tokens must be at least 1000, got 18"

    def refuse(recipe, *_):
        raise AssertionError(f"{recipe.stage} is made again")

    monkeypatch.setattr(artifacts, "_make", refuse)
    assert tiny_runs.run(asked, "quantize.gate=report").path == kept.path
    with pytest.raises(GateRejected):
        tiny_runs.run(asked, "quantize.gate=strict", "stage=train")


@pytest.mark.parametrize(
    ("more", "scheme"),
    [
        pytest.param(
            ["quantize.activations=nvfp4", "quantize.granularity=layer"],
            "nvfp4-pack-quantized",
            marks=pytest.mark.slow,
        ),
        (["quantize.rest=fp8"], "mixed-precision"),
        pytest.param(
            ["quantize.rest=fp8_block", "quantize.rule=amax", "quantize.granularity=layer"],
            "mixed-precision",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["quantize.cotune=true", "quantize.granularity=layer"],
            "nvfp4-pack-quantized",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["quantize.budget_in=bits", "quantize.budget=8"],
            "nvfp4-pack-quantized",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["quantize.budget_in=kl_nats", "quantize.budget=0.05"],
            "nvfp4-pack-quantized",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["quantize.budget_in=kl_nats", "quantize.budget=0.2", "quantize.rest=fp8"],
            "mixed-precision",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_every_kind_of_quantization_is_written_as_it_was_measured(words, more, scheme):
    made = tiny_runs.run(words, "quantize.selector=isolated", *more)
    recipe, figures = (tiny_runs.read_json(made, f"{n}.json") for n in ("recipe", "fidelity"))
    config = json.loads((made.path / "model" / "config.json").read_text())["quantization_config"]
    assert config["format"] == scheme
    assert figures["not_as_measured"] == []
    assert recipe["bits_per_weight"] == pytest.approx(bits_on_disk(made))
    row = figures["rows"][1]
    assert row["text"] == "selection"
    measured = recipe["rows"][-1]["measured_kl_nats"]
    if "quantize.cotune=true" in more:
        assert row["kl_mean_nats"] <= measured * (1 + 1e-4)
    else:
        assert row["kl_mean_nats"] == pytest.approx(measured, rel=1e-3)
    if "quantize.budget=8" in more:
        assert 6 < recipe["bits_per_weight"] <= 8
    if "quantize.budget_in=kl_nats" in more:
        ceiling = figures["max_kl_nats"]
        assert 0 < measured < recipe["rows"][-1]["measured_kl_nats_high"] <= ceiling
        assert recipe["chosen"]
        assert f"Budget: a mean KL of at most {ceiling}" in made.file("quantization.md").read_text()


def test_static_input_scales_are_those_of_whole_prompts(words):
    asked = [*words, "quantize.activations=nvfp4", "quantize.granularity=layer"]
    alone = tiny_runs.run(asked, "stage=sensitivity")
    rows = tiny_runs.read_lines(alone, "texts.jsonl")
    target = plain(words)
    for name in ("model.layers.0.self_attn.q_proj", "model.layers.3.mlp.down_proj"):
        seen = []
        module = target.model.get_submodule(name)
        handle = module.register_forward_pre_hook(lambda _, args, s=seen: s.append(args[0]))
        for row in (row for row in rows if row["text"] == "calibration"):
            assert len(row["prompt"]) > 6  # which is the context that divergences have
            target.model(torch.tensor([row["prompt"] + row["answer"][:6]]))
        handle.remove()
        expected = max(float(x.abs().max()) for x in seen)
        found = tiny_runs.read_json(alone, "sensitivity.json")["input_amax"][name]
        assert found == pytest.approx(expected, rel=1e-4)


def test_a_target_that_is_quantized_already_is_refused(words, made):
    again = [*words, f"target.path={made.path / 'model'}"]
    with pytest.raises(ValueError, match=r"quantize\.budget must be null .*nvfp4-pack-quantized"):
        tiny_runs.run(again)


def test_budgets_and_selectors_share_what_each_unit_costs_alone(words):
    before = tiny_runs.keys(words)
    for more in ("quantize.budget=0.9", "quantize.selector=isolated", "quantize.rest=fp8"):
        after = tiny_runs.keys(words, more)
        assert after["sensitivity"] == before["sensitivity"]
        assert after["quantize"] != before["quantize"]
    for more in ("quantize.rule=amax", "quantize.num_passages=2", "quantize.granularity=layer"):
        assert tiny_runs.keys(words, more)["sensitivity"] != before["sensitivity"]
    recipe = tiny_runs.read_json(tiny_runs.run(words), "recipe.json")
    alone = tiny_runs.read_json(tiny_runs.run(words, "stage=sensitivity"), "sensitivity.json")
    for name in ("units", "num_weights", "isolated_kl_nats"):
        assert recipe[name] == alone[name]
    keys = [key for key, _ in tiny_runs.read_lines(tiny_runs.run(words), "measured.jsonl")]
    assert not any(key.startswith("alone") for key in keys)


def swapped(weights):
    gate = "model.layers.2.mlp.gate_proj.weight"
    up = gate.replace("gate", "up")
    weights[gate].data, weights[up].data = weights[up].data, weights[gate].data


def scaled(weights):
    weights["model.layers.2.self_attn.o_proj.weight"].data *= 1.05


def head_quantized(weights):
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    head.data = nvfp4_quantize(head.data).dequantize()


def spoilt(weights):
    weights["model.layers.2.mlp.up_proj.weight"].data[0, 0] = torch.nan


@pytest.mark.parametrize(
    ("fault", "rest", "num_random"),  # the last, which counts for nothing here, sets keys apart
    [
        (swapped, "none", 20),
        pytest.param(scaled, "none", 21, marks=pytest.mark.slow),
        pytest.param(head_quantized, "none", 22, marks=pytest.mark.slow),
        pytest.param(spoilt, "none", 23, marks=pytest.mark.slow),
        pytest.param(swapped, "fp8", 24, marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_with_a_fault_passes_no_gate(words, monkeypatch, fault, rest, num_random):
    load_quantized = quantize.load_quantized

    def faulty(folder, dtype):
        model = load_quantized(folder, dtype)
        fault(dict(model.named_parameters()))
        return model

    monkeypatch.setattr(quantize, "load_quantized", faulty)
    asked = [*words, *QUICK, f"quantize.rest={rest}", f"quantize.num_random={num_random}"]
    num = 2 if fault is swapped else 1
    with pytest.raises(GateRejected, match=f"no quantize.gate .* got {num} other tensors, such as"):
        tiny_runs.run(asked, "quantize.gate=report")
    figures = tiny_runs.read_json(tiny_runs.artifacts(asked)["quantize"], "fidelity.json")
    broken = figures["broken_limits"]["production"]
    assert broken[:1] == figures["not_as_measured"]
    kl = figures["rows"][-1]["kl_mean_nats"]
    assert (kl is None) == (fault is spoilt)
    assert ("kl_mean_nats must be at most 0.06, got no finite number" in broken) == (kl is None)


def test_a_ceiling_that_no_unit_keeps_says_what_the_best_one_costs(words):
    with pytest.raises(
        ValueError, match=r"quantize\.budget must be a KL that some unit keeps, got"
    ):
        tiny_runs.run(words, *QUICK, "quantize.budget_in=kl_nats", "quantize.budget=1e-9")


def test_a_ceiling_counts_what_the_rest_loses_in_fp8(words):
    asked = [*QUICK, "quantize.budget_in=kl_nats", "quantize.budget=1e-9", "quantize.rest=fp8"]
    with pytest.raises(ValueError, match=r"must be a KL that quantize\.rest=fp8 keeps, got 1e-09"):
        tiny_runs.run(words, *asked)


def test_the_target_is_left_as_it_came(words, monkeypatch):
    left = []
    close = UnitSwitch.close

    def closed(switch):
        close(switch)
        left.append((switch._plain, switch._quantized, switch._now))

    monkeypatch.setattr(UnitSwitch, "close", closed)
    more = ["quantize.activations=nvfp4", "quantize.rest=fp8", "quantize.curve_points=1"]
    tiny_runs.run(words, *QUICK, *more)
    assert left == [({}, {}, frozenset())] * 2
