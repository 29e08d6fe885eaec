"""Training of a tiny head: what it learns, what it keeps, and what a kill leaves."""

from dataclasses import replace

import pytest
import tiny_heads
import tiny_training
import torch

from specfit.files import read_jsonl
from specfit.speculators.batches import pack
from specfit.training import checkpoints, loop
from specfit.training.checkpoints import load_head
from specfit_serve.stats import DecodeStats, Round


@pytest.fixture(scope="module")
def documents():
    return tiny_training.make_documents(tiny_heads.make_speculator(tiny_heads.make_target()))


def steps(folder):
    rows = read_jsonl(folder / "train_log.jsonl")
    return [{key: value for key, value in row.items() if key != "seconds"} for row in rows]


def test_training_on_a_few_answers_learns_them(tmp_path, documents):
    learned = replace(documents, validation={"code": documents.train}, weights={"code": 1.0})
    changes = {"epochs": 40, "pack_tokens": 512, "lr": 1e-2, "evals": 4}
    tiny_training.run(tmp_path, learned, **changes)
    log, evals = steps(tmp_path), read_jsonl(tmp_path / "evals.jsonl")
    assert len(log) == 40
    assert log[-1]["loss"] < 0.2 * log[0]["loss"]
    assert log[-1]["accuracy"][0] > log[0]["accuracy"][0] + 0.2
    assert log[-1]["expected_acceptance_length"] > log[0]["expected_acceptance_length"]
    assert evals[-1]["acceptance_length"] > evals[0]["acceptance_length"] + 0.1


class KilledError(Exception):
    pass


def kill_at_call(monkeypatch, module, name, call):
    """Raises instead of the call number `call` of a function."""
    original = getattr(module, name)
    calls = []

    def killed(*arguments, **keywords):
        calls.append(None)
        if len(calls) == call:
            raise KilledError
        return original(*arguments, **keywords)

    monkeypatch.setattr(module, name, killed)


@pytest.fixture(scope="module")
def unkilled(tmp_path_factory, documents):
    folder = tmp_path_factory.mktemp("unkilled")
    tiny_training.run(folder, documents)
    return folder


@pytest.mark.parametrize(
    ("module", "name", "call", "save_every_s"),
    [
        (loop, "_step", 3, 0.0),
        (loop, "_step", 9, 1e9),  # saved at evaluations only: some steps are done again
        (loop, "save_head", 1, 0.0),
        (checkpoints, "save_file", 4, 0.0),
        (loop, "save_state", 2, 1e9),  # after an evaluation was written down
        (checkpoints.shutil, "rmtree", 2, 0.0),  # two states stand side by side
    ],
)
def test_a_killed_training_goes_on_to_the_same_losses_and_the_same_head(
    tmp_path, documents, unkilled, monkeypatch, module, name, call, save_every_s
):
    with monkeypatch.context() as patched:
        kill_at_call(patched, module, name, call)
        with pytest.raises(KilledError):
            tiny_training.run(tmp_path, documents, save_every_s=save_every_s)
    done = len(steps(tmp_path)) if (tmp_path / "train_log.jsonl").exists() else 0
    assert done < len(steps(unkilled))
    tiny_training.run(tmp_path, documents, save_every_s=save_every_s)
    assert steps(tmp_path) == steps(unkilled)
    assert read_jsonl(tmp_path / "evals.jsonl") == read_jsonl(unkilled / "evals.jsonl")
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / file).read_bytes() == (unkilled / file).read_bytes()


def test_a_finished_training_that_is_run_again_does_nothing(tmp_path, documents, monkeypatch):
    tiny_training.run(tmp_path, documents, epochs=1, evals=1)
    before = (tmp_path / "train_log.jsonl").read_bytes()
    monkeypatch.setattr(loop, "_step", None)
    tiny_training.run(tmp_path, documents, epochs=1, evals=1)
    assert (tmp_path / "train_log.jsonl").read_bytes() == before


class ForcedReplay:
    """Measures as told, once for each component, and keeps the heads it was given."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = [length for length in lengths for _ in ("code", "chat")]
        self.heads: list[dict[str, torch.Tensor]] = []

    def __call__(self, head, _documents, *, num_draft_tokens, **_) -> list[DecodeStats]:
        self.heads.append({n: p.clone() for n, p in head.state_dict().items()})
        rounds = [Round(0, num_draft_tokens, self.lengths.pop(0) - 1)]
        return [DecodeStats.from_rounds(rounds, num_draft_tokens)]


def kept_head(folder):
    head, _ = load_head(folder / "config.json", folder / "model.safetensors", torch.device("cpu"))
    return head.state_dict()


def test_the_head_that_was_accepted_most_is_kept_not_the_last_nor_the_lowest_loss(
    tmp_path, documents, monkeypatch
):
    replay = ForcedReplay([1, 3, 2, 3])
    monkeypatch.setattr(loop, "replay", replay)
    progress = tiny_training.run(tmp_path, documents, evals=4)
    evals = read_jsonl(tmp_path / "evals.jsonl")
    assert [row["acceptance_length"] for row in evals] == [1, 3, 2, 3]
    assert [row["kept"] for row in evals] == [True, True, False, False]
    assert progress.best_step == evals[1]["step"] < progress.step
    kept = kept_head(tmp_path)
    assert all(torch.equal(kept[name], p) for name, p in replay.heads[2].items())
    assert not torch.equal(kept["fc.weight"], replay.heads[-1]["fc.weight"])


def test_a_killed_training_still_knows_the_best_head_so_far(tmp_path, documents, monkeypatch):
    replay = ForcedReplay([3, 2])
    monkeypatch.setattr(loop, "replay", replay)
    with monkeypatch.context() as patched:
        kill_at_call(patched, loop, "_step", 7)
        with pytest.raises(KilledError):
            tiny_training.run(tmp_path, documents, evals=2, save_every_s=1e9)
    kept = (tmp_path / "model.safetensors").read_bytes()
    progress = tiny_training.run(tmp_path, documents, evals=2, save_every_s=1e9)
    assert progress.best == 3
    assert (tmp_path / "model.safetensors").read_bytes() == kept


def test_what_is_measured_is_the_head_as_it_is_saved(tmp_path, documents, monkeypatch):
    replay = ForcedReplay([2])
    monkeypatch.setattr(loop, "replay", replay)
    tiny_training.run(tmp_path, documents, epochs=1, evals=1)
    for name, saved in kept_head(tmp_path).items():
        assert torch.equal(saved, replay.heads[0][name]), name


def test_a_component_without_validation_answers_is_left_out_of_the_evaluation(tmp_path, documents):
    without = replace(documents, validation=documents.validation | {"chat": []})
    tiny_training.run(tmp_path, without, epochs=1, evals=1)
    (row,) = read_jsonl(tmp_path / "evals.jsonl")
    assert list(row["by_component"]) == ["code"]
    assert row["acceptance_length"] == row["by_component"]["code"]


def test_validation_answers_without_a_round_are_an_error(tmp_path, documents):
    speculator = tiny_heads.make_speculator(tiny_heads.make_target())
    one_token = speculator.document(tiny_heads.random_tokens(6, seed=0), [(5, 6)])
    source = tiny_training.ListedStates([*documents.source.states, one_token])
    index = len(source.states) - 1
    short = replace(documents, source=source, validation={"code": [index], "chat": []})
    with pytest.raises(ValueError, match=r"^data\.num_validation must be larger"):
        tiny_training.run(tmp_path, short, epochs=1, evals=1)


def test_packs_added_up_train_as_one_pack_of_them_all(tmp_path, documents):
    changes = {"epochs": 3, "evals": 1}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    tiny_training.run(whole, documents, pack_tokens=512, packs_per_step=1, **changes)
    tiny_training.run(parts, documents, pack_tokens=1, packs_per_step=7, **changes)
    for one, other in zip(steps(whole), steps(parts), strict=True):
        # The third step's loss shows that the two gradients before it were the same.
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-4)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-3)
        assert one["tokens"] == other["tokens"]
        assert one["accuracy"] == other["accuracy"]


def test_the_logged_figures_are_those_of_the_packs(tmp_path, documents):
    tiny_training.run(tmp_path, documents, epochs=1, evals=1, pack_tokens=512)
    speculator = tiny_heads.make_speculator(tiny_heads.make_target())
    everything = pack([documents.source.read(i) for i in documents.train])
    figures = speculator.objective(num_steps=2)(everything)
    (row,) = steps(tmp_path)
    assert row["loss"] == pytest.approx((figures.loss / figures.weight).item(), rel=1e-5)
    assert row["tokens"] == int(everything.loss_mask.sum())  # every answer token, once
    expected = (figures.correct / figures.counted).tolist()
    assert row["accuracy"] == pytest.approx(expected)
