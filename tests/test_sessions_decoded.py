"""Sessions of several turns, from the profile through the answers to the figures."""

import json
from itertools import pairwise

import pytest
import tiny_runs
import tiny_targets
import torch
from transformers import AutoModelForCausalLM

from specfit.checks import GateRejected

TURNS = (
    "profile.components=[{name:mine,weight:1,sources:[mine],turns:{median:2,p90:3},"
    "prompt_tokens:{median:30,p90:40},new_tokens_per_turn:{median:20,p90:30},"
    "output_tokens:{median:5,p90:7},shared_prefix_tokens:12}]"
)


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sessions")
    target = tiny_targets.write_target(folder / "target")
    data = tiny_targets.write_conversations(folder / "data.jsonl", 90)
    more = ["profile.max_turns=3", "data.num_test=6", "generate.max_new_tokens=6", TURNS]
    return tiny_runs.overrides(folder / "root", target, data, *more)


@pytest.fixture(scope="module")
def conversations(words):
    rows = tiny_runs.read_lines(tiny_runs.run(words, "stage=prompts"), "conversations.jsonl")
    return {row["id"]: row for row in rows}


@pytest.fixture(scope="module")
def requests(words):
    return tiny_runs.read_lines(tiny_runs.run(words, "stage=measure"), "requests.jsonl")


@pytest.fixture(scope="module")
def model(words):
    path = next(w.partition("=")[2] for w in words if w.startswith("target.path="))
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def greedy(model, prompt, num_tokens):
    ids = list(prompt)
    for _ in range(num_tokens):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def test_sessions_have_the_turns_of_the_profile_and_share_its_prefix(conversations):
    tests = [row for row in conversations.values() if row["split"] == "test"]
    assert sorted(1 + len(row["follow_ups"]) for row in tests)[3] == 2
    lengths = {row["num_prefix_tokens"] for row in tests}
    assert min(lengths) >= 6
    assert len({tuple(row["prompt_ids"][: min(lengths)]) for row in tests}) == 1
    assert all(len(row["output_limits"]) == 1 + len(row["follow_ups"]) for row in tests)


def test_a_later_request_goes_on_from_what_the_target_itself_said(conversations, requests, model):
    plain = {row["id"]: row for row in requests if row["proposer"] == "none"}
    later = [row for row in plain.values() if row["turn"] > 0]
    assert later
    for row in later:
        session, _, turn = row["id"].partition("#")
        first = conversations[session]
        prompt = first["prompt_ids"]
        for i in range(int(turn)):
            before = plain[f"{session}#{i}" if i else session]
            ended = [] if before["finish_reason"] == "stop" else first["end_ids"]
            prompt = prompt + before["tokens"] + ended + first["follow_ups"][i]
        assert row["num_prompt_tokens"] == len(prompt)
        assert row["tokens"] == greedy(model, prompt, len(row["tokens"]))


def test_answers_are_as_long_as_the_profile_has_them(conversations, requests):
    for row in requests:
        limits = conversations[row["id"].partition("#")[0]]["output_limits"]
        assert len(row["tokens"]) <= limits[row["turn"]]
        ended = row["finish_reason"] in ("stop", "repetition")
        assert ended or len(row["tokens"]) == limits[row["turn"]]


def test_all_proposers_answer_the_same_requests_and_say_the_same(requests):
    of = {}
    for row in requests:
        of.setdefault(row["proposer"], {})[row["id"]] = row["tokens"]
    assert set(of) == {"none", "ngram", "eagle3"}
    assert of["none"] == of["ngram"] == of["eagle3"]


def test_figures_are_by_turn_and_of_sessions(words, requests):
    rows = tiny_runs.read_json(tiny_runs.run(words, "stage=measure"), "acceptance.json")["rows"]
    row = next(r for r in rows if (r["component"], r["proposer"]) == ("mine", "eagle3"))
    turns = [r["turn"] for r in requests if r["proposer"] == "eagle3"]
    assert row["num_prompts"] == len(turns)
    assert row["num_sessions"] == turns.count(0) == 6
    assert sum(one["num_rounds"] for one in row["by_turn"]) == row["num_rounds"]
    assert [one["turn"] for one in row["by_turn"]] == sorted({t + 1 for t in turns})


def test_training_learns_every_answer_of_a_session_and_nothing_else(words, conversations):
    artifact = tiny_runs.run(words, "stage=generate")
    rows = tiny_runs.read_lines(artifact, "answers.jsonl")
    assert any(row["turn"] > 0 for row in rows)
    for row in rows:
        session = conversations[row["id"]]
        assert row["turn"] == len(session["follow_ups"])
        spans = row["loss_spans"][len(session["prompt_spans"]) :]
        assert len(spans) == 1 + row["turn"]
        assert sum(end - start for start, end in spans) == row["num_answer_tokens"]
        # Between two answers there is what ends the first, if it was cut, and the next question.
        for i, ((_, end), (start, _)) in enumerate(pairwise(spans)):
            between = row["input_ids"][end:start]
            following = session["follow_ups"][i]
            assert between in (following, session["end_ids"] + following)


def test_a_killed_generation_goes_on_at_the_turn_where_it_was(words, tmp_path):
    whole = tiny_runs.read_lines(tiny_runs.run(words, "stage=generate"), "answers.jsonl")
    again = [w for w in words if not w.startswith("runtime.root=")]
    again.append(f"runtime.root={tmp_path}")
    tiny_runs.run(again, "stage=prompts")
    key = tiny_runs.keys(again)["generate"]
    partial = tmp_path / "generate" / f"{key}.partial"
    partial.mkdir(parents=True)
    # Of every session only the first answer was there, the last line cut in its middle.
    lines = []
    for row in whole:
        start, end = row["loss_spans"][-1 - row["turn"]]
        first = row | {"turn": 0, "input_ids": row["input_ids"][:end], "loss_spans": [[start, end]]}
        first |= {"num_answer_tokens": end - start}
        first["finish_reason"] = "stop" if row["input_ids"][end - 1] == 1 else "length"
        lines.append(json.dumps(first))
    (partial / "journal.jsonl").write_text("\n".join(lines)[:-20])
    assert tiny_runs.read_lines(tiny_runs.run(again, "stage=generate"), "answers.jsonl") == whole


def test_a_head_below_the_floor_is_rejected_and_kept(words):
    made = tiny_runs.run(words, "stage=measure")
    with pytest.raises(GateRejected, match=r"measure\.floor must be reached .* mine .* below 5"):
        tiny_runs.run(words, "stage=measure", "measure.floor=5")
    assert tiny_runs.run(words, "stage=measure", "measure.floor=1").path == made.path


def test_the_profile_s_page_says_what_is_covered(words):
    made = tiny_runs.run(words, "stage=profile")
    record = tiny_runs.read_json(made, "profile.json")
    covered = {
        row["quantity"]: row["covered"] for row in record["coverage"] if row["split"] == "test"
    }
    assert covered["turns"] is True
    kinds = {"prompt_tokens", "new_tokens_per_turn", "turns", "shared_prefix_tokens"}
    assert set(covered) == kinds
    assert record["drawn"][0]["turns"][1] == 2
    assert {"mix.png", "lengths.png", "arrivals.png", "profile.html"} <= set(made.files())


def test_a_prefix_longer_than_there_is_is_said_not_to_be_covered(words):
    longer = TURNS.replace("shared_prefix_tokens:12", "shared_prefix_tokens:99999")
    made = tiny_runs.run(words, "stage=profile", longer, "profile.max_turns=1")
    rows = tiny_runs.read_json(made, "profile.json")["coverage"]
    covered = {row["quantity"]: row["covered"] for row in rows if row["split"] == "test"}
    assert covered["shared_prefix_tokens"] is False
    assert covered["turns"] is True


def test_the_mixture_is_what_is_trained_on(words):
    made = tiny_runs.run(words, "stage=train", "fit.train_tokens=40")
    fitted = tiny_runs.artifacts(words, "stage=train", "fit.train_tokens=40")["fit"]
    shown = tiny_runs.read_lines(fitted, "mixture.jsonl")
    answers = tiny_runs.read_lines(tiny_runs.run(words, "stage=generate"), "answers.jsonl")
    lengths = {row["id"]: row["num_answer_tokens"] for row in answers}
    assert sum(lengths[row["id"]] for row in shown) == pytest.approx(40, abs=10)
    assert len(shown) < len([row for row in answers if row["split"] == "train"])
    assert made.key != tiny_runs.run(words, "stage=train").key
