"""`prompts` takes what the profile asks for, renders it as the target does, and never leaks."""

import json

import pytest
import tiny_targets

from specfit.config import DataConfig, LossOn
from specfit.stages import prompts
from specfit.traffic.config import ComponentConfig, FitConfig, ProfileConfig, Quantiles
from specfit.traffic.mixture import mixture
from specfit_data.sources import Format, Source


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return tiny_targets.write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def run(tmp_path, tokenizer):
    """Runs the stage on sources by name; their rows are lists of messages."""

    def run(sources, components, *, held_out=(), seed=0, folder="out", **options):
        data = DataConfig(
            sources={
                name: _source(tmp_path / f"{name}.jsonl", rows, held_out=name in held_out)
                for name, rows in sources.items()
            },
            **{"num_train": 20, "num_validation": 2, "num_test": 4} | options,
        )
        total = sum(weight for _, weight, *_ in components)
        found = [ComponentConfig(name, w / total, *rest) for name, w, *rest in components]
        profile = ProfileConfig("tiny", found)
        out = tmp_path / folder
        out.mkdir()
        shares = mixture(profile, FitConfig(floor=0.0))
        prompts.run(out, data=data, profile=profile, mixture=shares, seed=seed, tokenizer=tokenizer)
        rows = [json.loads(line) for line in (out / "conversations.jsonl").open()]
        return rows, json.loads((out / "prompts.json").read_text())["rows"]

    return run


def _source(path, rows, *, held_out):
    path.write_text("".join(json.dumps({"messages": m}) + "\n" for m in rows))
    return Source(str(path), Format.messages, "own", held_out=held_out)


def chats(num, topic="adds"):
    """One question and answer each."""
    return [
        [
            {"role": "user", "content": f"Write function number {i} that {topic}."},
            {"role": "assistant", "content": f"def f{i}(): pass"},
        ]
        for i in range(num)
    ]


def splits(rows, source=None):
    found = {"train": set(), "validation": set(), "test": set()}
    for row in rows:
        if source in (None, row["source"]):
            found[row["split"]].add(row["id"])
    return found


def test_a_held_out_source_is_only_measured_on(run):
    sources = {"own": chats(80), "theirs": chats(30, "sorts")}
    rows, _ = run(sources, [("c", 1.0, ["own", "theirs"])], held_out=["theirs"])
    found = splits(rows, "theirs")
    assert (len(found["train"]), len(found["validation"]), len(found["test"])) == (0, 0, 4)
    assert not splits(rows, "own")["test"]


def test_a_conversation_in_a_held_out_source_is_trained_on_nowhere_else(run):
    shared = chats(40, "sorts")
    sources = {"own": chats(40) + shared, "theirs": shared}
    components = [("c", 1.0, ["own", "theirs"])]
    rows, tallies = run(
        sources, components, held_out=["theirs"], num_train=1000, num_validation=100, num_test=1000
    )
    found = splits(rows)
    assert len(found["test"]) == 40
    assert len(found["train"] | found["validation"]) < 40  # the rest of `own` is in its test split
    assert not found["test"] & (found["train"] | found["validation"])
    assert {t["source"]: t["num_duplicates"] for t in tallies if t["num_duplicates"]} == {"own": 40}


def test_splits_share_no_conversation_even_when_one_is_in_two_sources(run):
    sources = {"a": chats(60), "b": chats(160)}
    rows, _ = run(
        sources,
        [("x", 1.0, ["a"]), ("y", 1.0, ["b"])],
        num_train=1000,
        num_validation=1000,
        num_test=1000,
    )
    assert len({row["id"] for row in rows}) == len(rows) == 160


def test_the_mixture_shares_out_training_and_half_of_the_test_is_even(run):
    sources = {"a": chats(80), "b": chats(80, "sorts")}
    rows, _ = run(sources, [("x", 3.0, ["a"]), ("y", 1.0, ["b"])], num_train=16, num_test=8)
    of_train = [row["component"] for row in rows if row["split"] == "train"]
    of_test = [row["component"] for row in rows if row["split"] == "test"]
    assert (of_train.count("x"), of_train.count("y")) == (12, 4)
    assert (of_test.count("x"), of_test.count("y")) == (5, 3)


def test_sources_of_a_component_take_turns(run):
    sources = {"a": chats(60), "b": chats(60, "sorts")}
    rows, _ = run(sources, [("x", 1.0, ["a", "b"])], num_train=10)
    of_train = [row["source"] for row in rows if row["split"] == "train"]
    assert of_train == ["a", "b"] * 5


UNKNOWN_ROLE = [{"role": "narrator", "content": "Once."}, {"role": "assistant", "content": "Yes."}]


def test_few_rejected_conversations_are_counted_with_their_reasons(run):
    rows, tallies = run({"a": [*chats(96), *[UNKNOWN_ROLE] * 4]}, [("x", 1.0, ["a"])])
    assert sum(t["num_rejected"] for t in tallies) == 4
    reasons = [reason for t in tallies for reason in t["reasons"]]
    assert len(reasons) == 1
    assert "narrator" in reasons[0]
    assert len(rows) == 26


def test_many_rejected_conversations_are_an_error_with_their_reasons(run):
    with pytest.raises(ValueError, match=r"6 of 100 .*data\.max_rejected \(0\.05\): 6x .*narrator"):
        run({"a": [*chats(94), *[UNKNOWN_ROLE] * 6]}, [("x", 1.0, ["a"])])


def test_rejected_rows_count_against_all_that_were_read_not_those_that_were_taken(run):
    # 2 % of the rows, but as many as half of what is taken.
    rows, _ = run(
        {"a": [*chats(294), *[UNKNOWN_ROLE] * 6]}, [("x", 1.0, ["a"])], num_train=8, num_test=2
    )
    assert len(rows) == 12


def test_a_limit_of_all_lets_everything_be_rejected_that_is(run):
    rows, _ = run({"a": [*chats(60), *[UNKNOWN_ROLE] * 60]}, [("x", 1.0, ["a"])], max_rejected=1.0)
    assert rows


def test_prompts_out_of_bounds_are_passed_over_and_counted(run):
    long = [
        [{"role": "user", "content": "word " * 200 + str(i)}, {"role": "assistant", "content": "a"}]
        for i in range(60)
    ]
    rows, tallies = run(
        {"a": chats(60) + long}, [("x", 1.0, ["a"])], num_train=1000, max_prompt_tokens=100
    )
    assert all(len(row["prompt_ids"]) <= 100 for row in rows)
    of_train = next(t for t in tallies if t["split"] == "train")
    assert of_train["num_passed_over"] + of_train["num_kept"] > of_train["num_kept"] > 30


def test_a_session_is_taken_by_its_first_request_however_long_its_conversation(run):
    turns = Quantiles(2.0, 2.0)
    long = [[*c, *c, {"role": "tool", "content": "found " * 90}] for c in chats(60)]
    rows, _ = run(
        {"a": long}, [("x", 1.0, ["a"], 0.0, None, None, None, turns)], max_prompt_tokens=60
    )
    assert len(rows) == 26
    assert all(len(row["prompt_ids"]) <= 60 and len(row["follow_ups"]) == 1 for row in rows)


def test_a_prompt_is_what_the_server_would_send(run, tokenizer):
    rows, _ = run({"a": chats(60)}, [("x", 1.0, ["a"])])
    for row in rows:
        number = tokenizer.decode(row["prompt_ids"]).split("number ")[1].split()[0]
        question = [{"role": "user", "content": f"Write function number {number} that adds."}]
        text = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
        assert row["prompt_ids"] == tokenizer.encode(text, add_special_tokens=False)


def two_turns(num):
    return [
        [*first, {"role": "user", "content": f"Again, {i}."}, {"role": "assistant", "content": "b"}]
        for i, first in enumerate(chats(num))
    ]


@pytest.mark.parametrize(
    ("loss_on", "learned"),
    [
        (LossOn.all_turns, ["def f{}(): pass<|im_end|>", "b<|im_end|>"]),
        (LossOn.last_turn, ["b<|im_end|>"]),
    ],
)
def test_the_turns_that_are_asked_for_are_learned_from(run, tokenizer, loss_on, learned):
    rows, _ = run({"a": two_turns(60)}, [("x", 1.0, ["a"])], loss_on=loss_on)
    for row in rows:
        number = tokenizer.decode(row["reference_ids"]).split("number ")[1].split()[0]
        found = [tokenizer.decode(row["reference_ids"][a:b]) for a, b in row["reference_spans"]]
        assert found == [text.format(number) for text in learned]
        before = [tokenizer.decode(row["prompt_ids"][a:b]) for a, b in row["prompt_spans"]]
        assert before == found[:-1]


def test_a_seed_gives_the_same_conversations_and_another_seed_others(run):
    first, again, other = (
        run({"a": chats(200)}, [("x", 1.0, ["a"])], seed=seed, folder=folder)[0]
        for seed, folder in [(0, "first"), (0, "again"), (1, "other")]
    )
    assert first == again
    assert splits(first)["train"] != splits(other)["train"]


def test_a_seed_moves_no_conversation_to_another_split(run):
    options = {"num_train": 1000, "num_validation": 1000, "num_test": 1000}
    first, other = (
        run({"a": chats(100)}, [("x", 1.0, ["a"])], seed=seed, folder=str(seed), **options)[0]
        for seed in (0, 1)
    )
    assert splits(first) == splits(other)


def test_the_example_page_shows_a_conversation_that_was_taken(run, tmp_path):
    rows, _ = run({"a": chats(60)}, [("x", 1.0, ["a"])])
    page = (tmp_path / "out" / "example.html").read_text()
    assert any(row["id"] in page for row in rows)
