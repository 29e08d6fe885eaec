"""Conversations to learn from, as `generate` leaves them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from specfit.files import read_jsonl


@dataclass(frozen=True)
class Document:
    """One conversation, prompt and answer."""

    id: str
    component: str
    source: str
    split: str  # train | validation
    input_ids: list[int]
    loss_spans: list[tuple[int, int]]  # where the assistant speaks: half-open, in tokens

    @property
    def num_tokens(self) -> int:
        """Prompt and answer."""
        return len(self.input_ids)

    @property
    def num_answer_tokens(self) -> int:
        """That are learned from."""
        return sum(end - start for start, end in self.loss_spans)

    @property
    def loss_mask(self) -> Bool[Tensor, "seq"]:
        """True where the assistant speaks."""
        mask = torch.zeros(len(self.input_ids), dtype=torch.bool)
        for start, end in self.loss_spans:
            mask[start:end] = True
        return mask


def document_of(row: dict[str, Any], max_tokens: int) -> Document | None:
    """A row of answers.jsonl, cut after `max_tokens`; None when nothing to learn is left of it.

    A cut in the middle of an answer is the same text as far as it goes.
    """
    spans = [(start, min(end, max_tokens)) for start, end in row["loss_spans"]]
    spans = [(start, end) for start, end in spans if start < end]
    if not spans:
        return None
    ids = row["input_ids"][:max_tokens]
    return Document(row["id"], row["component"], row["source"], row["split"], ids, spans)


def read_documents(path: Path, *, max_tokens: int, splits: Sequence[str]) -> list[Document]:
    """The documents of `splits`, each cut after `max_tokens`.

    Shortest first, so that neighbours in a batch pad little; the order is the same for a store and
    on the fly, since training takes documents by their index.
    """
    rows = [row for row in read_jsonl(path) if row["split"] in splits]
    documents = [d for row in rows if (d := document_of(row, max_tokens)) is not None]
    return sorted(documents, key=lambda d: (d.num_tokens, d.id))
