"""What the attention kernels compute, in torch: their definition, and the oracle of their tests.

The last columns of each sequence are its draft. Token i of a draft stands in the i-th column from
the first token's position on, and sees the columns before the draft, itself, and of the draft what
stands before it, or with a tree only its ancestors.

A sequence's columns are cut into splits of 256, each a softmax of its own, so that one long
sequence keeps a device busy. Cuts depend on nothing, and columns that a token does not see leave
its bits alone: they are the same whoever else is in the pass, and however long the draft.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float32, Int32, Int64
from torch import Tensor

from specfit_kernels import linear_twins
from specfit_kernels.kv_pages import PAGE, KVPages, Places
from specfit_kernels.linear_twins import Halves, Terms

SPLIT = 256  # columns
MAX_TREE = 64  # tokens, one a bit


@dataclass(frozen=True)
class AttentionPartials:
    """Of each split, what its tokens' softmax has seen; and what combining needs.

    A logit counts in bits: probabilities go as 2^logit. Splits behind a token's own column are not
    written. The last two are zeros between launches.
    """

    sums: Float32[Tensor, "splits tokens heads dim"]  # Σ 2^(logit - top) * value
    tops: Float32[Tensor, "splits tokens heads"]  # the largest logit; -inf where nothing is seen
    weights: Float32[Tensor, "splits tokens heads"]  # Σ 2^(logit - top)
    attended: Float32[Tensor, "tokens heads_dim"]  # on its way to a narrower format
    largest: Int32[Tensor, " tokens"]
    arrived: Int32[Tensor, " tokens"]

    @classmethod
    def empty(
        cls, num_tokens: int, num_heads: int, head_dim: int, max_length: int, device: torch.device
    ) -> "AttentionPartials":
        """Memory for sequences of up to `max_length` columns, their drafts included.

        A launch has programs for all of `max_length`. Sequences beyond it are read beyond this
        memory: kernels check none.
        """
        shape = (-(-max_length // SPLIT), num_tokens, num_heads)
        zeros = torch.zeros(2, num_tokens, dtype=torch.int32, device=device)
        return cls(
            torch.empty(*shape, head_dim, device=device),
            torch.empty(shape, device=device),
            torch.empty(shape, device=device),
            torch.empty(num_tokens, num_heads * head_dim, device=device),
            *zeros,
        )


def attn_verify(
    queries: Float32[Tensor, "tokens heads_dim"],
    places: Places,
    kv: KVPages,
    partials: AttentionPartials,
    tokens_per_sequence: int,
    *,
    tree: Int64[Tensor, " tokens"] | None = None,
    pdl: bool = False,
) -> None:
    """Writes the partials of tokens that stand by sequence, as many of each.

    Of a sequence only the first token's place is read; where it is negative, there are no columns
    and nothing is written. Bit j of a token's `tree` has it see token j of its own draft; bits from
    its own on are ignored.
    """
    del pdl  # of a launch, and here is none
    scale = math.log2(math.e) * kv.head_dim**-0.5
    grouped = queries.view(len(queries), kv.num_kv_heads, -1, kv.head_dim) * scale
    for first in range(0, len(queries), tokens_per_sequence):
        base = int(places.positions[first])
        if base < 0:
            continue
        tokens = slice(first, first + tokens_per_sequence)
        end = base + tokens_per_sequence
        pages = places.block_table[int(places.sequences[first]), : (end - 1) // PAGE + 1]
        keys, values = (
            cache[pages].transpose(0, 1).flatten(1, 2)[:, :end].float()
            for cache in (kv.keys, kv.values)
        )
        sees = _sees(base, tokens_per_sequence, None if tree is None else tree[tokens], keys.device)
        logits = torch.einsum("thgd,hcd->thgc", grouped[tokens], keys)
        logits = logits.masked_fill(~sees[:, None, None], -torch.inf)
        for split in range(-(-end // SPLIT)):
            columns = slice(split * SPLIT, (split + 1) * SPLIT)
            top = logits[..., columns].amax(-1)
            shift = top.masked_fill(top == -torch.inf, 0.0)
            powers = torch.exp2(logits[..., columns] - shift[..., None])
            sums = torch.einsum("thgc,hcd->thgd", powers, values[:, columns])
            partials.sums[split, tokens] = sums.flatten(1, 2)
            partials.tops[split, tokens] = top.flatten(1)
            partials.weights[split, tokens] = powers.sum(-1).flatten(1)


def attn_combine(
    partials: AttentionPartials,
    places: Places,
    out: Terms | Halves | Float32[Tensor, "tokens heads_dim"],
    tokens_per_sequence: int,
    *,
    pdl: bool = False,
) -> None:
    """Writes what the tokens have attended to; zeros where a place is negative."""
    attended = partials.attended
    for token, row in enumerate(attended.view((*partials.tops.shape[1:], -1))):
        first = token // tokens_per_sequence * tokens_per_sequence
        base = int(places.positions[first])
        num_splits = 0 if base < 0 else (base + token - first) // SPLIT + 1
        tops = partials.tops[:num_splits, token]
        factors = torch.exp2(tops - tops.amax(0)) if num_splits else tops
        sums = (factors[..., None] * partials.sums[:num_splits, token]).sum(0)
        weights = (factors * partials.weights[:num_splits, token]).sum(0)
        row.copy_(sums / weights[:, None] if num_splits else 0.0 * sums)
    match out:
        case Terms():
            linear_twins.quantize_tokens(attended, out, pdl=pdl)
        case Halves():
            linear_twins.halve_tokens(attended, out, pdl=pdl)
        case _:
            out.copy_(attended)


def _sees(
    base: int, num_tokens: int, tree: Int64[Tensor, " tokens"] | None, device: torch.device
) -> Tensor:
    """[tokens, columns]."""
    own = torch.arange(num_tokens, device=device)[:, None]
    behind = torch.arange(-base, num_tokens, device=device)[None, :]  # the draft's first column
    if tree is None:
        return behind <= own
    ancestor = (tree[:, None] >> behind.clamp(0, MAX_TREE - 1) & 1).bool() & (behind < own)
    return (behind < 0) | ancestor | (behind == own)
