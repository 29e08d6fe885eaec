"""`measure` decodes what was held out in every way, and says where a way leaves plain decoding."""

from dataclasses import replace

import pytest
import tiny_runs
import tiny_targets
import torch
from transformers import AutoModelForCausalLM

from specfit import measuring
from specfit.draft_vocab import DraftVocab
from specfit.measuring import Bench


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    folder = tmp_path_factory.mktemp("measure")
    target = tiny_targets.write_target(folder / "target")
    data = tiny_targets.write_conversations(folder / "data.jsonl", 60)
    short = ["generate.max_new_tokens=8", "measure.max_new_tokens=8", "stage=measure"]
    return tiny_runs.overrides(folder / "root", target, data, *short)


@pytest.fixture(scope="module")
def conversations(words):
    artifact = tiny_runs.run(words, "stage=prompts")
    rows = tiny_runs.read_lines(artifact, "conversations.jsonl")
    return {row["id"]: row for row in rows if row["split"] == "test"}


@pytest.fixture(scope="module")
def model(words):
    path = next(w.partition("=")[2] for w in words if w.startswith("target.path="))
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def figures(artifact):
    return tiny_runs.read_json(artifact, "acceptance.json")


def of_component(artifact):
    return [row for row in figures(artifact)["rows"] if row["component"] != "all"]


def test_plain_answers_are_the_argmax_of_the_whole_model(words, model, conversations):
    rows = tiny_runs.read_lines(tiny_runs.run(words), "requests.jsonl")
    plain = [row for row in rows if row["proposer"] == "none"]
    assert {row["id"] for row in plain} == set(conversations)
    for row in plain:
        ids = torch.tensor([conversations[row["id"]]["prompt_ids"] + row["tokens"]])
        with torch.no_grad():
            predicted = model(ids).logits[0].argmax(-1).tolist()
        assert row["tokens"] == predicted[-1 - len(row["tokens"]) : -1]


def test_every_proposer_k_and_temperature_is_measured(words):
    artifact = tiny_runs.run(
        words,
        "measure.num_draft_tokens=[1,3]",
        "measure.temperatures=[0.0,1.0]",
        "measure.max_new_tokens=4",
    )
    found = {
        (row["proposer"], row["num_draft_tokens"], row["temperature"])
        for row in of_component(artifact)
    }
    ways = [("none", 0)] + [(p, k) for p in ("ngram", "eagle3") for k in (1, 3)]
    assert found == {(*way, t) for way in ways for t in (0.0, 1.0)}
    for row in of_component(artifact):
        of_plain = row["proposer"] == "none" or row["temperature"] > 0
        assert row["outputs_equal_plain"] is (None if of_plain else True)


def test_coverage_is_the_share_of_the_tokens_that_can_be_drafted(words):
    artifact = tiny_runs.run(words)
    vocab = tiny_runs.artifacts(words)["fit"]
    known = set(DraftVocab.load(vocab.file("draft_vocab.safetensors")).target_ids.tolist())
    rows = tiny_runs.read_lines(artifact, "requests.jsonl")
    tokens = [t for row in rows if row["proposer"] == "eagle3" for t in row["tokens"]]
    (row,) = [r for r in of_component(artifact) if r["proposer"] == "eagle3"]
    assert row["coverage"] == pytest.approx(sum(t in known for t in tokens) / len(tokens))


def corrupt(monkeypatch, conversations, position, proposer):
    """Makes one answer of `proposer` leave the plain one at `position`."""
    first = min(conversations)
    decode = Bench.decode

    def corrupted(bench, way, *args):
        for answer in decode(bench, way, *args):
            if way.proposer == proposer and answer.id == first:
                answer.tokens[position] = (answer.tokens[position] + 1) % 320
            yield answer

    monkeypatch.setattr(Bench, "decode", corrupted)
    return first


def test_a_token_that_plain_decoding_would_not_emit_is_reported_with_its_margin(
    words, model, conversations, monkeypatch
):
    broken = corrupt(monkeypatch, conversations, 2, "eagle3")
    artifact = tiny_runs.run(words, "measure.num_bootstrap=51")
    (found,) = figures(artifact)["differences"]
    plain = next(
        row
        for row in tiny_runs.read_lines(artifact, "requests.jsonl")
        if (row["proposer"], row["id"]) == ("none", broken)
    )["tokens"]
    context = conversations[broken]["prompt_ids"] + plain[:2]
    with torch.no_grad():
        logits = model(torch.tensor([context])).logits[0, -1]
    assert (found["id"], found["proposer"], found["position"]) == (broken, "eagle3", 2)
    assert found["plain_token"] == plain[2] == int(logits.argmax())
    assert found["token"] == (plain[2] + 1) % 320
    assert found["margin"] == pytest.approx(
        float(logits[plain[2]] - logits[found["token"]]), abs=1e-4
    )
    equal = {
        (row["component"], row["proposer"]): row["outputs_equal_plain"]
        for row in figures(artifact)["rows"]
    }
    assert equal[("mine", "eagle3")] is equal[("all", "eagle3")] is False
    assert equal[("mine", "ngram")] is equal[("all", "ngram")] is True
    assert equal[("mine", "none")] is None


def test_where_the_context_ends_an_answer_it_ends_all_ways_at_the_same_token(
    words, conversations, monkeypatch
):
    longest = max(len(row["prompt_ids"]) for row in conversations.values())
    bench = Bench.__init__

    def cramped(self, config, profile, seed, rows, engine, speculator):
        short = replace(engine.target.info, max_position_embeddings=longest + 7)
        monkeypatch.setattr(engine.target, "info", short)
        bench(self, config, profile, seed, rows, engine, speculator)

    monkeypatch.setattr(Bench, "__init__", cramped)
    artifact = tiny_runs.run(words, "measure.num_draft_tokens=[1,3]", "measure.num_bootstrap=52")
    for row in tiny_runs.read_lines(artifact, "requests.jsonl"):
        if row["finish_reason"] == "length":
            assert len(row["tokens"]) == min(8, longest + 4 - row["num_prompt_tokens"])
    assert figures(artifact)["differences"] == []


def test_answers_of_one_token_are_not_measured_and_no_error(words):
    artifact = tiny_runs.run(words, "measure.max_new_tokens=1")
    assert all(row["acceptance_length"] is None for row in figures(artifact)["rows"])


class Killed(Exception):  # noqa: N818
    pass


def answers(rows):
    """By id and way, without the order in which they were finished."""
    return {
        (r["id"], r["proposer"], r["num_draft_tokens"]): (r["tokens"], r["rounds"]) for r in rows
    }


@pytest.mark.parametrize("torn", [False, True], ids=["between lines", "within a line"])
def test_a_killed_run_goes_on_where_it_was_and_measures_the_same(words, monkeypatch, torn):
    unkilled = tiny_runs.run(words)
    append, left = measuring.append_jsonl, [4]  # 3 of plain decoding, 1 of n-grams

    def append_or_die(path, rows):
        if not left[0]:
            raise Killed
        left[0] -= 1
        append(path, rows)

    there = [*words, f"measure.confidence=0.{94 - torn}"]  # another key, the same decoding
    with monkeypatch.context() as patch:
        patch.setattr(measuring, "append_jsonl", append_or_die)
        with pytest.raises(Killed):
            tiny_runs.run(there)
    key = tiny_runs.keys(there)["measure"]
    journal = unkilled.path.with_name(f"{key}.partial") / "requests.jsonl"
    if torn:
        journal.write_bytes(journal.read_bytes()[:-20])
    num_asked = []
    decode = Bench.decode

    def spy(bench, way, ids, num_slots, *args):
        if num_slots > 1:
            num_asked.append(len(ids))
        return decode(bench, way, ids, num_slots, *args)

    monkeypatch.setattr(Bench, "decode", spy)
    resumed = tiny_runs.run(there)
    assert resumed.key == key
    assert num_asked == [3 if torn else 2, 3]
    before, after = (tiny_runs.read_lines(a, "requests.jsonl") for a in (unkilled, resumed))
    assert answers(after) == answers(before)
    assert len(after) == len(before) == 9
    lengths = [[row["acceptance_length"] for row in of_component(a)] for a in (unkilled, resumed)]
    assert lengths[0] == lengths[1]


def test_more_heads_are_measured_beside_the_fitted_one(words):
    other = tiny_runs.run(words, "stage=train", "speculator.aux_layers=[1,4]", "train.lr=1e-4")
    found = tiny_runs.run(words, f"+measure.speculators.other={other.path}")
    rows = [row for row in figures(found)["rows"] if row["component"] == "mine"]
    assert [row["proposer"] for row in rows] == ["none", "ngram", "eagle3", "other"]
    assert all(row["outputs_equal_plain"] for row in rows[1:])
    assert all(0 < row["coverage"] <= 1 for row in rows[2:])
    own = of_component(tiny_runs.run(words))
    same = {row["proposer"]: row["acceptance_length"] for row in own}
    assert rows[2]["acceptance_length"] == same["eagle3"]
    alone = tiny_runs.run(words, "speculator.aux_layers=[1,4]", "train.lr=1e-4")
    (row,) = [row for row in of_component(alone) if row["proposer"] == "eagle3"]
    assert rows[3]["acceptance_length"] == row["acceptance_length"]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            "other=/no/such/folder",
            r"measure\.speculators\.other must be the folder of an artifact",
        ),
        (
            "ngram=/no/such/folder",
            r"measure\.speculators must have names of their own, got ngram",
        ),
        (
            "other=PROMPTS",
            r"measure\.speculators\.other must be an artifact of train, .* prompts",
        ),
    ],
)
def test_heads_that_are_none_are_refused(words, setting, message):
    prompts = tiny_runs.run(words, "stage=prompts").path
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        tiny_runs.run(words, f"+measure.speculators.{setting.replace('PROMPTS', str(prompts))}")


def test_a_head_of_another_target_is_refused(words, tmp_path):
    config = tiny_targets.CONFIGS["llama"]
    wider = type(config)(**(tiny_targets.SIZES | {"hidden_size": 48, "tie_word_embeddings": True}))
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(wider).save_pretrained(tmp_path / "wider")
    tiny_targets.write_tokenizer(tmp_path / "wider")
    other = tiny_runs.run(words, "stage=train", f"target.path={tmp_path / 'wider'}")
    with pytest.raises(ValueError, match=r"the head .* must be of .* 32 channels .* got 48"):
        tiny_runs.run(words, f"+measure.speculators.other={other.path}")
