"""Figures of fidelity are what their definitions say, and a gate judges the worse end of each."""

import json
import math

import pytest
import torch

from specfit.files import dumps
from specfit.quantization.fidelity import (
    GATES,
    TokenFigures,
    beyond_budget,
    broken_limits,
    other_than_measured,
)


def random_figures(num_sequences=6, num_tokens=20, noise=0.5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    parts, expected = [], []
    for _ in range(num_sequences):
        logits = torch.randn(num_tokens, 11, generator=generator)
        changed = logits + noise * torch.randn(num_tokens, 11, generator=generator)
        following = torch.randint(11, (num_tokens,), generator=generator)
        log_p, log_q = logits.log_softmax(-1), changed.log_softmax(-1)
        parts.append(TokenFigures.of(log_p, log_q, following))
        expected.append((log_p.double(), log_q.double(), following))
    return TokenFigures.joined(parts), expected


def test_figures_are_their_definitions():
    found, expected = random_figures()
    row = found.row(seed=0)
    kls, same, nats_p, nats_q = [], [], [], []
    for log_p, log_q, following in expected:
        for p, q, token in zip(log_p, log_q, following.tolist(), strict=True):
            kls.append(
                sum(math.exp(a) * (a - b) for a, b in zip(p.tolist(), q.tolist(), strict=True))
            )
            same.append(int(p.argmax()) == int(q.argmax()))
            nats_p.append(-float(p[token]))
            nats_q.append(-float(q[token]))
    n = len(kls)
    assert (row["num_sequences"], row["num_tokens"]) == (6, n)
    assert row["kl_mean_nats"] == pytest.approx(sum(kls) / n, rel=1e-5)
    assert row["kl_max_nats"] == pytest.approx(max(kls), rel=1e-5)
    assert row["kl_median_nats"] == pytest.approx(sorted(kls)[n // 2], rel=0.05)
    assert row["kl_p99_nats"] > sorted(kls)[int(0.98 * n)]
    assert row["top1_agreement"] == sum(same) / n
    perplexity = math.exp(sum(nats_q) / n) / math.exp(sum(nats_p) / n)
    assert row["perplexity_change"] == pytest.approx(perplexity - 1, rel=1e-5)


def test_every_figure_lies_in_its_interval():
    row = random_figures()[0].row(seed=1)
    names = [name.removesuffix("_low") for name in row if name.endswith("_low")]
    assert len(names) == 6
    for name in names:
        assert row[f"{name}_low"] <= row[name] <= row[f"{name}_high"]
        assert row[f"{name}_low"] < row[f"{name}_high"]


def test_intervals_resample_sequences_and_not_tokens():
    # All tokens of a sequence are alike: what varies is the six sequences.
    kl = torch.arange(6.0)[:, None].expand(6, 500)
    figures = TokenFigures(kl, kl < 9, -kl, -kl)
    row = figures.row(seed=0)
    spread = float(torch.arange(6.0).std()) / math.sqrt(6)
    assert row["kl_mean_nats_high"] - row["kl_mean_nats_low"] == pytest.approx(
        2 * 1.96 * spread, rel=0.25
    )


def test_equal_targets_have_no_divergence():
    row = random_figures(noise=0.0)[0].row(seed=0)
    assert row["kl_mean_nats"] == row["kl_mean_nats_high"] == 0
    assert row["top1_agreement"] == row["top1_agreement_low"] == 1
    assert row["perplexity_change"] == 0


def passing(gate):
    row = random_figures(num_sequences=20, num_tokens=50, noise=0.0)[0].row(seed=0)
    assert broken_limits(gate, row) == []
    return row


@pytest.mark.parametrize("gate", GATES)
def test_each_limit_is_judged_at_the_worse_end_of_the_interval(gate):
    for limit in GATES[gate]:
        row = passing(gate)
        if limit.at_most is not None:
            end, value = f"{limit.figure}_high", limit.at_most
            beyond = value * 1.001
        else:
            end, value = f"{limit.figure}_low", limit.at_least
            beyond = value * 0.999
        assert broken_limits(gate, row | {end: value}) == []
        (words,) = broken_limits(gate, row | {end: beyond})
        assert words.startswith(f"{limit.figure} must be at")
        (words,) = broken_limits(gate, row | {end: None})
        assert words.endswith("got no finite number")


@pytest.mark.parametrize("gate", GATES)
def test_no_gate_is_passed_on_too_little_text(gate):
    row = passing(gate)
    assert broken_limits(gate, row | {"num_sequences": 16, "num_tokens": 1000}) == []
    (words,) = broken_limits(gate, row | {"num_sequences": 15})
    assert words == "num_sequences must be at least 16, got 15"
    (words,) = broken_limits(gate, row | {"num_tokens": 999})
    assert words == "num_tokens must be at least 1000, got 999"


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_figures_that_are_not_finite_are_none_and_keep_no_limit(value):
    figures, _ = random_figures(num_sequences=20, num_tokens=50)
    figures.kl[3, 4] = value
    figures.log_q[3, 4] = -math.inf
    row = figures.row(seed=0)
    assert row["kl_mean_nats"] is row["kl_mean_nats_high"] is row["kl_max_nats"] is None
    assert row["perplexity_change"] is None
    assert row["top1_agreement"] > 0
    assert json.loads(dumps(row)) == row
    broken = broken_limits("production", row)
    assert "kl_mean_nats must be at most 0.06, got no finite number" in broken
    assert "perplexity_change must be at most 0.01, got no finite number" in broken


def test_a_ceiling_is_broken_where_other_text_refutes_it():
    row = {"kl_mean_nats": 0.052, "kl_mean_nats_low": 0.049, "kl_mean_nats_high": 0.055}
    assert beyond_budget(0.05, row) == []
    for low in (0.0501, None):
        (words,) = beyond_budget(0.05, row | {"kl_mean_nats_low": low})
        assert words.startswith("kl_mean_nats must be at most quantize.budget, 0.05, got ")


def test_gates_are_those_of_the_notes():
    assert [(x.figure, x.at_most, x.at_least) for x in GATES["strict"]] == [
        ("kl_mean_nats", 0.01, None),
        ("top1_agreement", None, 0.98),
    ]
    assert [(x.figure, x.at_most, x.at_least) for x in GATES["production"]] == [
        ("kl_mean_nats", 0.06, None),
        ("top1_agreement", None, 0.93),
        ("perplexity_change", 0.01, None),
    ]


def test_a_checkpoint_that_is_not_what_was_measured_is_found():
    measured = {"a": "1", "b": "2", "c": "3"}
    assert other_than_measured(measured, dict(measured)) == []
    for written in (measured | {"b": "3"}, measured | {"b.scale": "4"}, {"a": "1", "c": "3"}):
        (words,) = other_than_measured(measured, written)
        assert "got 1 other tensors, such as b" in words
