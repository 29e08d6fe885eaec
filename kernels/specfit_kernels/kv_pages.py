"""The paged KV cache of one layer, and where the tokens of a pass stand in it; for Triton kernels.

The cache of `cpu_layers` transposes keys for vector units; here keys lie as values do.
"""

from dataclasses import dataclass

import torch
from jaxtyping import BFloat16, Int32
from torch import Tensor

PAGE = 64  # columns


@dataclass(frozen=True)
class KVPages:
    """Keys and values of one layer, in pages of 64 columns that sequences are given one by one."""

    keys: BFloat16[Tensor, "pages kv_heads 64 dim"]
    values: BFloat16[Tensor, "pages kv_heads 64 dim"]

    @classmethod
    def empty(
        cls, num_pages: int, num_kv_heads: int, head_dim: int, device: torch.device
    ) -> "KVPages":
        """Room for some pages, not initialized."""
        shape = (num_pages, num_kv_heads, PAGE, head_dim)
        keys, values = (torch.empty(shape, dtype=torch.bfloat16, device=device) for _ in range(2))
        return cls(keys, values)

    @property
    def num_kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.keys.shape[1]

    @property
    def head_dim(self) -> int:
        """Of keys, values and queries."""
        return self.keys.shape[3]


@dataclass(frozen=True)
class Places:
    """Where the tokens of a pass stand: token i is at positions[i] of sequence sequences[i].

    Column p of a sequence is column p % 64 of page block_table[sequence, p // 64]. No two tokens
    may have the same place. Kernels check none of these numbers.
    """

    positions: Int32[Tensor, " tokens"]
    sequences: Int32[Tensor, " tokens"]
    block_table: Int32[Tensor, "sequences pages"]
