"""What training writes down: JSON lines, and Weights & Biases when asked for."""

import logging
import os
from pathlib import Path
from typing import Any

from specfit.files import append_jsonl, dumps, read_jsonl, write_text

log = logging.getLogger(__name__)

STEPS = "train_log.jsonl"
EVALS = "evals.jsonl"


class RunLog:
    """The two logs of a training folder."""

    def __init__(self, folder: Path, *, wandb_project: str | None, config: dict[str, Any]) -> None:
        """Opens the logs; `wandb_project` None leaves Weights & Biases out."""
        self.folder = folder
        self._wandb = _start_wandb(wandb_project, folder, config) if wandb_project else None

    def rewind(self, step: int) -> None:
        """Forgets what was written after `step`: it will be written again, the same.

        A log that was not begun is empty then.
        """
        for name in (STEPS, EVALS):
            path = self.folder / name
            rows = read_jsonl(path, tolerate_truncated_tail=True) if path.exists() else []
            kept = [row for row in rows if row["step"] <= step]
            write_text(path, "".join(dumps(row) + "\n" for row in kept))

    def step(self, row: dict[str, Any]) -> None:
        """One optimizer step."""
        append_jsonl(self.folder / STEPS, [row])
        if self._wandb:
            accuracy = {f"accuracy/{i + 1}": a for i, a in enumerate(row["accuracy"])}
            flat = {key: value for key, value in row.items() if not isinstance(value, list)}
            self._wandb.log(flat | accuracy, step=row["step"])

    def evaluation(self, row: dict[str, Any]) -> None:
        """One measurement of acceptance."""
        append_jsonl(self.folder / EVALS, [row])
        if self._wandb:
            lengths = {f"validation/{name}": al for name, al in row["by_component"].items()}
            mix = {"validation/acceptance_length": row["acceptance_length"]}
            self._wandb.log(mix | lengths, step=row["step"])

    def close(self) -> None:
        """Ends the run."""
        if self._wandb:
            self._wandb.finish()


def _start_wandb(project: str, folder: Path, config: dict[str, Any]) -> Any:
    try:
        import wandb
    except ImportError as error:
        raise ModuleNotFoundError(
            "runtime.wandb needs the package: pip install 'specfit-llm[wandb]'"
        ) from error
    online = bool(os.environ.get("WANDB_API_KEY"))
    if not online:
        log.info("runtime.wandb: no WANDB_API_KEY, so the run is kept offline in %s", folder)
    return wandb.init(
        project=project,
        name=folder.name.removesuffix(".partial"),
        dir=folder.parent,
        config=config,
        mode="online" if online else "offline",
        resume="allow",
        id=folder.name.removesuffix(".partial"),
    )
