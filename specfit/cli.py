"""`specfit stage=train train.ttt_steps=5`: the only entry point.

It imports no torch, so that `--help` and a mistyped key answer at once.
"""

import difflib
import logging
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import is_dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import NoReturn, get_type_hints

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from specfit import config
from specfit.artifacts import ArtifactStore, StatusRow
from specfit.checks import GateRejected
from specfit.files import write_json

log = logging.getLogger(__name__)
config.register()

# What a user did, or the machine: said in one line. Anything else is ours, and shows its traceback.
USER_ERRORS = (
    *(ValueError, TypeError, OSError, ModuleNotFoundError),
    *(HydraException, OmegaConfBaseException),
)


def main() -> None:
    """Runs the command line.

    Exits with 2 after an error of the user's, 3 where a gate rejects what was made, 130 after
    Ctrl-C.
    """
    # OpenMP's waiting threads otherwise burn the cores that other work on the machine needs, and
    # then wait for it in turn: ten times slower beside one busy process. So few rounds cost nothing
    # when alone; not to wait at all costs a third. Read when torch loads.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises errors instead of printing its own pages
    try:
        _app()
    except USER_ERRORS as error:
        if "SPECFIT_DEBUG" in os.environ:
            raise
        _exit(error)
    except KeyboardInterrupt:
        sys.stderr.write(
            "specfit: interrupted; what was made is kept: the same command resumes there\n"
        )
        sys.exit(130)


@hydra.main(version_base="1.3", config_path=str(config.CONF), config_name="config")
def _app(cfg: DictConfig) -> None:
    try:
        _job(config.typed(cfg))
    except USER_ERRORS as error:
        if HydraConfig.get().mode is RunMode.MULTIRUN:
            # Hydra runs the other jobs of the sweep, and raises the first error after them.
            log.error("job failed error=%s", one_line(error))
            raise
        if "SPECFIT_DEBUG" in os.environ:
            raise
        _exit(error)


def _exit(error: BaseException) -> NoReturn:
    sys.stderr.write(f"specfit: error: {one_line(error)}\n")
    sys.exit(3 if isinstance(error, GateRejected) else 2)


def _job(cfg: config.RunConfig) -> None:
    from specfit import pipeline

    if cfg.stage is config.Stage.status:
        sys.stdout.write(status_table(pipeline.status(cfg), datetime.now(UTC)))
        return
    try:
        artifact = pipeline.run(cfg)
    except GateRejected:
        _record(cfg, None)  # a sweep compares it all the same: what was rejected is kept
        raise
    _record(cfg, str(artifact.path))
    if cfg.stage is not config.Stage.serve:  # what it had to say is its address
        sys.stdout.write(f"{artifact.path}\n")
        sys.stdout.flush()


def _record(cfg: config.RunConfig, made: str | None) -> None:
    """Writes job.json: what a sweep reads of a job."""
    from specfit import pipeline

    job = {
        "overrides": list(HydraConfig.get().overrides.task),
        "stage": cfg.stage.name,
        "artifact": made,
        "keys": {stage: recipe.key for stage, recipe in pipeline.recipes(cfg).items()},
        "root": str(ArtifactStore(cfg.runtime.root).root),
    }
    write_json(Path(HydraConfig.get().runtime.output_dir) / "job.json", job)


def status_table(rows: Sequence[StatusRow], now: datetime) -> str:
    """One line an artifact: stage, key, size, state, and how long ago it was written."""
    cells = [("stage", "key", "size", "state", "age")]
    for row in rows:
        size = _size(row.num_bytes) if row.state != "missing" else "-"
        age = _age((now - row.when).total_seconds()) if row.when else "-"
        cells.append((row.stage, row.key, size, row.state, age))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in cells
    )
    return "\n".join(lines) + "\n"


def one_line(error: BaseException) -> str:
    """What is wrong, in one line, with the full key that Hydra and OmegaConf set apart."""
    if not isinstance(error, HydraException | OmegaConfBaseException):
        return _joined(str(error)) or type(error).__name__
    chain: list[BaseException] = [error]
    while (cause := chain[-1].__cause__) is not None:
        chain.append(cause)
    # The innermost is about the value; those around it repeat it in general terms.
    reason = next((e for e in reversed(chain) if isinstance(e, OmegaConfBaseException)), error)
    text, _, _ = str(reason).partition("Config search path")
    key = re.search(r"full_key: (\S+)", text)
    if key is None:
        return _joined(text)
    if re.match(r"Key '.*' (is not in struct|not in )", text):
        return _unknown_key(key[1])
    if isinstance(reason, MissingMandatoryValue):
        return f"{key[1]} must be given"
    return f"{key[1]}: {_joined(text[: key.start()])}"


def _unknown_key(key: str) -> str:
    """Says which known key `key` may have been meant to be."""
    known = [*_keys(config.RunConfig), "experiment"]  # a group that holds no values of its own
    parent, _, name = key.rpartition(".")
    siblings = [k.removeprefix(f"{parent}.") for k in known if k.rpartition(".")[0] == parent]
    if close := difflib.get_close_matches(name, siblings, n=1):
        nearest = f"{parent}.{close[0]}".removeprefix(".")
        return f"unknown key {key}; did you mean {nearest}?"
    # The right name in the wrong place, `lr=1` for `train.lr=1`.
    if elsewhere := [k for k in known if k.rpartition(".")[2] == name]:
        return f"unknown key {key}; did you mean {' or '.join(elsewhere)}?"
    if siblings:
        return f"unknown key {key}; known here: {', '.join(sorted(siblings))}"
    return f"unknown key {key}; `specfit --cfg job` prints all"


def _keys(node: type, prefix: str = "") -> Iterator[str]:
    for name, kind in get_type_hints(node).items():
        yield f"{prefix}{name}"
        if isinstance(kind, type) and is_dataclass(kind):
            yield from _keys(kind, f"{prefix}{name}.")


def _joined(text: str) -> str:
    return " ".join(text.split())


def _size(num_bytes: int) -> str:
    value, units = float(num_bytes), ["B", "KiB", "MiB", "GiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.0f} {units[0]}" if units[0] == "B" else f"{value:.1f} {units[0]}"


def _age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
