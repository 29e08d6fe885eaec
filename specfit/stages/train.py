"""`train`: fits the speculator; the checkpoint that is kept is the one that was accepted most."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from accelerate import Accelerator

from specfit.artifacts import Artifact
from specfit.config import ExtractConfig, Init, SpeculatorConfig
from specfit.draft_vocab import DraftVocab
from specfit.export.imports import read_head
from specfit.files import read_jsonl, require_free, write_json
from specfit.speculators.eagle3 import Eagle3
from specfit.speculators.initialize import head_config, initialize
from specfit.speculators.losses import parse_loss
from specfit.states.documents import read_documents
from specfit.states.online import OnlineStates
from specfit.states.store import StateStore
from specfit.targets.target import Target
from specfit.training.checkpoints import Progress, drop_states
from specfit.training.config import TrainConfig
from specfit.training.launch import launch
from specfit.training.loop import Documents, Listed, StateSource, train
from specfit.training.objective import DraftObjective
from specfit.training.runlog import EVALS, STEPS, RunLog
from specfit_kernels.floors import speed

VERSION = 3
FIGURES = "train.json"  # written last
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainJob:
    """Everything that a training process needs; it is sent to each."""

    folder: Path
    config: TrainConfig
    speculator: SpeculatorConfig
    extract: ExtractConfig
    weights: dict[str, float]  # of the profile's components
    seed: int
    answers: Artifact
    fit: Artifact
    states: Artifact | None  # None: on the fly
    open_target: Callable[[], Target]
    wandb_project: str | None


def check(config: TrainConfig, speculator: SpeculatorConfig, num_processes: int) -> None:
    """Refuses what could not be trained, before hours go into what it would be trained on.

    Raises:
        ValueError: the loss is not known, the processes cannot share the packs evenly, or random
            rows would be frozen.
    """
    parse_loss(config.loss)
    if config.epochs == 0 and speculator.from_checkpoint is None:
        raise ValueError(
            "train.epochs must be at least 1 without speculator.from_checkpoint, got 0"
        )
    begins_random = speculator.from_checkpoint is None and speculator.init is Init.random
    if config.freeze_lm_head and begins_random:
        raise ValueError("train.freeze_lm_head must be false with speculator.init=random")
    if config.packs_per_step % num_processes:
        raise ValueError(
            f"train.packs_per_step must be a multiple of runtime.num_processes ({num_processes}), "
            f"got {config.packs_per_step}"
        )


def run(job: TrainJob, *, num_processes: int) -> None:
    """Writes model.safetensors, config.json, train_log.jsonl, evals.jsonl and train.json."""
    check(job.config, job.speculator, num_processes)
    if not (job.folder / FIGURES).exists():  # else a run was killed after its last line
        launch(_work, num_processes, job)
    drop_states(job.folder)


def _work(job: TrainJob) -> None:
    target = job.open_target()
    accelerator = Accelerator(cpu=target.device.type == "cpu")
    given = job.speculator.from_checkpoint
    if given is not None:
        head, vocab = read_head(Path(given), target)
    else:
        vocab = DraftVocab.load(job.fit.file("draft_vocab.safetensors"))
        head = Eagle3(head_config(job.speculator, target.info))
        initialize(head, target, vocab, job.speculator.init, job.seed)
    head.lm_head.requires_grad_(not job.config.freeze_lm_head)
    num_parameters = sum(p.numel() for p in head.parameters())
    # Weights and two moments, twice while one state replaces another, and the kept head.
    require_free(job.folder, num_parameters * 4 * 3 * 2, "the states to resume training from")
    objective = DraftObjective(
        head.to(target.device),
        target,
        vocab,
        num_steps=job.config.ttt_steps,
        step_decay=job.config.step_decay,
        loss=parse_loss(job.config.loss),
    )
    documents = _documents(job, target)
    runlog = RunLog(
        job.folder,
        wandb_project=job.wandb_project if accelerator.is_main_process else None,
        config=asdict(job.config) | asdict(job.speculator),
    )
    progress = train(
        objective,
        documents,
        job.config,
        seed=job.seed,
        accelerator=accelerator,
        vocab=vocab,
        runlog=runlog,
        begins_trained=given is not None,
    )
    runlog.close()
    if accelerator.is_main_process:
        _write_figures(job, head, documents, progress)


def _documents(job: TrainJob, target: Target) -> Documents:
    source: StateSource
    if job.states is not None:
        source = StateStore(job.states)
    else:
        found = read_documents(
            job.answers.file("answers.jsonl"),
            max_tokens=job.extract.max_tokens,
            splits=("train", "validation"),
        )
        aux_layers = list(head_config(job.speculator, target.info).aux_layers)
        source = OnlineStates(target, found, aux_layers, job.extract.dtype)
    listed: Sequence[Listed] = source.documents
    index = {d.id: i for i, d in enumerate(listed)}
    of_train = [index[row["id"]] for row in read_jsonl(job.fit.file("mixture.jsonl"))]
    lengths = [listed[i].num_tokens for i in of_train]
    validation = {
        name: [i for i, d in enumerate(listed) if (d.split, d.component) == ("validation", name)]
        for name in job.weights
    }
    if not any(validation.values()):
        raise ValueError("data.num_validation must be larger: no validation answer is left")
    return Documents(source, of_train, lengths, validation, job.weights)


def _write_figures(job: TrainJob, head: Eagle3, documents: Documents, progress: Progress) -> None:
    rows = read_jsonl(job.folder / STEPS)
    evals = read_jsonl(job.folder / EVALS)
    num_chains = sum(row["tokens"] for row in rows)
    layer: float = sum(p.numel() for p in head.layer.parameters())
    # Three products a weight: forward, and the gradients of what goes in and of the weight, which
    # a frozen one does without. Keys, values and `fc` run on every token.
    layer += head.lm_head.weight.numel() * (2 / 3 if job.config.freeze_lm_head else 1)
    keys_values = 2 * head.layer.self_attn.k_proj.weight.numel()
    num_entries = job.config.epochs * sum(documents.train_lengths)
    per_chain = job.config.ttt_steps * layer - keys_values
    flops = 6.0 * (num_chains * per_chain + num_entries * (head.fc.weight.numel() + keys_values))
    figures: dict[str, object] = {
        "num_steps": progress.step,
        "num_tokens": num_chains,
        "kept_step": progress.best_step,
        "kept_acceptance_length": max(row["acceptance_length"] for row in evals),
        "num_parameters": sum(p.numel() for p in head.parameters()),
        "loss": job.config.loss,
        "ttt_steps": job.config.ttt_steps,
    }
    if progress.step:
        figures |= speed(
            num_tokens=num_chains,
            flops=flops,
            seconds=progress.seconds,
            shape=(
                max(1, num_chains // progress.step),
                head.config.intermediate_size,
                head.config.hidden_size,
            ),
            device=head.fc.weight.device,
        )
    write_json(job.folder / FIGURES, figures)
