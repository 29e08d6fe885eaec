"""Hidden states on disk: safetensors shards, and an index of the documents in them.

shard-00000.safetensors   the states of some documents, one after another; its metadata names them
documents.jsonl           which document stands where, in the order that training counts them in
store.json                dtype, layers, sizes
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from specfit.artifacts import Artifact
from specfit.files import fsync, read_jsonl
from specfit.states.codec import EncodedStates, decode, joined
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
        if not shards or document.num_tokens > room:
            shards.append([])
            room = shard_tokens
        shards[-1].append(document)
        room -= document.num_tokens
    return shards


def next_shard(folder: Path) -> Path:
    """The first shard that is not there yet."""
    numbers = [int(path.stem.removeprefix("shard-")) for path in shards_in(folder)]
    return folder / f"shard-{max(numbers, default=-1) + 1:05}.safetensors"


def shards_in(folder: Path) -> list[Path]:
    """All shards that are there, in order."""
    return sorted(folder.glob("shard-*.safetensors"))


def write_shard(
    path: Path,
    documents: Sequence[Document],
    states: Sequence[tuple[HiddenStates, EncodedStates]],
) -> list[Place]:
    """Writes the states of `documents`; the file is there whole or not at all."""
    encoded = joined([e for _, e in states])
    tensors = {
        "input_ids": torch.cat([s.input_ids for s, _ in states]).int(),
        "loss_mask": torch.cat([s.loss_mask for s, _ in states]),
        "log_normalizer": torch.cat([s.log_normalizer for s, _ in states]),
        "top_token": torch.cat([s.top_token for s, _ in states]).int(),
        "states": encoded.values,
    }
    if encoded.scales is not None:
        tensors["scales"] = encoded.scales
    places, start = [], 0
    for d in documents:
        places.append(Place(d.id, d.component, d.split, path.name, start, d.num_tokens))
        start += d.num_tokens
    partial = path.with_suffix(".tmp")
    tensors = {name: t.cpu().contiguous() for name, t in tensors.items()}
    save_file(tensors, partial, metadata={"places": json.dumps([asdict(p) for p in places])})
    fsync(partial)
    partial.replace(path)
    return places


def kept_places(path: Path, documents: dict[str, Document]) -> list[Place] | None:
    """What a shard of an earlier run holds.

    Args:
        path: the shard.
        documents: by id, those that it may hold.

    Returns:
        None when it cannot be read, or holds anything but `documents` as they are now: answers
        that were made again need not be the same.
    """
    try:
        with safe_open(path, "pt") as shard:
            places = [Place(**row) for row in json.loads((shard.metadata() or {})["places"])]
            input_ids, loss_mask = shard.get_tensor("input_ids"), shard.get_tensor("loss_mask")
    except (SafetensorError, KeyError, ValueError):
        return None
    for place in places:
        document = documents.get(place.id)
        rows = slice(place.start, place.start + place.num_tokens)
        if (
            document is None
            or (place.component, place.split) != (document.component, document.split)
            or input_ids[rows].tolist() != document.input_ids
            or not torch.equal(loss_mask[rows], document.loss_mask)
        ):
            return None
    return places


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
