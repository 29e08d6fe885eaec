"""The text to measure on: long answers only, and an early end where there will be too few."""

from types import SimpleNamespace

import pytest

from specfit.engine import DecodeEngine
from specfit.quantization import texts
from specfit.quantization.measured import Text
from specfit.quantization.texts import BATCH_SIZE, TextSettings, passages, read_texts, texts_of

COUNTED = 4


def conversations(num):
    return [
        {"id": f"c{i}", "component": "mine", "prompt_ids": [7] * (i % 5 + 1)} for i in range(num)
    ]


def settings(num_passages):
    return TextSettings(
        weights={"mine": 1.0},
        temperatures={"mine": 0.0},
        num_passages=num_passages,
        num_unit_passages=num_passages,
        num_context=3,
        num_counted=COUNTED,
        seed=0,
    )


@pytest.fixture
def answering(monkeypatch):
    """Answers whose kind follows from their number, and the ids of those that were made."""
    made = []

    def start(kind):
        def answer_plainly(_engine, requests, **_settings):
            for request in requests:
                made.append(request.id)
                found = kind(int(request.id[1:]))
                tokens = [1] * (COUNTED - (found == "short"))
                reason = "repetition" if found == "loop" else "length"
                yield SimpleNamespace(id=request.id, tokens=tokens, finish_reason=reason)

        monkeypatch.setattr(texts, "answer_plainly", answer_plainly)
        return made

    return start


def read(path, num, num_passages):
    engine = object.__new__(DecodeEngine)
    return read_texts(path / "answers.jsonl", conversations(num), engine, settings(num_passages))


def test_short_answers_and_loops_are_passed_over(tmp_path, answering):
    answering(lambda i: ["long", "short", "loop"][i % 3])
    found = read(tmp_path, 400, 8)
    ids = [answered.id for some in found.values() for answered in some]
    assert [len(found[text]) for text in Text] == [8] * 4
    assert sorted(ids, key=lambda i: int(i[1:])) == [f"c{i}" for i in range(0, 96, 3)]
    texts.write_texts(tmp_path / "texts.jsonl", found)
    assert texts_of(tmp_path / "texts.jsonl") == found


def test_too_few_long_answers_are_told_apart_before_all_are_made(tmp_path, answering):
    made = answering(lambda i: "long" if i % 10 == 0 else "loop" if i % 10 == 1 else "short")
    message = (
        rf"mine has 7 of 400 in the first {BATCH_SIZE} of 1000 \(50 ended before, 7 looped\); raise"
    )
    with pytest.raises(ValueError, match=message):
        read(tmp_path, 1000, 100)
    assert len(made) == BATCH_SIZE


def test_what_may_still_be_enough_is_answered_to_the_end(tmp_path, answering):
    made = answering(lambda i: "long" if i % 2 else "short")
    assert sum(map(len, read(tmp_path, 800, 100).values())) == 400
    assert len(made) == 800


def test_fewer_conversations_than_passages_are_refused_without_an_answer(tmp_path, answering):
    made = answering(lambda _: "long")
    with pytest.raises(ValueError, match=r"mine has 0 of 12 in the first 0 of 11 \(0 ended"):
        read(tmp_path, 11, 3)
    assert made == []


def test_prompts_are_cut_to_their_context_and_neighbours_are_alike(tmp_path, answering):
    answering(lambda _: "long")
    found = read(tmp_path, 40, 3)[Text.units]
    asked = settings(3)
    short, whole = passages(found, asked), passages(found, asked, 2048)
    lengths = sorted(len(answered.prompt) for answered in found)
    assert short.valid.sum(1).tolist() == [min(3, n) + COUNTED for n in lengths]
    assert whole.valid.sum(1).tolist() == [n + COUNTED for n in lengths]
