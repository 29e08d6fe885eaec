"""Beside the path: profiles fitted to logs, fingerprints, drift, and machines on paper."""

import logging
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from specfit.artifacts import Artifact, ArtifactStore, Recipe
from specfit.checks import require
from specfit.config import CONF, RunConfig, Stage
from specfit.files import read_json, write_json
from specfit.recipes import predicting, traffic_of
from specfit.stages import drift, fingerprint, predict
from specfit.targets.locate import file_digest
from specfit.traffic.inputs import TrafficInputs
from specfit.traffic.profile_files import from_json, to_json
from specfit_data.sources import local_file

LOGS_VERSION = 1
log = logging.getLogger(__name__)


class Beside:
    """The stages that read no artifact of the path, or one of another profile."""

    def __init__(
        self,
        cfg: RunConfig,
        store: ArtifactStore,
        target_key: str,
        count_tokens: Callable[[str], int],
    ) -> None:
        """`count_tokens` is of the tokenizer of the target whose artifact has `target_key`."""
        self.cfg, self.store, self.target_key = cfg, store, target_key
        self.inputs = TrafficInputs(cfg.profile, cfg.data.sources, cfg.seed, CONF, count_tokens)
        self.log_record: dict[str, Any] | None = None  # of the log that the profile is fitted to

    def observed(self) -> RunConfig:
        """The configuration with the profile that `from_logs` or `from_fingerprint` asks for.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: what it holds cannot become a profile.
        """
        given = self.cfg.profile
        if given.from_fingerprint is not None:
            path = Path(given.from_fingerprint).expanduser()
            return replace(self.cfg, profile=self.inputs.of_fingerprint(path))
        if given.from_logs is None:
            return self.cfg
        path = Path(given.from_logs).expanduser()
        require(path.is_file(), "profile.from_logs", "be a file", given.from_logs)

        def make(folder: Path) -> None:
            found = self.inputs.of_log(path)
            for note in found.record["notes"]:
                log.warning("%s: %s", given.from_logs, note)
            fitted = {"profile": to_json(found.profile), "record": found.record}
            write_json(folder / "profile.json", fitted)

        params = self._base() | {"log": self._digest(path)}
        # Lengths that a log does not say are counted by the target's tokenizer.
        inputs = {"target": self.target_key}
        recipe = Recipe("logs", LOGS_VERSION, params, inputs)
        # Its weights and lengths are in the keys of all that follows.
        known = self.cfg.stage is not Stage.status or self.store.find(recipe) is not None
        before = "be fitted before its status is asked for (stage=profile does that)"
        require(known, "profile.from_logs", before, given.from_logs)
        made = self.store.get_or_make(recipe, make)
        file = made.file("profile.json")
        found = read_json(file)
        self.log_record = {"log": str(given.from_logs)} | found["record"]
        return replace(self.cfg, profile=from_json(found["profile"], str(file)))

    def fingerprint(self) -> Artifact:
        """Counts a stream. A window that was released is found again, whatever the stream holds.

        So what is hashed is its name: a hash of the stream would say what was in it.
        """
        config = self.cfg.fingerprint
        ledger = Path(config.ledger or self.store.root / "fingerprint-ledger.json").expanduser()

        def make(folder: Path) -> None:
            with fingerprint.opened(config.requests) as stream:
                fingerprint.run(
                    folder,
                    config=config,
                    profile=self.cfg.profile,
                    classifier=self.inputs.classifier,
                    stream=stream,
                    ledger=ledger,
                )

        params = self._base() | {"fingerprint": asdict(config)}
        return self.store.get_or_make(
            Recipe(Stage.fingerprint.name, fingerprint.VERSION, params, {}), make
        )

    def drift(self, measure: Callable[[], Artifact]) -> Artifact:
        """`drift.old` (the profile that is fitted to, if null) against `drift.new`.

        Both are read before `measure` is asked, which may take hours.

        Raises:
            FileNotFoundError: there is no such profile or file.
            ValueError: `drift.new` is not given, or one of them is no profile.
        """
        config = self.cfg.drift
        require(config.new is not None, "drift.new", "be given for stage=drift", None)
        new = self.inputs.named(str(config.new), "drift.new")
        if config.old is None:
            old = self.observed().profile
        else:
            old = self.inputs.named(config.old, "drift.old")
        measured = measure()
        rows = read_json(measured.file("acceptance.json"))["rows"]
        thresholds = asdict(config)
        del thresholds["old"], thresholds["new"]
        params = {"drift": thresholds, "old": to_json(old), "new": to_json(new)}
        return self.store.get_or_make(
            Recipe(Stage.drift.name, drift.VERSION, params, {"measure": measured.key}),
            lambda folder: drift.run(folder, config=config, old=old, new=new, acceptance=rows),
        )

    def _base(self) -> dict[str, Any]:
        """What a log's or stream's requests may be of; a local file counts by its content."""
        sources = {}
        for name in sorted({name for c in self.cfg.profile.components for name in c.sources}):
            if name in self.cfg.data.sources:
                source = self.cfg.data.sources[name]
                sources[name] = asdict(source)
                path = local_file(source, name)
                if path is not None:
                    sources[name]["path"] = self._digest(path)
        return {"profile": traffic_of(self.cfg), "sources": sources, "seed": self.cfg.seed}

    def _digest(self, path: Path) -> str:
        return file_digest(path, self.store.root / "digests.json")


def is_described(cfg: RunConfig) -> bool:
    """Whether `predict` is arithmetic: model, acceptance and machine are all given."""
    given = cfg.predict.model is not None and cfg.predict.acceptance is not None
    return cfg.stage is Stage.predict and given


def described(cfg: RunConfig) -> Recipe:
    """The recipe of `predict` for a model on paper."""
    return Recipe(Stage.predict.name, predict.VERSION, predicting(cfg), {})


def predicted(cfg: RunConfig, store: ArtifactStore) -> Artifact:
    """`predict` for a model on paper: nothing is loaded."""
    return store.get_or_make(
        described(cfg),
        lambda folder: predict.run(
            predict.PredictJob(
                folder=folder, config=cfg.predict, hardware=cfg.hardware, profile=cfg.profile
            )
        ),
    )
