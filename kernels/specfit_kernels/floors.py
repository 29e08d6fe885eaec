"""What this machine can do at best, measured: what stages print themselves against."""

from time import perf_counter

import torch

GFLOP = 1e9


def matmul_gflops(rows: int, columns: int, inner: int, *, seconds: float = 0.2) -> float:
    """GFLOP/s of torch's fp32 product of `rows inner` by `inner columns`, the best of many.

    A product of the shape that a stage mostly does is the floor that it can be held against: what
    the machine gives for larger ones is not to be had for it.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    a = torch.randn(rows, inner, device=device)
    b = torch.randn(columns, inner, device=device)
    best = float("inf")
    end = perf_counter() + seconds
    while perf_counter() < end:
        start = perf_counter()
        torch.nn.functional.linear(a, b)
        if device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, perf_counter() - start)
    return 2 * rows * columns * inner / best / GFLOP
