"""`measure`: draft-and-verify decoding of held-out conversations, beside model-free baselines."""

import logging
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from specfit.acceptance import Intervals, Measured, Timed, component_row, mix_row
from specfit.answering import answer
from specfit.artifacts import Artifact
from specfit.config import MeasureConfig, ProfileConfig
from specfit.files import append_jsonl, read_jsonl, write_json, write_jsonl
from specfit.speculators.proposer import Eagle3Proposer
from specfit.targets.slots import SlotTarget
from specfit.targets.target import Target
from specfit.targets.vocabulary import token_classes
from specfit.training.checkpoints import load_head
from specfit_serve.decode import Decoded, DecodeSettings, Request
from specfit_serve.ngram import NgramProposer, NoProposer
from specfit_serve.protocols import Proposer

VERSION = 2
log = logging.getLogger(__name__)

TIMED_TOKENS = 48  # decoded alone of each timed prompt
WARM_UP_TOKENS = 4


@dataclass(frozen=True)
class _Pass:
    """One way of decoding all held-out conversations."""

    proposer: str
    num_draft_tokens: int
    temperature: float | None  # None: each component's own


class _Bench:
    """The held-out conversations, and decoding them."""

    def __init__(
        self,
        config: MeasureConfig,
        profile: ProfileConfig,
        seed: int,
        conversations: list[dict[str, Any]],
        target: Target,
        speculators: dict[str, Artifact],
    ) -> None:
        self.config = config
        self.seed = seed
        self.target = target
        self.by_id = {row["id"]: row for row in conversations}
        self.temperatures = {c.name: c.temperature for c in profile.components}
        self.classes = token_classes(target)
        self.heads = {
            name: load_head(s.file("config.json"), s.file("model.safetensors"), target.device)
            for name, s in speculators.items()
        }
        for name, (head, _) in self.heads.items():
            sizes = (head.config.hidden_size, head.config.vocab_size)
            own = (target.info.hidden_size, target.info.vocab_size)
            if sizes != own:
                raise ValueError(
                    f"measure.speculators.{name} must be of a target with {own[0]} channels and "
                    f"{own[1]} tokens, got {sizes[0]} and {sizes[1]}"
                )
        longest = max(len(row["prompt_ids"]) for row in conversations)
        # Where the target's context ends answers, it ends those of all ways at the same token.
        self.max_tokens = min(
            longest + config.max_new_tokens,
            target.info.max_position_embeddings - max(config.num_draft_tokens),
        )
        self._slots: SlotTarget | None = None

    def slots(self, way: _Pass, num_slots: int) -> SlotTarget:
        """One cache at a time: one of another size, or with other features, replaces it."""
        max_length = self.max_tokens + way.num_draft_tokens
        layers = None
        if way.proposer in self.heads:
            layers = list(self.heads[way.proposer][0].config.aux_layers)
        old = self._slots
        if old is None or (old.num_slots, old.max_length, old.aux_layers) != (
            *(num_slots, max_length),
            layers,
        ):
            self._slots = SlotTarget(
                self.target, num_slots=num_slots, max_length=max_length, aux_layers=layers
            )
        assert self._slots is not None
        return self._slots

    def proposer(self, name: str, num_slots: int) -> Proposer:
        """A fresh one, for a fresh set of requests."""
        match name:
            case "none":
                return NoProposer()
            case "ngram":
                return NgramProposer(self.config.ngram_min, self.config.ngram_max)
            case _:
                return Eagle3Proposer(
                    *self.heads[name],
                    self.target.embeddings.weight.detach(),
                    num_slots=num_slots,
                    max_length=self.max_tokens + max(self.config.num_draft_tokens),
                )

    def temperature(self, way: _Pass, component: str) -> float:
        """At which a component is decoded."""
        return self.temperatures[component] if way.temperature is None else way.temperature

    def decode(
        self, way: _Pass, ids: list[str], num_slots: int, max_new_tokens: int, label: str | None
    ) -> Iterator[Decoded]:
        """Answers the conversations `ids`."""
        requests = [
            Request(
                i,
                self.by_id[i]["prompt_ids"],
                self.temperature(way, self.by_id[i]["component"]),
            )
            for i in ids
        ]
        settings = DecodeSettings(
            num_draft_tokens=way.num_draft_tokens,
            max_new_tokens=max_new_tokens,
            batch_size=num_slots,
            seed=self.seed,
        )
        return answer(
            self.slots(way, num_slots),
            self.proposer(way.proposer, num_slots),
            requests,
            settings,
            classes=self.classes,
            label=label,
        )


def run(
    folder: Path,
    *,
    config: MeasureConfig,
    profile: ProfileConfig,
    seed: int,
    prompts: Artifact,
    speculators: dict[str, Artifact],
    target: Target,
) -> None:
    """Writes requests.jsonl and timings.jsonl (an answer a line) and acceptance.json (figures).

    Answers of an earlier, killed run in `folder` are kept. `speculators` are by name as
    `acceptance.json` has it, the fitted one first.
    """
    conversations = [
        row for row in read_jsonl(prompts.file("conversations.jsonl")) if row["split"] == "test"
    ]
    if not conversations:
        raise ValueError("data.num_test must be larger: no held-out conversation is left")
    bench = _Bench(config, profile, seed, conversations, target, speculators)
    ways = list(_ways(config, speculators))
    for way in ways:
        _decode_all(folder / "requests.jsonl", bench, way)
    _time_all(folder / "timings.jsonl", bench, ways)
    measured = [Measured(**row) for row in read_jsonl(folder / "requests.jsonl")]
    timed = [Timed(**row["timed"]) for row in read_jsonl(folder / "timings.jsonl")]
    differences = _differences(bench, measured)
    rows = list(_rows(bench, ways, profile, measured, timed, differences))
    write_json(
        folder / "acceptance.json",
        {
            "rows": rows,
            "differences": differences,
            "confidence": config.confidence,
            "device": str(target.device),
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


def _ways(config: MeasureConfig, speculators: Iterable[str]) -> Iterator[_Pass]:
    temperatures: list[float | None] = [*config.temperatures] if config.temperatures else [None]
    for temperature in temperatures:
        yield _Pass("none", 0, temperature)
        for proposer in ("ngram", *speculators):
            for k in config.num_draft_tokens:
                yield _Pass(proposer, k, temperature)


def _decode_all(journal: Path, bench: _Bench, way: _Pass) -> None:
    """All held-out conversations, many at once, those in the journal left out."""
    done = set()
    if journal.exists():
        rows = read_jsonl(journal, tolerate_truncated_tail=True)
        done = {row["id"] for row in rows if _is_of(bench, way, row)}
    ids = [i for i in bench.by_id if i not in done]
    if not ids:
        return
    limit = bench.config.max_new_tokens
    num_slots = min(bench.config.batch_size, len(bench.by_id))
    label = f"measure {way.proposer} k={way.num_draft_tokens}"
    for answered in bench.decode(way, ids, num_slots, limit, label):
        conversation = bench.by_id[answered.id]
        found = Measured(
            id=answered.id,
            component=conversation["component"],
            proposer=way.proposer,
            temperature=bench.temperature(way, conversation["component"]),
            num_draft_tokens=way.num_draft_tokens,
            num_prompt_tokens=len(conversation["prompt_ids"]),
            tokens=answered.tokens,
            finish_reason=answered.finish_reason,
            loop_start=answered.loop_start,
            rounds=[[r.start, r.num_drafted, r.num_kept] for r in answered.rounds],
        )
        append_jsonl(journal, [asdict(found)])


def _is_of(bench: _Bench, way: _Pass, row: dict[str, Any]) -> bool:
    found = (row["proposer"], row["num_draft_tokens"], row["temperature"])
    return found == (
        way.proposer,
        way.num_draft_tokens,
        bench.temperature(way, row["component"]),
    )


def _time_all(journal: Path, bench: _Bench, ways: list[_Pass]) -> None:
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


def _timed(bench: _Bench, way: _Pass, answer: Decoded) -> Timed:
    component = bench.by_id[answer.id]["component"]
    return Timed(
        component=component,
        proposer=way.proposer,
        temperature=bench.temperature(way, component),
        num_draft_tokens=way.num_draft_tokens,
        num_tokens=max(0, len(answer.tokens) - 1),
        target_seconds=answer.target_seconds,
        draft_seconds=answer.draft_seconds,
    )


def _differences(bench: _Bench, measured: list[Measured]) -> list[dict[str, Any]]:
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
        ids = torch.tensor([context], device=bench.target.device)
        _, last = bench.target.states(ids, torch.ones_like(ids, dtype=torch.bool), [])
        logits = bench.target.logits(last[0, -1])
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
    bench: _Bench,
    ways: list[_Pass],
    profile: ProfileConfig,
    measured: list[Measured],
    timed: list[Timed],
    differences: list[dict[str, Any]],
) -> Iterator[dict[str, Any]]:
    config = bench.config
    intervals = Intervals(config.num_bootstrap, config.confidence, bench.seed)
    weights = {c.name: c.weight for c in profile.components}
    for way in ways:
        own = [m for m in measured if _is_of(bench, way, asdict(m))]
        by_component = {n: [m for m in own if m.component == n] for n in weights}
        by_component = {name: found for name, found in by_component.items() if found}
        different = {
            d["component"]
            for d in differences
            if (d["proposer"], d["num_draft_tokens"]) == (way.proposer, way.num_draft_tokens)
        }
        of_way = [t for t in timed if _is_of(bench, way, asdict(t))]
        times = {name: [t for t in of_way if t.component == name] for name in by_component}
        equal: dict[str, bool | None] = {}
        for name, found in by_component.items():
            row = component_row(found, times[name], intervals)
            greedy = found[0].temperature == 0 and way.proposer != "none"
            equal[name] = name not in different if greedy else None
            if way.proposer in bench.heads:
                row["coverage"] = _coverage(bench, way.proposer, found)
            yield row | {"outputs_equal_plain": equal[name]}
        known = [value for value in equal.values() if value is not None]
        yield mix_row(by_component, times, weights, intervals) | {
            "outputs_equal_plain": all(known) if known else None
        }


def _coverage(bench: _Bench, head: str, measured: list[Measured]) -> float:
    """Share of the answers' tokens that are in the draft vocabulary."""
    tokens = torch.tensor([token for m in measured for token in m.tokens])
    return float(bench.heads[head][1].t2d.cpu()[tokens].float().mean())
