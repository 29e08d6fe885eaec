"""A training of a tiny head on documents in memory, also as the work of a process."""

import os
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import tiny_heads
from accelerate import Accelerator

from specfit.targets.target import HiddenStates
from specfit.training.checkpoints import Progress
from specfit.training.config import TrainConfig
from specfit.training.loop import Documents, train
from specfit.training.runlog import RunLog

NUM_TRAIN = 7


@dataclass(frozen=True)
class ListedStates:
    """A state source of documents in memory; those of `validation` come last."""

    states: list[HiddenStates]

    @property
    def documents(self) -> list[Any]:
        """Lengths are all that is asked."""
        return [SimpleNamespace(num_tokens=len(s.input_ids)) for s in self.states]

    def read(self, index: int) -> HiddenStates:
        """The states of document `index`."""
        return self.states[index]


def make_documents(speculator: tiny_heads.Speculator) -> Documents:
    """The target's own greedy answers, the last three of them for validation."""
    requests = tiny_heads.greedy_requests(NUM_TRAIN + 3)
    settings = {"num_draft_tokens": 0, "max_new_tokens": 10, "batch_size": 2}
    answers = tiny_heads.answer(speculator, requests, **settings)
    states = []
    for request in requests:
        whole = list(request.prompt) + answers[request.id].tokens
        states.append(speculator.document(whole, [(len(request.prompt), len(whole))]))
    return Documents(
        ListedStates(states),
        list(range(NUM_TRAIN)),
        [len(s.input_ids) for s in states[:NUM_TRAIN]],
        {"code": [NUM_TRAIN, NUM_TRAIN + 1], "chat": [NUM_TRAIN + 2]},
        {"code": 2.0, "chat": 1.0},
    )


def config(**changes: Any) -> TrainConfig:
    """Ten optimizer steps in two epochs, unless changed."""
    settings = {"ttt_steps": 2, "epochs": 2, "pack_tokens": 48, "lr": 5e-3, "evals": 3}
    settings |= {"eval_draft_tokens": 3, "save_every_s": 0.0}
    return TrainConfig(**(settings | changes))


def run(folder: Path, documents: Documents | None = None, **changes: Any) -> Progress:
    """Trains in `folder`, from wherever an earlier run there got to."""
    settings = config(**changes)
    speculator = tiny_heads.make_speculator(tiny_heads.make_target())
    folder.mkdir(exist_ok=True)
    return train(
        speculator.objective(num_steps=settings.ttt_steps),
        documents or make_documents(speculator),
        settings,
        seed=0,
        accelerator=Accelerator(cpu=True),
        vocab=speculator.vocab,
        runlog=RunLog(folder, wandb_project=None, config={}),
    )


def work(folder: Path, changes: dict[str, Any]) -> None:
    """What each of several processes runs."""
    run(folder, **changes)
    (folder / f"rank-{os.environ['RANK']}-of-{os.environ['WORLD_SIZE']}").touch()
