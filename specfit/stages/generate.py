"""`generate`: the target's own answers to the prompts, which is what a speculator must predict."""

import json
import logging
from collections import Counter
from pathlib import Path
from time import perf_counter
from typing import Any

from specfit.answering import answer_plainly
from specfit.artifacts import Artifact
from specfit.config import GenerateConfig
from specfit.engine import DecodeEngine
from specfit.files import append_jsonl, read_jsonl, write_json, write_text
from specfit.states.record import StateRecorder
from specfit_kernels.floors import speed
from specfit_serve.decode import Decoded, Request

VERSION = 2
FIGURES = "generate.json"  # written last
LOOPED = "repetition"  # the finish reason of an answer that is dropped
log = logging.getLogger(__name__)


def run(
    folder: Path,
    *,
    config: GenerateConfig,
    temperatures: dict[str, float],
    seed: int,
    prompts: Artifact,
    engine: DecodeEngine,
    recorder: StateRecorder | None = None,
) -> None:
    """Writes answers.jsonl and generate.json.

    Args:
        folder: where; answers of an earlier, killed run in it are kept.
        config: how to decode.
        temperatures: of each component.
        seed: of sampled answers.
        prompts: the conversations.
        engine: answers them.
        recorder: keeps the hidden states of the answers made here.
    """
    if (folder / FIGURES).exists():
        return  # an earlier run was killed after its last line
    conversations = [
        row for row in read_jsonl(prompts.file("conversations.jsonl")) if row["split"] != "test"
    ]
    references: list[dict[str, Any]] = []
    if not config.on_policy:
        # Validation answers are the target's in any case: they stand for what it would verify.
        references = _references([row for row in conversations if row["split"] == "train"])
        conversations = [row for row in conversations if row["split"] == "validation"]
    figures = _answer(folder, config, temperatures, seed, conversations, engine, recorder)
    _finish(folder, references, figures)


def _answer(
    folder: Path,
    config: GenerateConfig,
    temperatures: dict[str, float],
    seed: int,
    conversations: list[dict[str, Any]],
    engine: DecodeEngine,
    recorder: StateRecorder | None,
) -> dict[str, Any]:
    journal = folder / "journal.jsonl"
    done = set()
    if journal.exists():
        done = {row["id"] for row in read_jsonl(journal, tolerate_truncated_tail=True)}
        log.info("generate: %d of %d answers are there already", len(done), len(conversations))
    by_id = {row["id"]: row for row in conversations if row["id"] not in done}

    def temperature(row: dict[str, Any]) -> float:
        own = temperatures[row["component"]]
        return own if config.temperature is None else config.temperature

    requests = [Request(row["id"], row["prompt_ids"], temperature(row)) for row in by_id.values()]
    most = [len(r.prompt) + config.max_new_tokens for r in requests]
    if recorder and not recorder.has_room(most):
        recorder = None
    started = perf_counter()
    num_tokens = num_prompt_tokens = 0
    for found in answer_plainly(
        engine,
        requests,
        max_new_tokens=config.max_new_tokens,
        batch_size=config.batch_size,
        label="generate",
        top_p=config.top_p,
        seed=seed,
        recorder=recorder,
    ):
        row = _row(by_id[found.id], found)
        append_jsonl(journal, [row])
        if recorder and found.finish_reason != LOOPED:
            recorder.keep(found.slot, row)
        num_tokens += len(found.tokens)
        num_prompt_tokens += len(by_id[found.id]["prompt_ids"])
    if recorder:
        recorder.flush()
    seconds = perf_counter() - started
    target = engine.target
    flops = target.info.forward_flops(num_prompt_tokens + num_tokens, num_tokens)
    shape = (config.batch_size, target.info.intermediate_size, target.info.hidden_size)
    figures = speed(
        num_tokens=num_tokens,
        flops=flops,
        seconds=seconds,
        shape=shape,
        device=target.device,
        dtype=target.model.dtype,
    )
    return {"engine": engine.name} | figures


def _row(conversation: dict[str, Any], answer: Decoded) -> dict[str, Any]:
    start = len(conversation["prompt_ids"])
    return {
        "id": conversation["id"],
        "component": conversation["component"],
        "source": conversation["source"],
        "split": conversation["split"],
        "input_ids": conversation["prompt_ids"] + answer.tokens,
        "loss_spans": [*conversation["prompt_spans"], [start, start + len(answer.tokens)]],
        "num_answer_tokens": len(answer.tokens),
        "finish_reason": answer.finish_reason,
    }


def _references(conversations: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The data's own answers.

    Raises:
        ValueError: there are none.
    """
    rows = [_reference(row) for row in conversations if row["reference_ids"]]
    if not rows:
        raise ValueError(
            "generate.on_policy must be true: no conversation of the data has an answer"
        )
    return rows


def _reference(conversation: dict[str, Any]) -> dict[str, Any]:
    kept = ("id", "component", "source", "split")
    return {name: conversation[name] for name in kept} | {
        "input_ids": conversation["reference_ids"],
        "loss_spans": conversation["reference_spans"],
        "num_answer_tokens": sum(end - start for start, end in conversation["reference_spans"]),
        "finish_reason": "reference",
    }


def _finish(folder: Path, references: list[dict[str, Any]], figures: dict[str, Any]) -> None:
    """Leaves looping answers out, orders the rest, and counts."""
    journal = folder / "journal.jsonl"
    answers = read_jsonl(journal, tolerate_truncated_tail=True) if journal.exists() else []
    rows = sorted([*answers, *references], key=lambda row: row["id"])
    kept = [row for row in rows if row["finish_reason"] != LOOPED]
    if not kept:
        raise ValueError(f"generate: all {len(rows)} answers loop; try generate.temperature=0.7")
    write_text(folder / "answers.jsonl", "".join(json.dumps(row) + "\n" for row in kept))
    groups = sorted({(row["component"], row["split"]) for row in rows})
    num_tokens = sum(row["num_answer_tokens"] for row in kept)
    figures |= {
        "num_answers": len(kept),
        "num_looped": len(rows) - len(kept),
        "num_tokens": num_tokens,
        "mean_answer_tokens": num_tokens / len(kept),
        "finish_reasons": Counter(row["finish_reason"] for row in rows),
        "rows": [_count(rows, component, split) for component, split in groups],
    }
    write_json(folder / FIGURES, figures)
    journal.unlink(missing_ok=True)
    log.info(
        "generate: %d answers, %d tokens, %d dropped since they loop, %.0f tokens/s",
        *(len(kept), num_tokens, len(rows) - len(kept), figures.get("tokens_per_second") or 0),
    )


def _count(rows: list[dict[str, Any]], component: str, split: str) -> dict[str, Any]:
    group = [row for row in rows if (row["component"], row["split"]) == (component, split)]
    kept = [row for row in group if row["finish_reason"] != LOOPED]
    return {
        "component": component,
        "split": split,
        "num_answers": len(kept),
        "num_looped": len(group) - len(kept),
        "num_tokens": sum(row["num_answer_tokens"] for row in kept),
    }
