"""Losses against float64, and what they are where p is outside the draft vocabulary."""

import math

import pytest
import torch
from torch import Tensor

from specfit.speculators.losses import LOSSES, draft_loss, parse_loss

VOCAB, DRAFT = 11, 6


def distributions(num: int = 5) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draft logits, the target's log p over the draft vocabulary, p over all, top draft ids."""
    generator = torch.Generator().manual_seed(0)
    full = torch.randn(num, VOCAB, generator=generator, dtype=torch.float64) * 2
    log_p = full.log_softmax(-1)
    top = full.argmax(-1)
    # The draft vocabulary is the target's tokens 0..DRAFT-1.
    top_draft = torch.where(top < DRAFT, top, -1)
    logits = torch.randn(num, DRAFT, generator=generator, dtype=torch.float64)
    return logits, log_p[:, :DRAFT], log_p.exp(), top_draft


def reference(name: str, logits: Tensor, p: Tensor, top: Tensor) -> list[float]:
    """By the definitions, token by token over the target's whole vocabulary."""
    values = []
    for row in range(len(logits)):
        exponentials = [math.exp(x) for x in logits[row].tolist()]
        q = [e / sum(exponentials) for e in exponentials]
        p_row = p[row].tolist()
        match name:
            case "kl":
                value = sum(p_row[i] * math.log(p_row[i] / q[i]) for i in range(DRAFT))
            case "tv":
                both = [*q, *[0.0] * (VOCAB - DRAFT)]
                value = sum(abs(a - b) for a, b in zip(p_row, both, strict=True)) / 2
            case "lk":
                value = -math.log(sum(min(p_row[i], q[i]) for i in range(DRAFT)))
            case "ce":
                value = -math.log(q[top[row]]) if top[row] >= 0 else 0.0
        values.append(value)
    return values


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_what_its_definition_gives_in_float64(name):
    logits, log_p, p, top = distributions()
    assert (top < 0).any()
    assert (top >= 0).any()
    found = draft_loss({name: 1.0}, logits.float(), log_p.float(), top)
    assert found.tolist() == pytest.approx(reference(name, logits, p, top), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("name", LOSSES)
def test_a_losss_gradient_is_its_finite_difference(name):
    logits, log_p, p, top = distributions()
    given = logits.float().requires_grad_()
    draft_loss({name: 1.0}, given, log_p.float(), top).sum().backward()
    width = 1e-5
    for row in range(len(logits)):
        for i in range(DRAFT):
            values = []
            for sign in (1, -1):
                moved = logits.clone()
                moved[row, i] += sign * width
                values.append(sum(reference(name, moved, p, top)))
            slope = (values[0] - values[1]) / (2 * width)
            assert given.grad[row, i].item() == pytest.approx(slope, rel=1e-3, abs=1e-5)


def test_a_position_whose_top_token_cannot_be_drafted_has_no_cross_entropy():
    logits, log_p, _, top = distributions()
    logits = logits.float().requires_grad_()
    outside = torch.full_like(top, -1)
    found = draft_loss({"ce": 1.0}, logits, log_p.float(), outside)
    found.sum().backward()
    assert found.tolist() == [0.0] * len(top)
    assert not logits.grad.any()


def test_mass_outside_the_draft_vocabulary_counts_as_never_accepted():
    # p has 0.4 in the draft vocabulary, spread as q is: the best that can be had is 0.4.
    q = torch.tensor([[0.5, 0.3, 0.2]])
    log_p = (0.4 * q).log()
    top = torch.tensor([-1])
    assert draft_loss({"tv": 1.0}, q.log(), log_p, top).item() == pytest.approx(0.6)
    assert draft_loss({"lk": 1.0}, q.log(), log_p, top).item() == pytest.approx(-math.log(0.4))
    expected = 0.4 * math.log(0.4)
    assert draft_loss({"kl": 1.0}, q.log(), log_p, top).item() == pytest.approx(expected)


def test_no_overlap_at_all_is_finite():
    log_p = torch.full((1, DRAFT), -200.0)
    logits = torch.zeros(1, DRAFT, requires_grad=True)
    found = draft_loss({"lk": 1.0, "kl": 1.0, "tv": 1.0}, logits, log_p, torch.tensor([-1]))
    found.sum().backward()
    assert math.isfinite(found.item())
    assert logits.grad.isfinite().all()


def test_a_mix_is_the_weighted_sum():
    logits, log_p, _, top = distributions()
    single = {n: draft_loss({n: 1.0}, logits.float(), log_p.float(), top) for n in LOSSES}
    mixed = draft_loss(parse_loss("0.5*kl + 2*tv+lk+.25*ce"), logits.float(), log_p.float(), top)
    expected = 0.5 * single["kl"] + 2 * single["tv"] + single["lk"] + 0.25 * single["ce"]
    torch.testing.assert_close(mixed, expected)


def test_mixes_parse():
    assert parse_loss("lk") == {"lk": 1.0}
    assert parse_loss("0.5*kl+0.5*tv") == {"kl": 0.5, "tv": 0.5}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "kld",
        "kl+",
        "kl-tv",
        "kl+kl",
        "KL",
        "0.5.5*kl",
        ".*kl",
        "0*kl",
        "-1*kl",
        "kl*0.5",
        "2kl",
    ],
)
def test_what_is_no_mix_is_refused_by_its_key(text):
    with pytest.raises(ValueError, match=r"^train\.loss must be a sum of kl, tv, lk, ce"):
        parse_loss(text)
