"""`measure`: draft-and-verify decoding of held-out conversations, beside model-free baselines."""

import json
import logging
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from specfit.acceptance import (
    Measured,
    Timed,
    changes,
    component_row,
    mix_row,
    worst_component,
)
from specfit.artifacts import Artifact
from specfit.checks import GateRejected
from specfit.engine import DecodeEngine
from specfit.files import read_jsonl, write_json, write_jsonl
from specfit.measure_config import MeasureConfig
from specfit.measuring import Bench, Way, decode_all, held_out, is_of
from specfit.traffic.config import ProfileConfig
from specfit_serve.decode import Decoded

VERSION = 5
log = logging.getLogger(__name__)

TIMED_TOKENS = 48  # decoded alone of each timed prompt
WARM_UP_TOKENS = 4


def run(
    folder: Path,
    *,
    config: MeasureConfig,
    profile: ProfileConfig,
    seed: int,
    prompts: Artifact,
    speculators: dict[str, Artifact],
    engine: DecodeEngine,
) -> None:
    """Writes requests.jsonl and timings.jsonl (an answer a line) and acceptance.json (figures).

    Answers of an earlier, killed run in `folder` are kept. `speculators` are by name as
    `acceptance.json` has it, the fitted one first.
    """
    bench = Bench(config, profile, seed, held_out(prompts), engine, speculators)
    ways = list(_ways(config, speculators))
    for i, way in enumerate(ways):
        decode_all(folder / "requests.jsonl", bench, way, leads=i == 0)
    _time_all(folder / "timings.jsonl", bench, ways)
    measured = [Measured(**row) for row in read_jsonl(folder / "requests.jsonl")]
    timed = [Timed(**row["timed"]) for row in read_jsonl(folder / "timings.jsonl")]
    differences = _differences(bench, measured)
    rows = list(_rows(bench, ways, measured, timed, differences))
    write_json(
        folder / "acceptance.json",
        {
            "rows": rows,
            "differences": differences,
            "heads": _heads(bench, ways, measured),
            "confidence": config.confidence,
            "device": str(engine.target.device),
            "engine": engine.name,
            "num_threads": torch.get_num_threads(),
        },
    )
    for row in rows:
        if row["acceptance_length"] is not None and row["proposer"] != "none":
            log.info(
                "measure %s %s T=%s k=%d: acceptance length %.3f [%.3f, %.3f] over %d prompts",
                *(row["component"], row["proposer"], row["temperature"], row["num_draft_tokens"]),
                *(row["acceptance_length"], row["acceptance_length_low"]),
                *(row["acceptance_length_high"], row["num_prompts"]),
            )


def check_floor(made: Artifact, floor: float | None) -> None:
    """Refuses a head that is too slow on some component; the mix may hide it.

    Raises:
        GateRejected: the acceptance length of one is below `floor` at its interval's lower end.
    """
    if floor is None:
        return
    rows = json.loads(made.file("acceptance.json").read_text())["rows"]
    worst = worst_component(rows)
    if worst["acceptance_length_low"] < floor:
        raise GateRejected(
            f"measure.floor must be reached on every component: {worst['component']} has an "
            f"acceptance length of {worst['acceptance_length']:.3f} "
            f"[{worst['acceptance_length_low']:.3f}, {worst['acceptance_length_high']:.3f}] at "
            f"k={worst['num_draft_tokens']}, below {floor:g}; it is kept in {made.path}"
        )


def _ways(config: MeasureConfig, speculators: Iterable[str]) -> Iterator[Way]:
    temperatures: list[float | None] = [*config.temperatures] if config.temperatures else [None]
    for temperature in temperatures:
        yield Way("none", 0, temperature)
        for proposer in ("ngram", *speculators):
            for k in config.num_draft_tokens:
                yield Way(proposer, k, temperature)


def _time_all(journal: Path, bench: Bench, ways: list[Way]) -> None:
    """Some conversations of each component, alone.

    All ways on one conversation before the next, so that what else the machine does meets all of
    them alike.
    """
    if journal.exists():
        return
    limit = min(TIMED_TOKENS, bench.config.max_new_tokens)
    chosen: list[str] = []
    for component in bench.temperatures:
        own = [i for i in sorted(bench.by_id) if bench.by_id[i]["component"] == component]
        chosen += own[: bench.config.num_timed]
    for way in ways:  # warms up
        next(bench.decode(way, chosen[:1], 1, min(limit, WARM_UP_TOKENS), None))
    rows = []
    turns = [(i, way) for i in chosen for way in ways]
    for i, way in tqdm(turns, unit="answer", desc="measure alone"):
        (answered,) = bench.decode(way, [i], 1, limit, None)
        rows.append({"id": i, "timed": asdict(_timed(bench, way, answered))})
    write_jsonl(journal, rows)


def _timed(bench: Bench, way: Way, answer: Decoded) -> Timed:
    component = bench.by_id[answer.id]["component"]
    return Timed(
        component=component,
        proposer=way.proposer,
        temperature=bench.temperature(way, component),
        num_draft_tokens=way.num_draft_tokens,
        num_tokens=max(0, len(answer.tokens) - 1),
        num_rounds=len(answer.rounds),
        num_prompt_tokens=len(bench.by_id[answer.id]["prompt_ids"]),
        target_seconds=answer.target_seconds,
        draft_seconds=answer.draft_seconds,
    )


def _differences(bench: Bench, measured: list[Measured]) -> list[dict[str, Any]]:
    """Where a greedy speculative answer leaves the plain one.

    `margin` is the target's logit of plain's token minus that of the other.
    """
    plain = {m.id: m for m in measured if m.proposer == "none" and m.temperature == 0}
    found = []
    for m in measured:
        if m.proposer == "none" or m.temperature > 0 or m.tokens == plain[m.id].tokens:
            continue
        pairs = list(zip(m.tokens, plain[m.id].tokens, strict=False))
        position = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
        context = bench.by_id[m.id]["prompt_ids"] + plain[m.id].tokens[:position]
        target = bench.engine.target
        ids = torch.tensor([context], device=target.device)
        _, last = target.states(ids, torch.ones_like(ids, dtype=torch.bool), [])
        logits = target.logits(last[0, -1])
        plain_token, token = _at(plain[m.id].tokens, position), _at(m.tokens, position)
        both = plain_token is not None and token is not None
        found.append(
            {
                "component": m.component,
                "proposer": m.proposer,
                "num_draft_tokens": m.num_draft_tokens,
                "id": m.id,
                "position": position,
                "margin": float(logits[plain_token] - logits[token]) if both else None,
                "plain_token": plain_token,
                "token": token,
            }
        )
    return found


def _at(tokens: list[int], position: int) -> int | None:
    return tokens[position] if position < len(tokens) else None


def _rows(
    bench: Bench,
    ways: list[Way],
    measured: list[Measured],
    timed: list[Timed],
    differences: list[dict[str, Any]],
) -> Iterator[dict[str, Any]]:
    for way in ways:
        own = [m for m in measured if is_of(bench, way, asdict(m))]
        weights = bench.mix_weights(own)
        by_component = {n: [m for m in own if m.component == n] for n in weights}
        by_component = {name: found for name, found in by_component.items() if found}
        different = {
            d["component"]
            for d in differences
            if (d["proposer"], d["num_draft_tokens"]) == (way.proposer, way.num_draft_tokens)
        }
        of_way = [t for t in timed if is_of(bench, way, asdict(t))]
        times = {name: [t for t in of_way if t.component == name] for name in by_component}
        equal: dict[str, bool | None] = {}
        for name, found in by_component.items():
            row = component_row(found, times[name], bench.intervals)
            greedy = found[0].temperature == 0 and way.proposer != "none"
            equal[name] = name not in different if greedy else None
            if way.proposer in bench.heads:
                row["coverage"] = _coverage(bench, way.proposer, found)
            yield row | {"outputs_equal_plain": equal[name]}
        known = [value for value in equal.values() if value is not None]
        yield mix_row(by_component, times, weights, bench.intervals) | {
            "outputs_equal_plain": all(known) if known else None
        }


def _heads(bench: Bench, ways: list[Way], measured: list[Measured]) -> list[dict[str, Any]]:
    """The fitted head against each other one, on the same requests: from that to the fitted."""
    fitted, *others = bench.heads
    found = []
    for way in (way for way in ways if way.proposer in others):
        after = replace(way, proposer=fitted)
        both = [[m for m in measured if is_of(bench, w, asdict(m))] for w in (way, after)]
        for row in changes(both[0], both[1], bench.mix_weights(both[1]), bench.intervals):
            setting = {"num_draft_tokens": way.num_draft_tokens, "temperature": way.temperature}
            found.append({"proposer": fitted, "instead_of": way.proposer} | setting | row)
    return found


def _coverage(bench: Bench, head: str, measured: list[Measured]) -> float:
    """Share of the answers' tokens that are in the draft vocabulary."""
    tokens = torch.tensor([token for m in measured for token in m.tokens])
    return float(bench.heads[head][1].t2d.cpu()[tokens].float().mean())
