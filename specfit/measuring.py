"""Draft-and-verify decoding of held-out conversations: ways of it, and what is recorded."""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specfit.acceptance import Intervals, Measured, by_session
from specfit.answering import answer
from specfit.artifacts import Artifact
from specfit.engine import DecodeEngine
from specfit.files import append_jsonl, read_jsonl
from specfit.measure_config import MeasureConfig
from specfit.mix import weights_of_tokens
from specfit.targets.vocabulary import token_classes
from specfit.traffic.config import ProfileConfig
from specfit.traffic.mixture import known_token_shares
from specfit.training.checkpoints import load_head
from specfit.turns import next_prompt, request_id
from specfit_serve.decode import Decoded, DecodeSettings, Request
from specfit_serve.ngram import NgramProposer, NoProposer
from specfit_serve.protocols import DecodeTarget, Proposer


def held_out(prompts: Artifact) -> list[dict[str, Any]]:
    """The conversations that nothing was fitted to.

    Raises:
        ValueError: there are none.
    """
    rows = read_jsonl(prompts.file("conversations.jsonl"))
    found = [row for row in rows if row["split"] == "test"]
    if not found:
        raise ValueError("data.num_test must be larger: no held-out conversation is left")
    return found


@dataclass(frozen=True)
class Way:
    """One way of decoding all held-out conversations."""

    proposer: str
    num_draft_tokens: int
    temperature: float | None  # None: each component's own


class Bench:
    """The held-out conversations, and decoding them."""

    def __init__(
        self,
        config: MeasureConfig,
        profile: ProfileConfig,
        seed: int,
        conversations: list[dict[str, Any]],
        engine: DecodeEngine,
        speculators: dict[str, Artifact],
    ) -> None:
        self.config = config
        self.seed = seed
        self.engine = engine
        target = engine.target
        self.by_id = {row["id"]: row for row in conversations}
        self.temperatures = {c.name: c.temperature for c in profile.components}
        self.weights = {c.name: c.weight for c in profile.components}
        self.token_shares = known_token_shares(profile)
        self.intervals = Intervals(config.num_bootstrap, config.confidence, seed)
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
                    f"the head {speculators[name].path} must be of a target with {own[0]} channels "
                    f"and {own[1]} tokens, got {sizes[0]} and {sizes[1]}"
                )
        longest = max(_most_tokens(row, config.max_new_tokens) for row in conversations)
        # Where the target's context ends answers, it ends those of all ways at the same token.
        self.max_tokens = min(
            longest, target.info.max_position_embeddings - max(config.num_draft_tokens)
        )
        self._slots: tuple[object, DecodeTarget] | None = None

    def slots(self, way: Way, num_slots: int) -> DecodeTarget:
        """One cache at a time: one of another size, or with other features, replaces it."""
        max_length = self.max_tokens + way.num_draft_tokens
        layers = None
        if way.proposer in self.heads:
            layers = list(self.heads[way.proposer][0].config.aux_layers)
        kind = (num_slots, max_length, layers)
        if self._slots is None or self._slots[0] != kind:
            self._slots = None  # first, so that there are never two caches in memory
            slots = self.engine.slots(num_slots=num_slots, max_length=max_length, aux_layers=layers)
            self._slots = kind, slots
        return self._slots[1]

    def proposer(self, name: str, num_slots: int) -> Proposer:
        """A fresh one, for a fresh set of requests."""
        match name:
            case "none":
                return NoProposer()
            case "ngram":
                return NgramProposer(self.config.ngram_min, self.config.ngram_max)
            case _:
                return self.engine.eagle3(
                    *self.heads[name],
                    num_slots=num_slots,
                    max_length=self.max_tokens + max(self.config.num_draft_tokens),
                )

    def temperature(self, way: Way, component: str) -> float:
        """At which a component is decoded."""
        return self.temperatures[component] if way.temperature is None else way.temperature

    def mix_weights(self, measured: Iterable[Measured]) -> dict[str, float]:
        """By request: the profile's, or those that give components its shares of the tokens."""
        if self.token_shares is None:
            return self.weights
        own = list(measured)
        stats = {
            name: list(by_session([m for m in own if m.component == name]).values())
            for name in self.weights
        }
        return weights_of_tokens(stats, self.token_shares)

    def go_on(self, answered: Measured) -> None:
        """Adds the next request of a session, now that the answer before it is known.

        A session ends with an answer that loops, or where the target's context is full.
        """
        row = self.by_id[answered.id]
        following = row.get("follow_ups", [])
        if answered.turn == len(following) or answered.finish_reason == "repetition":
            return
        prompt = next_prompt(
            row["prompt_ids"] + answered.tokens,
            answered.finish_reason,
            following[answered.turn],
            row["end_ids"],
        )
        turn = answered.turn + 1
        if len(prompt) < self.max_tokens:
            request = row | {"id": request_id(answered.session, turn), "prompt_ids": prompt}
            self.by_id[request["id"]] = request | {"turn": turn}

    def decode(
        self, way: Way, ids: list[str], num_slots: int, max_new_tokens: int, label: str | None
    ) -> Iterator[Decoded]:
        """Answers the conversations `ids`."""
        requests = [
            Request(
                i,
                self.by_id[i]["prompt_ids"],
                self.temperature(way, self.by_id[i]["component"]),
                _limit(self.by_id[i]),
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


def _limit(row: dict[str, Any]) -> int | None:
    """The most tokens of its answer, where the profile says."""
    limits: list[int] | None = row.get("output_limits")
    return None if limits is None else limits[row.get("turn", 0)]


def _most_tokens(row: dict[str, Any], max_new_tokens: int) -> int:
    """Of a session, its last answer included."""
    following = row.get("follow_ups", [])
    later = sum(len(ids) + len(row["end_ids"]) for ids in following)
    return len(row["prompt_ids"]) + later + (len(following) + 1) * max_new_tokens


def decode_all(journal: Path, bench: Bench, way: Way, *, leads: bool = False) -> None:
    """Adds all requests to the journal, decoded many at once; those in it are left out.

    The answers of a way that leads are what the sessions go on from, in all ways: so all ways
    answer the same requests.
    """
    done = set()
    if journal.exists():
        for row in read_jsonl(journal, tolerate_truncated_tail=True):
            if is_of(bench, way, row):
                done.add(row["id"])
                if leads:
                    bench.go_on(Measured(**row))
    limit = bench.config.max_new_tokens
    while ids := [i for i in bench.by_id if i not in done]:
        num_slots = min(bench.config.batch_size, len(bench.by_id))
        label = f"measure {way.proposer} k={way.num_draft_tokens}"
        for answered in bench.decode(way, ids, num_slots, limit, label):
            found = _measured(bench, way, answered)
            append_jsonl(journal, [asdict(found)])
            done.add(found.id)
            if leads:
                bench.go_on(found)


def _measured(bench: Bench, way: Way, answered: Decoded) -> Measured:
    conversation = bench.by_id[answered.id]
    return Measured(
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
        turn=conversation.get("turn", 0),
    )


def is_of(bench: Bench, way: Way, row: dict[str, Any]) -> bool:
    """Whether a recorded answer was decoded this way."""
    found = (row["proposer"], row["num_draft_tokens"], row["temperature"])
    return found == (
        way.proposer,
        way.num_draft_tokens,
        bench.temperature(way, row["component"]),
    )
