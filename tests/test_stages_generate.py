"""`generate` answers as the target alone would, whatever the batch, and picks up after a kill."""

from dataclasses import replace

import pytest
import tiny_runs
import tiny_targets
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from specfit.stages import generate
from specfit.traffic import pools

SHORT = ["stage=generate", "generate.max_new_tokens=8"]


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    folder = tmp_path_factory.mktemp("generate")
    target = tiny_targets.write_target(folder / "target", "qwen3")
    data = tiny_targets.write_conversations(folder / "data.jsonl", 60)
    return tiny_runs.overrides(folder / "root", target, data, *SHORT)


@pytest.fixture(scope="module")
def model(words):
    path = next(w.partition("=")[2] for w in words if w.startswith("target.path="))
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


@pytest.fixture(scope="module")
def conversations(words):
    artifact = tiny_runs.run(words, "stage=prompts")
    rows = tiny_runs.read_lines(artifact, "conversations.jsonl")
    return {row["id"]: row for row in rows if row["split"] != "test"}


def answers(words, *more):
    return tiny_runs.read_lines(tiny_runs.run(words, *more), "answers.jsonl")


def argmax_answer(model, prompt, limit):
    """The greedy answer by whole forward passes of transformers, a token each."""
    ids = list(prompt)
    while len(ids) < len(prompt) + limit:
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] == 1:
            break
    return ids[len(prompt) :]


def test_greedy_answers_are_the_argmax_of_the_whole_model(words, model, conversations):
    found = answers(words)
    assert len(found) > 5
    for row in found:
        prompt = conversations[row["id"]]["prompt_ids"]
        assert row["input_ids"] == prompt + argmax_answer(model, prompt, 8)
        assert row["loss_spans"] == [[len(prompt), len(row["input_ids"])]]


def test_held_out_conversations_are_not_answered(words, conversations):
    artifact = tiny_runs.run(words)
    figures = tiny_runs.read_json(artifact, "generate.json")
    assert figures["engine"] == "fp4"
    assert figures["num_answers"] + figures["num_looped"] == len(conversations) == 10
    assert {row["id"] for row in tiny_runs.read_lines(artifact, "answers.jsonl")} <= set(
        conversations
    )


@pytest.mark.parametrize("batch_size", [1, 3])
def test_the_batch_does_not_change_an_answer(words, batch_size):
    assert answers(words, f"generate.batch_size={batch_size}") == answers(words)


def test_sampled_answers_are_the_same_again_and_others_with_another_seed(
    words, tmp_path, monkeypatch
):
    # The same prompts with every seed.
    monkeypatch.setattr(pools, "_rank", lambda _seed, conversation_id: conversation_id)

    def sampled(root, seed):
        options = ["generate.temperature=1.0", f"seed={seed}", f"runtime.root={tmp_path / root}"]
        return {row["id"]: row["input_ids"] for row in answers(words, *options)}

    first, again, other = sampled("a", 0), sampled("b", 0), sampled("a", 1)
    assert again == first
    both = set(first) & set(other)
    assert len(both) > 5
    assert sum(first[i] != other[i] for i in both) > len(both) / 2


def test_a_temperature_of_null_is_each_components_own(words):
    greedy = answers(words)
    own = [*words, "profile.components=[{name:mine,sources:[mine],temperature:1.0}]"]
    assert answers(own) == answers(words, "generate.temperature=1.0")
    assert answers(own) != greedy


class Killed(Exception):  # noqa: N818
    pass


@pytest.fixture
def killed(words, tmp_path, monkeypatch):
    """The words of a run that was killed after four answers, and what it had written."""
    there = [*words, f"runtime.root={tmp_path / 'root'}"]
    append = generate.append_jsonl
    with monkeypatch.context() as patch:
        left = [4]

        def append_or_die(path, rows):
            if left[0] == 0:
                raise Killed
            left[0] -= 1
            append(path, rows)

        patch.setattr(generate, "append_jsonl", append_or_die)
        with pytest.raises(Killed):
            tiny_runs.run(there)
    (journal,) = (tmp_path / "root").glob("generate/*.partial/journal.jsonl")
    return there, journal


def decoded(monkeypatch):
    """The ids that are decoded from here on."""
    ids = []
    answer = generate.answer_plainly

    def spy(target, requests, **kwargs):
        ids.extend(r.id for r in requests)
        return answer(target, requests, **kwargs)

    monkeypatch.setattr(generate, "answer_plainly", spy)
    return ids


def test_a_killed_run_goes_on_where_it_was_and_ends_the_same(words, killed, monkeypatch):
    there, journal = killed
    kept = {row["id"] for row in generate.read_jsonl(journal)}
    ids = decoded(monkeypatch)
    resumed, unkilled = tiny_runs.run(there), tiny_runs.run(words)
    assert len(kept) == 4
    assert len(ids) == 6
    assert not kept & set(ids)
    assert resumed.key == unkilled.key
    name = "answers.jsonl"
    assert resumed.file(name).read_bytes() == unkilled.file(name).read_bytes()


def test_an_answer_that_a_kill_cut_short_is_given_again(words, killed, monkeypatch):
    there, journal = killed
    journal.write_bytes(journal.read_bytes()[:-20])
    ids = decoded(monkeypatch)
    assert answers(there) == answers(words)
    assert len(ids) == 7


def test_a_journal_is_not_part_of_the_artifact(words):
    assert tiny_runs.run(words).files() == ["answers.jsonl", "generate.json"]


@pytest.fixture(scope="module")
def broken(words, tmp_path_factory):
    """The words of a run on a target whose states are all zero: it says token 0 for ever."""
    folder = tmp_path_factory.mktemp("broken") / "target"
    path = next(w.partition("=")[2] for w in words if w.startswith("target.path="))
    model = AutoModelForCausalLM.from_pretrained(path)
    torch.nn.init.zeros_(model.lm_head.weight)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(path).save_pretrained(folder)
    return [*words, f"target.path={folder}"]


def test_a_target_that_only_loops_is_an_error_with_a_way_out(broken):
    with pytest.raises(ValueError, match=r"all 10 answers loop; try generate\.temperature"):
        tiny_runs.run(broken)


def test_looping_answers_are_dropped_and_counted(words, conversations, monkeypatch):
    # The first three prompts by id are answered by a loop, the others as they are.
    looping = sorted(conversations)[:3]
    answers_of = generate.answer_plainly

    def loop(*args, **kwargs):
        for answer in answers_of(*args, **kwargs):
            loops = {"finish_reason": "repetition", "loop_start": 0}
            yield replace(answer, **(loops if answer.id in looping else {}))

    monkeypatch.setattr(generate, "answer_plainly", loop)
    artifact = tiny_runs.run(words, "generate.max_new_tokens=5")
    figures = tiny_runs.read_json(artifact, "generate.json")
    rows = tiny_runs.read_lines(artifact, "answers.jsonl")
    assert figures["num_looped"] == figures["finish_reasons"]["repetition"] >= 3
    assert figures["num_answers"] == len(rows) == 10 - figures["num_looped"]
    assert not {row["id"] for row in rows} & set(looping)
    assert figures["num_tokens"] == sum(row["num_answer_tokens"] for row in rows)
    assert sum(row["num_looped"] for row in figures["rows"]) == figures["num_looped"]


def test_off_policy_learns_from_the_answers_in_the_data(words, conversations):
    tokenizer = AutoTokenizer.from_pretrained(
        next(w.partition("=")[2] for w in words if w.startswith("target.path="))
    )
    found = answers(words, "generate.on_policy=false")
    assert {row["id"] for row in found} == set(conversations)
    for row in found:
        if row["split"] == "validation":  # stands for what the target would verify
            prompt = conversations[row["id"]]["prompt_ids"]
            assert row["input_ids"][: len(prompt)] == prompt
            assert row["finish_reason"] != "reference"
            continue
        assert row["input_ids"] == conversations[row["id"]]["reference_ids"]
        ((start, end),) = row["loss_spans"]
        number = tokenizer.decode(row["input_ids"]).split("number ")[1].split()[0]
        learned = tokenizer.decode(row["input_ids"][start:end])
        assert learned == f"def add{number}(a):\n    return a + {number}<|im_end|>"


def test_off_policy_needs_answers_in_the_data(words, tmp_path):
    data = tiny_targets.write_conversations(tmp_path / "bare.jsonl", 60, answers=False)
    with pytest.raises(ValueError, match=r"generate\.on_policy must be true: no conversation"):
        tiny_runs.run(words, "generate.on_policy=false", f"data.sources.mine.path={data}")


def test_a_killed_off_policy_run_holds_every_answer_once(words, tmp_path, monkeypatch):
    there = [*words, f"runtime.root={tmp_path / 'root'}", "generate.on_policy=false"]

    def die(*_):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(generate, "_finish", die)
        with pytest.raises(Killed):
            tiny_runs.run(there)
    ids = [row["id"] for row in answers(there)]
    assert len(ids) == len(set(ids)) == 10
