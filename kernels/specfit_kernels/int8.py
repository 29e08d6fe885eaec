"""INT8 weights: 32 values in a row share a float16 scale. 8.5 bits a value.

value = code * scale, scale = amax / 127, rounded up. Relative RMSE on Gaussian values: .0052.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Float16, Int8
from torch import Tensor

from specfit_kernels.weights import finite_amax, row_chunks

BLOCK = 32
LARGEST = 127
_LARGEST_SCALE = 65504.0


@dataclass(frozen=True)
class Int8Tensor:
    """A matrix in INT8."""

    codes: Int8[Tensor, "rows columns"]  # -127..127; the kernels refuse -128
    scales: Float16[Tensor, "rows blocks"]  # of 32 columns each; a row's last block may be shorter

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Float[Tensor, "rows columns"]:
        """The values, computed in float32."""
        out = torch.empty(self.codes.shape, dtype=dtype, device=self.codes.device)
        for rows in row_chunks(*self.codes.shape):
            scales = self.scales[rows].float().repeat_interleave(BLOCK, 1)
            out[rows] = self.codes[rows] * scales[:, : self.codes.shape[1]]
        return out


@torch.no_grad()
def quantize(weight: Float[Tensor, "rows columns"], *, name: str = "weight") -> Int8Tensor:
    """Each value becomes the nearest code; none is clipped.

    Raises:
        ValueError: The weight holds a NaN, an infinity, or a value that no float16 scale reaches.
    """
    amax = float(finite_amax(weight, name))
    if amax > LARGEST * _LARGEST_SCALE:
        raise ValueError(f"{name} must be at most {LARGEST * _LARGEST_SCALE:g} in size, got {amax}")
    num_rows, columns = weight.shape
    codes = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scales = weight.new_empty(num_rows, -(-columns // BLOCK), dtype=torch.float16)
    for rows in row_chunks(num_rows, columns):
        padded = torch.nn.functional.pad(weight[rows].float(), (0, -columns % BLOCK))
        blocks = padded.view(len(padded), -1, BLOCK)
        scales[rows] = _scales(blocks.abs().amax(2))
        # A scale of zero has only zeros below it.
        steps = scales[rows].float().clamp(min=2.0**-24)
        codes[rows] = (blocks / steps[..., None]).round().flatten(1)[:, :columns].to(torch.int8)
    return Int8Tensor(codes, scales)


def _scales(amax: Float[Tensor, "rows blocks"]) -> Float16[Tensor, "rows blocks"]:
    """The least float16 numbers that are amax / 127 or more."""
    scales = (amax / LARGEST).half()
    above = (scales.view(torch.int16) + 1).view(torch.float16)
    return torch.where(scales.float() * LARGEST < amax, above, scales)
