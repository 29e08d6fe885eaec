"""`prompts`: conversations of the profile's components, as the target reads them."""

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from tqdm import tqdm

from specfit.config import ComponentConfig, DataConfig, ProfileConfig
from specfit.files import write_json, write_text
from specfit_data.conversations import Conversation
from specfit_data.example_page import example_html
from specfit_data.render import Rendered, Renderer, RenderError
from specfit_data.sources import Rejected, read
from specfit_data.splits import split_of, without_duplicates

VERSION = 2
log = logging.getLogger(__name__)

SPLITS = ("train", "validation", "test")
MAX_ROWS = 50_000  # read of one source; which of them are taken is drawn by hash
NUM_REASONS = 3  # of rejections, logged


@dataclass
class _Tally:
    """What became of the conversations of one component, source and split."""

    component: str
    source: str
    licence: str
    split: str
    num_kept: int = 0
    num_rejected: int = 0
    num_duplicates: int = 0
    num_passed_over: int = 0  # too long or too short
    num_prompt_tokens: int = 0
    num_rows: int = 0  # read of the source
    num_unreadable: int = 0  # of these, no conversation
    num_learned: int = 0  # tokens of reference answers
    num_read: int = 0  # tokens of references, prompts included
    reasons: Counter[str] = field(default_factory=Counter)

    def row(self) -> dict[str, Any]:
        """As it stands in prompts.json."""
        values = dict(vars(self))
        del values["num_rows"], values["num_unreadable"]
        learned, num_read = values.pop("num_learned"), values.pop("num_read")
        return values | {"assistant_share": learned / num_read if num_read else None}


class _Pool:
    """The conversations of one source, by split, in an order that only their ids decide."""

    def __init__(
        self, name: str, component: str, data: DataConfig, seen: set[str], seed: int
    ) -> None:
        self.source = data.sources[name]
        self.tallies = {
            split: _Tally(component, name, self.source.licence, split) for split in SPLITS
        }
        found: dict[str, list[Conversation]] = {split: [] for split in SPLITS}
        for conversation in self._read(name, seen):
            split = split_of(conversation.id, held_out=self.source.held_out)
            found[split].append(conversation)
        self.waiting = {
            split: sorted(own, key=lambda c: _rank(seed, c.id)) for split, own in found.items()
        }

    def _read(self, name: str, seen: set[str]) -> Iterator[Conversation]:
        # What is not a conversation belongs to no split; the first that counts takes it.
        tally = self.tallies["test" if self.source.held_out else "train"]

        def conversations() -> Iterator[Conversation]:
            for found in islice(read(name, self.source), MAX_ROWS):
                tally.num_rows += 1
                if tally.num_rows == MAX_ROWS:
                    log.warning("prompts: only the first %d rows of %s are read", MAX_ROWS, name)
                if isinstance(found, Rejected):
                    tally.num_unreadable += 1
                    tally.reasons[found.reason] += 1
                    log.debug("prompts: %s rejected: %s", found.where, found.reason)
                else:
                    yield found

        num_unique = 0
        for conversation in without_duplicates(conversations(), seen):
            num_unique += 1
            yield conversation
        tally.num_rejected = tally.num_unreadable
        tally.num_duplicates = tally.num_rows - tally.num_unreadable - num_unique


def run(
    folder: Path, *, data: DataConfig, profile: ProfileConfig, seed: int, tokenizer: Any
) -> None:
    """Writes conversations.jsonl, prompts.json and example.html.

    Raises:
        ValueError: a source is not known or may not be used so, too many conversations cannot be
            rendered, or a component has none left.
    """
    renderer = Renderer(tokenizer)
    _check_sources(data, profile)
    seen: set[str] = set()
    pools: dict[tuple[str, str], _Pool] = {}
    # Held-out sources first: what is measured on is then a duplicate anywhere else.
    pairs = [(c.name, source) for c in profile.components for source in c.sources]
    for name, source in sorted(pairs, key=lambda p: not data.sources[p[1]].held_out):
        pools[name, source] = _Pool(source, name, data, seen, seed)
    total_weight = sum(c.weight for c in profile.components)
    rows: list[dict[str, Any]] = []
    with tqdm(total=data.num_train + data.num_validation + data.num_test, desc="prompts") as bar:
        for component in profile.components:
            own = [pools[component.name, source] for source in component.sources]
            for split in SPLITS:
                share = component.weight / total_weight
                quota = max(1, round(getattr(data, f"num_{split}") * share))
                taken = list(_take(own, split, quota, data, renderer, bar))
                _check_taken(component, split, taken, own)
                rows += taken
    tallies = [t for pool in pools.values() for t in pool.tallies.values()]
    _check_rejected(tallies, data.max_rejected)
    _write(folder, rows, tallies, tokenizer)


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


def _take(
    pools: list[_Pool], split: str, quota: int, data: DataConfig, renderer: Renderer, bar: Any
) -> Iterator[dict[str, Any]]:
    """Up to `quota` conversations of a split, from each source in turn.

    A component with held-out sources is measured on those alone.
    """
    if split == "test" and any(pool.source.held_out for pool in pools):
        pools = [pool for pool in pools if pool.source.held_out]
    queues = [(pool.tallies[split], iter(pool.waiting[split])) for pool in pools]
    num_taken = 0
    while queues and num_taken < quota:
        tally, queue = queues.pop(0)
        for conversation in queue:
            row = _rendered(conversation, tally, data, renderer)
            if row is not None:
                yield row
                num_taken += 1
                bar.update()
                queues.append((tally, queue))
                break


def _rendered(
    conversation: Conversation, tally: _Tally, data: DataConfig, renderer: Renderer
) -> dict[str, Any] | None:
    reference: Rendered | None = None
    try:
        prompt = renderer.prompt(conversation, data.loss_on.name)
        if any(m.role == "assistant" for m in conversation.messages):
            reference = renderer.full(conversation, data.loss_on.name)
    except RenderError as error:
        tally.num_rejected += 1
        tally.reasons[str(error)] += 1
        return None
    if not data.min_prompt_tokens <= len(prompt.input_ids) <= data.max_prompt_tokens:
        tally.num_passed_over += 1
        return None
    tally.num_kept += 1
    tally.num_prompt_tokens += len(prompt.input_ids)
    if reference is not None:
        tally.num_learned += sum(end - start for start, end in reference.spans)
        tally.num_read += len(reference.input_ids)
    return {
        "id": conversation.id,
        "component": tally.component,
        "source": tally.source,
        "licence": tally.licence,
        "split": tally.split,
        "prompt_ids": prompt.input_ids,
        "prompt_spans": prompt.spans,
        "reference_ids": reference.input_ids if reference else None,
        "reference_spans": reference.spans if reference else None,
    }


def _check_taken(
    component: ComponentConfig, split: str, taken: list[dict[str, Any]], pools: list[_Pool]
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


def _check_rejected(tallies: list[_Tally], max_rejected: float) -> None:
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


def _most_common(tallies: list[_Tally]) -> str:
    reasons: Counter[str] = sum((t.reasons for t in tallies), Counter())
    return "; ".join(f"{n}x {reason}" for reason, n in reasons.most_common(NUM_REASONS))


def _write(folder: Path, rows: list[dict[str, Any]], tallies: list[_Tally], tokenizer: Any) -> None:
    write_text(folder / "conversations.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    used = [t.row() for t in tallies if t.num_kept + t.num_rejected + t.num_passed_over]
    write_json(folder / "prompts.json", {"rows": used})
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


def _rank(seed: int, conversation_id: str) -> str:
    return hashlib.sha256(f"{seed}:{conversation_id}".encode()).hexdigest()
