"""`generate`: the target's own answers to the prompts, which is what a speculator must predict."""

import json
import logging
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

from specfit.answering import answer_plainly
from specfit.artifacts import Artifact
from specfit.config import GenerateConfig
from specfit.engine import DecodeEngine
from specfit.files import append_jsonl, read_jsonl, write_json, write_text
from specfit.states.record import StateRecorder
from specfit.turns import next_prompt, request_id, session_id
from specfit_kernels.floors import speed
from specfit_serve.decode import Decoded, Request

VERSION = 3
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
    generating = _Generating(folder, config, temperatures, seed, conversations, engine)
    _finish(folder, references, generating.answer(recorder))


class _Generating:
    """The sessions that are answered, turn by turn, and what of them is in the journal."""

    def __init__(
        self,
        folder: Path,
        config: GenerateConfig,
        temperatures: dict[str, float],
        seed: int,
        conversations: list[dict[str, Any]],
        engine: DecodeEngine,
    ) -> None:
        self.journal = folder / "journal.jsonl"
        self.config, self.seed, self.engine = config, seed, engine
        self.temperatures = temperatures
        self.sessions = {row["id"]: row for row in conversations}
        self.newest: dict[str, dict[str, Any]] = {}  # of each session: the last answer
        self.num_tokens = self.num_prompt_tokens = 0
        if self.journal.exists():
            rows = read_jsonl(self.journal, tolerate_truncated_tail=True)
            self.newest = {row["id"]: row for row in rows}
            log.info("generate: %d answers of %d sessions are there", len(rows), len(self.sessions))

    def answer(self, recorder: StateRecorder | None) -> dict[str, Any]:
        """Answers what is not answered yet; returns how fast that was."""
        started = perf_counter()
        room = self.engine.target.info.max_position_embeddings
        while prompts := dict(_prompts(self.sessions, self.newest, room)):
            self._answer(prompts, recorder)
        if recorder:
            recorder.flush()
        target = self.engine.target
        num_tokens = self.num_prompt_tokens + self.num_tokens
        shape = (self.config.batch_size, target.info.intermediate_size, target.info.hidden_size)
        return {"engine": self.engine.name} | speed(
            num_tokens=self.num_tokens,
            flops=target.info.forward_flops(num_tokens, self.num_tokens),
            seconds=perf_counter() - started,
            shape=shape,
            device=target.device,
            dtype=target.model.dtype,
        )

    def _answer(
        self, prompts: dict[str, tuple[int, list[int]]], recorder: StateRecorder | None
    ) -> None:
        requests = [
            Request(request_id(name, turn), prompt, self._temperature(self.sessions[name]))
            for name, (turn, prompt) in prompts.items()
        ]
        most = [len(r.prompt) + self.config.max_new_tokens for r in requests]
        if recorder and not recorder.has_room(most):
            recorder = None
        for found in answer_plainly(
            self.engine,
            requests,
            max_new_tokens=self.config.max_new_tokens,
            batch_size=self.config.batch_size,
            label="generate",
            top_p=self.config.top_p,
            seed=self.seed,
            recorder=recorder,
        ):
            session = self.sessions[session_id(found.id)]
            turn, prompt = prompts[session["id"]]
            row = _row(session, turn, prompt, self.newest.get(session["id"]), found)
            append_jsonl(self.journal, [row])
            self.newest[session["id"]] = row
            # The states of a session's last request are those of all of it.
            is_last = turn == len(session["follow_ups"])
            if recorder and is_last and found.finish_reason != LOOPED:
                recorder.keep(found.slot, row)
            self.num_tokens += len(found.tokens)
            self.num_prompt_tokens += len(prompt)

    def _temperature(self, session: dict[str, Any]) -> float:
        own = self.temperatures[session["component"]]
        return own if self.config.temperature is None else self.config.temperature


def _prompts(
    sessions: dict[str, dict[str, Any]], newest: dict[str, dict[str, Any]], room: int
) -> Iterator[tuple[str, tuple[int, list[int]]]]:
    """By session: the turn that comes next, and its prompt of less than `room` tokens."""
    for name, session in sessions.items():
        before = newest.get(name)
        if before is None:
            yield name, (0, session["prompt_ids"])
            continue
        turn = before["turn"] + 1
        if before["finish_reason"] == LOOPED or turn > len(session["follow_ups"]):
            continue
        following = session["follow_ups"][turn - 1]
        answered, reason = before["input_ids"], before["finish_reason"]
        prompt = next_prompt(answered, reason, following, session["end_ids"])
        if len(prompt) < room:
            yield name, (turn, prompt)


def _row(
    session: dict[str, Any],
    turn: int,
    prompt: list[int],
    before: dict[str, Any] | None,
    answer: Decoded,
) -> dict[str, Any]:
    spans, num_tokens = session["prompt_spans"], 0
    if before is not None:
        spans, num_tokens = before["loss_spans"], before["num_answer_tokens"]
    start = len(prompt)
    return {
        "id": session["id"],
        "component": session["component"],
        "source": session["source"],
        "split": session["split"],
        "turn": turn,
        "input_ids": prompt + answer.tokens,
        "loss_spans": [*spans, [start, start + len(answer.tokens)]],
        "num_answer_tokens": num_tokens + len(answer.tokens),
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
        "turn": 0,
        "input_ids": conversation["reference_ids"],
        "loss_spans": conversation["reference_spans"],
        "num_answer_tokens": sum(end - start for start, end in conversation["reference_spans"]),
        "finish_reason": "reference",
    }


def _finish(folder: Path, references: list[dict[str, Any]], figures: dict[str, Any]) -> None:
    """Leaves looping answers out, orders the rest, and counts."""
    journal = folder / "journal.jsonl"
    answers = read_jsonl(journal, tolerate_truncated_tail=True) if journal.exists() else []
    # Of a session, its last answer with all before it; one that loops ends it before that.
    whole: dict[str, dict[str, Any]] = {}
    for row in answers:
        if row["id"] not in whole or row["finish_reason"] != LOOPED:
            whole[row["id"]] = row
    rows = sorted([*whole.values(), *references], key=lambda row: row["id"])
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
