"""Tiny random targets in memory, of more architectures than `tiny_targets` writes to disk."""

import functools
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import torch
from tiny_targets import CONFIGS, SIZES
from transformers import (
    AutoModelForCausalLM,
    Cohere2Config,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    GraniteConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from specfit.targets.info import read_info
from specfit.targets.target import Target

WINDOW = 7  # shorter than the sequences of the tests
MIXED = ["sliding_attention", "sliding_attention", "full_attention"] * 2
ARCHITECTURES: dict[str, Any] = CONFIGS | {
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=False),
    "mistral_window": MistralConfig(**SIZES, sliding_window=WINDOW),
    "qwen3_window": Qwen3Config(
        **SIZES, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=2
    ),
    # Eager attention, which adds its mask: SDPA has no soft cap and no sinks.
    "gemma2": Gemma2Config(
        **SIZES, sliding_window=WINDOW, query_pre_attn_scalar=16, final_logit_softcapping=5.0
    ),
    "gpt_oss": GptOssConfig(
        **SIZES, sliding_window=WINDOW, num_local_experts=4, num_experts_per_tok=2
    ),
    "gemma3": Gemma3TextConfig(
        **SIZES, sliding_window=WINDOW, query_pre_attn_scalar=16, layer_types=MIXED
    ),
    "granite": GraniteConfig(
        **SIZES, logits_scaling=3.0, residual_multiplier=0.5, embedding_multiplier=2.0
    ),
    "cohere2": Cohere2Config(**SIZES, sliding_window=WINDOW, logit_scale=0.3),
}


@functools.cache
def tiny(architecture: str, dtype: torch.dtype = torch.float32) -> Target:
    """A random target; one object for all tests, so none may change it."""
    torch.manual_seed(0)
    config = deepcopy(ARCHITECTURES[architecture])  # the model writes its dtype into it
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    tokenizer = SimpleNamespace(bos_token_id=None, eos_token_id=1)
    info = read_info(
        model.eval().requires_grad_(False),
        name=architecture,
        tokenizer=tokenizer,
        quantization=None,
    )
    return Target(model, tokenizer, info)


def random_tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    """Ids of any token of a tiny target."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(SIZES["vocab_size"], shape, generator=generator)
