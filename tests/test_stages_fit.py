"""`fit` chooses the tokens that the profile's answers ask for; `train` follows it."""

import json

import pytest
import tiny_runs
import tiny_targets

from specfit.artifacts import ArtifactStore, Recipe
from specfit.draft_vocab import DraftVocab
from specfit.stages import fit
from specfit.targets.info import TargetInfo
from specfit.traffic.config import ComponentConfig, FitConfig, ProfileConfig


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fit")
    target = tiny_targets.write_target(folder / "target")
    data = tiny_targets.write_conversations(folder / "data.jsonl", 60)
    options = ["generate.on_policy=false", "train.evals=2", "train.pack_tokens=64"]
    return tiny_runs.overrides(folder / "root", target, data, *options)


@pytest.fixture(scope="module")
def info(words):
    artifact = tiny_runs.run(words, "stage=target")
    return TargetInfo(**tiny_runs.read_json(artifact, "info.json"))


@pytest.fixture
def fitted(tmp_path, info):
    """Runs the stage on answers of (component, split, prompt, answer); the target has EOS 1."""

    def fitted(
        answers,
        weights,
        size,
        folder="out",
        max_tokens=100,
        texts=(),
        config=None,
        measured=None,
    ):
        def write_prompts(to):
            own = [*((name, []) for name in weights), *texts]
            rows = [
                {"component": name, "split": "train", "prompt_ids": ids, "reference_ids": None}
                for name, ids in own
            ]
            (to / "conversations.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))

        def write(to):
            rows = [
                {
                    "id": str(i),
                    "component": component,
                    "source": "s",
                    "split": split,
                    "input_ids": prompt + answer,
                    "loss_spans": [[len(prompt), len(prompt) + len(answer)]],
                }
                for i, (component, split, prompt, answer) in enumerate(answers)
            ]
            (to / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

        store = ArtifactStore(tmp_path / "root")
        out = tmp_path / folder
        out.mkdir()
        total = sum(weights.values())
        components = [ComponentConfig(n, w / total, ["s"]) for n, w in weights.items()]
        fit.run(
            fit.FitJob(
                folder=out,
                config=FitConfig(**config or {}),
                profile=ProfileConfig("p", components),
                draft_vocab_size=size,
                head=None,
                max_tokens=max_tokens,
                prompts=store.get_or_make(
                    Recipe("prompts", 1, {"folder": folder}, {}), write_prompts
                ),
                answers=store.get_or_make(Recipe("generate", 1, {"folder": folder}, {}), write),
                info=info,
                measured=measured,
            )
        )
        vocab = DraftVocab.load(out / "draft_vocab.safetensors")
        return vocab.target_ids.tolist(), json.loads((out / "fit.json").read_text())["rows"]

    return fitted


def test_the_most_frequent_tokens_of_the_answers_can_be_drafted(fitted):
    answers = [("a", "train", [9, 9, 9, 9], [5, 5, 5, 7, 7, 8]), ("a", "validation", [2], [6] * 9)]
    ids, rows = fitted(answers, {"a": 1.0}, 3)
    assert ids == [1, 5, 7]  # EOS always; neither prompts nor validation answers count
    coverage = {row["split"]: (row["coverage"], row["num_tokens"]) for row in rows}
    assert coverage == {"train": (5 / 6, 6), "validation": (0.0, 9)}


def test_tokens_that_never_occur_fill_the_rest_from_the_lowest(fitted):
    ids, _ = fitted([("a", "train", [2], [300])], {"a": 1.0}, 5)
    assert ids == [0, 1, 2, 3, 300]


def test_talkative_traffic_does_not_crowd_out_the_rest(fitted):
    # Ten answers of 40 tokens 5, 6 and 7 beside one of two tokens; the weights are alike.
    answers = [("a", "train", [2], [5] * 20 + [6] * 12 + [7] * 8) for _ in range(10)]
    answers += [("b", "train", [2], [8] * 10 + [9] * 2)]
    ids, _ = fitted(answers, {"a": 1.0, "b": 1.0}, 4)
    assert ids == [1, 5, 6, 8]


def test_a_component_counts_by_its_weight(fitted):
    answers = [("a", "train", [2], [5, 6, 7]), ("b", "train", [2], [8, 9, 10])]
    of_a, _ = fitted(answers, {"a": 2.0, "b": 1.0}, 4, folder="a")
    of_b, _ = fitted(answers, {"a": 1.0, "b": 2.0}, 4, folder="b")
    assert (of_a, of_b) == ([1, 5, 6, 7], [1, 8, 9, 10])


def test_what_is_cut_off_is_not_counted(fitted):
    ids, _ = fitted([("a", "train", [2], [5, 6, 7, 7])], {"a": 1.0}, 3, max_tokens=3)
    assert ids == [1, 5, 6]


def test_a_component_without_answers_is_an_error(fitted):
    with pytest.raises(ValueError, match="profile component b has no answers to learn from"):
        fitted([("a", "train", [2], [5])], {"a": 1.0, "b": 1.0}, 3)


def test_the_head_that_is_kept_is_the_one_that_was_accepted_most(words):
    artifact = tiny_runs.run(words, "stage=train")
    evals = tiny_runs.read_lines(artifact, "evals.jsonl")
    summary = tiny_runs.read_json(artifact, "train.json")
    best = max(row["acceptance_length"] for row in evals)
    assert len(evals) == 2
    assert summary["kept_acceptance_length"] == best
    assert summary["kept_step"] == next(
        row["step"] for row in evals if row["acceptance_length"] == best
    )
    log = tiny_runs.read_lines(artifact, "train_log.jsonl")
    assert [row["step"] for row in log] == list(range(1, summary["num_steps"] + 1))


def test_tokens_of_prompts_come_after_those_of_answers_and_before_those_never_seen(fitted):
    answers = [("a", "train", [9], [40, 41]), ("a", "validation", [9], [40])]
    ids, _ = fitted(answers, {"a": 1.0}, 4, texts=[("a", [300])])
    assert ids == [1, 40, 41, 300]
