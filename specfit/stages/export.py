"""`export`: the speculator as servers load it, each folder proven under its engine's own rules."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from specfit.artifacts import Artifact
from specfit.export.config import EngineName, ExportConfig
from specfit.export.engines import ENGINES
from specfit.export.parity import compare
from specfit.export.served import Served
from specfit.files import read_jsonl, write_json, write_text
from specfit.speculators.batches import pack
from specfit.speculators.eagle3 import Eagle3Config
from specfit.targets.target import HiddenStates, Target
from specfit.training.checkpoints import load_head

VERSION = 2
COMMAND = "SERVE.md"
PARITY = "parity.json"
MANIFEST = "manifest.json"
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ExportJob:
    """What the stage works on."""

    folder: Path
    config: ExportConfig
    prompts: Artifact  # whose held-out conversations heads are compared over
    speculator: Artifact
    target: Target
    target_gguf: Path | None  # its own file, where it has one


def run(job: ExportJob) -> None:
    """Writes a folder an engine, parity.json and manifest.json.

    Raises:
        ValueError: an engine that was asked for cannot serve the head, or what was written does
            not draft under its rules as the trained head does.
    """
    config, weights = (job.speculator.file(n) for n in ("config.json", "model.safetensors"))
    trained = load_head(config, weights, job.target.device)
    served = Served(job.target.info, _gguf(job))
    engines, refused = chosen(job.config, trained[0].config, served)
    for name, reason in refused.items():
        log.info("export %s: left out: %s", name, reason)
    tokens = _held_out(job)
    batch = pack([_states(job.target, tokens, list(trained[0].config.aux_layers))])
    rows = []
    for engine in engines:
        folder, translator = job.folder / engine.name, ENGINES[engine]
        folder.mkdir(exist_ok=True)
        translator.write(folder, *trained, served)
        write_text(folder / COMMAND, translator.serving(served, job.config.num_draft_tokens))
        twin = translator.twin(folder, served)
        aux = _states(job.target, tokens, list(twin.aux_layers)).aux
        embeddings = job.target.embeddings.weight.detach()
        row = compare(trained, batch, twin, aux, embeddings, job.config.num_draft_tokens)
        if not row["is_equal"]:
            raise ValueError(
                f"{folder}: the exported head must draft as the trained one, got {row}"
            )
        rows.append({"engine": engine.name} | row)
        share = row["drafted_tokens_equal"]
        log.info(
            "export %s: %.4f of %d drafted tokens equal, logits within %.1e",
            *(engine.name, share, row["num_drafted_tokens"], row["max_logit_difference"]),
        )
    write_json(job.folder / PARITY, {"rows": rows})
    write_json(job.folder / MANIFEST, _manifest(job.folder, engines, refused))


def chosen(
    config: ExportConfig, head: Eagle3Config, served: Served
) -> tuple[list[EngineName], dict[str, str]]:
    """The engines to write, and with `auto` why others are left out.

    Raises:
        ValueError: an engine was named that cannot serve the head.
    """
    refused = {engine: ENGINES[engine].refusal(head, served) for engine in ENGINES}
    if config.engines == [EngineName.auto]:
        kept = [engine for engine, reason in refused.items() if reason is None]
        return kept, {e.name: reason for e, reason in refused.items() if reason is not None}
    for engine in config.engines:
        reason = refused[engine]
        if reason is not None:
            raise ValueError(reason)
    return list(config.engines), {}


def _gguf(job: ExportJob) -> Path | None:
    if job.config.target_gguf is None:
        return job.target_gguf
    path = Path(job.config.target_gguf)
    if not path.is_file():
        raise ValueError(f"export.target_gguf must be a GGUF file, got {path}")
    return path


def _held_out(job: ExportJob) -> torch.Tensor:
    """Tokens of test conversations, one after the other, as many as are asked for."""
    limit = min(job.config.num_tokens, job.target.info.max_position_embeddings)
    tokens: list[int] = []
    for row in read_jsonl(job.prompts.file("conversations.jsonl")):
        if row["split"] == "test" and len(tokens) < limit:
            tokens += row["prompt_ids"]
    return torch.tensor(tokens[:limit], device=job.target.device)


def _states(target: Target, tokens: torch.Tensor, aux_layers: list[int]) -> HiddenStates:
    mask = torch.ones_like(tokens, dtype=torch.bool)
    aux, last = target.states(tokens[None], mask[None], aux_layers)
    nothing = torch.zeros(len(tokens), device=tokens.device)
    return HiddenStates(tokens, mask, aux[0].float(), last[0].float(), nothing, nothing.long())


def _manifest(folder: Path, engines: list[EngineName], refused: dict[str, str]) -> dict[str, Any]:
    written = [
        {
            "engine": engine.name,
            "files": sorted(
                str(p.relative_to(folder)) for p in (folder / engine.name).rglob("*") if p.is_file()
            ),
        }
        for engine in engines
    ]
    return {"engines": written, "refused": refused}
