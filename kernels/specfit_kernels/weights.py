"""What every format needs of a weight matrix: its largest size, and its rows a few at a time."""

from collections.abc import Iterator

import torch
from jaxtyping import Float, Float32
from torch import Tensor

CHUNK_VALUES = 1 << 18  # in float32 a MiB: a handful of such tensors stay in a core's cache


def row_chunks(rows: int, columns: int, *, multiple: int = 1) -> Iterator[slice]:
    """Slices that cover all rows, each of about CHUNK_VALUES values and a multiple of `multiple`.

    A chunk is never less than `multiple` rows, however long they are.
    """
    step = max(1, CHUNK_VALUES // (columns * multiple)) * multiple
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


@torch.no_grad()
def finite_amax(weight: Float[Tensor, "rows columns"], name: str) -> Float32[Tensor, ""]:
    """The largest magnitude.

    Raises:
        ValueError: The weight holds a NaN or an infinity; it says where the first is.
    """
    lowest, highest = torch.aminmax(weight)
    amax = torch.maximum(-lowest, highest).float()
    if not amax.isfinite():
        # Row by row: of a matrix that fills the memory no mask can be made.
        row = next(i for i in range(len(weight)) if not weight[i].isfinite().all())
        column = int(weight[row].isfinite().int().argmin())
        got = float(weight[row, column])
        raise ValueError(f"{name} must be finite, got {got} at [{row}, {column}]")
    return amax
