"""How fast a weight is quantized to NVFP4: ours, compressed-tensors', and a copy of the same bytes.

    python kernels/bench/quantize.py

All figures are of one run and in GB/s of input; the best of several passes counts.
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from time import perf_counter

import torch
from compressed_tensors import compressors, quantization
from torch import Tensor

from specfit_kernels.nvfp4 import quantize
from specfit_kernels.rules import ScaleRule


def compressed_tensors_path(weight: Tensor) -> None:
    """Statistics, scales and codes, by the functions that its users' tools call."""
    scheme = quantization.QuantizationScheme(**quantization.quant_scheme.NVFP4, targets=["Linear"])
    global_scale = quantization.utils.generate_gparam(*torch.aminmax(weight))
    blocks = weight.view(len(weight), -1, 16)
    scales, _ = quantization.utils.calculate_qparams(
        blocks.amin(-1), blocks.amax(-1), scheme.weights, global_scale=global_scale
    )
    state = {"weight": weight, "weight_scale": scales, "weight_global_scale": global_scale}
    compressors.NVFP4PackedCompressor.compress(state, scheme)


def best_seconds(path: Callable[[Tensor], object], weight: Tensor, repetitions: int) -> float:
    """Of one pass over the weight, after one that is not timed."""
    path(weight)
    seconds = []
    for _ in range(repetitions):
        start = perf_counter()
        path(weight)
        seconds.append(perf_counter() - start)
    return min(seconds)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--columns", type=int, default=4096, help="a multiple of 16")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repetitions", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    weight = torch.randn(options.rows, options.columns)
    target = torch.empty_like(weight)
    paths: dict[str, Callable[[Tensor], object]] = {
        "memcpy": target.copy_,
        "compressed-tensors": compressed_tensors_path,
        **{rule.name: partial(quantize, rule=rule) for rule in (ScaleRule.amax, ScaleRule.search)},
    }
    seconds = {
        name: best_seconds(path, weight, options.repetitions) for name, path in paths.items()
    }
    shape = f"{options.rows} x {options.columns} float32, {options.threads} threads"
    sys.stdout.write(f"{shape:<44}{'GB/s':>8}{'of memcpy':>12}{'of c-t':>9}\n")
    for name, passed in seconds.items():
        of_memcpy, of_peer = seconds["memcpy"] / passed, seconds["compressed-tensors"] / passed
        speed = weight.nbytes / passed / 1e9
        sys.stdout.write(f"{name:<44}{speed:8.3f}{of_memcpy:12.4f}{of_peer:9.2f}\n")


if __name__ == "__main__":
    main()
