"""Keeps the hidden states that decoding computes anyway, so that no second pass is needed."""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specfit.artifacts import ArtifactStore, Recipe
from specfit.config import ExtractConfig
from specfit.files import DiskFull, require_free
from specfit.states.codec import EncodedStates, bytes_per_token, encode, joined
from specfit.states.compute import of_document
from specfit.states.documents import Document, document_of
from specfit.states.store import next_shard, write_shard
from specfit.targets.target import HiddenStates, Target
from specfit_serve.ngram import NoProposer

log = logging.getLogger(__name__)


class StateRecorder(NoProposer):
    """Stands where a proposer would, drafts nothing, and keeps the features that it is shown.

    They are the states of a forward pass over the whole conversation, to the rounding that batches
    of another shape bring. Of an answer's last token, which nothing follows, there are none: its
    row is 0.
    """

    def __init__(
        self, folder: Path, *, config: ExtractConfig, aux_layers: list[int], target: Target
    ) -> None:
        """Writes shards into `folder`, a store in the making."""
        self.folder = folder
        self.config = config
        self.target = target
        self.layers = [*aux_layers, target.info.num_layers]  # that features must be of
        self.num_tokens = 0  # kept so far
        self._seen: dict[int, list[EncodedStates]] = {}  # by slot
        self._documents: list[Document] = []  # of the next shard
        self._states: list[tuple[HiddenStates, EncodedStates]] = []

    def has_room(self, lengths: Iterable[int]) -> bool:
        """Whether the disk holds the states of conversations of up to `lengths` tokens.

        Where it does not, `extract` asks again when the answers, which may be shorter, are known.
        """
        num_tokens = sum(min(length, self.config.max_tokens) for length in lengths)
        hidden_size = self.target.info.hidden_size
        size = bytes_per_token(len(self.layers), hidden_size, self.config.dtype)
        try:
            require_free(self.folder, num_tokens * size, f"hidden states of {num_tokens} tokens")
        except DiskFull as error:
            log.warning("generate: hidden states are not kept meanwhile: %s", error)
            return False
        return True

    def start(
        self,
        slot: int,
        tokens: Sequence[int],  # noqa: ARG002
        features: Float[Tensor, "prompt width"] | None,
    ) -> None:
        """Keeps the states of the prompt."""
        assert features is not None
        self._seen[slot] = [self._encoded(features)]

    def observe(
        self,
        features: Float[Tensor, "rows seq width"] | None,
        num_kept: Int[Tensor, " rows"],  # noqa: ARG002
    ) -> None:
        """Keeps the states of each sequence's newest token."""
        assert features is not None
        encoded = self._encoded(features[:, 0])
        for slot in range(len(features)):
            self._seen[slot].append(encoded.rows(slice(slot, slot + 1)))

    def move(self, source: int, to: int) -> None:
        """The sequence of slot `source` continues in slot `to`."""
        self._seen[to] = self._seen.pop(source)

    def keep(self, slot: int, answer: dict[str, Any]) -> None:
        """Takes what was seen in `slot` as the states of `answer`, a row of answers.jsonl."""
        document = document_of(answer, self.config.max_tokens)
        if document is None:
            return
        seen = joined(self._seen[slot])
        no_scales = None if seen.scales is None else torch.zeros_like(seen.scales[:1])
        last = EncodedStates(torch.zeros_like(seen.values[:1]), no_scales)
        states = joined([seen, last]).rows(slice(document.num_tokens))
        self._documents.append(document)
        self._states.append(of_document(self.target, document, states))
        self.num_tokens += document.num_tokens
        if sum(d.num_tokens for d in self._documents) >= self.config.shard_tokens:
            self.flush()

    def flush(self) -> None:
        """Writes what has not been written yet."""
        if self._documents:
            write_shard(next_shard(self.folder), self._documents, self._states)
        self._documents, self._states = [], []

    def _encoded(self, features: Float[Tensor, "rows width"]) -> EncodedStates:
        layers = features.view(len(features), len(self.layers), -1)
        return encode(layers, self.config.dtype)


@contextmanager
def recorder_in(
    store: ArtifactStore, recipe: Recipe | None, open_recorder: Callable[[Path], StateRecorder]
) -> Iterator[StateRecorder | None]:
    """Keeps hidden states while answers are made; None where nobody asks, or they are there."""
    if recipe is None:
        yield None
        return
    with store.prepared(recipe) as folder:
        yield None if folder is None else open_recorder(folder)
