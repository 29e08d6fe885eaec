"""The CPU kernels beside what the machine's memory allows, torch and onnxruntime, in one run.

    python kernels/bench/cpu.py

onnxruntime is one of them where it is installed, with onnx. llama.cpp multiplies no matrix by
itself: `specfit stage=bench bench.llama_cpp=...` is where it is a peer.

Shapes are those of SmolLM2-135M. Weights come from memory: each product goes over copies that no
cache holds, and a whole step over 30 layers and the head. Medians; a thread unless told otherwise.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from time import perf_counter

import torch
from torch import Tensor

from specfit_kernels import cpu, cpu_build, int8, nvfp4
from specfit_kernels.cpu_layers import PAGE, DecoderLayer, LayerStack, PagedKV, Rope, Rows
from specfit_kernels.cpu_weights import Activations, CpuWeight, Matrix, pack
from specfit_kernels.floors import read_bytes_per_second
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
    """A way to multiply: bits a weight, and a product with one matrix."""

    name: str
    bits: float
    product: Callable[[Tensor], Product]


def ours(name: str, bits: float, quantize: Callable[[Tensor], Matrix], mode: Activations) -> Kind:
    """A format of the CPU kernels."""

    def product(weight: Tensor) -> Product:
        packed = pack([quantize(weight)], activations=mode)
        return lambda x: cpu.linear(x, packed)

    return Kind(f"{name} x {mode.name}", bits, product)


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


def torch_int4(weight: Tensor) -> Product:
    """Torch's packed 4 bits in groups of 32, with a scale and a zero point each; random codes."""
    rows, columns = weight.shape
    codes = torch.randint(16, weight.shape, dtype=torch.int32)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    scales = torch.rand(columns // 32, rows, 2)
    return lambda x: torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, 32, scales)


def onnxruntime_int4(weight: Tensor) -> Product:
    """MatMulNBits with groups of 32 and activations in int8; random codes."""
    import onnxruntime
    from onnx import TensorProto, helper

    rows, columns = weight.shape
    codes = torch.randint(256, (rows, columns // 32, 16), dtype=torch.uint8)
    scales = torch.rand(rows * columns // 32)
    sizes = {"N": rows, "K": columns, "bits": 4, "block_size": 32, "accuracy_level": 4}
    node = helper.make_node("MatMulNBits", ["x", "w", "s"], ["y"], domain="com.microsoft", **sizes)
    graph = helper.make_graph(
        [node],
        "product",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", columns])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["rows", rows])],
        [
            helper.make_tensor(name, kind, tensor.shape, tensor.numpy().tobytes(), raw=True)
            for name, kind, tensor in (
                ("w", TensorProto.UINT8, codes),
                ("s", TensorProto.FLOAT, scales),
            )
        ],
    )
    versions = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=versions, ir_version=9)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return lambda x: session.run(None, {"x": x.numpy()})


KINDS = [
    ours("nvfp4", 4.5, amax_nvfp4, Activations.int8),
    ours("nvfp4", 4.5, amax_nvfp4, Activations.fp32),
    ours("int8", 8.5, int8.quantize, Activations.int8),
    ours("int8", 8.5, int8.quantize, Activations.fp32),
    ours("bf16", 16, Tensor.bfloat16, Activations.fp32),
    ours("fp32", 32, lambda weight: weight, Activations.fp32),
    Kind("torch int4", 5, torch_int4),
    Kind("torch dynamic int8", 8, torch_dynamic_int8),
    Kind("torch bf16", 16, torch_product(torch.bfloat16)),
    Kind("torch fp32", 32, torch_product(torch.float32)),
]
if find_spec("onnxruntime") and find_spec("onnx"):
    KINDS.append(Kind("onnxruntime int4", 5, onnxruntime_int4))


def median_seconds(call: Callable[[], object], repetitions: int) -> float:
    """Of one call, after one that is not timed."""
    call()
    seconds = []
    for _ in range(repetitions):
        start = perf_counter()
        call()
        seconds.append(perf_counter() - start)
    return statistics.median(seconds)


def product_seconds(
    kind: Kind, shape: tuple[int, int], rows: Sequence[int], times: int
) -> list[float]:
    """Of one product, for each number of rows."""
    weight = torch.randn(shape)
    copies = max(1, int(8 * MEMORY_BYTES / (kind.bits * weight.numel())))
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
    stack = LayerStack(layers, kvs, Rope(angles.cos(), angles.sin()))
    norm = torch.ones(HIDDEN)

    def step(stream: Tensor) -> Tensor:
        num = len(stream)
        positions = torch.arange(context - num, context)
        places = Rows(positions, torch.zeros_like(positions), torch.arange(num_pages)[None])
        out, _ = cpu.forward_layers(stream, stack, places)
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
    bandwidth = read_bytes_per_second()
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
            floor = kind.bits / 8 * shape[0] * shape[1] / bandwidth
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
