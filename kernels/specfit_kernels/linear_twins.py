"""What the linear kernels compute, in torch: their definition, and the oracle of their tests.

y[token, row] = token scale * row scale * Σ_k x[token, k] * w[row, k]

Weights are NVFP4: w = E2M1 code * E4M3 scale of its 16 columns, 4.5 bits. The row scale is the
matrix's global scale, so that matrices that are fused may each have their own. `TiledWeight` and
`WordWeight` order the same bits for two kinds of kernels.

Tokens are `Terms`, for tensor cores that multiply NVFP4 with NVFP4, or `Halves`, float16.
Term by term a token is quantized to NVFP4, then what is left of it, and so on; the products of the
terms are added. Relative error of y on Gaussian values at K = 4096 with one to three terms: 9.6e-2,
8.6e-3, 8.0e-4; Halves 2.1e-4; bfloat16 1.7e-3. A token's scale is a power of two, so that dividing
by it and subtracting a term are exact, and compiled or not the codes are the same.

Kernels for a few tokens cut K into splits, each a partial sum [splits, tokens, rows] in units of y,
that whoever reads them adds from the first on. How they cut depends on the weight's shape only, and
no sum on how many tokens there are: a token's bits are the same alone and among others.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Float8e4m3fn, Float16, Float32, Int32, UInt8
from torch import Tensor
from torch.nn.functional import pad

from specfit_kernels import e2m1, fp8
from specfit_kernels.nvfp4 import BLOCK, FP4Tensor
from specfit_kernels.weights import row_chunks

STEP = 256  # columns that a program takes at a time
TILED_ROWS = 128  # rows of a weight that it has: W4A4
WORD_ROWS = 64  # and W4A16
_PROGRAMS = 296  # two for each of a B200's processors, wherever it runs: more splits fill no device


@dataclass(frozen=True)
class Splits:
    """How kernels for a few tokens cut K."""

    num: int
    steps: int  # of STEP columns, in each but the last, which may have fewer


@dataclass(frozen=True)
class TiledWeight:
    """For W4A4. Scales lie in tiles of 128 rows and 64 columns, as sm_100's tensor cores take them.

    Scale (r, g) of a tile is byte 16 * (r % 32) + 4 * (r // 32) + g. Tiles cover rows to a multiple
    of 128 and columns to one of 256, where scales are zero.
    """

    codes: UInt8[Tensor, "rows bytes"]  # two a byte, the even column low; zeros to 32 columns
    scales: Float8e4m3fn[Tensor, "row_tiles k_tiles 512"]
    row_scales: Float32[Tensor, " rows"]
    columns: int

    @property
    def num_steps(self) -> int:
        """Steps of STEP columns."""
        return -(-self.columns // STEP)

    @property
    def splits(self) -> Splits:
        """Those of `skinny_w4a4`."""
        return _splits(len(self.codes), TILED_ROWS, self.num_steps)

    def values(self) -> Float32[Tensor, "rows padded"]:
        """Without row scales, with zeros to a multiple of 256 columns."""
        num_tiles = self.scales.shape[:2]
        tiles = self.scales.float().view(*num_tiles, 32, 4, 4).permute(0, 3, 2, 1, 4)
        scales = tiles.reshape(num_tiles[0] * 128, -1)[: len(self.codes)]
        codes = pad(e2m1.unpack(self.codes), (0, scales.shape[1] * BLOCK - self.codes.shape[1] * 2))
        return e2m1.decode(codes) * scales.repeat_interleave(BLOCK, 1)


@dataclass(frozen=True)
class WordWeight:
    """For W4A16, ordered so that few instructions make float16 where tensor cores take it.

    Word w of 32 columns holds those that one thread gives to two products, 16 * s + 8 * h + 2 * w
    and the one after: code c = 2 * s + h of the low half and of the high half. Of a half, the bits
    from 3 * c on are the size of code c, and bit 13, 14, 12 or 15 the sign of code 0, 1, 2 or 3.
    A shift and a mask bring a size, and others a sign, to where float16 has them in both halves at
    once; for codes 2 and 3 they are the same.

    A scale's byte is the upper half of float16 of scale * 2^7, without the sign. Rows end with
    zeros to a multiple of 256 columns.
    """

    words: Int32[Tensor, "rows words"]
    scales: UInt8[Tensor, "rows groups"]
    row_scales: Float32[Tensor, " rows"]
    columns: int

    @property
    def num_steps(self) -> int:
        """Steps of STEP columns."""
        return -(-self.columns // STEP)

    @property
    def splits(self) -> Splits:
        """Those of `gemv_w4a16`."""
        return _splits(len(self.words), WORD_ROWS, self.num_steps)

    def values(self) -> Float32[Tensor, "rows padded"]:
        """Without row scales, with zeros to a multiple of 256 columns."""
        halves = self.words.view(torch.int16).view(len(self.words), -1, 4, 1, 2).int()
        size_shifts, sign_shifts = _half_shifts(halves.device)
        codes = (halves >> size_shifts & 7) | (halves >> sign_shifts & 1) << 3
        codes = codes.permute(0, 1, 3, 2, 4).flatten(1).to(torch.uint8)
        scales = (self.scales.to(torch.int16) << 7).view(torch.float16).float() * 2.0**-7
        return e2m1.decode(codes) * scales.repeat_interleave(BLOCK, 1)


@dataclass(frozen=True)
class Terms:
    """Tokens in NVFP4: x = token scale * Σ over terms of code * scale of its 16 columns.

    Rows of codes and scales end with zeros to a multiple of 256 columns.
    """

    codes: UInt8[Tensor, "tokens terms bytes"]
    scales: Float8e4m3fn[Tensor, "tokens terms groups"]
    token_scales: Float32[Tensor, " tokens"]

    @classmethod
    def empty(cls, num_tokens: int, columns: int, num_terms: int, device: torch.device) -> "Terms":
        """Uninitialized memory for 1, 2 or 3 terms."""
        if num_terms not in (1, 2, 3):
            raise ValueError(f"num_terms must be 1, 2 or 3, got {num_terms}")
        padded = -(-columns // STEP) * STEP
        shape = (num_tokens, num_terms)
        return cls(
            torch.empty(*shape, padded // 2, dtype=torch.uint8, device=device),
            torch.empty(*shape, padded // BLOCK, dtype=torch.float8_e4m3fn, device=device),
            torch.empty(num_tokens, device=device),
        )

    def values(self) -> Float32[Tensor, "terms tokens padded"]:
        """Each term's, without the token scale."""
        codes = e2m1.decode(e2m1.unpack(self.codes))
        return (codes * self.scales.float().repeat_interleave(BLOCK, -1)).transpose(0, 1)


@dataclass(frozen=True)
class Halves:
    """Tokens in float16 times a scale; rows end with zeros to a multiple of 256 columns."""

    values: Float16[Tensor, "tokens padded"]
    token_scales: Float32[Tensor, " tokens"]

    @classmethod
    def empty(cls, num_tokens: int, columns: int, device: torch.device) -> "Halves":
        """Uninitialized memory."""
        padded = -(-columns // STEP) * STEP
        values = torch.empty(num_tokens, padded, dtype=torch.float16, device=device)
        return cls(values, torch.empty(num_tokens, device=device))


def tiled(parts: Sequence[FP4Tensor]) -> TiledWeight:
    """Matrices one below another, for W4A4.

    Raises:
        ValueError: The matrices differ in columns, or a scale is NaN or negative.
    """
    codes, scales, row_scales = _joined(parts)
    scales = pad(scales.view(torch.uint8), (0, -scales.shape[1] % 16, 0, -len(scales) % 128))
    tiles = scales.view(len(scales) // 128, 4, 32, -1, 4).permute(0, 3, 2, 1, 4).flatten(2)
    return TiledWeight(
        pad(codes, (0, -codes.shape[1] % 16)),
        tiles.contiguous().view(torch.float8_e4m3fn),
        row_scales,
        parts[0].columns,
    )


def worded(parts: Sequence[FP4Tensor]) -> WordWeight:
    """Matrices one below another, for W4A16.

    Raises:
        ValueError: The matrices differ in columns, or a scale is NaN or negative.
    """
    packed, scales, row_scales = _joined(parts)
    packed = pad(packed, (0, -packed.shape[1] % (STEP // 2)))
    num_rows, num_bytes = packed.shape
    words = torch.empty(num_rows, num_bytes // 4, dtype=torch.int32, device=packed.device)
    for rows in row_chunks(num_rows, 2 * num_bytes):
        words[rows] = _words(packed[rows])
    scale_halves = (scales.float() * 2.0**7).to(torch.float16).view(torch.int16)
    return WordWeight(
        words,
        pad((scale_halves >> 7).to(torch.uint8), (0, -scales.shape[1] % (STEP // BLOCK))),
        row_scales,
        parts[0].columns,
    )


def quantize_tokens(x: Float[Tensor, "tokens columns"], out: Terms, *, pdl: bool = False) -> None:
    """Writes the terms; the scale of 16 columns brings their largest size to about 6.

    An infinity or a NaN stays in its token, all of whose products are NaN.
    """
    del pdl  # of a launch, and here is none
    amax = x.abs().amax(1).float()
    bits = (amax * (1 / 2688)).view(torch.int32)
    scales = ((bits + 0x7FFFFF) & 0x7F800000).clamp(min=27 << 23).view(torch.float32)
    out.token_scales.copy_(torch.where(amax.isfinite(), scales, torch.nan))
    padded = pad(x.float(), (0, 2 * out.codes.shape[2] - x.shape[1]))
    rest = (padded / scales[:, None]).view(len(x), -1, BLOCK)
    for term in range(out.codes.shape[1]):
        block_scales = fp8.to_e4m3(rest.abs().amax(2) * (1 / 6)).float().clamp(min=2.0**-9)
        codes = e2m1.encode(rest * (1 / block_scales)[..., None])
        rest = rest - e2m1.decode(codes) * block_scales[..., None]
        out.codes[:, term] = e2m1.pack(codes.flatten(1))
        out.scales[:, term] = block_scales.to(torch.float8_e4m3fn)


def halve_tokens(x: Float[Tensor, "tokens columns"], out: Halves, *, pdl: bool = False) -> None:
    """Writes float16 under a scale that brings a token's largest size into [2^14, 2^15)."""
    del pdl
    power = x.abs().amax(1).float().view(torch.int32) & 0x7F800000
    scales = (power.clamp(min=41 << 23) - (14 << 23)).view(torch.float32)
    out.token_scales.copy_(scales)
    scaled = (x.float() / scales[:, None]).to(torch.float16)
    out.values.copy_(pad(scaled, (0, out.values.shape[1] - x.shape[1])))


def skinny_w4a4(
    weight: TiledWeight,
    tokens: Terms,
    partials: Float32[Tensor, "splits tokens rows"],
    *,
    pdl: bool = False,
) -> None:
    """Writes the partial sums of a few tokens."""
    del pdl
    width = weight.splits.steps * STEP
    x, w = tokens.values(), weight.values()
    for split, partial in enumerate(partials):
        part = slice(split * width, (split + 1) * width)
        product = (x[..., part] @ w[:, part].T).sum(0)
        partial.copy_(_scaled(product, weight.row_scales, tokens.token_scales))


def gemv_w4a16(
    weight: WordWeight,
    tokens: Halves,
    partials: Float32[Tensor, "splits tokens rows"],
    *,
    pdl: bool = False,
) -> None:
    """Writes the partial sums of a few tokens."""
    del pdl
    width = weight.splits.steps * STEP
    x, w = tokens.values.float(), weight.values()
    for split, partial in enumerate(partials):
        part = slice(split * width, (split + 1) * width)
        product = x[:, part] @ w[:, part].T
        partial.copy_(_scaled(product, weight.row_scales, tokens.token_scales))


def gemm_w4a4(weight: TiledWeight, tokens: Terms, out: Float[Tensor, "tokens rows"]) -> None:
    """Writes y of many tokens, rounded once to the type of `out`."""
    product = (tokens.values() @ weight.values().T).sum(0)
    out.copy_(_scaled(product, weight.row_scales, tokens.token_scales))


def gemm_w4a16(weight: WordWeight, tokens: Halves, out: Float[Tensor, "tokens rows"]) -> None:
    """Writes y of many tokens, rounded once to the type of `out`."""
    product = tokens.values.float() @ weight.values().T
    out.copy_(_scaled(product, weight.row_scales, tokens.token_scales))


def sum_splits(
    partials: Float32[Tensor, "splits tokens rows"],
    out: Float[Tensor, "tokens rows"],
    *,
    pdl: bool = False,
) -> None:
    """Adds partial sums from the first on, and rounds once to the type of `out`."""
    del pdl
    total = partials[0]
    for partial in partials[1:]:
        total = total + partial
    out.copy_(total)


def _scaled(
    product: Float32[Tensor, "tokens rows"],
    row_scales: Float32[Tensor, " rows"],
    token_scales: Float32[Tensor, " tokens"],
) -> Float32[Tensor, "tokens rows"]:
    return product * row_scales * token_scales[:, None]


def _splits(num_rows: int, row_tile: int, num_steps: int) -> Splits:
    wanted = max(1, _PROGRAMS // -(-num_rows // row_tile))
    steps = -(-num_steps // min(wanted, num_steps))
    return Splits(-(-num_steps // steps), steps)


def _words(packed: UInt8[Tensor, "rows bytes"]) -> Int32[Tensor, "rows words"]:
    # Of 32 columns: two products, two pairs of each, four words, two halves.
    codes = e2m1.unpack(packed).int().view(len(packed), -1, 4, 4, 2).transpose(2, 3)
    size_shifts, sign_shifts = _half_shifts(codes.device)
    halves = ((codes & 7) << size_shifts | codes >> 3 << sign_shifts).sum(3)
    bytes_ = torch.stack([halves & 255, halves >> 8], -1).to(torch.uint8)
    return bytes_.flatten(1).view(torch.int32)


def _half_shifts(device: torch.device) -> tuple[Int32[Tensor, "4 1"], Int32[Tensor, "4 1"]]:
    """How far the size and the sign of each of a half's four codes are from its lowest bit."""
    sizes = torch.tensor([[0], [3], [6], [9]], dtype=torch.int32, device=device)
    signs = torch.tensor([[13], [14], [12], [15]], dtype=torch.int32, device=device)
    return sizes, signs


_Joined = tuple[
    UInt8[Tensor, "rows bytes"], Float8e4m3fn[Tensor, "rows groups"], Float32[Tensor, " rows"]
]


def _joined(parts: Sequence[FP4Tensor]) -> _Joined:
    """Codes, block scales and row scales of all parts."""
    columns = parts[0].columns
    for i, part in enumerate(parts):
        if part.columns != columns:
            raise ValueError(
                f"parts[{i}] must have {columns} columns, as parts[0], got {part.columns}"
            )
        block_scales = part.block_scales.float()
        if not bool((block_scales >= 0).all()):
            # min() is NaN where there is one.
            got = float(block_scales.min())
            raise ValueError(f"parts[{i}].block_scales must be 0 or more, got {got}")
    scales = torch.cat([part.block_scales.view(torch.uint8) for part in parts])
    row_scales = [
        (1 / part.global_scale if part.divides else part.global_scale).expand(len(part.codes))
        for part in parts
    ]
    return (
        torch.cat([part.codes for part in parts]),
        scales.view(torch.float8_e4m3fn),
        torch.cat(row_scales),
    )
