"""The CPU kernels in torch: what they are defined by, and what runs where none can be compiled.

Signatures are those of `cpu`; arguments are not checked again. Sums are added in torch's order, so
that results differ from the kernels' by rounding. Rows are multiplied one by one: what a row's
bits are does not depend on the others.
"""

from collections.abc import Collection

import torch
from jaxtyping import Float32, Int64
from torch import Tensor
from torch.nn.functional import silu

from specfit_kernels.cpu_layers import (
    PAGE,
    DecoderLayer,
    HeadNorms,
    LayerStack,
    PagedKV,
    Rope,
    Rows,
)
from specfit_kernels.cpu_weights import Activations, CpuWeight

_BLOCK = 32


def quantized(x: Float32[Tensor, "rows columns"]) -> Float32[Tensor, "rows columns"]:
    """What int8 activations are multiplied as: in blocks of 32, code * (amax / 127).

    Blocks whose amax is below 2^-100 are zeros. A NaN or an infinity leaves nothing finite.
    """
    rows, columns = x.shape
    padded = torch.nn.functional.pad(x, (0, -columns % _BLOCK))
    blocks = padded.view(rows, -(-columns // _BLOCK), _BLOCK)
    amax = blocks.abs().amax(2, keepdim=True)
    zeros = amax < 2.0**-100
    # A tensor, since a Python number is divided by as number * reciprocal, which rounds twice.
    largest = x.new_tensor(127.0)
    codes = (blocks * torch.where(zeros, 0.0, largest / amax)).round()
    scales = torch.where(zeros, 0.0, amax / largest)
    return (codes * scales).flatten(1)[:, :columns]


def linear(
    x: Float32[Tensor, "rows columns"], weight: CpuWeight
) -> Float32[Tensor, "rows channels"]:
    """The product in float32, with the activations as the weight wants them."""
    if weight.activations is Activations.int8:
        x = quantized(x)
    y = torch.empty(len(x), weight.rows)
    for row, out in zip(x, y, strict=True):
        torch.mv(weight.values, row, out=out)
    return y if weight.bias is None else y + weight.bias[: weight.rows]


def rmsnorm(
    x: Float32[Tensor, "rows size"], weight: Float32[Tensor, " size"], eps: float
) -> Float32[Tensor, "rows size"]:
    """Each row: x / sqrt(mean(x^2) + eps) * weight."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def add_rmsnorm(
    x: Float32[Tensor, "rows size"],
    added: Float32[Tensor, "rows size"],
    weight: Float32[Tensor, " size"],
    eps: float,
) -> tuple[Float32[Tensor, "rows size"], Float32[Tensor, "rows size"]]:
    """The sum, which is the new residual stream, and its norm."""
    stream = x + added
    return stream, rmsnorm(stream, weight, eps)


def rope_append(
    qkv: Float32[Tensor, "rows width"],
    rows: Rows,
    kv: PagedKV,
    rope: Rope,
    norms: HeadNorms | None = None,
) -> Float32[Tensor, "rows queries"]:
    """Turned queries; turned keys, and values, go to the rows' places in the cache."""
    num_kv_heads, head_dim = kv.num_kv_heads, kv.head_dim
    heads = qkv.view(len(qkv), qkv.shape[1] // head_dim, head_dim)
    num_heads = heads.shape[1] - 2 * num_kv_heads
    queries, keys = heads[:, :num_heads], heads[:, num_heads:-num_kv_heads]
    values = heads[:, -num_kv_heads:]
    if norms is not None:
        queries = rmsnorm(queries.flatten(0, 1), norms.queries, norms.eps).view(queries.shape)
        keys = rmsnorm(keys.flatten(0, 1), norms.keys, norms.eps).view(keys.shape)
    pages = rows.block_table[rows.sequences, rows.positions // PAGE]
    columns = rows.positions % PAGE
    kv.keys[pages, :, :, columns] = _turned(keys, rows, rope).to(kv.keys.dtype)
    kv.values[pages, :, columns] = values.to(kv.values.dtype)
    return _turned(queries, rows, rope).flatten(1)


def _turned(
    heads: Float32[Tensor, "rows heads head_dim"], rows: Rows, rope: Rope
) -> Float32[Tensor, "rows heads head_dim"]:
    cosines, sines = rope.cosines[rows.positions, None], rope.sines[rows.positions, None]
    first, second = heads.chunk(2, dim=-1)
    turned = first * cosines - second * sines, second * cosines + first * sines
    return torch.cat(turned, dim=-1)


def attention(
    queries: Float32[Tensor, "rows width"], rows: Rows, kv: PagedKV
) -> Float32[Tensor, "rows width"]:
    """Softmax attention of each row over the columns of its sequence, up to its own."""
    num_kv_heads, head_dim = kv.num_kv_heads, kv.head_dim
    out = torch.empty_like(queries)
    places = zip(rows.positions.tolist(), rows.sequences.tolist(), strict=True)
    for row, (position, sequence) in enumerate(places):
        pages = rows.block_table[sequence, : position // PAGE + 1]
        # heads dim columns, and heads columns dim
        keys = kv.keys[pages].permute(1, 2, 0, 3).flatten(2)[..., : position + 1].float()
        values = kv.values[pages].permute(1, 0, 2, 3).flatten(1, 2)[:, : position + 1].float()
        groups = queries[row].view(num_kv_heads, -1, head_dim) * head_dim**-0.5
        out[row] = (torch.softmax(groups @ keys, dim=-1) @ values).flatten()
    return out


def silu_mul(
    gate_up: Float32[Tensor, "rows twice_size"],
) -> Float32[Tensor, "rows size"]:
    """SiLU of the first half of each row, times the second."""
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate) * up


def argmax(x: Float32[Tensor, "rows size"]) -> Int64[Tensor, " rows"]:
    """The first of the largest of each row; a NaN counts as larger than all."""
    return x.argmax(-1)


def forward_layers(
    stream: Float32[Tensor, "rows hidden"],
    stack: LayerStack,
    rows: Rows,
    capture: Collection[int] = (),
) -> tuple[Float32[Tensor, "rows hidden"], dict[int, Float32[Tensor, "rows hidden"]]]:
    """The stream behind the last layer, and copies of it where it enters layers of `capture`."""
    captured = {}
    for index, (layer, kv) in enumerate(zip(stack.layers, stack.kvs, strict=True)):
        if index in capture:
            captured[index] = stream.clone()
        stream = _decoder_layer(stream, layer, rows, kv, stack.rope)
    if len(stack.layers) in capture:
        captured[len(stack.layers)] = stream.clone()
    return stream, captured


def _decoder_layer(
    stream: Float32[Tensor, "rows hidden"],
    layer: DecoderLayer,
    rows: Rows,
    kv: PagedKV,
    rope: Rope,
) -> Float32[Tensor, "rows hidden"]:
    qkv = linear(rmsnorm(stream, layer.input_norm, layer.eps), layer.qkv)
    queries = rope_append(qkv, rows, kv, rope, layer.head_norms)
    attended = linear(attention(queries, rows, kv), layer.o)
    stream, normed = add_rmsnorm(stream, attended, layer.post_attention_norm, layer.eps)
    return stream + linear(silu_mul(linear(normed, layer.gate_up)), layer.down)
