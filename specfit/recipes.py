"""What decides the result of each stage: the configuration that counts, and its inputs."""

import hashlib
from dataclasses import asdict
from pathlib import Path
from typing import Any

from specfit.artifacts import Recipe
from specfit.config import ExtractMode, RunConfig
from specfit.stages import export, extract, fit, generate, measure, prompts, report, target, train
from specfit.targets.load import device_of, dtype_name
from specfit.targets.locate import Location, file_digest
from specfit_data.sources import local_file


def recipes_of(cfg: RunConfig, location: Location, digests: Path) -> dict[str, Recipe]:
    """The recipe of each stage of the path, in order."""
    found: dict[str, Recipe] = {}

    def add(stage: str, version: int, params: dict[str, Any], *inputs: str) -> None:
        found[stage] = Recipe(stage, version, params, {i: found[i].key for i in inputs})

    online = cfg.extract.mode is ExtractMode.online
    components = [asdict(c) for c in cfg.profile.components]
    weights = {c.name: c.weight for c in cfg.profile.components}
    temperatures = {c.name: c.temperature for c in cfg.profile.components}
    states = {k: v for k, v in asdict(cfg.extract).items() if k != "mode"}
    add(
        "target",
        target.VERSION,
        {
            "identity": location.identity,
            "dtype": dtype_name(cfg.target.dtype, device_of(cfg.runtime.device)),
            "trust_remote_code": cfg.target.trust_remote_code,
        },
    )
    add("prompts", prompts.VERSION, _data(cfg, digests) | {"seed": cfg.seed}, "target")
    add(
        "generate",
        generate.VERSION,
        asdict(cfg.generate) | {"temperatures": temperatures, "seed": cfg.seed},
        "target",
        "prompts",
    )
    add(
        "fit",
        fit.VERSION,
        {
            "weights": weights,
            "draft_vocab_size": cfg.speculator.draft_vocab_size,
            "max_tokens": cfg.extract.max_tokens,
        },
        "generate",
    )
    if not online:
        add(
            "extract",
            extract.VERSION,
            states | {"aux_layers": cfg.speculator.aux_layers},
            "target",
            "generate",
        )
    add(
        "train",
        train.VERSION,
        {
            "train": _shaping(asdict(cfg.train)),
            "speculator": asdict(cfg.speculator),
            "weights": weights,
            "seed": cfg.seed,
        }
        | ({"states": states} if online else {}),
        *("target", "generate", "fit"),
        *(() if online else ("extract",)),
    )
    add(
        "measure",
        measure.VERSION,
        {"measure": asdict(cfg.measure), "components": components, "seed": cfg.seed},
        *("target", "prompts", "train"),
    )
    add("export", export.VERSION, {"seed": cfg.seed}, "target", "train")
    add(
        "report",
        report.VERSION,
        {"profile": asdict(cfg.profile), "sweep": _sweep(cfg.report.sweep)},
        *(stage for stage in found if stage != "target"),
    )
    return found


def _data(cfg: RunConfig, digests: Path) -> dict[str, Any]:
    """The data that the profile uses; a local file counts by its content, not by its name."""
    data = asdict(cfg.data)
    used = sorted({name for c in cfg.profile.components for name in c.sources})
    sources = {name: data["sources"][name] for name in used if name in data["sources"]}
    for name, values in sources.items():
        path = local_file(cfg.data.sources[name], name)
        if path is not None:
            values["path"] = f"sha256:{file_digest(path, digests)}"
    components = [(c.name, c.weight, c.sources) for c in cfg.profile.components]
    return data | {"sources": sources, "components": components}


def _shaping(values: dict[str, Any]) -> dict[str, Any]:
    """Without what only says how often to save."""
    return {key: value for key, value in values.items() if key != "save_every_s"}


def _sweep(folder: str | None) -> list[tuple[str, str]] | None:
    """The jobs of a multirun folder, by the content of what each wrote."""
    if folder is None:
        return None
    if not Path(folder).is_dir():
        raise FileNotFoundError(f"report.sweep: no such folder: {folder}")
    jobs = [p for p in sorted(Path(folder).iterdir()) if p.is_dir()]
    return [(job.name, _text_digest(job / "job.json")) for job in jobs]


def _text_digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "missing"
