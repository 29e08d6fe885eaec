"""Random weights of real sizes, on a GPU: what is read and multiplied, and means nothing."""

from dataclasses import dataclass

import torch
from jaxtyping import BFloat16
from torch import Tensor

from specfit_kernels.layer_twins import Rope
from specfit_kernels.linear_twins import tiled, worded
from specfit_kernels.nvfp4 import BLOCK, FP4Tensor
from specfit_serve.gpu_weights import GpuLayer, GpuWeights, Matrix

CODE_SIZE = 2.93  # of a random code, root mean square


@dataclass(frozen=True)
class Geometry:
    """Sizes of a Llama."""

    name: str
    hidden: int
    inner: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_layers: int
    vocab_size: int

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """Rows and columns of a layer's matrices."""
        queries = self.num_heads * self.head_dim
        return {
            "qkv": (queries + 2 * self.num_kv_heads * self.head_dim, self.hidden),
            "o": (self.hidden, queries),
            "gate_up": (2 * self.inner, self.hidden),
            "down": (self.hidden, self.inner),
        }


SMOLLM2 = Geometry("SmolLM2-135M", 576, 1536, 9, 3, 64, 30, 49152)
LLAMA_8B = Geometry("Llama-3.1-8B", 4096, 14336, 32, 8, 128, 32, 128256)


def random_fp4(rows: int, columns: int, device: torch.device) -> FP4Tensor:
    """Any codes; a product keeps the size of what is multiplied."""
    codes = torch.randint(256, (rows, columns // 2), dtype=torch.uint8, device=device)
    scales = 0.75 + 0.5 * torch.rand(rows, columns // BLOCK, device=device)
    global_scale = torch.tensor(1 / (CODE_SIZE * columns**0.5), device=device)
    return FP4Tensor(codes, scales.to(torch.float8_e4m3fn), global_scale, False, columns)


def random_matrix(shape: tuple[int, int], num_terms: int, device: torch.device) -> Matrix:
    """For W4A4 with so many terms a token; for W4A16 with none."""
    parts = [random_fp4(*shape, device)]
    return tiled(parts) if num_terms else worded(parts)


def random_bf16(shape: tuple[int, int], device: torch.device) -> BFloat16[Tensor, "rows columns"]:
    """Embeddings, or a head."""
    values = torch.randn(shape, dtype=torch.bfloat16, device=device)
    return values.mul_(shape[1] ** -0.5)


def random_weights(geometry: Geometry, num_terms: int, device: torch.device) -> GpuWeights:
    """All layers of a model, each with weights of its own."""
    angles = torch.arange(1 << 14)[:, None] * 1e4 ** -(
        torch.arange(geometry.head_dim // 2) / (geometry.head_dim // 2)
    )

    def layer() -> GpuLayer:
        qkv, o, gate_up, down = (
            random_matrix(geometry.shapes[name], num_terms, device)
            for name in ("qkv", "o", "gate_up", "down")
        )
        norms = torch.ones(2, geometry.hidden, device=device)
        return GpuLayer(qkv, o, gate_up, down, norms[0], norms[1], 1e-5)

    shape = geometry.vocab_size, geometry.hidden
    return GpuWeights(
        embeddings=random_bf16(shape, device),
        layers=tuple(layer() for _ in range(geometry.num_layers)),
        norm=torch.ones(geometry.hidden, device=device),
        eps=1e-5,
        head=random_bf16(shape, device),
        rope=Rope(angles.cos().to(device), angles.sin().to(device)),
        eos_ids=frozenset(),
        num_terms=num_terms,
    )
