"""What the kernels between the products compute, in torch: their definition, and their oracle.

A decoder layer is `rmsnorm_quant`, the product of queries, keys and values, `rope_append`,
attention, the product of its outputs, `rmsnorm_quant`, gate and up, `silu_mul_quant`, down. The
products leave partial sums [splits, tokens, rows], which these add from the first on, and they take
tokens quantized, which these write: `Terms` or `Halves`, see `linear_twins`.

Where no sum's order is open, the kernels' bits are those of torch: the stream, what is captured,
what is turned without head norms, and the quantized tokens once the values before them are given.
Means, exponentials and the products of `skinny_bf16` differ by float32's rounding.
"""

from dataclasses import dataclass

import torch
from jaxtyping import BFloat16, Float, Float32
from torch import Tensor
from torch.nn.functional import silu

from specfit_kernels import linear_twins
from specfit_kernels.kv_pages import PAGE, KVPages, Places
from specfit_kernels.linear_twins import Halves, Terms


@dataclass(frozen=True)
class Rope:
    """The angles by which pairs (i, i + head_dim / 2) are turned."""

    cosines: Float32[Tensor, "positions half"]
    sines: Float32[Tensor, "positions half"]


@dataclass(frozen=True)
class HeadNorms:
    """RMSNorms of each query and key before they are turned, as in Qwen 3."""

    queries: Float32[Tensor, " head_dim"]
    keys: Float32[Tensor, " head_dim"]
    eps: float


def rmsnorm_quant(
    stream: Float32[Tensor, "tokens hidden"],
    weight: Float[Tensor, " hidden"],
    eps: float,
    out: Terms | Halves,
    *,
    partials: Float32[Tensor, "splits tokens hidden"] | None = None,
    normed: Float32[Tensor, "tokens hidden"] | None = None,
    captured: Float32[Tensor, "tokens hidden"] | BFloat16[Tensor, "tokens hidden"] | None = None,
    pdl: bool = False,
) -> None:
    """Adds the partial sums to the stream, and quantizes stream / sqrt(mean(stream^2) + eps) * w.

    `normed` gets the values that are quantized, `captured` the stream behind the addition.
    """
    del pdl  # of a launch, and here is none
    if partials is not None:
        stream += _sum(partials)
    y = _rmsnorm(stream, weight.float(), eps)
    if normed is not None:
        normed.copy_(y)
    if captured is not None:
        captured.copy_(stream)
    _quantize(y, out)


def silu_mul_quant(
    partials: Float32[Tensor, "splits tokens twice_inner"],
    out: Terms | Halves,
    *,
    pdl: bool = False,
) -> None:
    """Quantizes SiLU of the first half of each token's sums, times the second."""
    del pdl
    gate, up = _sum(partials).chunk(2, dim=-1)
    _quantize(silu(gate) * up, out)


def rope_append(
    partials: Float32[Tensor, "splits tokens width"],
    places: Places,
    kv: KVPages,
    rope: Rope,
    queries: Float32[Tensor, "tokens query_width"],
    *,
    bias: Float32[Tensor, " width"] | None = None,
    head_norms: HeadNorms | None = None,
    pdl: bool = False,
) -> None:
    """Writes turned queries; turned keys, and values, go to the tokens' places in the cache.

    A token's sums are its query heads, then its keys, then its values.
    """
    del pdl
    num_kv_heads, head_dim = kv.num_kv_heads, kv.head_dim
    total = _sum(partials) if bias is None else _sum(partials) + bias
    heads = total.view(len(total), -1, head_dim)
    of_queries, keys, values = heads.tensor_split((-2 * num_kv_heads, -num_kv_heads), dim=1)
    if head_norms is not None:
        of_queries = _rmsnorm(of_queries, head_norms.queries, head_norms.eps)
        keys = _rmsnorm(keys, head_norms.keys, head_norms.eps)
    queries.copy_(_turned(of_queries, places, rope).flatten(1))
    pages = places.block_table[places.sequences, places.positions // PAGE]
    columns = places.positions % PAGE
    kv.keys[pages, :, columns] = _turned(keys, places, rope).bfloat16()
    kv.values[pages, :, columns] = values.bfloat16()


def skinny_bf16(
    weight: BFloat16[Tensor, "rows columns"],
    x: Float32[Tensor, "tokens columns"] | BFloat16[Tensor, "tokens columns"],
    out: Float32[Tensor, "tokens rows"],
    *,
    pdl: bool = False,
) -> None:
    """Writes the products of a few tokens."""
    del pdl
    out.copy_(x.float() @ weight.float().T)


def _sum(
    partials: Float32[Tensor, "splits tokens rows"],
) -> Float32[Tensor, "tokens rows"]:
    total = torch.empty_like(partials[0])
    linear_twins.sum_splits(partials, total)
    return total


def _rmsnorm(
    x: Float32[Tensor, "*n size"], weight: Float32[Tensor, " size"], eps: float
) -> Float32[Tensor, "*n size"]:
    return x * (1 / torch.sqrt(x.square().mean(-1, keepdim=True) + eps)) * weight


def _quantize(y: Float32[Tensor, "tokens columns"], out: Terms | Halves) -> None:
    if isinstance(out, Terms):
        linear_twins.quantize_tokens(y, out)
    else:
        linear_twins.halve_tokens(y, out)


def _turned(
    heads: Float32[Tensor, "tokens heads head_dim"], places: Places, rope: Rope
) -> Float32[Tensor, "tokens heads head_dim"]:
    cosines, sines = rope.cosines[places.positions, None], rope.sines[places.positions, None]
    first, second = heads.chunk(2, dim=-1)
    turned = first * cosines - second * sines, second * cosines + first * sines
    return torch.cat(turned, dim=-1)
