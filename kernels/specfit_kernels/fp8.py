"""FP8 weights: E4M3 values with one float32 scale for the matrix, or one per 128 x 128 block.

value = code * scale, scale = amax / 448: compressed-tensors' `float-quantized`, its `weight` and
`weight_scale`. Where all values are zero the scale is float32's epsilon, as there.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Float8e4m3fn, Float32
from torch import Tensor

from specfit_kernels.weights import finite_amax, row_chunks

BLOCK = 128
LARGEST = 448.0


@dataclass(frozen=True)
class FP8Tensor:
    """A matrix in E4M3."""

    values: Float8e4m3fn[Tensor, "rows columns"]
    scales: Float32[Tensor, "*blocks"]  # [1], or one per block of 128 x 128; the last are smaller

    def dequantized(self, dtype: torch.dtype) -> Float[Tensor, "rows columns"]:
        """The values times their scales, computed in float32."""
        out = torch.empty(self.values.shape, dtype=dtype, device=self.values.device)
        for rows in row_chunks(*self.values.shape, multiple=BLOCK):
            scales = self.scales if self.scales.ndim == 1 else _spread(self.scales, rows, out)
            out[rows] = self.values[rows].float() * scales
        return out


def to_e4m3(x: Float[Tensor, "*n"]) -> Float8e4m3fn[Tensor, "*n"]:
    """Rounded to nearest, ties to even; beyond ±448 it is ±448, and NaN stays."""
    # torch's own cast turns what is out of range into NaN.
    return x.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)


@torch.no_grad()
def quantize_tensor(weight: Float[Tensor, "rows columns"], *, name: str = "weight") -> FP8Tensor:
    """One scale for all.

    Raises:
        ValueError: The weight holds a NaN or an infinity.
    """
    scales = _scales(finite_amax(weight, name)).view(1)
    values = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    for rows in row_chunks(*weight.shape):
        values[rows] = to_e4m3(weight[rows].float() / scales)
    return FP8Tensor(values, scales)


@torch.no_grad()
def quantize_blocks(weight: Float[Tensor, "rows columns"], *, name: str = "weight") -> FP8Tensor:
    """One scale for each 128 rows and 128 columns.

    Raises:
        ValueError: The weight holds a NaN or an infinity.
    """
    finite_amax(weight, name)
    num_rows, num_columns = weight.shape
    values = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    scales = weight.new_empty(-(-num_rows // BLOCK), -(-num_columns // BLOCK), dtype=torch.float32)
    for rows in row_chunks(num_rows, num_columns, multiple=BLOCK):
        chunk = weight[rows].float()
        padding = (0, -num_columns % BLOCK, 0, -len(chunk) % BLOCK)
        sizes = torch.nn.functional.pad(chunk.abs(), padding)
        amax = sizes.view(-1, BLOCK, scales.shape[1], BLOCK).amax((1, 3))
        scales[_blocks(rows)] = _scales(amax)
        values[rows] = to_e4m3(chunk / _spread(scales, rows, values))
    return FP8Tensor(values, scales)


def _scales(amax: Float32[Tensor, "*n"]) -> Float32[Tensor, "*n"]:
    # A tensor, since by a Python number torch divides on a GPU as product with its reciprocal.
    scales = amax / amax.new_tensor(LARGEST)
    return torch.where(scales == 0, torch.finfo(torch.float32).eps, scales)


def _blocks(rows: slice) -> slice:
    return slice(rows.start // BLOCK, -(-rows.stop // BLOCK))


def _spread(
    scales: Float32[Tensor, "row_blocks column_blocks"], rows: slice, like: Tensor
) -> Float32[Tensor, "some_rows columns"]:
    """The scale of each value of some rows, which start with a block."""
    rows_there, columns = like[rows].shape
    wide = scales[_blocks(rows)].repeat_interleave(BLOCK, 1)[:, :columns]
    return wide.repeat_interleave(BLOCK, 0)[:rows_there]
