"""Configurations of the whole path on a tiny target: composed as the command line composes them."""

import copy
import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir

from specfit import config, pipeline
from specfit.artifacts import Artifact, ArtifactStore

CONF = Path(__file__).parents[1] / "conf"
SMALL = [
    "data=local",
    "data.num_train=8",
    "data.num_validation=2",
    "data.num_test=3",
    "profile=local",
    "profile.name=tiny",
    "profile.components=[{name:mine,weight:1,sources:[mine]}]",
    "generate.max_new_tokens=16",
    "generate.batch_size=4",
    "speculator.draft_vocab_size=128",
    "train.ttt_steps=2",
    "train.epochs=1",
    "train.pack_tokens=128",
    "train.evals=1",
    "measure.num_draft_tokens=[2]",
    "measure.max_new_tokens=12",
    "measure.num_timed=1",
    "measure.num_bootstrap=50",
    "runtime.device=cpu",
    "runtime.num_threads=1",
    "runtime.min_free_gb=0",
]


def overrides(root: Path, target: Path, data: Path, *more: str) -> list[str]:
    """Of a small run; those in `more` come last and win."""
    named = [
        "target=folder",
        f"target.path={target}",
        f"data.sources.mine.path={data}",
        f"runtime.root={root}",
    ]
    return [*SMALL, *named, *more]


def composed(words: Sequence[str]) -> config.RunConfig:
    """The configuration that the command line makes of `words`."""
    return copy.deepcopy(_composed(tuple(words)))


@functools.cache
def _composed(words: tuple[str, ...]) -> config.RunConfig:
    config.register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return config.typed(compose("config", overrides=list(words)))


def run(words: Sequence[str], *more: str) -> Artifact:
    """Runs up to the stage that `words` and `more` ask for."""
    return pipeline.run(composed([*words, *more]))


def keys(words: Sequence[str], *more: str) -> dict[str, str]:
    """The keys of all stages."""
    return {s: r.key for s, r in pipeline.recipes(composed([*words, *more])).items()}


def artifacts(words: Sequence[str], *more: str) -> dict[str, Artifact | None]:
    """What is made of each stage, or None."""
    cfg = composed([*words, *more])
    store = ArtifactStore(cfg.runtime.root)
    return {stage: store.find(recipe) for stage, recipe in pipeline.recipes(cfg).items()}


def read_json(artifact: Artifact, name: str) -> Any:
    """A verified file of an artifact."""
    return json.loads(artifact.file(name).read_text())


def read_lines(artifact: Artifact, name: str) -> list[Any]:
    """The rows of a verified file of an artifact."""
    return [json.loads(line) for line in artifact.file(name).read_text().splitlines()]
