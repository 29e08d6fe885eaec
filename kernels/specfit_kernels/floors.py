"""What this machine can do at best, measured: what stages print themselves against."""

from time import perf_counter

import torch

GFLOP = 1e9
WEIGHT_BYTES = 1 << 26  # more than caches hold: a model's weights come from memory, too


def matmul_gflops(
    rows: int,
    columns: int,
    inner: int,
    device: torch.device,
    dtype: torch.dtype,
    *,
    seconds: float = 0.3,
) -> float:
    """GFLOP/s of torch's product of `rows inner` activations with `inner columns` weights.

    The best pass of several over matrices that together fill WEIGHT_BYTES. A product of the shape
    that a stage mostly does is what it can be held against: what the machine gives for larger ones
    is not to be had for it.
    """
    activations = torch.randn(rows, inner, device=device).to(dtype)
    num = max(1, WEIGHT_BYTES // (dtype.itemsize * columns * inner))
    weights = [torch.randn(columns, inner, device=device).to(dtype) for _ in range(num)]
    best = float("inf")
    end = perf_counter() + seconds
    while best == float("inf") or perf_counter() < end:
        start = perf_counter()
        for weight in weights:
            torch.nn.functional.linear(activations, weight)
        if device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, perf_counter() - start)
    return 2 * rows * columns * inner * num / best / GFLOP


def read_bytes_per_second(*, seconds: float = 0.3) -> float:
    """At which torch's threads read memory: the best of several sums over WEIGHT_BYTES."""
    values = torch.ones(WEIGHT_BYTES // 4)
    best = float("inf")
    end = perf_counter() + seconds
    while best == float("inf") or perf_counter() < end:
        start = perf_counter()
        values.sum()
        best = min(best, perf_counter() - start)
    return values.nbytes / best


def speed(
    *,
    num_tokens: int,
    flops: float,
    seconds: float,
    shape: tuple[int, int, int],
    device: torch.device,
    dtype: torch.dtype = torch.float32,
) -> dict[str, float | int | None]:
    """A stage's figures: its seconds, tokens/s and GFLOP/s beside those of a product of `shape`.

    `num_tokens` are those of the `seconds`: after a kill, of the last attempt.
    """
    done = num_tokens > 0
    return {
        "num_timed_tokens": num_tokens,
        "seconds": seconds,
        "tokens_per_second": num_tokens / seconds if done else None,
        "achieved_gflops": flops / seconds / GFLOP if done else None,
        "matmul_gflops": matmul_gflops(*shape, device, dtype) if done else None,
    }
