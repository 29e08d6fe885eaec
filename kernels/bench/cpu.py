"""The CPU kernels beside what the machine's memory allows and beside torch, in one run.

    python kernels/bench/cpu.py

Shapes are those of SmolLM2-135M. Weights come from memory: each product goes over copies that no
cache holds, and a whole step over 30 layers and the head. Medians; a thread unless told otherwise.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter

import torch
from torch import Tensor

from specfit_kernels import cpu, cpu_build, int8, nvfp4
from specfit_kernels.cpu_layers import PAGE, DecoderLayer, PagedKV, Rope, Rows
from specfit_kernels.cpu_weights import Activations, CpuWeight, Matrix, pack
from specfit_kernels.rules import ScaleRule

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, LAYERS, VOCABULARY = 576, 1536, 9, 3, 64, 30, 49152
SHAPES = {
    "qkv": ((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN),
    "o": (HIDDEN, HIDDEN),
    "gate_up": (2 * INNER, HIDDEN),
    "down": (HIDDEN, INNER),
    "head": (VOCABULARY, HIDDEN),
}
MEMORY_BYTES = 96 << 20  # of copies of one weight
Product = Callable[[Tensor], object]


@dataclass(frozen=True)
class Kind:
    """A way to multiply: bytes a weight, and a product with one matrix."""

    name: str
    bytes_per_weight: float
    product: Callable[[Tensor], Product]


def ours(name: str, bits: float, quantize: Callable[[Tensor], Matrix], mode: Activations) -> Kind:
    """A format of the CPU kernels."""

    def product(weight: Tensor) -> Product:
        packed = pack([quantize(weight)], activations=mode)
        return lambda x: cpu.linear(x, packed)

    return Kind(f"{name} x {mode.name}", bits / 8, product)


def amax_nvfp4(weight: Tensor) -> nvfp4.FP4Tensor:
    """The quickest rule, since the values do not matter."""
    return nvfp4.quantize(weight, ScaleRule.amax)


def torch_product(dtype: torch.dtype) -> Callable[[Tensor], Product]:
    """A product of torch in some type, from and to float32."""

    def product(weight: Tensor) -> Product:
        cast = weight.to(dtype)
        return lambda x: torch.nn.functional.linear(x.to(dtype), cast).float()

    return product


def torch_dynamic_int8(weight: Tensor) -> Product:
    """A scale a channel, activations quantized on the fly."""
    scales = weight.abs().amax(1) / 127
    zeros = torch.zeros(len(weight), dtype=torch.int64)
    quantized = torch.quantize_per_channel(weight, scales, zeros, 0, torch.qint8)
    packed = torch.ops.quantized.linear_prepack(quantized, None)
    return lambda x: torch.ops.quantized.linear_dynamic(x, packed)


KINDS = [
    ours("nvfp4", 4.5, amax_nvfp4, Activations.int8),
    ours("nvfp4", 4.5, amax_nvfp4, Activations.fp32),
    ours("int8", 8.5, int8.quantize, Activations.int8),
    ours("int8", 8.5, int8.quantize, Activations.fp32),
    ours("bf16", 16, Tensor.bfloat16, Activations.fp32),
    ours("fp32", 32, lambda weight: weight, Activations.fp32),
    Kind("torch dynamic int8", 1, torch_dynamic_int8),
    Kind("torch bf16", 2, torch_product(torch.bfloat16)),
    Kind("torch fp32", 4, torch_product(torch.float32)),
]


def median_seconds(call: Callable[[], object], repetitions: int) -> float:
    """Of one call, after one that is not timed."""
    call()
    seconds = []
    for _ in range(repetitions):
        start = perf_counter()
        call()
        seconds.append(perf_counter() - start)
    return statistics.median(seconds)


def read_bytes_per_second(repetitions: int) -> float:
    """Of a sum over a matrix that no cache holds."""
    values = torch.ones(MEMORY_BYTES // 4)
    return values.nbytes / median_seconds(values.sum, repetitions)


def product_seconds(
    kind: Kind, shape: tuple[int, int], rows: Sequence[int], times: int
) -> list[float]:
    """Of one product, for each number of rows."""
    weight = torch.randn(shape)
    copies = max(1, int(MEMORY_BYTES / (kind.bytes_per_weight * weight.numel())))
    products = [kind.product(weight) for _ in range(copies)]

    def all_of(x: Tensor) -> None:
        for product in products:
            product(x)

    inputs = [torch.randn(num, shape[1]) for num in rows]
    return [median_seconds(partial(all_of, x), times) / copies for x in inputs]


def model(mode: Activations) -> tuple[list[DecoderLayer], CpuWeight]:
    """Layers in NVFP4 and a head in INT8, all random."""

    def packed(name: str) -> CpuWeight:
        return pack([amax_nvfp4(torch.randn(SHAPES[name]) * 0.02)], activations=mode)

    layers = [
        DecoderLayer(
            qkv=packed("qkv"),
            o=packed("o"),
            gate_up=packed("gate_up"),
            down=packed("down"),
            input_norm=torch.ones(HIDDEN),
            post_attention_norm=torch.ones(HIDDEN),
            eps=1e-5,
        )
        for _ in range(LAYERS)
    ]
    head = int8.quantize(torch.randn(SHAPES["head"]) * 0.02)
    return layers, pack([head], activations=mode)


def step_seconds(mode: Activations, rows: Sequence[int], context: int, times: int) -> list[float]:
    """Of a pass over the last rows of a context: all layers, norm, head and argmax."""
    layers, head = model(mode)
    num_pages = context // PAGE + 1
    kvs = [PagedKV.empty(num_pages, KV_HEADS, HEAD_DIM) for _ in range(LAYERS)]
    for kv in kvs:
        kv.keys.normal_()
        kv.values.normal_()
    angles = torch.randn(context, HEAD_DIM // 2)
    rope, norm = Rope(angles.cos(), angles.sin()), torch.ones(HIDDEN)

    def step(stream: Tensor) -> Tensor:
        num = len(stream)
        positions = torch.arange(context - num, context)
        places = Rows(positions, torch.zeros_like(positions), torch.arange(num_pages)[None])
        out, _ = cpu.forward_layers(stream, layers, places, kvs, rope)
        return cpu.argmax(cpu.linear(cpu.rmsnorm(out, norm, 1e-5), head))

    streams = [torch.randn(num, HIDDEN) for num in rows]
    return [median_seconds(partial(step, stream), times) for stream in streams]


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--context", type=int, default=256, help="columns in the KV cache")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 5, 16])
    parser.add_argument("--repetitions", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows, times = options.rows, options.repetitions
    bandwidth = read_bytes_per_second(times)
    path = cpu_build.paths()[0].value
    sys.stdout.write(f"path {path}, {options.threads} threads, reads {bandwidth / 1e9:.1f} GB/s\n")

    header = "".join(f"{f'us M={num}':>11}{'floor':>7}" for num in rows)
    for name, shape in SHAPES.items():
        title = f"{name} {shape[0]} x {shape[1]}"
        sys.stdout.write(
            f"\n{title:<22}{header}   of M={rows[0]}; floor: share of memory's speed\n"
        )
        for kind in KINDS:
            seconds = product_seconds(kind, shape, rows, times)
            floor = kind.bytes_per_weight * shape[0] * shape[1] / bandwidth
            cells = "".join(f"{1e6 * s:11.1f}{floor / s:7.2f}" for s in seconds)
            ratios = " ".join(f"{s / seconds[0]:.2f}" for s in seconds)
            sys.stdout.write(f"{kind.name:<22}{cells}   {ratios}\n")

    num_weights = LAYERS * sum(n * k for name, (n, k) in SHAPES.items() if name != "head")
    moved = num_weights * 4.5 / 8 + VOCABULARY * HIDDEN * 8.5 / 8
    sys.stdout.write(
        f"\na step over {options.context} columns; weights alone: {moved / 1e6:.1f} MB, "
    )
    sys.stdout.write(f"{1e3 * moved / bandwidth:.2f} ms\n")
    for mode in Activations:
        seconds = step_seconds(mode, rows, options.context, times)
        for num, s in zip(rows, seconds, strict=True):
            ratio = s / seconds[0]
            sys.stdout.write(
                f"{mode.name:<6} M={num:<4}{1e3 * s:8.2f} ms  {ratio:5.2f} of M={rows[0]}\n"
            )


if __name__ == "__main__":
    main()
