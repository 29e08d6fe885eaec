"""Documents side by side in one pack, and the chains of drafts that start in them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from specfit.targets.target import HiddenStates


@dataclass(frozen=True)
class TrainBatch:
    """Packed documents. They do not see each other."""

    tokens: Int[Tensor, "seq"]
    document_ids: Int[Tensor, "seq"]
    positions: Int[Tensor, "seq"]  # within the document
    loss_mask: Bool[Tensor, "seq"]
    aux: Float[Tensor, "seq aux hidden"]
    last: Float[Tensor, "seq hidden"]
    log_normalizer: Float[Tensor, "seq"]
    top_token: Int[Tensor, "seq"]
    lengths: tuple[int, ...]  # of the documents

    def to(self, device: torch.device) -> "TrainBatch":
        """The same batch on `device`."""
        tensors = {name: v.to(device) for name, v in vars(self).items() if name != "lengths"}
        return TrainBatch(**tensors, lengths=self.lengths)


def pack(documents: Sequence[HiddenStates]) -> TrainBatch:
    """Puts documents side by side."""
    lengths = tuple(len(d.input_ids) for d in documents)
    device = documents[0].input_ids.device
    return TrainBatch(
        tokens=torch.cat([d.input_ids for d in documents]),
        document_ids=torch.cat([torch.full((n,), i, device=device) for i, n in enumerate(lengths)]),
        positions=torch.cat([torch.arange(n, device=device) for n in lengths]),
        loss_mask=torch.cat([d.loss_mask for d in documents]),
        aux=torch.cat([d.aux for d in documents]),
        last=torch.cat([d.last for d in documents]),
        log_normalizer=torch.cat([d.log_normalizer for d in documents]),
        top_token=torch.cat([d.top_token for d in documents]),
        lengths=lengths,
    )


def epoch_packs(
    lengths: Sequence[int], pack_tokens: int, *, seed: int, epoch: int
) -> list[list[int]]:
    """The document indices of each pack of one epoch, all documents once, in random order.

    A document longer than `pack_tokens` has a pack to itself.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    packs: list[list[int]] = []
    room = 0
    for index in torch.randperm(len(lengths), generator=generator).tolist():
        if not packs or lengths[index] > room:
            packs.append([])
            room = pack_tokens
        packs[-1].append(index)
        room -= lengths[index]
    return packs


def chain_starts(batch: TrainBatch) -> Int[Tensor, "chains"]:
    """The entries t from which a learned token, x_{t+2}, is drafted first."""
    return torch.nonzero(_learned_at(batch, 2)).flatten()


def chain_counts(
    batch: TrainBatch, starts: Int[Tensor, "chains"], num_steps: int
) -> Bool[Tensor, "steps chains"]:
    """Whether drafting step s of each chain is in the loss: its token and all before are learned.

    A chain ends where its document or the assistant's turn does.
    """
    counted = torch.stack([_learned_at(batch, 2 + s)[starts] for s in range(num_steps)])
    return counted.cummin(0).values.bool()


def _learned_at(batch: TrainBatch, offset: int) -> Bool[Tensor, "seq"]:
    """Whether token i + offset is learned and of the same document as token i."""
    n = len(batch.tokens)
    found = torch.zeros(n, dtype=torch.bool, device=batch.tokens.device)
    if offset < n:
        same = batch.document_ids[offset:] == batch.document_ids[: n - offset]
        found[: n - offset] = batch.loss_mask[offset:] & same
    return found
