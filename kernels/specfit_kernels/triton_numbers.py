"""The number formats inside Triton kernels, and sums whose order is fixed.

`e2m1` and `fp8` define the formats. What is here gives their bits, compiled and in Triton's
interpreter alike: it computes with integers, and with float operations that are exact or single.
Triton's own conversions are no choice, since its interpreter rounds to E4M3 and bfloat16 wrongly.

Cost, in instructions a value: `decode_e2m1` and `decode_e4m3` 4, the encoders 10.
"""

from typing import no_type_check

import triton
import triton.language as tl

# `no_type_check` keeps the tests' shape checker from wrapping what Triton compiles.


@no_type_check
@triton.jit
def decode_e2m1(codes):
    """float32 values of codes 0..15; code 8 is -0.0."""
    # Its bits, shifted to where float32 has them, are the value with the exponent too low by 126.
    bits = codes.to(tl.uint32)
    bits = ((bits & 8) << 28) | ((bits & 7) << 22)
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37


@no_type_check
@triton.jit
def decode_e4m3(codes):
    """float32 values of codes 0..255 but the two of NaN, which scales never have."""
    bits = codes.to(tl.uint32)
    bits = ((bits & 0x80) << 24) | ((bits & 0x7F) << 20)
    return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36


@no_type_check
@triton.jit
def encode_e2m1(x):
    """Codes, as uint32, of the nearest values; `e2m1.encode`, and NaN becomes 6."""
    bits = x.to(tl.uint32, bitcast=True)
    sizes = tl.minimum(bits & 0x7FFFFFFF, 0x40C00000)  # 6.0
    rounded = ((sizes + 0x1FFFFF + ((sizes >> 22) & 1)) >> 22) - 252
    # Below 1.0 the steps are halves, and those are the last bits of floats at 1.5 * 2^22.
    halves = (sizes.to(tl.float32, bitcast=True) + 6291456.0).to(tl.uint32, bitcast=True) & 3
    codes = tl.where(sizes < 0x3F800000, halves, rounded)
    return codes | tl.where(sizes == 0, 0, (bits >> 28) & 8)


@no_type_check
@triton.jit
def encode_e4m3(x):
    """Codes, as uint32, of the nearest values; `fp8.to_e4m3`, NaN included."""
    bits = x.to(tl.uint32, bitcast=True)
    sizes = tl.minimum(bits & 0x7FFFFFFF, 0x43E00000)  # 448.0
    rounded = ((sizes + 0x7FFFF + ((sizes >> 20) & 1)) >> 20) - 960
    # Below 2^-6 the steps are 2^-9: the last bits of floats at 1.5 * 2^14.
    least = (sizes.to(tl.float32, bitcast=True) + 24576.0).to(tl.uint32, bitcast=True) & 15
    codes = tl.where(sizes < 0x3C800000, least, rounded)
    codes = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7F, codes)
    return codes | ((bits >> 24) & 0x80)


@no_type_check
@triton.jit
def pack(codes, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """uint8[ROWS, COLUMNS / 2] of E2M1 codes: two a byte, the even column in the low nibble."""
    low, high = tl.split(codes.reshape(ROWS, COLUMNS // 2, 2))
    return (low | (high << 4)).to(tl.uint8)


@no_type_check
@triton.jit
def unpack(packed, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The codes [ROWS, COLUMNS] that `pack` put together."""
    return tl.join(packed & 15, packed >> 4).reshape(ROWS, COLUMNS)


@no_type_check
@triton.jit
def size_bits(x):
    """Bits of |x|, which order as the sizes do, with infinity and then NaN above all others.

    Their maximum is the same everywhere, where that of floats with a NaN among them is not.
    """
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@no_type_check
@triton.jit
def term_scale(amax_bits):
    """A token's scale for E2M1 terms: the least power of two that is amax / 2688 or more.

    2688 is the largest E2M1 value of the largest E4M3 scale. The scale is 2^-100 or more, and NaN
    where amax is not finite.
    """
    bits = (amax_bits.to(tl.float32, bitcast=True) * (1 / 2688)).to(tl.int32, bitcast=True)
    power = tl.maximum((bits + 0x7FFFFF) & 0x7F800000, 27 << 23)
    return tl.where(amax_bits >= 0x7F800000, 0x7FC00000, power).to(tl.float32, bitcast=True)


@no_type_check
@triton.jit
def half_scale(amax_bits):
    """A token's scale for float16: a power of two that brings amax into [2^14, 2^15).

    2^-100 or more.
    """
    power = tl.maximum(amax_bits & 0x7F800000, 41 << 23) - (14 << 23)
    return power.to(tl.float32, bitcast=True)


@no_type_check
@triton.jit
def inverse_power(scale):
    """1 / scale, exact, of a power of two."""
    return ((254 << 23) - scale.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)


@no_type_check
@triton.jit
def encode_term(x, BLOCKS: tl.constexpr):
    """One E2M1 term of x[BLOCKS, 16], in units of the token's scale, and what it leaves.

    Returns the packed codes uint8[BLOCKS, 8], the E4M3 scales' codes uint8[BLOCKS] and the rest,
    x - scale * code. All steps but the two products by a reciprocal are exact.
    """
    amax = tl.max(size_bits(x), 1).to(tl.float32, bitcast=True)
    scale_codes = tl.maximum(encode_e4m3(amax * (1 / 6)), 1)
    scales = decode_e4m3(scale_codes)
    inverse = tl.div_rn(1.0, scales)
    codes = encode_e2m1(x * inverse[:, None])
    rest = x - decode_e2m1(codes) * scales[:, None]
    return pack(codes, BLOCKS, 16), scale_codes.to(tl.uint8), rest


@no_type_check
@triton.jit
def sum_of_splits(partials, offsets, mask, split_stride, SPLITS: tl.constexpr):
    """Sums partials[0..SPLITS), each `split_stride` values after the last, from the first on."""
    total = tl.load(partials + offsets, mask=mask, other=0.0)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(partials + split * split_stride + offsets, mask=mask, other=0.0)
    return total
