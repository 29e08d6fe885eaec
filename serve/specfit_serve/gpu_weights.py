"""A model as the Triton kernels read it. Nothing here needs Triton."""

from dataclasses import dataclass

from jaxtyping import BFloat16, Float32
from torch import Tensor

from specfit_kernels.layer_twins import HeadNorms, Rope
from specfit_kernels.linear_twins import TiledWeight, WordWeight

Matrix = TiledWeight | WordWeight


@dataclass(frozen=True)
class GpuLayer:
    """A layer of Llama, Qwen 2 (a bias in qkv) or Qwen 3 (head norms)."""

    qkv: Matrix  # queries, then keys, then values
    o: Matrix
    gate_up: Matrix
    down: Matrix
    input_norm: Float32[Tensor, " hidden"]
    post_attention_norm: Float32[Tensor, " hidden"]
    eps: float
    qkv_bias: Float32[Tensor, " width"] | None = None
    head_norms: HeadNorms | None = None

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        """In the order in which they are read."""
        return self.qkv, self.o, self.gate_up, self.down


@dataclass(frozen=True)
class GpuWeights:
    """All layers have matrices of the same sizes and kind, and all tensors are on one device."""

    embeddings: BFloat16[Tensor, "vocab hidden"]
    layers: tuple[GpuLayer, ...]
    norm: Float32[Tensor, " hidden"]
    eps: float  # of that norm
    head: BFloat16[Tensor, "vocab hidden"]
    rope: Rope  # at every position of the context
    eos_ids: frozenset[int]
    num_terms: int  # NVFP4 terms of a token, for TiledWeight; 0: float16, for WordWeight

    @property
    def head_dim(self) -> int:
        """Of queries, keys and values."""
        return 2 * self.rope.cosines.shape[1]

    @property
    def num_heads(self) -> int:
        """Of queries."""
        return self.layers[0].o.columns // self.head_dim

    @property
    def num_kv_heads(self) -> int:
        """Of keys and values."""
        return (len(self.layers[0].qkv.row_scales) // self.head_dim - self.num_heads) // 2

    @property
    def num_bytes(self) -> int:
        """Of the matrices that a pass reads; an embedding is one row."""
        matrices = [matrix for layer in self.layers for matrix in layer.matrices]
        return self.head.nbytes + sum(
            (m.codes if isinstance(m, TiledWeight) else m.words).nbytes + m.scales.nbytes
            for m in matrices
        )
