"""States kept while answers are made are those of a pass over them, and a store takes them in."""

import shutil
from collections import namedtuple
from dataclasses import replace

import pytest
import tiny_heads
import tiny_runs
import tiny_targets
import torch
from tiny_architectures import random_tokens, tiny

from specfit.artifacts import Artifact, ArtifactStore, Recipe
from specfit.config import ExtractConfig, StateDtype
from specfit.files import append_jsonl
from specfit.speculators.batches import pack
from specfit.stages import extract, generate
from specfit.states.compute import compute
from specfit.states.documents import document_of
from specfit.states.record import StateRecorder
from specfit.states.store import StateStore
from specfit.targets.slots import SlotTarget
from specfit_serve.decode import DecodeSettings, Request, decode

AUX = [1, 3, 5]
PROMPTS = [13, 9, 5, 4, 4]
Usage = namedtuple("Usage", "total used free")
# By which recorded states may differ, of the value and of the largest: an order of additions, and
# a unit in the last place of what they are kept in.
TOLERANCES = {
    StateDtype.fp32: (0, 2e-5),
    StateDtype.bf16: (2**-7, 2e-5),
    StateDtype.int8: (0, 1.01 / 127),
    StateDtype.fp8: (2**-2, 2**-8),
}


@pytest.fixture(autouse=True)
def _no_measuring(monkeypatch):
    for stage in (extract, generate):
        monkeypatch.setattr(stage, "speed", lambda **_: {})


def record(folder, architecture, config):
    """Five answers, two at once, whose states go into `folder`; what answers.jsonl would hold.

    They end at different times, so that slots change hands.
    """
    target = tiny(architecture)
    recorder = StateRecorder(folder, config=config, aux_layers=AUX, target=target)
    slots = SlotTarget(target, num_slots=2, max_length=24, aux_layers=recorder.layers)
    prompts = {f"d{i}": random_tokens(n, seed=i).tolist() for i, n in enumerate(PROMPTS)}
    requests = [Request(name, prompt, 1.5) for name, prompt in prompts.items()]
    rows = []
    for answer in decode(slots, recorder, requests, DecodeSettings(0, 11, 2)):
        length = len(prompts[answer.id])
        row = {
            "id": answer.id,
            "component": "coding",
            "source": "s",
            "split": "validation" if answer.id == "d3" else "train",
            "input_ids": prompts[answer.id] + answer.tokens,
            "loss_spans": [[length, length + len(answer.tokens)]],
        }
        recorder.keep(answer.slot, row)
        rows.append(row)
    recorder.flush()
    return rows


def make(root, architecture="llama", change=None, **config):
    """The store of recorded states, and the rows they are of.

    `change(folder, rows)` returns the rows that the store is asked for instead.
    """
    config = ExtractConfig(**({"shard_tokens": 30} | config))
    store, recipe = ArtifactStore(root), Recipe("extract", 1, {}, {})
    with store.prepared(recipe) as folder:
        rows = record(folder, architecture, config)
        if change:
            rows = change(folder, rows)
    answers = store.get_or_make(
        Recipe("generate", 1, {}, {}), lambda folder: append_jsonl(folder / "answers.jsonl", rows)
    )
    made = store.get_or_make(
        recipe,
        lambda folder: extract.run(
            folder, config=config, aux_layers=AUX, answers=answers, target=tiny(architecture)
        ),
    )
    return made, rows


def counts(artifact: Artifact):
    """Tokens that needed no pass, and all."""
    figures = tiny_runs.read_json(artifact, "store.json")
    return figures["num_kept_tokens"], figures["num_tokens"]


def assert_states_are_those_of_a_pass(artifact, rows, architecture="llama", config=None):
    config = config or ExtractConfig(shard_tokens=30)
    documents = {d.id: d for row in rows if (d := document_of(row, config.max_tokens))}
    store = StateStore(artifact)
    assert {place.id for place in store.documents} == set(documents)
    rtol, of_largest = TOLERANCES[config.dtype]
    for index, place in enumerate(store.documents):
        document, states = documents[place.id], store.read(index)
        (expected, _), *_ = compute(tiny(architecture), [document], AUX, config.dtype)
        assert states.input_ids.tolist() == document.input_ids
        assert torch.equal(states.loss_mask, expected.loss_mask)
        assert (place.component, place.split) == (document.component, document.split)
        for found, right in ((states.aux, expected.aux), (states.last, expected.last)):
            atol = of_largest * float(right.abs().max())
            torch.testing.assert_close(found[:-1], right[:-1], rtol=rtol, atol=atol)
        if config.dtype is StateDtype.fp32:
            close = torch.testing.assert_close
            close(states.log_normalizer, expected.log_normalizer, rtol=0, atol=1e-4)
            assert torch.equal(states.top_token, expected.top_token)


@pytest.mark.parametrize("dtype", StateDtype)
def test_recorded_states_are_those_of_a_pass(tmp_path, dtype):
    artifact, rows = make(tmp_path, dtype=dtype)
    assert len({len(row["input_ids"]) for row in rows}) > 2
    kept, total = counts(artifact)
    assert kept == total == sum(len(row["input_ids"]) for row in rows)
    assert len(extract.shards_in(artifact.path)) > 1
    assert_states_are_those_of_a_pass(artifact, rows, config=ExtractConfig(dtype=dtype))


@pytest.mark.parametrize("architecture", ["qwen3_moe", "gemma2", "gpt_oss"])
def test_other_architectures_are_recorded_alike(tmp_path, architecture):
    artifact, rows = make(tmp_path, architecture, dtype=StateDtype.fp32)
    config = ExtractConfig(dtype=StateDtype.fp32)
    assert_states_are_those_of_a_pass(artifact, rows, architecture, config)


def test_conversations_are_cut_and_those_with_nothing_to_learn_left_out(tmp_path):
    artifact, rows = make(tmp_path, max_tokens=9)  # two prompts are as long
    kept, total = counts(artifact)
    assert kept == total == sum(min(9, len(row["input_ids"])) for row in rows) - 2 * 9
    assert_states_are_those_of_a_pass(artifact, rows, config=ExtractConfig(max_tokens=9))


def test_states_of_other_answers_are_made_again(tmp_path):
    def other(_folder, rows):
        rows[0]["input_ids"][-1] ^= 1
        return rows

    artifact, rows = make(tmp_path, change=other)
    kept, total = counts(artifact)
    assert 0 < kept < total  # the shards without it stay
    assert_states_are_those_of_a_pass(artifact, rows)


def test_states_of_an_answer_that_is_gone_are_not_in_the_store(tmp_path):
    artifact, rows = make(tmp_path, change=lambda _folder, rows: rows[1:])
    kept, total = counts(artifact)
    assert 0 < kept < total == sum(len(row["input_ids"]) for row in rows)
    assert_states_are_those_of_a_pass(artifact, rows)


@pytest.mark.parametrize("length", [0, 7, 300, -40])
def test_a_shard_that_was_cut_short_is_made_again(tmp_path, length):
    def cut(folder, rows):
        shard = extract.shards_in(folder)[0]
        shard.write_bytes(shard.read_bytes()[:length])
        return rows

    artifact, rows = make(tmp_path, change=cut)
    kept, total = counts(artifact)
    assert 0 < kept < total
    assert_states_are_those_of_a_pass(artifact, rows)


def test_answers_that_were_not_recorded_are_passed_over(tmp_path):
    def lose(folder, rows):
        extract.shards_in(folder)[-1].unlink()
        return rows

    artifact, rows = make(tmp_path, change=lose)
    kept, total = counts(artifact)
    assert 0 < kept < total
    assert_states_are_those_of_a_pass(artifact, rows)


def test_a_disk_too_small_for_the_longest_answers_is_seen(tmp_path, monkeypatch):
    config = ExtractConfig(max_tokens=50)
    recorder = StateRecorder(tmp_path, config=config, aux_layers=AUX, target=tiny("llama"))
    needed = (20 + 50) * (4 * 32 * 2 + 13)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(1 << 40, 0, needed - 1))
    assert not recorder.has_room([20, 60])
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(1 << 40, 0, needed))
    assert recorder.has_room([20, 60])


def test_nothing_is_learned_from_the_state_of_an_answers_last_token():
    speculator = tiny_heads.make_speculator(tiny_heads.make_target())
    whole = [speculator.document(tiny_heads.random_tokens(14, seed), [(5, 14)]) for seed in (1, 2)]
    without = []
    for states in whole:
        aux, last = states.aux.clone(), states.last.clone()
        aux[-1], last[-1] = 0, 0
        without.append(replace(states, aux=aux, last=last))
    losses, gradients = [], []
    for documents in (whole, without):
        speculator.head.zero_grad()
        figures = speculator.objective()(pack(documents))
        figures.loss.backward()
        losses.append(figures.loss.detach())
        gradients.append([p.grad.clone() for p in speculator.head.parameters()])
    assert losses[0] > 0
    assert torch.equal(*losses)
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.fixture
def words(tmp_path):
    target = tiny_targets.write_target(tmp_path / "target", "llama")
    data = tiny_targets.write_conversations(tmp_path / "data.jsonl", 60)
    more = ["generate.max_new_tokens=8", "extract.shard_tokens=64"]
    return tiny_runs.overrides(tmp_path / "root", target, data, *more)


def test_a_kill_while_answers_are_made_loses_no_state_that_is_written(words, monkeypatch):
    real, left = generate.append_jsonl, [7]

    def append_or_die(path, rows):
        if left[0] == 0:
            raise KeyboardInterrupt
        left[0] -= 1
        real(path, rows)

    with monkeypatch.context() as patch:
        patch.setattr(generate, "append_jsonl", append_or_die)
        with pytest.raises(KeyboardInterrupt):
            tiny_runs.run(words, "stage=extract")
    artifact = tiny_runs.run(words, "stage=extract")
    kept, total = counts(artifact)
    assert 0 < kept < total
    answers = tiny_runs.read_lines(tiny_runs.run(words, "stage=generate"), "answers.jsonl")
    assert total == sum(len(row["input_ids"]) for row in answers)
    passed = tiny_runs.run(words, "stage=extract", "extract.while_generating=false")
    assert passed.key == artifact.key


@pytest.mark.parametrize(
    "more", [["stage=generate"], ["stage=fit"], ["stage=train", "extract.mode=online"]]
)
def test_nothing_is_kept_that_no_one_asked_for(words, more):
    path = tiny_runs.run(words, *more).path
    assert not (path.parents[1] / "extract").exists()


def test_looping_answers_are_not_kept(words, monkeypatch):
    real, ids = generate.answer_plainly, []

    def loop(*args, **kwargs):
        for answer in real(*args, **kwargs):
            ids.append(answer.id)
            loops = {"finish_reason": "repetition", "loop_start": 0}
            yield replace(answer, **(loops if len(ids) % 3 == 0 else {}))

    monkeypatch.setattr(generate, "answer_plainly", loop)
    artifact = tiny_runs.run(words, "stage=extract")
    answers = tiny_runs.read_lines(tiny_runs.run(words, "stage=generate"), "answers.jsonl")
    assert len(answers) == 7
    kept, total = counts(artifact)
    assert kept == total == sum(len(row["input_ids"]) for row in answers)


def test_without_room_for_the_longest_answers_states_are_made_by_a_pass(words, monkeypatch):
    monkeypatch.setattr(StateRecorder, "has_room", lambda *_: False)
    artifact = tiny_runs.run(words, "stage=extract")
    kept, total = counts(artifact)
    assert kept == 0 < total
