"""An epoch shows the mixture that was asked for, as far as there are answers."""

import pytest

from specfit.states.documents import Document
from specfit.traffic.config import FitConfig
from specfit.traffic.mixture import Share
from specfit.traffic.selection import select


def documents(component, lengths):
    return [
        Document(f"{component}{i}", component, "s", "train", [0] * (n + 2), [(2, n + 2)])
        for i, n in enumerate(lengths)
    ]


def shares(**training):
    return [Share(name, 0.5, 0.5, share) for name, share in training.items()]


def test_tokens_are_shared_out_as_the_mixture_says():
    there = {"a": documents("a", [10] * 100), "b": documents("b", [20] * 100)}
    taken = select(there, shares(a=0.75, b=0.25), FitConfig(train_tokens=800))
    assert [t.num_tokens for t in taken] == [600, 200]
    assert [t.row()["taken"] for t in taken] == [0.75, 0.25]
    assert [t.row()["capped"] for t in taken] == ["", ""]


def test_a_scarce_component_is_repeated_up_to_the_limit_and_then_capped():
    there = {"a": documents("a", [10] * 10), "b": documents("b", [10] * 100)}
    taken = select(there, shares(a=0.5, b=0.5), FitConfig(train_tokens=600, max_repeats=2.0))
    a, b = (t.row() for t in taken)
    assert (a["num_tokens"], a["repeats"], a["num_there"]) == (200, 2.0, 10)
    assert a["capped"] == "capped at 200 of 300 tokens"
    assert (b["num_tokens"], b["capped"]) == (300, "")
    assert (a["taken"], b["taken"]) == (0.4, 0.6)


def test_parts_of_a_repeat_show_some_documents_once_more():
    [taken] = select({"a": documents("a", [10] * 10)}, shares(a=1.0), FitConfig(train_tokens=150))
    counts = [sum(d.id == f"a{i}" for d in taken.documents) for i in range(10)]
    assert sorted(counts) == [1] * 5 + [2] * 5


def test_short_and_long_answers_keep_their_proportion():
    there = {"a": documents("a", [5] * 40 + [50] * 40)}
    [taken] = select(there, shares(a=1.0), FitConfig(train_tokens=1100))
    lengths = [d.num_answer_tokens for d in taken.documents]
    assert lengths.count(5) == pytest.approx(20, abs=1)
    assert lengths.count(50) == pytest.approx(20, abs=1)
    assert taken.num_tokens == pytest.approx(1100, rel=0.05)


def test_without_a_budget_the_epoch_has_as_many_tokens_as_there_are():
    there = {"a": documents("a", [10] * 30), "b": documents("b", [10] * 10)}
    taken = select(there, shares(a=0.5, b=0.5), FitConfig(max_repeats=3.0))
    assert [t.num_tokens for t in taken] == [200, 200]


def test_a_component_goes_without_none_however_small_its_share():
    there = {"a": documents("a", [10] * 30), "b": documents("b", [40] * 3)}
    taken = select(there, shares(a=0.999, b=0.001), FitConfig(train_tokens=100))
    assert len(taken[1].documents) == 1
