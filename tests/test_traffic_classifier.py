"""The classifier learns, is measured on what it has not seen, and reads back as it was saved."""

import random
import zlib

import numpy as np
import pytest
import torch

from specfit.traffic import classifier

WORDS = {"code": ["def", "return", "class", "self"], "chat": ["please", "tell", "why", "hello"]}


def texts(kind, num, seed, *, other=0.0):
    """Made-up texts; each word is another kind's with the probability `other`."""
    rng = random.Random(f"{kind}{seed}")
    kinds = [kind] + [k for k in WORDS if k != kind]
    return [
        (" ".join(rng.choice(WORDS[kinds[rng.random() < other]]) for _ in range(12)), False)
        for _ in range(num)
    ]


@pytest.fixture(scope="module")
def trained():
    return classifier.train({kind: texts(kind, 60, 0) for kind in WORDS}, seed=0)


def test_texts_that_were_not_seen_are_told_apart(trained):
    for kind in WORDS:
        assert {trained.component(*example) for example in texts(kind, 20, 1)} == {kind}


def test_rows_of_the_confusion_sum_to_one(trained):
    np.testing.assert_allclose(trained.confusion.sum(1), 1)
    assert trained.num_texts == [60, 60]


def test_kinds_of_the_same_texts_are_confused():
    same = texts("code", 200, 0)
    confused = classifier.train({"one": same[:100], "two": same[100:]}).confusion
    assert 0.25 < confused[0, 0] < 0.75


def test_the_confusion_is_of_texts_that_were_held_out():
    # Half of the words say nothing, so some texts are mistaken; on its own texts, none is.
    examples = {kind: texts(kind, 60, 0, other=0.45) for kind in WORDS}
    trained = classifier.train(examples)
    own = [trained.component(*e) == kind for kind, of in examples.items() for e in of]
    assert all(own)
    assert np.diag(trained.confusion).mean() < 1


def test_tools_tell_equal_texts_apart():
    some = [text for text, _ in texts("chat", 60, 0)]
    trained = classifier.train(
        {"tools": [(t, True) for t in some], "none": [(t, False) for t in some]}
    )
    assert trained.component("hello", True) == "tools"
    assert trained.component("hello", False) == "none"


def test_training_twice_gives_the_same_weights(trained):
    again = classifier.train({kind: texts(kind, 60, 0) for kind in WORDS}, seed=0)
    assert torch.equal(again.weights, trained.weights)
    assert np.array_equal(again.confusion, trained.confusion)


def test_a_classifier_reads_back_as_it_was_saved(trained, tmp_path):
    trained.save(tmp_path / "classifier.safetensors")
    read = classifier.load(tmp_path / "classifier.safetensors")
    assert read.components == trained.components
    assert read.num_texts == trained.num_texts
    assert torch.equal(read.weights, trained.weights)
    assert np.array_equal(read.confusion, trained.confusion)


def test_a_classifier_with_other_features_is_refused(trained, tmp_path, monkeypatch):
    trained.save(tmp_path / "c.safetensors")
    monkeypatch.setattr(classifier, "NUM_FEATURES", 7)
    with pytest.raises(ValueError, match=r"c\.safetensors must have 7 features"):
        classifier.load(tmp_path / "c.safetensors")


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="must be a file"):
        classifier.load(tmp_path / "c.safetensors")


@pytest.mark.parametrize("text", ["", "a", "ab", "\ud800 word", "日本語", "x" * 100_000])
def test_any_text_has_features_of_one_norm(text):
    [row] = classifier.features([(text, False)])
    assert float(row[: classifier.NUM_BINS].norm()) == pytest.approx(1 if text else 0, abs=1e-5)
    assert float(row[classifier.NUM_BINS : -2].sum()) == 1


def test_features_are_those_of_the_definition():
    [row] = classifier.features([("abc", True)])
    gram = (3 << 24) + (ord("a") << 16) + (ord("b") << 8) + ord("c")
    hashes = [gram, zlib.crc32(b"abc")]
    bins = [(h * 0x9E3779B97F4A7C15 % 2**64) >> 52 for h in hashes]
    length = classifier.NUM_BINS + 2  # 3 characters: two bits
    tools, constant = classifier.NUM_FEATURES - 2, classifier.NUM_FEATURES - 1
    assert row.nonzero().flatten().tolist() == [*sorted(bins), length, tools, constant]


def test_one_component_is_refused():
    with pytest.raises(ValueError, match="must be two or more"):
        classifier.train({"code": texts("code", 60, 0)})


def test_too_few_texts_are_refused():
    few = {"code": texts("code", 60, 0), "chat": texts("chat", 1, 0) * 60}
    with pytest.raises(ValueError, match="texts of component chat must be at least 10, got 1"):
        classifier.train(few)
