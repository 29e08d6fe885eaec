"""What the CPU kernels work on besides weights: a paged KV cache, the rows of a pass, a layer."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor

from specfit_kernels import cpu_build
from specfit_kernels.cpu_weights import CpuWeight

PAGE = 64  # columns; the order of additions in attention depends on it
MAX_HEAD_DIM = 256


def refused(name: str, requirement: str, got: object) -> ValueError:
    """The error of an argument that is not what it must be."""
    return ValueError(f"{name} must {requirement}, got {got}")


def require_tensor(
    name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> None:
    """That the kernels may take the address; -1 in `shape` is any size."""
    if not tensor.is_cpu:
        raise refused(name, "be on the CPU", tensor.device)
    if tensor.dtype is not dtype:
        raise refused(name, f"be {dtype}", tensor.dtype)
    if len(shape) != tensor.ndim or any(
        want not in (-1, size) for want, size in zip(shape, tensor.shape, strict=True)
    ):
        wanted = ", ".join("any" if want == -1 else str(want) for want in shape)
        raise refused(name, f"have the shape [{wanted}]", list(tensor.shape))
    if not tensor.is_contiguous():
        raise refused(name, "be contiguous", f"strides {tensor.stride()}")


@dataclass(frozen=True)
class PagedKV:
    """Keys and values of one layer, in pages of 64 columns that sequences are given one by one.

    Keys lie transposed, so that the lanes of a vector are columns; values as they are multiplied.
    """

    keys: Float[Tensor, "pages kv_heads head_dim 64"]  # float32 or bfloat16
    values: Float[Tensor, "pages kv_heads 64 head_dim"]

    def __post_init__(self) -> None:
        num_pages, num_kv_heads, head_dim, _ = self.keys.shape
        if self.keys.dtype not in (torch.float32, torch.bfloat16):
            raise refused("kv.keys", "be float32 or bfloat16", self.keys.dtype)
        if head_dim % 8 or not 0 < head_dim <= MAX_HEAD_DIM:
            raise refused("kv", f"have a head_dim of 8, 16 .. {MAX_HEAD_DIM}", head_dim)
        heads = (num_pages, num_kv_heads)
        require_tensor("kv.keys", self.keys, (*heads, head_dim, PAGE), self.keys.dtype)
        require_tensor("kv.values", self.values, (*heads, PAGE, head_dim), self.keys.dtype)

    @classmethod
    def empty(
        cls, num_pages: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype = torch.float32
    ) -> "PagedKV":
        """Room for some pages, not initialized."""
        return cls(
            torch.empty(num_pages, num_kv_heads, head_dim, PAGE, dtype=dtype),
            torch.empty(num_pages, num_kv_heads, PAGE, head_dim, dtype=dtype),
        )

    @cached_property
    def num_kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.keys.shape[1]

    @cached_property
    def head_dim(self) -> int:
        """Of keys, values and queries."""
        return self.keys.shape[2]

    @cached_property
    def native(self) -> Any:
        """What the compiled kernels know of it."""
        return cpu_build.library().Cache(
            self.keys.data_ptr(),
            self.values.data_ptr(),
            *self.keys.shape[:3],
            self.keys.dtype is torch.bfloat16,
        )


@dataclass(frozen=True)
class Rows:
    """Where the rows of a pass stand: row i is the token at positions[i] of sequence sequences[i].

    Column p of a sequence is column p % 64 of page block_table[sequence, p // 64]. A row sees the
    columns up to its own; no two rows may have the same place.
    """

    positions: Int64[Tensor, " rows"]
    sequences: Int64[Tensor, " rows"]
    block_table: Int64[Tensor, "sequences pages"]

    def __post_init__(self) -> None:
        require_tensor("rows.positions", self.positions, (-1,), torch.int64)
        shape = tuple(self.positions.shape)
        require_tensor("rows.sequences", self.sequences, shape, torch.int64)
        require_tensor("rows.block_table", self.block_table, (-1, -1), torch.int64)


def require_places(rows: Rows, kv: PagedKV, num_positions: int) -> None:
    """What no shape says, as the compiled kernels check it themselves."""
    num_sequences, num_pages = rows.block_table.shape
    longest = min(num_positions, num_pages * PAGE)
    for position, sequence in zip(rows.positions.tolist(), rows.sequences.tolist(), strict=True):
        if not 0 <= position < longest:
            within = "be within the block table and the RoPE table, below"
            raise refused("positions", f"{within} {longest}", position)
        if not 0 <= sequence < num_sequences:
            within = f"be within the block table, below {num_sequences}"
            raise refused("sequences", within, sequence)
        for page in rows.block_table[sequence, : position // PAGE + 1].tolist():
            if not 0 <= page < len(kv.keys):
                raise refused("block_table", f"name pages below {len(kv.keys)}", page)


@dataclass(frozen=True)
class Rope:
    """The angles by which pairs (i, i + head_dim / 2) are turned."""

    cosines: Float32[Tensor, "positions half"]
    sines: Float32[Tensor, "positions half"]

    def __post_init__(self) -> None:
        require_tensor("rope.cosines", self.cosines, (-1, -1))
        require_tensor("rope.sines", self.sines, tuple(self.cosines.shape))


@dataclass(frozen=True)
class HeadNorms:
    """RMSNorms of each query and key before they are turned, as in Qwen 3."""

    queries: Float32[Tensor, " head_dim"]
    keys: Float32[Tensor, " head_dim"]
    eps: float

    def __post_init__(self) -> None:
        require_tensor("norms.queries", self.queries, (-1,))
        require_tensor("norms.keys", self.keys, tuple(self.queries.shape))


@dataclass(frozen=True)
class DecoderLayer:
    """A layer of Llama, Qwen 2 (biases in qkv) or Qwen 3 (head norms)."""

    qkv: CpuWeight  # queries, then keys, then values
    o: CpuWeight
    gate_up: CpuWeight
    down: CpuWeight
    input_norm: Float32[Tensor, " hidden"]
    post_attention_norm: Float32[Tensor, " hidden"]
    eps: float
    head_norms: HeadNorms | None = None

    def __post_init__(self) -> None:
        hidden = self.o.rows
        require_tensor("input_norm", self.input_norm, (hidden,))
        require_tensor("post_attention_norm", self.post_attention_norm, (hidden,))
        widths = self.qkv.columns, self.gate_up.columns, self.down.rows
        if widths != (hidden,) * 3:
            raise refused("qkv, gate_up and down", f"fit {hidden} states", widths)
        if self.gate_up.rows != 2 * self.down.columns:
            raise refused("gate_up", f"have {2 * self.down.columns} rows", self.gate_up.rows)

    @cached_property
    def native(self) -> Any:
        """What the compiled kernels know of it."""
        norms = self.head_norms
        return cpu_build.library().Layer(
            self.qkv.native,
            self.o.native,
            self.gate_up.native,
            self.down.native,
            self.input_norm.data_ptr(),
            self.post_attention_norm.data_ptr(),
            self.eps,
            norms.queries.data_ptr() if norms else 0,
            norms.keys.data_ptr() if norms else 0,
            norms.eps if norms else 0.0,
        )


@dataclass(frozen=True)
class LayerStack:
    """Layers with the cache of each, checked once: a pass over few tokens has no time for that."""

    layers: Sequence[DecoderLayer]
    kvs: Sequence[PagedKV]
    rope: Rope

    def __post_init__(self) -> None:
        if not self.layers or len(self.kvs) != len(self.layers):
            got = f"{len(self.kvs)} of {len(self.layers)}"
            raise refused("kvs", "be as many as layers, one or more", got)
        hidden = self.layers[0].o.rows
        for layer, kv in zip(self.layers, self.kvs, strict=True):
            if layer.o.rows != hidden:
                raise refused("layers", f"all have {hidden} states", layer.o.rows)
            require_heads("o.columns", layer.o.columns, kv)
            width = layer.o.columns + 2 * kv.num_kv_heads * kv.head_dim
            if layer.qkv.rows != width:
                raise refused("qkv", f"have {width} rows", layer.qkv.rows)
            require_angles(self.rope, layer.head_norms, kv)

    @cached_property
    def native(self) -> tuple[list[Any], list[Any]]:
        """What the compiled kernels know of layers and caches."""
        return [layer.native for layer in self.layers], [kv.native for kv in self.kvs]


def require_heads(name: str, width: int, kv: PagedKV) -> None:
    """Whether so many channels are whole groups of queries."""
    if width <= 0 or width % (kv.num_kv_heads * kv.head_dim):
        heads = f"a multiple of {kv.num_kv_heads} heads of {kv.head_dim} for queries"
        raise refused(name, f"hold {heads}", width)


def require_angles(rope: Rope, norms: HeadNorms | None, kv: PagedKV) -> None:
    """Whether both are of the cache's heads."""
    half = rope.cosines.shape[1]
    if 2 * half != kv.head_dim:
        raise refused("rope", f"have {kv.head_dim // 2} angles a position", half)
    if norms is not None and len(norms.queries) != kv.head_dim:
        raise refused("norms.queries", f"be {kv.head_dim} long", len(norms.queries))
