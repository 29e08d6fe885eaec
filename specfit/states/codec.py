"""How hidden states are kept: as they are, or in eight bits with one scale a token and layer."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from specfit.config import StateDtype

TORCH_DTYPES = {
    StateDtype.fp32: torch.float32,
    StateDtype.bf16: torch.bfloat16,
    StateDtype.int8: torch.int8,
    StateDtype.fp8: torch.float8_e4m3fn,
}
_LARGEST = {StateDtype.int8: 127.0, StateDtype.fp8: 448.0}


@dataclass(frozen=True)
class EncodedStates:
    """States as they stand in a shard."""

    values: Tensor  # seq layers hidden
    scales: Float[Tensor, "seq layers"] | None  # what a value is multiplied with; None: 1

    def rows(self, rows: slice) -> "EncodedStates":
        """Those of some tokens."""
        return EncodedStates(self.values[rows], None if self.scales is None else self.scales[rows])


def joined(parts: Sequence[EncodedStates]) -> EncodedStates:
    """States of one kind, one after another."""
    scales = [part.scales for part in parts if part.scales is not None]
    values = torch.cat([part.values for part in parts])
    return EncodedStates(values, torch.cat(scales) if scales else None)


def encode(states: Float[Tensor, "seq layers hidden"], dtype: StateDtype) -> EncodedStates:
    """`bf16` is exact for a target that computes in bf16; int8 and fp8 (E4M3) are symmetric."""
    if dtype not in _LARGEST:
        return EncodedStates(states.to(TORCH_DTYPES[dtype]), None)
    largest = _LARGEST[dtype]
    scales = states.abs().amax(-1).float().clamp(min=1e-12) / largest
    scaled = (states.float() / scales[..., None]).clamp(-largest, largest)
    if dtype is StateDtype.int8:
        scaled = scaled.round()
    return EncodedStates(scaled.to(TORCH_DTYPES[dtype]), scales)


def decode(encoded: EncodedStates) -> Float[Tensor, "seq layers hidden"]:
    """In fp32, whatever they were kept in."""
    values = encoded.values.float()
    return values if encoded.scales is None else values * encoded.scales[..., None]


def bytes_per_token(num_layers: int, hidden_size: int, dtype: StateDtype) -> int:
    """Of a shard: states, scales, token id, mask, log-normalizer and top token."""
    scales = 4 * num_layers if dtype in _LARGEST else 0
    return num_layers * hidden_size * TORCH_DTYPES[dtype].itemsize + scales + 4 + 1 + 4 + 4
