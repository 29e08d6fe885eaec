"""Attention masks for targets, made by us so that every path masks alike."""

from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor


def attention_masks(
    config: Any,
    query_positions: Int[Tensor, "rows queries"],
    key_positions: Int[Tensor, "rows keys"],
    key_valid: Bool[Tensor, "rows keys"],
) -> Tensor | dict[str, Tensor]:
    """What `forward` of a transformers model takes as `attention_mask`, `rows 1 queries keys`.

    A query sees the valid keys at positions up to its own; in a sliding layer only the last
    `sliding_window` of them. Models whose layers differ get one mask a kind.

    Raises:
        ValueError: a layer kind that has no position-wise mask (linear attention, chunks).
    """
    config = config.get_text_config()
    distance = query_positions[:, :, None] - key_positions[:, None, :]
    full: Tensor = ((distance >= 0) & key_valid[:, None, :])[:, None]
    kinds = set(getattr(config, "layer_types", None) or [])
    unknown = kinds - {"full_attention", "sliding_attention"}
    if unknown:
        raise ValueError(f"target.path: layers of kind {', '.join(sorted(unknown))} are not read")
    window = getattr(config, "sliding_window", None)
    if not window or kinds == {"full_attention"} or not getattr(config, "use_sliding_window", True):
        return _for_attention(config, full)
    sliding: Tensor = full & (distance < window)[:, None]
    if kinds == {"full_attention", "sliding_attention"}:
        masks = {"full_attention": full, "sliding_attention": sliding}
        return {kind: _for_attention(config, mask) for kind, mask in masks.items()}
    return _for_attention(config, sliding)


def _for_attention(config: Any, looks: Tensor) -> Tensor:
    """SDPA takes True where one looks; eager attention adds, and would add True as 1."""
    if config._attn_implementation != "eager":
        return looks
    dtype = config.dtype or torch.float32
    return torch.zeros_like(looks, dtype=dtype).masked_fill(~looks, torch.finfo(dtype).min)
