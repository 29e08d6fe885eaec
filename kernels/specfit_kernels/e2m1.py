"""E2M1, the float of four bits: a sign, two of exponent, one of mantissa.

code    0   1   2   3   4   5   6   7     and 8 more: the same, negative
value   0  .5   1 1.5   2   3   4   6
"""

import torch
from jaxtyping import Float, Float32, UInt8
from torch import Tensor

LARGEST = 6.0
_VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def nearest(x: Float32[Tensor, "*n"]) -> Float32[Tensor, "*n"]:
    """The nearest value of each; ties go to the even code, and beyond ±6 to ±6. NaN stays."""
    return nearest_sizes(x.abs()).copysign_(x)


def nearest_sizes(sizes: Float32[Tensor, "*n"]) -> Float32[Tensor, "*n"]:
    """`nearest` of what is not negative."""
    sizes = sizes.clamp(max=LARGEST)
    # Values in [2^e, 2^(e+1)) are 2^e / 2 apart, and those below 1 as far as those in [1, 2). A
    # float32 without its mantissa is 2^e; dividing by it is exact, so ties stay ties.
    steps = (sizes.view(torch.int32) & 0x7F800000).view(torch.float32).clamp_(1, 4).mul_(0.5)
    return sizes.div_(steps).round_().mul_(steps)


def encode(x: Float[Tensor, "*n"]) -> UInt8[Tensor, "*n"]:
    """The code of the nearest value.

    What is below zero keeps its sign when it is rounded to zero (code 8); -0.0 itself is code 0.
    compressed-tensors and ModelOpt do the same.
    """
    sizes = nearest_sizes(x.abs().float())
    # The codes of sizes up to 2, from 2 to 4 and from 4 on lie on three lines, and a code is on
    # the lowest of them.
    codes = torch.minimum(2 * sizes, sizes + 2).minimum(sizes / 2 + 4)
    return codes.to(torch.uint8) + (x < 0).to(torch.uint8) * 8


def decode(codes: UInt8[Tensor, "*n"]) -> Float32[Tensor, "*n"]:
    """The value of each code of 0..15; code 8 is 0.0."""
    values = _VALUES.to(codes.device)
    return values.index_select(0, codes.flatten().int()).view(codes.shape)


def pack(codes: UInt8[Tensor, "*n columns"]) -> UInt8[Tensor, "*n half"]:
    """Two codes a byte, the even column in the low nibble; `columns` is even."""
    return codes[..., 0::2] | codes[..., 1::2] << 4


def unpack(packed: UInt8[Tensor, "*n half"]) -> UInt8[Tensor, "*n columns"]:
    """The codes that `pack` put together."""
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)
