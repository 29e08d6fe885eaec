"""Weights as the CPU kernels read them: tiles of 16 output channels, side by side (see cpu.cpp).

Packing permutes the bytes of a checkpoint and adds one float32 a channel. Matrices that take the
same input are packed as one, each with its own global scale: q, k and v, or gate and up.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Float32, Shaped, UInt8
from torch import Tensor
from torch.nn.functional import pad

from specfit_kernels import cpu_build, e2m1, fp8
from specfit_kernels.fp8 import FP8Tensor
from specfit_kernels.int8 import Int8Tensor
from specfit_kernels.nvfp4 import FP4Tensor

TILE = 16
Matrix = FP4Tensor | Int8Tensor | FP8Tensor | Float[Tensor, "_ _"]
_INT8_OFFSET = 128


class Activations(Enum):
    """What a row is multiplied as."""

    fp32 = "fp32"  # as it is
    int8 = "int8"  # in blocks of 32, scale amax / 127; for weights in NVFP4 and INT8


class WeightFormat(Enum):
    """In the order of cpu.cpp."""

    nvfp4 = 0
    int8 = 1
    fp8 = 2
    bf16 = 3
    fp32 = 4


class _Layout(NamedTuple):
    """A chunk of a tile: a few columns of its 16 channels."""

    columns: int
    scales: int  # of each channel; they come first
    scale_dtype: torch.dtype
    elements: int  # of each channel
    together: int  # elements of one channel that are next to each other
    dtype: torch.dtype


_LAYOUTS = {
    WeightFormat.nvfp4: _Layout(64, 4, torch.float8_e4m3fn, 32, 4, torch.uint8),
    WeightFormat.int8: _Layout(64, 2, torch.float16, 64, 4, torch.uint8),
    WeightFormat.fp8: _Layout(128, 1, torch.float32, 128, 1, torch.float8_e4m3fn),
    WeightFormat.bf16: _Layout(16, 0, torch.float32, 16, 2, torch.bfloat16),
    WeightFormat.fp32: _Layout(16, 0, torch.float32, 16, 1, torch.float32),
}


@dataclass(frozen=True)
class CpuWeight:
    """A packed matrix, or several, one below the other."""

    format: WeightFormat
    rows: int
    columns: int
    tiles: UInt8[Tensor, "tiles bytes"]
    channel_scales: Float32[Tensor, " channels"]  # of all tiles
    bias: Float32[Tensor, " channels"] | None
    activations: Activations

    def __post_init__(self) -> None:
        whole_numbers = self.format in (WeightFormat.nvfp4, WeightFormat.int8)
        if self.activations is Activations.int8 and not whole_numbers:
            raise ValueError(
                f"activations must be fp32 for weights in {self.format.name}, got int8"
            )

    @cached_property
    def native(self) -> Any:
        """What the compiled kernels know of it."""
        return cpu_build.library().Weight(
            self.format.value,
            self.activations is Activations.int8,
            self.rows,
            self.columns,
            self.tiles.data_ptr(),
            self.channel_scales.data_ptr(),
            0 if self.bias is None else self.bias.data_ptr(),
        )

    @cached_property
    def values(self) -> Float32[Tensor, "rows columns"]:
        """The dequantized matrix, which is kept: torch's twins multiply with it."""
        layout = _LAYOUTS[self.format]
        chunks = self.tiles.view(len(self.tiles), -(-self.columns // layout.columns), -1)
        scale_bytes = TILE * layout.scales * layout.scale_dtype.itemsize
        codes = _untiled(chunks[:, :, scale_bytes:], layout.dtype, layout.together)
        match self.format:
            case WeightFormat.nvfp4:
                values = e2m1.decode(_checkpoint_order(codes))
            case WeightFormat.int8:
                values = codes.float() - _INT8_OFFSET
            case _:
                values = codes.float()
        if layout.scales:
            scales = _untiled(chunks[:, :, :scale_bytes], layout.scale_dtype, 1).float()
            values *= scales.repeat_interleave(layout.columns // layout.scales, 1)
        values *= self.channel_scales[:, None]
        return values[: self.rows, : self.columns].contiguous()


@torch.no_grad()
def pack(
    parts: Sequence[Matrix],
    *,
    activations: Activations = Activations.fp32,
    bias: Float[Tensor, " rows"] | None = None,
    name: str = "weight",
) -> CpuWeight:
    """Matrices of one format and width, one below the other, and what is added to their outputs.

    Tensors that are not quantized are kept in their type, bfloat16 or float32.

    Raises:
        ValueError: The parts' formats or widths differ, the width is no multiple of 16, a scale or
            an FP8 value is not finite, a global scale not positive either, an INT8 code is -128, or
            `activations` does not go with the format.
    """
    formats, widths = {_format(part, name) for part in parts}, {_columns(part) for part in parts}
    if len(formats) != 1:
        raise ValueError(
            f"{name} must have parts of one format, got {sorted(f.name for f in formats)}"
        )
    if len(widths) != 1 or min(widths) % 16:
        raise ValueError(
            f"{name} must have columns that are a multiple of 16, got {sorted(widths)}"
        )
    [weight_format], [columns] = formats, widths
    layout = _LAYOUTS[weight_format]
    num_chunks = -(-columns // layout.columns)
    raw = [_raw(part) for part in parts]
    codes, scales, channel_scales = (torch.cat(tensors) for tensors in zip(*raw, strict=True))
    if bias is not None and len(bias) != len(codes):
        raise ValueError(f"bias must have the {len(codes)} rows of {name}, got {len(bias)}")
    if not bool(((channel_scales > 0) & channel_scales.isfinite()).all()):
        found = [float(part.global_scale) for part in parts if isinstance(part, FP4Tensor)]
        raise ValueError(f"{name} must have positive, finite global scales, got {found}")
    if weight_format is WeightFormat.int8 and bool((codes == 0).any()):
        raise ValueError(f"{name} must have codes of -127 to 127, got -128")
    chunks = _tiled(codes, layout.elements, layout.together, num_chunks)
    if layout.scales:
        for which, values in ("scales", scales), ("values", codes):
            if values.dtype.is_floating_point and not values.float().isfinite().all():
                raise ValueError(f"{name} must have finite {which}, got NaN or infinity")
        chunks = torch.cat([_tiled(scales, layout.scales, 1, num_chunks), chunks], dim=2)
    return CpuWeight(
        weight_format,
        len(codes),
        columns,
        chunks.flatten(1),
        _channels(channel_scales),
        None if bias is None else _channels(bias.float()),
        activations,
    )


def _format(part: Matrix, name: str) -> WeightFormat:
    match part:
        case FP4Tensor():
            return WeightFormat.nvfp4
        case Int8Tensor():
            return WeightFormat.int8
        case FP8Tensor():
            return WeightFormat.fp8
    kinds = {torch.bfloat16: WeightFormat.bf16, torch.float32: WeightFormat.fp32}
    if part.dtype not in kinds:
        raise ValueError(f"{name} must be bfloat16 or float32, got {part.dtype}")
    return kinds[part.dtype]


def _columns(part: Matrix) -> int:
    match part:
        case FP4Tensor():
            return part.columns
        case Int8Tensor():
            return part.codes.shape[1]
        case FP8Tensor():
            return part.values.shape[1]
    return part.shape[1]


def _raw(part: Matrix) -> tuple[Tensor, Tensor, Tensor]:
    """What is tiled, the scales of its blocks, and those of its channels."""
    match part:
        case FP4Tensor():
            ones = torch.ones(len(part.codes))
            channel_scales = ones / part.global_scale if part.divides else ones * part.global_scale
            return _kernel_order(part.codes), part.block_scales, channel_scales
        case Int8Tensor():
            # As unsigned bytes: adding 128 is turning the sign bit.
            codes, scales = part.codes.view(torch.uint8) ^ _INT8_OFFSET, part.scales
        case FP8Tensor():
            num_rows, columns = part.values.shape
            scales = part.scales.expand(-(-num_rows // fp8.BLOCK), -(-columns // fp8.BLOCK))
            codes, scales = part.values, scales.repeat_interleave(fp8.BLOCK, 0)[:num_rows]
        case _:
            codes, scales = part, part.new_empty(0)
    return codes, scales, torch.ones(len(codes))


def _kernel_order(packed: UInt8[Tensor, "rows bytes"]) -> UInt8[Tensor, "rows bytes"]:
    """Of each 8 codes, byte j gets those of columns j and j + 4, not of 2j and 2j + 1."""
    low, high = e2m1.unpack(packed).view(len(packed), -1, 2, 4).unbind(2)
    return (low | high << 4).flatten(1)


def _checkpoint_order(packed: UInt8[Tensor, "rows bytes"]) -> UInt8[Tensor, "rows columns"]:
    """The codes, one a byte, that `_kernel_order` arranged."""
    fours = packed.view(len(packed), -1, 4)
    return torch.stack([fours & 15, fours >> 4], dim=2).flatten(1)


def _tiled(
    rows: Shaped[Tensor, "rows elements"], elements: int, together: int, num_chunks: int
) -> UInt8[Tensor, "tiles chunks bytes"]:
    """With zeros for what is missing of the last tile and of the last chunk."""
    size = rows.element_size()
    missing = (num_chunks * elements - rows.shape[1]) * size, -len(rows) % TILE
    padded = pad(rows.contiguous().view(torch.uint8), (0, missing[0], 0, missing[1]))
    tiles = padded.view(len(padded) // TILE, TILE, -1, together * size)
    return tiles.transpose(1, 2).reshape(len(tiles), num_chunks, -1)


def _untiled(
    chunks: UInt8[Tensor, "tiles chunks bytes"], dtype: torch.dtype, together: int
) -> Shaped[Tensor, "rows elements"]:
    """What `_tiled` was given, with its zeros."""
    groups = chunks.reshape(len(chunks), -1, TILE, together * dtype.itemsize)
    return groups.transpose(1, 2).reshape(len(chunks) * TILE, -1).view(dtype)


def _channels(values: Float32[Tensor, " rows"]) -> Float32[Tensor, " channels"]:
    return pad(values, (0, -len(values) % TILE))
