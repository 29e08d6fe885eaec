"""Hidden states on disk: safetensors shards, and an index of the documents in them.

shard-00000.safetensors   the states of some documents, one after another
documents.jsonl           which document stands where
store.json                dtype, layers, sizes
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from specfit.artifacts import Artifact
from specfit.files import read_jsonl
from specfit.states.codec import EncodedStates, decode
from specfit.states.documents import Document
from specfit.targets.target import HiddenStates


@dataclass(frozen=True)
class Place:
    """Where a document's states are."""

    id: str
    component: str
    split: str
    shard: str
    start: int  # row of its first token
    num_tokens: int


def plan_shards(documents: Sequence[Document], shard_tokens: int) -> list[list[Document]]:
    """Documents in order, as many a shard as fit in `shard_tokens`, at least one."""
    shards: list[list[Document]] = []
    room = 0
    for document in documents:
        if not shards or len(document.input_ids) > room:
            shards.append([])
            room = shard_tokens
        shards[-1].append(document)
        room -= len(document.input_ids)
    return shards


def shard_name(index: int) -> str:
    """The file name of shard `index`."""
    return f"shard-{index:05}.safetensors"


def places(shards: Sequence[Sequence[Document]]) -> Iterator[Place]:
    """Where each document of `shards` stands."""
    for index, documents in enumerate(shards):
        start = 0
        for document in documents:
            length = len(document.input_ids)
            yield Place(
                document.id, document.component, document.split, shard_name(index), start, length
            )
            start += length


def write_shard(path: Path, states: Sequence[tuple[HiddenStates, EncodedStates]]) -> None:
    """Writes one shard; it is there whole or not at all."""
    tensors = {
        "input_ids": torch.cat([s.input_ids for s, _ in states]).int(),
        "loss_mask": torch.cat([s.loss_mask for s, _ in states]),
        "log_normalizer": torch.cat([s.log_normalizer for s, _ in states]),
        "top_token": torch.cat([s.top_token for s, _ in states]).int(),
        "states": torch.cat([encoded.values for _, encoded in states]),
    }
    if states[0][1].scales is not None:
        tensors["scales"] = torch.cat([e.scales for _, e in states if e.scales is not None])
    partial = path.with_suffix(".tmp")
    save_file({name: t.cpu().contiguous() for name, t in tensors.items()}, partial)
    partial.replace(path)


class StateStore:
    """Reads a finished store; the documents of a shard without its neighbours."""

    def __init__(self, artifact: Artifact) -> None:
        self.artifact = artifact
        rows = read_jsonl(artifact.file("documents.jsonl"))
        self.documents = [Place(**row) for row in rows]
        self._open: dict[str, Any] = {}

    def read(self, index: int) -> HiddenStates:
        """The states of document `index`, in fp32.

        Raises:
            CorruptArtifact: its shard is not what was written.
        """
        place = self.documents[index]
        if place.shard not in self._open:
            self._open[place.shard] = safe_open(self.artifact.file(place.shard), "pt")
        shard = self._open[place.shard]
        rows = slice(place.start, place.start + place.num_tokens)

        def tensor(name: str) -> Tensor:
            found: Tensor = shard.get_slice(name)[rows]
            return found

        scales = tensor("scales") if "scales" in shard.keys() else None  # noqa: SIM118
        states = decode(EncodedStates(tensor("states"), scales))
        return HiddenStates(
            tensor("input_ids").long(),
            tensor("loss_mask"),
            states[:, :-1],
            states[:, -1],
            tensor("log_normalizer"),
            tensor("top_token").long(),
        )


def index_rows(shards: Sequence[Sequence[Document]]) -> list[dict[str, Any]]:
    """What `documents.jsonl` holds."""
    return [asdict(place) for place in places(shards)]
