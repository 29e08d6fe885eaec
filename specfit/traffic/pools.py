"""The conversations of a source, by split, and what became of them."""

import hashlib
import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from specfit.config import DataConfig
from specfit_data.conversations import Conversation
from specfit_data.sources import Rejected, read
from specfit_data.splits import split_of, without_duplicates

SPLITS = ("train", "validation", "test")
MAX_ROWS = 50_000  # read of one source; which of them are taken is drawn by hash
log = logging.getLogger(__name__)


@dataclass
class Tally:
    """What became of the conversations of one component, source and split."""

    component: str
    source: str
    licence: str
    split: str
    num_kept: int = 0  # in a session, as its first request or a later one
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


class Pool:
    """The conversations of one source, by split, in an order that only their ids decide."""

    def __init__(
        self, name: str, component: str, data: DataConfig, seen: set[str], seed: int
    ) -> None:
        self.source_name, self.source = name, data.sources[name]
        self.tallies = {
            split: Tally(component, name, self.source.licence, split) for split in SPLITS
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


def _rank(seed: int, conversation_id: str) -> str:
    return hashlib.sha256(f"{seed}:{conversation_id}".encode()).hexdigest()
