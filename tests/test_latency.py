"""What timings are made into: ratios, costs between those that were timed, predictions."""

from pathlib import Path

import pytest
import torch
from tiny_architectures import random_tokens, tiny

from specfit.engine import DecodeEngine
from specfit.latency import speeds
from specfit.latency.config import BenchConfig, Format
from specfit.latency.costs import PassCosts, draft_seconds, pass_costs
from specfit.latency.formats import divergence, engine_in
from specfit.latency.llama_cpp import llama_cpp
from specfit.latency.speeds import Answer, Prompt, Timed, Way
from specfit.latency.transformers_loop import transformers_loop
from specfit_kernels.cpu_weights import Activations, WeightFormat
from specfit_kernels.floors import read_bytes_per_second
from specfit_serve.ngram import NgramProposer, NoProposer
from specfit_serve.stats import Round

COSTS = PassCosts({1: 2.0, 2: 2.5, 4: 4.5}, context=100, num_bytes=10)
PROMPTS = [Prompt("a", "x", [1, 2]), Prompt("b", "x", [3]), Prompt("c", "y", [4])]


def way(name: str, seconds: list[float], tokens: list[int], plain: Way | None = None) -> Way:
    """Answers prompt after prompt; each takes the next number of seconds."""
    clock = iter(seconds)

    def answer(_prompt: Prompt) -> Answer:
        # One draft token a round; half of them are kept.
        rounds = [Round(1, 1, i % 2) for i in range(2)]
        return Answer(tokens, next(clock), rounds)

    return Way("nvfp4", name, 0 if plain is None else 1, plain=plain, open=lambda: answer)


def test_ratios_are_of_the_same_repetition_and_the_mix_is_tokens_over_seconds():
    plain = way("none", [1.0, 1.0, 2.0, 10.0, 10.0, 20.0], [1] * 5)
    drafting = way("eagle3", [0.5, 0.5, 2.0, 5.0, 5.0, 10.0], [1] * 5, plain)
    peer = Way("gguf", "llama.cpp", 0, open=lambda: lambda _: Answer([1] * 9, 4.0))
    found = speeds.time_all([plain, drafting, peer], PROMPTS, 2)
    rows = {
        (row["proposer"], row["component"]): row for row in speeds.rows(found, {"llama_cpp": peer})
    }
    assert rows["none", "x"]["tokens_per_second_high"] == 8 / 2
    assert rows["none", "x"]["tokens_per_second_low"] == 8 / 20
    assert rows["none", "all"]["tokens_per_second_high"] == 12 / 4
    drafted = rows["eagle3", "all"]
    # 3 s instead of 4, then 20 s instead of 40.
    assert drafted["speculative_over_plain_low"] == pytest.approx(4 / 3)
    assert drafted["speculative_over_plain_high"] == pytest.approx(2)
    assert drafted["speculative_over_plain"] == pytest.approx(5 / 3)
    assert drafted["acceptance_length"] == 1.5
    assert drafted["outputs_equal_plain"] is True
    assert "plain_over_llama_cpp" not in drafted
    assert rows["none", "y"]["plain_over_llama_cpp_high"] == (4 / 2) / (8 / 4)
    assert not any(key.startswith("plain_over") for key in rows["llama.cpp", "all"])


def test_a_row_says_where_answers_are_other_than_plain():
    plain = way("none", [1.0] * 3, [1, 2])
    other = way("eagle3", [1.0] * 3, [1, 3], plain)
    rows = list(speeds.rows(speeds.time_all([plain, other], PROMPTS, 1), {}))
    assert [row["outputs_equal_plain"] for row in rows if row["proposer"] == "eagle3"] == [
        False
    ] * 3


def test_costs_between_timed_widths_lie_on_a_line():
    assert COSTS.table(4) == [2.0, 2.5, 3.5, 4.5]


def test_a_prediction_is_of_the_rounds_as_they_went():
    rounds = [Round(1, 1, 1), Round(3, 3, 0), Round(4, 0, 0)]
    timed = Timed([1.0], [4], [Answer([0] * 5, 1.0, rounds, draft_seconds=0.4)])
    # Four tokens alone take 8 s; the rounds 2.5, 4.5 and 2.
    assert speeds.predicted(timed, COSTS, 3) == pytest.approx(8.0 / 9.4)
    assert speeds.acceptance_length(timed) == pytest.approx(4 / 3)


@pytest.mark.parametrize("form", Format)
def test_a_format_is_what_the_kernels_read(form):
    engine = engine_in(form, tiny("llama"), None, Activations.int8)
    assert {layer.down.format.name for layer in engine.weights.layers} == {form.value}
    eight = form in (Format.fp8, Format.nvfp4)
    assert engine.weights.head.format is (WeightFormat.int8 if eight else WeightFormat[form.value])
    target = engine.slots(num_slots=1, max_length=60, aux_layers=None)
    reference = DecodeEngine(tiny("llama")).slots(num_slots=1, max_length=60, aux_layers=None)
    text = (random_tokens(20, seed=0).tolist(), random_tokens(30, seed=1).tolist())
    kl, same = divergence(reference, target, [text])
    most = {Format.fp32: 1e-8, Format.bf16: 1e-2, Format.fp8: 0.3, Format.nvfp4: 3.0}[form]
    assert -1e-9 <= kl <= most
    assert (same == 1) if form is Format.fp32 else (kl > 1e-6)


def test_transformers_decodes_the_same_tokens_until_the_end_of_the_answer():
    target = tiny("qwen2")
    prompt = Prompt("a", "x", random_tokens(12, seed=3).tolist())
    engine = engine_in(Format.fp32, target, None, Activations.fp32)
    slots = engine.slots(num_slots=1, max_length=60, aux_layers=None)
    opened = speeds.looped(slots, NoProposer, num_draft_tokens=0, max_new_tokens=20, costs=None)
    ours, theirs = opened()(prompt), transformers_loop(target, 20)()(prompt)
    assert ours.tokens == theirs.tokens
    assert ours.seconds > 0 < theirs.seconds


def test_with_costs_the_number_of_draft_tokens_follows_them():
    target = engine_in(Format.fp32, tiny("llama"), None, Activations.fp32).slots(
        num_slots=1, max_length=100, aux_layers=None
    )
    dear = PassCosts({1: 1.0, 2: 50.0, 4: 99.0}, context=1, num_bytes=1)
    prompt = Prompt("a", "x", [5, 6, 7] * 6)
    asked = []
    for costs in (None, (dear, 0.0)):
        opened = speeds.looped(
            target,
            lambda: NgramProposer(2, 4),
            num_draft_tokens=3,
            max_new_tokens=30,
            costs=costs,
        )
        asked.append(sum(r.num_drafted for r in opened()(prompt).rounds))
    assert asked[1] == 0 < asked[0]


def test_passes_are_timed_and_leave_the_slot_free():
    target = engine_in(Format.nvfp4, tiny("llama"), None, Activations.int8).slots(
        num_slots=1, max_length=64, aux_layers=[1]
    )
    costs = pass_costs(target, (1, 3), 40, 3)
    assert set(costs.seconds) == {1, 3}
    assert min(costs.seconds.values()) > 0
    kv_bytes = 41 * 6 * 2 * 2 * 16 * 4  # columns, layers, keys and values, heads, dim, float32
    assert costs.num_bytes == target.weights.num_bytes + kv_bytes
    assert draft_seconds(target, NgramProposer(2, 4), 2, 40, 3) > 0
    assert target.pages.num_free == 1


def test_memory_is_read_at_some_speed():
    assert 1e8 < read_bytes_per_second(seconds=0.02) < 1e13


def test_a_folder_without_llama_cpp_is_named(tmp_path):
    with (
        pytest.raises(FileNotFoundError, match=r"bench\.llama_cpp.*libllama\.so, got .*npm pack"),
        llama_cpp(tmp_path, Path("model.gguf"), num_threads=1, num_columns=64),
    ):
        pass


def test_libraries_that_do_not_load_are_an_error_and_no_hang(tmp_path):
    (tmp_path / "libllama.so").write_bytes(b"nothing")
    (tmp_path / "libggml.so").write_bytes(b"nothing")
    with (
        llama_cpp(tmp_path, Path("model.gguf"), num_threads=1, num_columns=64) as child,
        pytest.raises(ValueError, match=r"bench\.llama_cpp must name libraries.*exit code 1"),
    ):
        child.answer([1], 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"formats": []}, r"bench\.formats"),
        ({"num_draft_tokens": [2, 2]}, r"bench\.num_draft_tokens"),
        ({"repetitions": 0}, r"bench\.repetitions"),
    ],
)
def test_bad_settings_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        BenchConfig(**options)


def test_the_default_stack_ends_in_nvfp4():
    assert BenchConfig().formats == [Format.fp32, Format.bf16, Format.fp8, Format.nvfp4]
    assert torch.get_num_threads() == 1
