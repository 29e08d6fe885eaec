"""The tokens a speculator can draft."""

from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Bool, Float, Int
from safetensors.torch import load_file, save_file
from torch import Tensor


@dataclass(frozen=True)
class DraftVocab:
    """A subset of the target's vocabulary, in ascending order of the target's ids."""

    d2t: Int[Tensor, "draft"]  # target id - draft id: what engines call offsets
    t2d: Bool[Tensor, "vocab"]  # which target tokens can be drafted

    @classmethod
    def from_counts(
        cls, counts: Float[Tensor, "vocab"], size: int, always: list[int]
    ) -> "DraftVocab":
        """The `size` most frequent tokens, `always` among them; ties go to the lower id.

        Raises:
            ValueError: `size` is beyond the target's vocabulary, or too small for `always`.
        """
        if not 1 <= size <= len(counts):
            raise ValueError(
                "speculator.draft_vocab_size must be positive and at most the target's vocabulary "
                f"of {len(counts)}, got {size}"
            )
        if size < len(set(always)):
            raise ValueError(
                "speculator.draft_vocab_size must hold the tokens that end an answer, "
                f"{sorted(set(always))}, got {size}"
            )
        ranked = counts.double().clone()
        ranked[always] = torch.inf
        chosen = ranked.argsort(descending=True, stable=True)[:size].sort().values
        t2d = torch.zeros(len(counts), dtype=torch.bool)
        t2d[chosen] = True
        return cls(chosen - torch.arange(size), t2d)

    @property
    def target_ids(self) -> Int[Tensor, "draft"]:
        """The target id of each draft id."""
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    @property
    def draft_ids(self) -> Int[Tensor, "vocab"]:
        """The draft id of each target id, -1 where it cannot be drafted."""
        ids = torch.full((len(self.t2d),), -1, dtype=torch.int64, device=self.t2d.device)
        ids[self.target_ids] = torch.arange(len(self.d2t), device=self.t2d.device)
        return ids

    def save(self, path: Path) -> None:
        """Writes d2t and t2d as safetensors."""
        save_file({"d2t": self.d2t, "t2d": self.t2d}, path)

    @classmethod
    def load(cls, path: Path) -> "DraftVocab":
        """Reads what `save` wrote."""
        tensors = load_file(path)
        return cls(tensors["d2t"], tensors["t2d"])
