"""The decode loop on a CPU: products with packed weights, and what lies between them.

Each function is a kernel of cpu.cpp on the path that `cpu_build` chooses, or its twin in
`cpu_twins`, which defines it. A row's bits are the same alone and among others and at any place, so
that decoding with speculation gives the very logits of decoding without. Compiled paths give the
same bits with any number of threads (torch's), the twins with the same number.

Raises, everywhere: ValueError for a tensor that is not what its annotation says, not contiguous or
not on the CPU, and for rows that stand outside of the block table, the cache or the RoPE table.
"""

from collections.abc import Collection
from typing import Any

import torch
from jaxtyping import Float32, Int64
from torch import Tensor

from specfit_kernels import cpu_build, cpu_twins
from specfit_kernels.cpu_layers import (
    PAGE,
    HeadNorms,
    LayerStack,
    PagedKV,
    Rope,
    Rows,
    refused,
    require_angles,
    require_heads,
    require_places,
    require_tensor,
)
from specfit_kernels.cpu_weights import CpuWeight


def linear(
    x: Float32[Tensor, "rows columns"], weight: CpuWeight
) -> Float32[Tensor, "rows channels"]:
    """Rows times the transposed weight, plus its bias.

    A weight is decoded once for 8 rows on the avx512vnni path, once for 4 on the others. With
    float32 activations the result is within 1e-6 of what float64 gives for the dequantized weights,
    relative to the row's norm; int8 activations lose about 5e-3 and are what makes several rows as
    cheap as one.
    """
    require_tensor("x", x, (-1, weight.columns))
    native = cpu_build.native()
    if native is None:
        return cpu_twins.linear(x, weight)
    y = torch.empty(len(x), weight.rows)
    native.linear(x.data_ptr(), len(x), weight.native, y.data_ptr(), torch.get_num_threads())
    return y


def rmsnorm(
    x: Float32[Tensor, "rows size"], weight: Float32[Tensor, " size"], eps: float
) -> Float32[Tensor, "rows size"]:
    """Each row: x / sqrt(mean(x^2) + eps) * weight."""
    require_tensor("weight", weight, (-1,))
    require_tensor("x", x, (-1, len(weight)))
    native = cpu_build.native()
    if native is None:
        return cpu_twins.rmsnorm(x, weight, eps)
    y = torch.empty(x.shape)
    addresses = x.data_ptr(), 0, weight.data_ptr()
    native.rmsnorm(*addresses, eps, *x.shape, 0, y.data_ptr(), torch.get_num_threads())
    return y


def add_rmsnorm(
    x: Float32[Tensor, "rows size"],
    added: Float32[Tensor, "rows size"],
    weight: Float32[Tensor, " size"],
    eps: float,
) -> tuple[Float32[Tensor, "rows size"], Float32[Tensor, "rows size"]]:
    """The sum, which is the new residual stream, and its norm."""
    require_tensor("weight", weight, (-1,))
    require_tensor("x", x, (-1, len(weight)))
    require_tensor("added", added, tuple(x.shape))
    native = cpu_build.native()
    if native is None:
        return cpu_twins.add_rmsnorm(x, added, weight, eps)
    stream, y = torch.empty(x.shape), torch.empty(x.shape)
    addresses = x.data_ptr(), added.data_ptr(), weight.data_ptr()
    results = stream.data_ptr(), y.data_ptr()
    native.rmsnorm(*addresses, eps, *x.shape, *results, torch.get_num_threads())
    return stream, y


def rope_append(
    qkv: Float32[Tensor, "rows width"],
    rows: Rows,
    kv: PagedKV,
    rope: Rope,
    norms: HeadNorms | None = None,
) -> Float32[Tensor, "rows queries"]:
    """Turned queries; turned keys, and values, go to the rows' places in the cache."""
    require_tensor("qkv", qkv, (len(rows.positions), -1))
    width = qkv.shape[1] - 2 * kv.num_kv_heads * kv.head_dim
    require_heads("qkv", width, kv)
    require_angles(rope, norms, kv)
    native = cpu_build.native()
    if native is None:
        require_places(rows, kv, len(rope.cosines))
        return cpu_twins.rope_append(qkv, rows, kv, rope, norms)
    queries = torch.empty(len(qkv), width)
    addresses = (norms.queries.data_ptr(), norms.keys.data_ptr()) if norms else (0, 0)
    native.rope_append(
        qkv.data_ptr(),
        width // kv.head_dim,
        _native_pass(rows, rope),
        kv.native,
        *addresses,
        norms.eps if norms else 0.0,
        queries.data_ptr(),
    )
    return queries


def attention(
    queries: Float32[Tensor, "rows width"], rows: Rows, kv: PagedKV
) -> Float32[Tensor, "rows width"]:
    """Softmax attention of each row over the columns of its sequence, up to its own."""
    require_tensor("queries", queries, (len(rows.positions), -1))
    require_heads("queries", queries.shape[1], kv)
    native = cpu_build.native()
    if native is None:
        require_places(rows, kv, rows.block_table.shape[1] * PAGE)
        return cpu_twins.attention(queries, rows, kv)
    y = torch.empty(queries.shape)
    num_heads = queries.shape[1] // kv.head_dim
    native.attention(
        queries.data_ptr(), num_heads, _native_pass(rows, None), kv.native, y.data_ptr()
    )
    return y


def silu_mul(gate_up: Float32[Tensor, "rows twice_size"]) -> Float32[Tensor, "rows size"]:
    """SiLU of the first half of each row, times the second; halves are a multiple of 16 wide."""
    require_tensor("gate_up", gate_up, (-1, -1))
    rows, width = gate_up.shape
    if width % 32:
        raise refused("gate_up", "have columns that are a multiple of 32", width)
    native = cpu_build.native()
    if native is None:
        return cpu_twins.silu_mul(gate_up)
    y = torch.empty(rows, width // 2)
    native.silu_mul(gate_up.data_ptr(), *y.shape, y.data_ptr(), torch.get_num_threads())
    return y


def argmax(x: Float32[Tensor, "rows size"]) -> Int64[Tensor, " rows"]:
    """The first of the largest of each row; a NaN counts as larger than all."""
    require_tensor("x", x, (-1, -1))
    if x.shape[1] == 0:
        raise refused("x", "have columns", 0)
    native = cpu_build.native()
    if native is None:
        return cpu_twins.argmax(x)
    y = torch.empty(len(x), dtype=torch.int64)
    native.argmax(x.data_ptr(), *x.shape, y.data_ptr())
    return y


def forward_layers(
    stream: Float32[Tensor, "rows hidden"],
    stack: LayerStack,
    rows: Rows,
    capture: Collection[int] = (),
) -> tuple[Float32[Tensor, "rows hidden"], dict[int, Float32[Tensor, "rows hidden"]]]:
    """The stream behind the last layer, and copies of it where it enters layers of `capture`.

    Each layer appends to its cache. Index len(layers) is the stream behind the last. What lies
    between the layers' parts is kept by the calling thread, and grows to the largest pass.
    """
    num_layers = len(stack.layers)
    if any(not 0 <= index <= num_layers for index in capture):
        raise refused("capture", f"be within 0..{num_layers}", sorted(capture))
    require_tensor("stream", stream, (len(rows.positions), stack.layers[0].o.rows))
    native = cpu_build.native()
    if native is None:
        for kv in stack.kvs:
            require_places(rows, kv, len(stack.rope.cosines))
        return cpu_twins.forward_layers(stream, stack, rows, capture)
    out = stream.clone()
    captured = {index: torch.empty(stream.shape) for index in capture}
    native.forward_layers(
        *stack.native,
        _native_pass(rows, stack.rope),
        out.data_ptr(),
        [(index, copy.data_ptr()) for index, copy in captured.items()],
    )
    return out, captured


def _native_pass(rows: Rows, rope: Rope | None) -> Any:
    cosines, sines = (rope.cosines.data_ptr(), rope.sines.data_ptr()) if rope else (0, 0)
    return cpu_build.library().Pass(
        len(rows.positions),
        rows.positions.data_ptr(),
        rows.sequences.data_ptr(),
        rows.block_table.data_ptr(),
        *rows.block_table.shape,
        cosines,
        sines,
        len(rope.cosines) if rope else rows.block_table.shape[1] * PAGE,
        torch.get_num_threads(),
    )
