"""The stage `predict`: rows from measured acceptance, on a given machine and on this one."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from tiny_heads import make_speculator, make_target

from specfit.engine import DecodeEngine
from specfit.latency.config import Format
from specfit.latency.formats import engine_in
from specfit.prediction.config import AcceptanceConfig, HardwareConfig, PredictConfig
from specfit.prediction.measured import measure
from specfit.prediction.model import described
from specfit.stages.predict import FIGURES, PredictJob, acceptance_lengths, run
from specfit.traffic.config import ComponentConfig, ProfileConfig, Quantiles
from specfit_kernels.cpu_weights import Activations

CONF = Path(__file__).parents[1] / "conf"
KEPT = {"code": [0.8, 0.6, 0.5], "talk": [0.5, 0.2, 0.1]}


def row(component: str, k: int, **changes: Any) -> dict[str, Any]:
    length = 1 + sum(KEPT[component][:k])
    values = {
        "component": component,
        "proposer": "eagle3",
        "temperature": 0.0,
        "num_draft_tokens": k,
        "num_prompts": 10,
        "num_tokens": 2000 if component == "code" else 400,
        "acceptance_length": length,
        "acceptance_length_low": length - 0.1,
        "acceptance_length_high": length + 0.2,
        "acceptance_by_position": KEPT[component][:k],
    }
    return values | changes


ROWS = [
    row("code", 3),
    row("talk", 3),
    row("code", 3) | {"component": "all", "acceptance_by_position": None},
    row("code", 3, proposer="none", acceptance_by_position=[]),
]
PROFILE = ProfileConfig(
    name="mine",
    components=[
        ComponentConfig(
            name="code",
            weight=0.25,
            sources=["a"],
            prompt_tokens=Quantiles(1000.0, 1000.0),
            output_tokens=Quantiles(300.0, 300.0),
        ),
        ComponentConfig(name="talk", weight=0.75, sources=["b"]),
    ],
)


def machine(name: str) -> HardwareConfig:
    schema = OmegaConf.structured(HardwareConfig)
    found = OmegaConf.to_object(
        OmegaConf.merge(schema, OmegaConf.load(CONF / "hardware" / f"{name}.yaml"))
    )
    assert isinstance(found, HardwareConfig)
    return found


def job(folder: Path, **changes: Any) -> PredictJob:
    values = {
        "folder": folder,
        "config": PredictConfig(concurrencies=[1, 8, 64], hit_rate=0.5),
        "hardware": machine("b200"),
        "profile": PROFILE,
        "acceptance": ROWS,
        "info": dataclasses.replace(make_target().info, dtype="bfloat16"),
    }
    return PredictJob(**values | changes)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    made: Path = tmp_path_factory.mktemp("given")
    run(job(made))
    return made


def read(folder: Path, kind: str) -> list[dict[str, Any]]:
    rows = json.loads((folder / FIGURES).read_text())["rows"]
    return [row for row in rows if row["kind"] == kind]


def test_there_is_a_row_for_each_traffic_k_and_load(folder):
    found = [
        (r["component"], r["num_draft_tokens"], r["concurrency"]) for r in read(folder, "latency")
    ]
    assert len(set(found)) == len(found) == 3 * 4 * 3
    assert {name for name, _, _ in found} == {"code", "talk", "all"}


def test_the_parts_of_a_round_sum_to_it(folder):
    parts = ("weights", "kv", "compute", "layers", "communication", "drafting")
    for r in read(folder, "latency"):
        assert sum(r[f"{part}_ms"] for part in parts) == pytest.approx(r["round_ms"])
        alone = r["round_ms"] / r["acceptance_length"]
        assert r["ms_per_token"] == pytest.approx(alone / (1 - r["prefill_share"]))
        assert r["tokens_per_second"] == pytest.approx(1e3 * r["concurrency"] / r["ms_per_token"])


def test_intervals_are_those_of_the_acceptance_lengths(folder):
    for r in read(folder, "latency"):
        added = r["ms_per_token"] - r["round_ms"] / r["acceptance_length"]
        quick = added + r["round_ms"] / r["acceptance_length_high"]
        slow = added + r["round_ms"] / r["acceptance_length_low"]
        assert r["ms_per_token_low"] == pytest.approx(quick)
        assert r["ms_per_token_high"] == pytest.approx(slow)
        assert (quick < slow) == (r["num_draft_tokens"] > 0)


def test_the_mix_is_tokens_over_rounds(folder):
    [mix] = [
        r
        for r in read(folder, "latency")
        if (r["component"], r["num_draft_tokens"], r["concurrency"]) == ("all", 3, 1)
    ]
    tokens = {"code": 0.25 * 200, "talk": 0.75 * 40}
    rounds = {name: tokens[name] / (1 + sum(KEPT[name])) for name in tokens}
    assert mix["acceptance_length"] == pytest.approx(80 / sum(rounds.values()))


def test_lengths_come_from_the_profile_or_the_configuration(folder):
    context = {r["component"]: r["context_tokens"] for r in read(folder, "latency")}
    assert context["code"] == pytest.approx(1000 + 300 / 2)
    assert context["talk"] == 512 + 40 / 2  # answers as they were measured


def test_the_best_k_is_the_one_of_the_least_time(folder):
    rows = read(folder, "latency")
    for best in read(folder, "best"):
        own = [
            r["ms_per_token"]
            for r in rows
            if (r["component"], r["concurrency"]) == (best["component"], best["concurrency"])
        ]
        assert min(own) == best["ms_per_token"] == own[best["best_k"]]


def test_more_of_what_drafts_well_makes_the_mix_quicker(folder):
    changes = [r for r in read(folder, "mix_change") if r["num_draft_tokens"] == 3]
    assert {r["component"] for r in changes} == {"code", "talk"}
    by_load = {(r["component"], r["concurrency"]): r["ms_per_token_change"] for r in changes}
    assert by_load["code", 1] < 0 < by_load["talk", 1]
    assert all(r["share_change"] == pytest.approx(0.1) for r in changes)


def test_the_page_shows_it(folder):
    page = (folder / "predict.md").read_text()
    assert "Predicted latency of tiny" in page
    assert "Where a round's time goes, of the mix." in page
    assert "What 10 points more of the requests" in page
    assert "MLPerf Inference v6.0" in page
    assert (folder / "predict.png").stat().st_size > 0
    assert (folder / "predict.html").stat().st_size > 0


@pytest.mark.parametrize("k", [1, 2, 3])
def test_a_shorter_draft_keeps_the_first_positions(k):
    lengths, tokens = acceptance_lengths(ROWS, "code", "eagle3", 0.0)
    assert tokens == 200
    value = 1 + sum(KEPT["code"][:k])
    assert lengths[k].value == pytest.approx(value)
    share = (value - 1) / 1.9
    assert lengths[k].low == pytest.approx(1 + share * 1.8)
    assert lengths[k].high == pytest.approx(1 + share * 2.1)


def test_a_k_that_was_measured_has_its_own_interval():
    own = row("code", 1, acceptance_length_low=1.75)
    lengths, _ = acceptance_lengths([*ROWS, own], "code", "eagle3", 0.0)
    assert lengths[1].low == pytest.approx(1.75)
    assert lengths[2].low == pytest.approx(1 + 1.4 / 1.9 * 1.8)


@pytest.mark.parametrize(
    ("rows", "arguments", "message"),
    [
        (ROWS, ("code", "ngram", 0.0), r"predict\.proposer must be measured for code \(eagle3\)"),
        (ROWS, ("chat", "eagle3", 0.0), r"predict\.proposer must be measured for chat \(none is\)"),
        (ROWS, ("code", "eagle3", 1.0), r"measure\.temperatures must have what code is served at"),
        (
            [row("code", 2, acceptance_by_position=[0.9, 1.2])],
            ("code", "eagle3", 0.0),
            r"acceptance_length of code must lie in \[1, 3\] at k = 2, got 3\.1",
        ),
    ],
)
def test_acceptance_that_does_not_fit_is_refused(rows, arguments, message):
    with pytest.raises(ValueError, match=message):
        acceptance_lengths(rows, *arguments)


def test_given_acceptance_names_each_component(tmp_path):
    config = PredictConfig(acceptance=[AcceptanceConfig("code", [1.5], "a test")])
    with pytest.raises(ValueError, match=r"predict\.acceptance must name each component.*talk"):
        run(job(tmp_path, config=config, acceptance=None))


def test_without_acceptance_or_a_target_there_is_nothing_to_predict(tmp_path):
    with pytest.raises(ValueError, match=r"predict\.acceptance must be given, got null"):
        run(job(tmp_path, acceptance=None))
    with pytest.raises(ValueError, match=r"predict\.model must be given without a target"):
        run(job(tmp_path, info=None))


def test_a_trillion_parameters_take_no_target_and_no_measurement(tmp_path):
    experiment = OmegaConf.load(CONF / "experiment" / "trillion.yaml")

    def typed(kind: type, *values: Any) -> Any:
        return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(kind), *values))

    b200 = OmegaConf.load(CONF / "hardware" / "b200.yaml")
    run(
        PredictJob(
            folder=tmp_path,
            config=typed(PredictConfig, experiment.predict),
            hardware=typed(HardwareConfig, b200, experiment.hardware),
            profile=typed(ProfileConfig, experiment.profile),
        )
    )
    assert len(read(tmp_path, "factor")) == 6
    page = (tmp_path / "predict.md").read_text()
    assert "on 16 x B200" in page
    assert "BF16 to FP8" in page
    assert "on the same devices: 3." in page
    [plain] = [
        r for r in read(tmp_path, "latency") if (r["num_draft_tokens"], r["concurrency"]) == (0, 1)
    ]
    assert "ms_per_token_low" not in plain  # nobody measured an interval


def test_on_this_machine_constants_are_measured(tmp_path):
    target = make_target()
    made = job(
        tmp_path,
        hardware=machine("cpu"),
        info=target.info,
        open_engine=lambda: engine_in(Format.fp32, target, None, Activations.fp32),
    )
    run(made)
    passes = read(tmp_path, "pass")
    assert {(r["batch"], r["tokens_per_sequence"]) for r in passes} >= {(1, 1), (1, 9), (4, 3)}
    for r in passes:
        assert r["relative_error"] == pytest.approx(r["modelled_ms"] / r["measured_ms"] - 1)
    constants = json.loads((tmp_path / FIGURES).read_text())["constants"]
    assert 0 < constants["achieved_bandwidth"]["value"] <= 1 + 1e-9
    assert constants["draft_cost"]["value"] == 0  # there is no head
    assert "Passes that the constants were fitted to" in (tmp_path / "predict.md").read_text()


@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe"])
def test_a_head_is_timed_and_slots_are_left_free(architecture):
    speculator = make_speculator(make_target(architecture))
    target = speculator.target
    engine = (
        engine_in(Format.fp32, target, None, Activations.fp32)
        if architecture == "llama"
        else DecodeEngine(target)
    )
    found = measure(engine, described(target.info, None), (speculator.head, speculator.vocab))
    assert found.draft_seconds > 0
    step = found.model.step_seconds(1, 1, 0.0)
    assert found.model.draft_cost == pytest.approx(found.draft_seconds / step)
    assert found.model.num_layers == 6
    assert (found.model.expert_bytes > 0) == (architecture == "qwen3_moe")


def test_a_model_that_is_only_described_cannot_be_measured(tmp_path):
    experiment = OmegaConf.load(CONF / "experiment" / "trillion.yaml")
    schema = OmegaConf.structured(PredictConfig)
    config = OmegaConf.to_object(OmegaConf.merge(schema, experiment.predict))
    profile = ProfileConfig(name="x", components=[ComponentConfig(name="long_chat", sources=["a"])])
    with pytest.raises(ValueError, match=r"hardware must have values for predict\.model"):
        run(job(tmp_path, config=config, profile=profile, hardware=machine("cpu")))


@pytest.mark.parametrize("form", [Format.bf16, Format.fp8, Format.nvfp4])
def test_a_target_that_a_cpu_holds_in_fp32_is_predicted_in_another_format(tmp_path, form):
    info = dataclasses.replace(make_target().info, dtype="float32")
    with pytest.raises(
        ValueError, match=r"predict\.format .* must be bf16, fp8 or nvfp4 on B200, got fp32"
    ):
        run(job(tmp_path, info=info))
    found = described(info, form)
    assert (found.attention.format, found.head.format, found.kv_format) == (
        form,
        Format.bf16,
        Format.bf16,
    )
    run(job(tmp_path, info=info, config=PredictConfig(concurrencies=[1], format=form)))
    assert read(tmp_path, "best")


def test_prompt_lookup_drafts_without_a_pass(tmp_path):
    looked_up = [row(name, 3, proposer="ngram") for name in ("code", "talk")]
    config = PredictConfig(concurrencies=[1, 8], proposer="ngram")
    run(job(tmp_path, config=config, acceptance=[*ROWS, *looked_up]))
    found = read(tmp_path, "latency")
    assert {r["num_draft_tokens"] for r in found} == {0, 1, 2, 3}
    assert {r["drafting_ms"] for r in found} == {0.0}
