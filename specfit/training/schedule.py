"""Which packs an optimizer step takes, and its learning rate."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from specfit.speculators.batches import epoch_packs
from specfit.training.config import TrainConfig


@dataclass(frozen=True)
class StepPlan:
    """One optimizer step."""

    epoch: int
    packs: list[list[int]]  # document indices


def plan_steps(lengths: Sequence[int], config: TrainConfig, seed: int) -> list[StepPlan]:
    """All steps of a training, the last of each epoch with what is left: every document counts."""
    plans = []
    for epoch in range(config.epochs):
        packs = epoch_packs(lengths, config.pack_tokens, seed=seed, epoch=epoch)
        plans += [
            StepPlan(epoch, packs[i : i + config.packs_per_step])
            for i in range(0, len(packs), config.packs_per_step)
        ]
    return plans


def eval_steps(num_steps: int, num_evals: int) -> set[int]:
    """After which steps acceptance is measured: evenly spaced, the last one among them."""
    return {math.ceil(num_steps * (i + 1) / num_evals) for i in range(num_evals)}


def learning_rate(step: int, num_steps: int, config: TrainConfig) -> float:
    """Of step 0..num_steps-1: a linear rise, then a cosine down to `min_lr_share`."""
    warmup = max(1, round(config.warmup_share * num_steps))
    if step < warmup:
        return config.lr * (step + 1) / warmup
    done = (step - warmup) / max(1, num_steps - warmup)
    share = config.min_lr_share
    return config.lr * (share + (1 - share) * 0.5 * (1 + math.cos(math.pi * done)))
