"""The training loop of one process."""

import logging
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol, runtime_checkable

import torch
from accelerate import Accelerator
from jaxtyping import Float
from torch import Tensor
from tqdm import tqdm

from specfit.draft_vocab import DraftVocab
from specfit.mix import Sessions, each_alone, mixed_acceptance_length, mixed_interval
from specfit.speculators.batches import TrainBatch, pack
from specfit.targets.target import HiddenStates
from specfit.training.checkpoints import Progress, load_state, rounded, save_head, save_state
from specfit.training.config import TrainConfig
from specfit.training.objective import DraftObjective, PackFigures
from specfit.training.replay import replay
from specfit.training.runlog import RunLog
from specfit.training.schedule import StepPlan, eval_steps, learning_rate, plan_steps

log = logging.getLogger(__name__)


@runtime_checkable
class Listed(Protocol):
    """What is known of a document before its states are read."""

    @property
    def id(self) -> str:
        """Of its conversation."""

    @property
    def component(self) -> str:
        """Of the profile."""

    @property
    def split(self) -> str:
        """`train` or `validation`."""

    @property
    def num_tokens(self) -> int:
        """Prompt and answer."""


@runtime_checkable
class StateSource(Protocol):
    """A store, or states made on the fly."""

    @property
    def documents(self) -> Sequence[Listed]:
        """All documents, in the order of their indices."""

    def read(self, index: int) -> HiddenStates:
        """The states of document `index`."""


@dataclass(frozen=True)
class Documents:
    """Where documents are read, and which are for what."""

    source: StateSource
    train: list[int]  # indices into the source
    train_lengths: list[int]
    validation: dict[str, list[int]]  # by component
    weights: dict[str, float]  # of the components, by requests

    def batch(self, packed: Sequence[int], device: torch.device) -> TrainBatch:
        """The pack of the training documents `packed`."""
        return pack([self.source.read(self.train[i]) for i in packed]).to(device)


def train(
    objective: DraftObjective,
    documents: Documents,
    config: TrainConfig,
    *,
    seed: int,
    accelerator: Accelerator,
    vocab: DraftVocab,
    runlog: RunLog,
    begins_trained: bool = False,
) -> Progress:
    """Trains to the last step of the plan, from wherever an earlier run in this folder got to.

    With `begins_trained` the head is measured before the first step, too, and may be what is kept.
    """
    head = objective.head
    optimizer = torch.optim.AdamW(
        [p for p in head.parameters() if p.requires_grad],
        lr=config.lr,
        betas=(config.betas[0], config.betas[1]),
        weight_decay=config.weight_decay,
        fused=True,  # one pass over the weights: a quarter of a step of small packs otherwise
    )
    plans = plan_steps(documents.train_lengths, config, seed)
    evals = eval_steps(len(plans), config.evals)
    resumed = load_state(runlog.folder, head, optimizer)
    progress = resumed or Progress()
    wrapped = accelerator.prepare(objective)
    main = accelerator.is_main_process
    if main:
        runlog.rewind(progress.step if resumed else -1)
    started = saved = perf_counter()
    before = progress.seconds
    if main and begins_trained and not resumed:
        _evaluate(objective, documents, config, seed, vocab, progress, 0, runlog)
    bar = tqdm(total=len(plans), initial=progress.step, unit="step", desc="train", disable=not main)
    for step in range(progress.step, len(plans)):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, len(plans), config)
        figures = _step(wrapped, optimizer, plans[step], documents, config, accelerator)
        progress.step = step + 1
        progress.seconds = before + perf_counter() - started
        if main:
            lr = optimizer.param_groups[0]["lr"]
            row = {"step": step + 1, "epoch": plans[step].epoch, "lr": lr}
            row |= figures | {"seconds": progress.seconds}
            runlog.step(row)
            bar.update()
            bar.set_postfix_str(_summary(row, progress))
            if step + 1 in evals:
                _evaluate(objective, documents, config, seed, vocab, progress, row["epoch"], runlog)
            if step + 1 in evals or perf_counter() - saved > config.save_every_s:
                save_state(runlog.folder, head, optimizer, progress)
                saved = perf_counter()
        accelerator.wait_for_everyone()
    bar.close()
    return progress


def _step(
    wrapped: Any,
    optimizer: torch.optim.Optimizer,
    plan: StepPlan,
    documents: Documents,
    config: TrainConfig,
    accelerator: Accelerator,
) -> dict[str, Any]:
    """One optimizer step: this process's packs, weighted by what all packs hold together."""
    world, rank = accelerator.num_processes, accelerator.process_index
    packs = plan.packs[rank::world]
    # Every process runs as many packs; one that has none left runs another's, without weight.
    num_rounds = -(-len(plan.packs) // world)
    shares = [1.0] * len(packs) + [0.0] * (num_rounds - len(packs))
    packs = packs + [plan.packs[0]] * (num_rounds - len(packs))
    optimizer.zero_grad(set_to_none=True)
    sums = torch.zeros(2 + 3 * config.ttt_steps, device=accelerator.device, dtype=torch.float64)
    for i, (share, packed) in enumerate(zip(shares, packs, strict=True)):
        last = i == num_rounds - 1
        with nullcontext() if last else accelerator.no_sync(wrapped):
            figures: PackFigures = wrapped(documents.batch(packed, accelerator.device))
            (share * figures.loss).backward()  # type: ignore[no-untyped-call]
        sums += share * _flat(figures)
    sums = accelerator.reduce(sums)
    # So far the gradient is the mean over processes of sums over packs.
    parameters = [p for p in wrapped.parameters() if p.grad is not None]
    for parameter in parameters:
        parameter.grad.mul_(world / sums[1].float())
    norm = torch.nn.utils.clip_grad_norm_(parameters, config.max_grad_norm)
    optimizer.step()
    return _row(sums, config.ttt_steps) | {"grad_norm": float(norm)}


def _flat(figures: PackFigures) -> Float[Tensor, "figures"]:
    parts = [figures.loss.detach()[None], figures.weight[None]]
    return torch.cat([*parts, figures.counted, figures.correct, figures.kept]).double()


def _row(sums: Float[Tensor, "figures"], num_steps: int) -> dict[str, Any]:
    counted, correct, kept = sums[2:].view(3, num_steps).tolist()
    return {
        "loss": float(sums[0] / sums[1]),
        "tokens": int(counted[0]),
        "accuracy": [c / max(1, n) for c, n in zip(correct, counted, strict=True)],
        # Of greedy drafting over the recorded text: 1 + the mean number of right drafts in a row.
        "expected_acceptance_length": 1 + sum(kept) / max(1, counted[0]),
    }


def _evaluate(
    objective: DraftObjective,
    documents: Documents,
    config: TrainConfig,
    seed: int,
    vocab: DraftVocab,
    progress: Progress,
    epoch: int,
    runlog: RunLog,
) -> None:
    """Measures acceptance on the validation conversations; the best head so far is kept."""
    head = rounded(objective.head)
    stats: dict[str, Sessions] = {}
    for component, indices in documents.validation.items():
        found = replay(
            head,
            (documents.source.read(i) for i in indices),
            num_draft_tokens=config.eval_draft_tokens,
            embeddings=objective.embeddings,
            target_ids=objective.target_ids,
        )
        # What has no round (no answer, or answers of one token) has no acceptance length either.
        if any(s.num_rounds for s in found):
            stats[component] = each_alone(found)
    if not stats:
        raise ValueError(
            "data.num_validation must be larger: no validation answer has more than one token"
        )
    length = mixed_acceptance_length(stats, documents.weights)
    low, high = mixed_interval(
        stats, documents.weights, num_bootstrap=1000, confidence=0.95, seed=seed
    )
    better = length > progress.best
    if better:
        save_head(runlog.folder, head, vocab)
        progress.best, progress.best_step = length, progress.step
    by_component = {
        name: mixed_acceptance_length({name: own}, {name: 1.0}) for name, own in stats.items()
    }
    runlog.evaluation(
        {
            "step": progress.step,
            "epoch": epoch,
            "acceptance_length": length,
            "acceptance_length_low": low,
            "acceptance_length_high": high,
            "by_component": by_component,
            "kept": better,
        }
    )
    log.info(
        "train step %d: validation acceptance length %.3f [%.3f, %.3f] at k=%d%s",
        *(progress.step, length, low, high, config.eval_draft_tokens, ", kept" if better else ""),
    )


def _summary(row: dict[str, Any], progress: Progress) -> str:
    accuracy = "/".join(f"{a:.2f}" for a in row["accuracy"])
    return (
        f"loss {row['loss']:.3f} acc {accuracy} AL {row['expected_acceptance_length']:.2f}"
        f" best {progress.best:.3f}"
    )
