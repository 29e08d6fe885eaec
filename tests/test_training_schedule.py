"""Which packs a step takes, and learning rates."""

import math

import pytest

from specfit.training.config import TrainConfig
from specfit.training.schedule import eval_steps, learning_rate, plan_steps


def test_the_learning_rate_rises_linearly_and_falls_as_a_cosine():
    config = TrainConfig(lr=1.0, min_lr_share=0.1, warmup_share=0.2)
    found = [learning_rate(step, 20, config) for step in range(20)]
    assert found[:5] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])
    assert found[12] == pytest.approx(0.1 + 0.9 / 2)  # half of the cosine
    assert found[8] == pytest.approx(0.1 + 0.9 * (1 + math.sqrt(0.5)) / 2)
    assert found[3:] == sorted(found[3:], reverse=True)
    assert 0.1 < found[-1] < 0.12


def test_without_warmup_the_first_step_has_the_whole_rate():
    config = TrainConfig(lr=2.0, warmup_share=0.0)
    assert learning_rate(0, 10, config) == 2.0


@pytest.mark.parametrize("num_steps", [1, 2, 3])
def test_the_rate_of_a_short_training_is_positive_and_at_most_lr(num_steps):
    config = TrainConfig(lr=1.0)
    rates = [learning_rate(step, num_steps, config) for step in range(num_steps)]
    assert all(0 < rate <= 1 for rate in rates)


@pytest.mark.parametrize("packs_per_step", [1, 2, 3, 8])
def test_every_document_is_in_one_step_of_each_epoch_the_tail_included(packs_per_step):
    lengths = [5, 3, 9, 4, 4, 7, 2]
    config = TrainConfig(epochs=3, pack_tokens=10, packs_per_step=packs_per_step)
    plans = plan_steps(lengths, config, seed=0)
    for epoch in range(3):
        own = [plan for plan in plans if plan.epoch == epoch]
        assert sorted(i for plan in own for p in plan.packs for i in p) == list(range(7))
        assert all(len(plan.packs) == packs_per_step for plan in own[:-1])
        assert 1 <= len(own[-1].packs) <= packs_per_step
    assert [plan.epoch for plan in plans] == sorted(plan.epoch for plan in plans)


@pytest.mark.parametrize("num_evals", [1, 2, 3, 7, 10, 50])
@pytest.mark.parametrize("num_steps", [1, 2, 9, 10, 33])
def test_evaluations_are_evenly_spaced_and_end_with_the_last_step(num_steps, num_evals):
    found = sorted(eval_steps(num_steps, num_evals))
    assert len(found) == min(num_steps, num_evals)
    assert found[-1] == num_steps
    gaps = [b - a for a, b in zip([0, *found], found, strict=False)]
    assert min(gaps) >= 1
    assert max(gaps) - min(gaps) <= 1
