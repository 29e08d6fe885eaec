"""What decides the result of each stage: the configuration that counts, and its inputs."""

import hashlib
import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from specfit.artifacts import Artifact, Recipe, artifact_at
from specfit.checks import require
from specfit.config import ExtractMode, RunConfig, Stage
from specfit.export.imports import files_of
from specfit.stages import (
    bench,
    export,
    extract,
    fit,
    generate,
    measure,
    predict,
    profile,
    prompts,
    quantize,
    report,
    sensitivity,
    target,
    train,
)
from specfit.targets.load import device_of, dtype_name
from specfit.targets.locate import Location, file_digest
from specfit.traffic.mixture import Share, known_token_shares, mixture
from specfit_data.sources import commit_of, local_file


def recipes_of(cfg: RunConfig, location: Location, digests: Path) -> dict[str, Recipe]:
    """The recipe of each stage of the path, in order; `bench` is on it where it is asked for."""
    found: dict[str, Recipe] = {}

    def add(stage: Stage, version: int, params: dict[str, Any], inputs: str) -> None:
        keys = {i: found[i].key for i in inputs.split()}
        found[stage.name] = Recipe(stage.name, version, params, keys)

    online = cfg.extract.mode is ExtractMode.online
    stored = "" if online else "extract"
    shares = [vars(share) for share in planned_mixture(cfg)]
    # What everything after the prompts is fitted to.
    served = "target" if cfg.quantize.budget is None else "quantize"
    add(Stage.target, target.VERSION, _target(cfg, location), "")
    add(Stage.prompts, prompts.VERSION, _data(cfg, digests) | {"mixture": shares}, "target")
    if cfg.stage is Stage.profile:
        add(Stage.profile, profile.VERSION, traffic_of(cfg) | {"seed": cfg.seed}, "prompts")
    if served == "quantize":
        alone, under_budget = _quantize(cfg)
        add(Stage.sensitivity, sensitivity.VERSION, alone, "target prompts")
        add(Stage.quantize, quantize.VERSION, under_budget, "target prompts sensitivity")
    add(Stage.generate, generate.VERSION, _generate(cfg), f"{served} prompts")
    head = given_checkpoint(cfg, digests)
    add(Stage.fit, fit.VERSION, _fitting(cfg, head), "prompts generate")
    states = asdict(cfg.extract)
    del states["mode"], states["while_generating"]  # how states are made, not what they are
    if not online:
        layers = {"aux_layers": None if head else cfg.speculator.aux_layers, "head": head}
        add(Stage.extract, extract.VERSION, states | layers, f"{served} generate")
    training = _training(cfg, head, states if online else None)
    add(Stage.train, train.VERSION, training, f"{served} generate fit {stored}")
    more = {name: head.key for name, head in more_heads(cfg).items()}
    if cfg.measure.full_precision_head:
        more["full_precision"] = recipes_of(unquantized(cfg), location, digests)["train"].key
    measuring = {
        "measure": _measuring(cfg) | {"speculators": more},
        "components": _components(cfg),
        "token_shares": known_token_shares(cfg.profile),
        "seed": cfg.seed,
    }
    add(Stage.measure, measure.VERSION, measuring, f"{served} prompts train")
    predicted = predicting(cfg)
    add(Stage.predict, predict.VERSION, predicted, f"{served} measure train")
    add(Stage.export, export.VERSION, _export(cfg, digests), f"{served} prompts train")
    if cfg.stage is Stage.bench or cfg.report.bench:
        timing = asdict(cfg.bench) | {"num_threads": cfg.runtime.num_threads}
        timing["processor"] = bench.processor()
        add(Stage.bench, bench.VERSION, timing, f"{served} prompts measure train")
    quantized = "quantize" if served == "quantize" else ""
    timed = "bench" if cfg.report.bench else ""
    read = f"prompts {quantized} generate fit {stored} train measure predict export {timed}"
    add(Stage.report, report.VERSION, _shown(cfg), read)
    return found


def _training(
    cfg: RunConfig, given: dict[str, str] | None, states: dict[str, Any] | None
) -> dict[str, Any]:
    return {
        "train": {k: v for k, v in asdict(cfg.train).items() if k != "save_every_s"},
        # One that is given decides all else about itself.
        "speculator": {"head": given} if given else asdict(cfg.speculator),
        "weights": {c.name: c.weight for c in cfg.profile.components},
        "states": states,
        "seed": cfg.seed,
    }


def _fitting(cfg: RunConfig, given: dict[str, str] | None) -> dict[str, Any]:
    head = measured_head(cfg)
    return {
        "components": [
            (c.name, c.weight, None if c.output_tokens is None else asdict(c.output_tokens))
            for c in cfg.profile.components
        ],
        "fit": asdict(cfg.fit) | {"measured": None if head is None else head.key},
        "draft_vocab_size": None if given else cfg.speculator.draft_vocab_size,
        "head": given,
        "max_tokens": cfg.extract.max_tokens,
    }


def _export(cfg: RunConfig, digests: Path) -> dict[str, Any]:
    file = cfg.export.target_gguf
    known = file is not None and Path(file).is_file()  # else the stage says what is wrong
    digest = file_digest(Path(file), digests) if known and file else file
    return asdict(cfg.export) | {"target_gguf": digest}


def _shown(cfg: RunConfig) -> dict[str, Any]:
    sweeps = {name: _sweep(getattr(cfg.report, name), name) for name in ("sweep", "matrix")}
    return {"profile": traffic_of(cfg)} | sweeps


def more_heads(cfg: RunConfig) -> dict[str, Artifact]:
    """The heads of `measure.speculators`.

    Raises:
        FileNotFoundError: a folder holds no artifact.
        ValueError: it is the artifact of another stage.
    """
    heads = cfg.measure.speculators.items()
    return {name: _head_at(path, f"measure.speculators.{name}") for name, path in heads}


def given_head(cfg: RunConfig) -> Artifact | None:
    """The head of `quantize.speculator`; raises as `more_heads`."""
    path = cfg.quantize.speculator
    return None if path is None else _head_at(path, "quantize.speculator")


def given_checkpoint(cfg: RunConfig, digests: Path) -> dict[str, str] | None:
    """The digests of the files of `speculator.from_checkpoint`, by what they are.

    Raises:
        ValueError: there is no head; the message names the folder.
    """
    if cfg.speculator.from_checkpoint is None:
        return None
    files = files_of(Path(cfg.speculator.from_checkpoint))
    return {name: file_digest(file, digests) for name, file in files.items()}


def measured_head(cfg: RunConfig) -> Artifact | None:
    """What `fit.measured` names.

    Raises:
        FileNotFoundError: the folder holds no artifact.
        ValueError: it is the artifact of another stage.
    """
    path = cfg.fit.measured
    return None if path is None else _artifact_of(Stage.measure, path, "fit.measured")


def measured_rows(cfg: RunConfig) -> list[dict[str, Any]] | None:
    """The rows of acceptance.json of `fit.measured`; raises as `measured_head`."""
    head = measured_head(cfg)
    if head is None:
        return None
    rows: list[dict[str, Any]] = json.loads(head.file("acceptance.json").read_text())["rows"]
    return rows


def planned_mixture(cfg: RunConfig) -> list[Share]:
    """The training mixture, as far as it is known before the target has answered."""
    return mixture(cfg.profile, cfg.fit, measured=measured_rows(cfg))


def unquantized(cfg: RunConfig) -> RunConfig:
    """The path to a head for the target before it was quantized.

    Raises:
        ValueError: it is not quantized.
    """
    require(
        cfg.quantize.budget is not None,
        "measure.full_precision_head",
        "be false without quantize.budget",
        True,
    )
    return replace(
        cfg,
        quantize=replace(cfg.quantize, budget=None),
        measure=replace(cfg.measure, full_precision_head=False),
    )


def _head_at(path: str, key: str) -> Artifact:
    return _artifact_of(Stage.train, path, key)


def _artifact_of(stage: Stage, path: str, key: str) -> Artifact:
    found = artifact_at(path, key)
    if found.stage != stage.name:
        raise ValueError(
            f"{key} must be an artifact of {stage.name}, got one of {found.stage}: {path}"
        )
    return found


def _target(cfg: RunConfig, location: Location) -> dict[str, Any]:
    return {
        "identity": location.identity,
        # The device decides what `auto` is, and so far it counts.
        "dtype": dtype_name(cfg.target.dtype, device_of(cfg.runtime.device)),
        "trust_remote_code": cfg.target.trust_remote_code,
    }


def _quantize(cfg: RunConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    """What decides the figures of each unit alone, and what decides the choice."""
    params = asdict(cfg.quantize)
    del params["gate"]  # it judges what is made, and makes nothing
    under_budget = {
        name: params.pop(name)
        for name in ("budget", "budget_in", "selector", "rest", "cotune", "sets_per_unit")
    }
    under_budget |= {"num_random": params.pop("num_random"), "seed": cfg.seed}
    del params["speculator"]
    head = given_head(cfg)
    if head is not None:
        measuring = {
            "components": _components(cfg),
            "measure": _measuring(cfg),
        }
        under_budget |= {"speculator": head.key} | measuring
    return params | {"components": _components(cfg), "seed": cfg.seed}, under_budget


def _generate(cfg: RunConfig) -> dict[str, Any]:
    temperatures = {c.name: c.temperature for c in cfg.profile.components}
    return asdict(cfg.generate) | {"temperatures": temperatures, "seed": cfg.seed}


def _data(cfg: RunConfig, digests: Path) -> dict[str, Any]:
    """The data that the profile uses; a local file counts by its content, not by its name."""
    data = asdict(cfg.data)
    used = sorted({name for c in cfg.profile.components for name in c.sources})
    sources = {name: data["sources"][name] for name in used if name in data["sources"]}
    for name, values in sources.items():
        source = cfg.data.sources[name]
        path = local_file(source, name)
        if path is not None:
            values["path"] = f"sha256:{file_digest(path, digests)}"
        elif re.fullmatch(r"[0-9a-f]{40}", source.revision) is None:
            # A branch moves: what is read, and counts, is the commit that it is at now.
            values["revision"] = source.revision = commit_of(source, name)
    # When sessions begin and what they are promised decides no prompt; how hot they are served and
    # how long their users think neither.
    traffic = traffic_of(cfg)
    del traffic["arrival"], traffic["slo"]
    for component in traffic["components"]:
        del component["temperature"], component["think_seconds"]
    return data | {"sources": sources, "traffic": traffic, "seed": cfg.seed}


def predicting(cfg: RunConfig) -> dict[str, Any]:
    """What decides a prediction, its inputs apart."""
    params = {
        "predict": asdict(cfg.predict),
        "hardware": asdict(cfg.hardware),
        "profile": traffic_of(cfg),
        "seed": cfg.seed,
    }
    if cfg.hardware.measured:
        params["processor"] = bench.processor()
    return params


def traffic_of(cfg: RunConfig) -> dict[str, Any]:
    """The profile, apart from what it is called and where it is from; a replay by its content."""
    found = asdict(cfg.profile)
    if cfg.profile.arrival.file is not None:
        found["arrival"]["file"] = _text_digest(Path(cfg.profile.arrival.file))
    del found["name"], found["from_logs"], found["from_fingerprint"]
    return found


def _components(cfg: RunConfig) -> list[tuple[str, float, float]]:
    """What of the profile decides how prompts that are there are decoded, and weighed."""
    return [(c.name, c.weight, c.temperature) for c in cfg.profile.components]


def _measuring(cfg: RunConfig) -> dict[str, Any]:
    """Apart from the floor: it judges what is measured, and measures nothing."""
    params = asdict(cfg.measure)
    del params["floor"]
    return params


def _sweep(folder: str | None, name: str) -> list[tuple[str, str]] | None:
    """The jobs of a multirun folder, by the content of what each wrote."""
    if folder is None:
        return None
    if not Path(folder).is_dir():
        raise FileNotFoundError(f"report.{name}: no such folder: {folder}")
    jobs = [p for p in sorted(Path(folder).iterdir()) if p.is_dir()]
    return [(job.name, _text_digest(job / "job.json")) for job in jobs]


def _text_digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "missing"
