"""`prompts`: sessions of the profile's components, as the target reads them."""

import json
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from tqdm import tqdm

from specfit.config import DataConfig
from specfit.files import write_json, write_text
from specfit.traffic.config import ComponentConfig, ProfileConfig
from specfit.traffic.draw import mean_turns
from specfit.traffic.mixture import Share, normalized
from specfit.traffic.pools import SPLITS, Pool, Tally
from specfit.traffic.sessions import (
    Candidate,
    Lengths,
    Wanted,
    output_limits,
    prefix_of,
    put_together,
)
from specfit_data.conversations import Conversation
from specfit_data.example_page import example_html
from specfit_data.render import Rendered, Renderer, RenderError
from specfit_data.sessions import Session, prefix_text, session_of, with_prefix

VERSION = 3
log = logging.getLogger(__name__)

NUM_REASONS = 3  # of rejections, logged


def run(
    folder: Path,
    *,
    data: DataConfig,
    profile: ProfileConfig,
    mixture: Sequence[Share],
    seed: int,
    tokenizer: Any,
) -> None:
    """Writes conversations.jsonl, prompts.json and example.html.

    `data.num_train` sessions are shared out so that the components' answers have the tokens that
    `mixture` asks for, if all answers are as long; `fit` corrects that when they are known. For
    validation and the test each component has half by its weight and half by their number, so that
    a rare one is measured, too: figures of the mix weigh components by the profile.

    Raises:
        ValueError: a source is not known or may not be used so, too many conversations cannot be
            rendered, or a component has none left.
    """
    _check_sources(data, profile)
    making = _Making(data, profile, seed, Renderer(tokenizer), tokenizer)
    seen: set[str] = set()
    pools: dict[tuple[str, str], Pool] = {}
    # Held-out sources first: what is measured on is then a duplicate anywhere else.
    pairs = [(c.name, source) for c in profile.components for source in c.sources]
    for name, source in sorted(pairs, key=lambda p: not data.sources[p[1]].held_out):
        pools[name, source] = Pool(source, name, data, seen, seed)
    quotas = _quotas(data, profile, mixture)
    rows: list[dict[str, Any]] = []
    lengths: list[dict[str, Any]] = []
    with tqdm(total=sum(quotas.values()), desc="prompts") as making.bar:
        for component in profile.components:
            own = [pools[component.name, source] for source in component.sources]
            for split in SPLITS:
                taken, found = making.sessions(component, split, quotas[component.name, split], own)
                _check_taken(component, split, taken, own)
                rows += taken
                lengths += found
    tallies = [t for pool in pools.values() for t in pool.tallies.values()]
    _check_rejected(tallies, data.max_rejected)
    shares = [vars(share) for share in mixture]
    _write(folder, rows, tallies, {"lengths": lengths, "mixture": shares}, tokenizer)


def _quotas(
    data: DataConfig, profile: ProfileConfig, mixture: Sequence[Share]
) -> dict[tuple[str, str], int]:
    """Sessions, by component and split."""
    turns = {c.name: mean_turns(c, profile.max_turns) for c in profile.components}
    even = 1 / len(profile.components)
    trained = normalized({s.component: s.training / turns[s.component] for s in mixture})
    shares = {
        "train": trained,
        "validation": {c.name: (c.weight + even) / 2 for c in profile.components},
    }
    shares["test"] = shares["validation"]
    return {
        (name, split): max(1, round(getattr(data, f"num_{split}") * share))
        for split, of in shares.items()
        for name, share in of.items()
    }


@dataclass
class _Making:
    """Renders sessions."""

    data: DataConfig
    profile: ProfileConfig
    seed: int
    renderer: Renderer
    tokenizer: Any
    bar: Any = None

    def sessions(
        self, component: ComponentConfig, split: str, quota: int, pools: list[Pool]
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Up to `quota` sessions as rows, and their lengths beside those that are wanted."""
        wanted = Wanted.of(component, self.profile, quota, self.seed)
        queue = self._candidates(split, pools, whole=wanted.whole)
        candidates = list(islice(queue, wanted.num_candidates))
        sessions = put_together(wanted, candidates)
        limits = output_limits(wanted, [1 + len(s.follow_ups) for s in sessions], self.seed)
        lengths = Lengths()
        prefix = self._prefix(component)
        tallies = {pool.source_name: pool.tallies[split] for pool in pools}
        rows = []
        for session, limit in zip(sessions, limits, strict=True):
            tally = tallies[session.first.source]
            row = self._row(session, prefix, tally, lengths)
            if row is not None:
                rows.append(row | {"split": split, "output_limits": limit})
                self.bar.update()
        found = [
            {"component": component.name, "split": split} | row
            for row in lengths.rows(wanted, component)
        ]
        return rows, found

    def _candidates(self, split: str, pools: list[Pool], *, whole: bool) -> Iterator[Candidate]:
        """Conversations of a split, from each source in turn.

        A component with held-out sources is measured on those alone.
        """
        if split == "test" and any(pool.source.held_out for pool in pools):
            pools = [pool for pool in pools if pool.source.held_out]
        queues = [(pool.tallies[split], iter(pool.waiting[split])) for pool in pools]
        while queues:
            tally, queue = queues.pop(0)
            for conversation in queue:
                candidate = self._candidate(conversation, tally, whole=whole)
                if candidate is not None:
                    yield candidate
                    queues.append((tally, queue))
                    break

    def _candidate(
        self, conversation: Conversation, tally: Tally, *, whole: bool
    ) -> Candidate | None:
        # What comes after the first request of a session is no part of its prompt.
        first = conversation if whole else session_of(conversation).first
        try:
            prompt = self.renderer.prompt(first, self.data.loss_on.name)
            if _is_answered(first):
                self.renderer.full(first, self.data.loss_on.name)
        except RenderError as error:
            _reject(tally, error)
            return None
        num_tokens = len(prompt.input_ids)
        if not self.data.min_prompt_tokens <= num_tokens <= self.data.max_prompt_tokens:
            tally.num_passed_over += 1
            return None
        return Candidate(conversation, num_tokens)

    def _prefix(self, component: ComponentConfig) -> str | None:
        num_tokens = prefix_of(component, self.profile)
        if num_tokens == 0:
            return None
        return prefix_text(num_tokens, lambda text: len(self.tokenizer(text).input_ids))

    def _row(
        self, session: Session, prefix: str | None, tally: Tally, lengths: Lengths
    ) -> dict[str, Any] | None:
        conversation = session.first
        loss_on = self.data.loss_on.name
        reference: Rendered | None = None
        try:
            bare = self.renderer.prompt(conversation, loss_on)
            if prefix is not None:
                session = with_prefix(session, prefix)
            prompt = self.renderer.prompt(session.first, loss_on)
            if _is_answered(conversation) and not session.follow_ups:
                reference = self.renderer.full(session.first, loss_on)
            follow_ups = [
                self.renderer.follow_up(session, i) for i in range(len(session.follow_ups))
            ]
            end_ids = self.renderer.end_of_turn(session)
        except RenderError as error:
            _reject(tally, error)
            return None
        num_tokens = len(prompt.input_ids)
        tally.num_kept += 1 + session.num_composed
        tally.num_prompt_tokens += num_tokens
        if reference is not None:
            tally.num_learned += sum(end - start for start, end in reference.spans)
            tally.num_read += len(reference.input_ids)
        lengths.prompts.append(len(bare.input_ids))
        if prefix is not None:
            lengths.prefixes.append(num_tokens - len(bare.input_ids))
        lengths.new += map(len, follow_ups)
        lengths.turns.append(1 + len(follow_ups))
        return {
            "id": conversation.id,
            "component": tally.component,
            "source": tally.source,
            "licence": tally.licence,
            "prompt_ids": prompt.input_ids,
            "prompt_spans": prompt.spans,
            "num_prefix_tokens": num_tokens - len(bare.input_ids),
            # What a later request adds to the answer before it, which is not known here.
            "follow_ups": follow_ups,
            "end_ids": end_ids,
            "reference_ids": reference.input_ids if reference else None,
            "reference_spans": reference.spans if reference else None,
        }


def _is_answered(conversation: Conversation) -> bool:
    return any(m.role == "assistant" for m in conversation.messages)


def _reject(tally: Tally, error: RenderError) -> None:
    tally.num_rejected += 1
    tally.reasons[str(error)] += 1


def _check_sources(data: DataConfig, profile: ProfileConfig) -> None:
    owner: dict[str, str] = {}
    for component in profile.components:
        for name in component.sources:
            if name in owner:
                raise ValueError(
                    f"profile.components: source {name} must be in one component, it is in "
                    f"{owner[name]} and {component.name}"
                )
            owner[name] = component.name
    for i, component in enumerate(profile.components):
        key = f"profile.components[{i}].sources"
        unknown = [name for name in component.sources if name not in data.sources]
        if unknown:
            raise ValueError(
                f"{key} must be in data.sources ({', '.join(sorted(data.sources))}), "
                f"got {', '.join(unknown)}"
            )
        if all(data.sources[name].held_out for name in component.sources):
            raise ValueError(
                f"{key} must have a source to train on; {', '.join(component.sources)} is held out"
            )


def _check_taken(
    component: ComponentConfig, split: str, taken: list[dict[str, Any]], pools: list[Pool]
) -> None:
    if taken:
        return
    tallies = [pool.tallies[split] for pool in pools]
    passed = sum(t.num_passed_over for t in tallies)
    rejected = sum(t.num_rejected for t in tallies)
    there = sum(len(pool.waiting[split]) for pool in pools)
    raise ValueError(
        f"profile component {component.name} has no {split} conversation: {there} of its sources "
        f"{', '.join(component.sources)} belong to that split, of which {passed} are longer or "
        "shorter than data.min_prompt_tokens and data.max_prompt_tokens allow; "
        f"{rejected} are rejected" + (f": {_most_common(tallies)}" if rejected else "")
    )


def _check_rejected(tallies: list[Tally], max_rejected: float) -> None:
    rows, unreadable = sum(t.num_rows for t in tallies), sum(t.num_unreadable for t in tallies)
    unrendered = sum(t.num_rejected for t in tallies) - unreadable
    tried = unrendered + sum(t.num_kept + t.num_passed_over for t in tallies)
    # All rows are read, but only as many rendered as are wanted.
    for rejected, total in ((unreadable, rows), (unrendered, tried)):
        if rejected:
            log.warning("prompts: %d of %d rejected: %s", rejected, total, _most_common(tallies))
        if rejected > max_rejected * total:
            raise ValueError(
                f"{rejected} of {total} conversations are rejected, more than data.max_rejected "
                f"({max_rejected:g}): {_most_common(tallies)}"
            )


def _most_common(tallies: list[Tally]) -> str:
    reasons: Counter[str] = sum((t.reasons for t in tallies), Counter())
    return "; ".join(f"{n}x {reason}" for reason, n in reasons.most_common(NUM_REASONS))


def _write(
    folder: Path,
    rows: list[dict[str, Any]],
    tallies: list[Tally],
    figures: dict[str, Any],
    tokenizer: Any,
) -> None:
    write_text(folder / "conversations.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    used = [t.row() for t in tallies if t.num_kept + t.num_rejected + t.num_passed_over]
    write_json(folder / "prompts.json", {"rows": used} | figures)
    example = next((row for row in rows if row["reference_ids"]), rows[0])
    ids = example["reference_ids"] or example["prompt_ids"]
    spans = example["reference_spans"] or example["prompt_spans"]
    learned = [any(start <= i < end for start, end in spans) for i in range(len(ids))]
    texts = [tokenizer.decode([i]) for i in ids]
    title = f"{example['source']} {example['id']}: what is learned"
    write_text(folder / "example.html", example_html(texts, learned, title))
    log.info("prompts:\n%s", _table(used))


def _table(rows: list[dict[str, Any]]) -> str:
    names = ["component", "source", "split", "num_kept", "num_rejected", "num_duplicates"]
    names += ["num_passed_over", "num_prompt_tokens", "assistant_share"]
    lines = [[name.removeprefix("num_") for name in names]]
    for row in rows:
        share = row["assistant_share"]
        cells = [str(row[name]) for name in names[:-1]]
        lines.append([*cells, "-" if share is None else f"{share:.2f}"])
    widths = [max(len(line[i]) for line in lines) for i in range(len(names))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )
