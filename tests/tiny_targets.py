"""Tiny random targets with real tokenizers and chat templates, as checkpoints on disk."""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3MoeConfig,
)

VOCAB_SIZE = 320
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,  # not hidden_size / num_attention_heads
    "max_position_embeddings": 256,
    "eos_token_id": 1,
    "bos_token_id": None,
    "pad_token_id": 1,
    "initializer_range": 0.3,  # peaked enough that argmax is not a coin toss
}
CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama3_rope": LlamaConfig(
        **SIZES,
        tie_word_embeddings=False,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "yarn_rope": LlamaConfig(
        **SIZES,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "qwen3": Qwen3Config(**SIZES, tie_word_embeddings=False),
    "qwen3_moe": Qwen3MoeConfig(
        **SIZES,
        tie_word_embeddings=False,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
    ),
}
TEXTS = [
    "def add(a, b):\n    return a + b\n",
    "Write a Python function that adds two numbers.",
    "for i in range(10):\n    print(i)\n",
    "The weather tool takes a city and a unit.",
]


def write_tokenizer(folder: Path, chat_template: str = CHATML) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of VOCAB_SIZE tokens or a few less, saved to `folder`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        extra_special_tokens=["<|im_start|>"],
        chat_template=chat_template,
    )
    fast.save_pretrained(folder)
    return fast


def write_target(folder: Path, architecture: str = "llama", seed: int = 0) -> Path:
    """A checkpoint of a random model of one of CONFIGS, with its tokenizer."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[architecture]).eval()
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def write_conversations(path: Path, num: int = 40, *, answers: bool = True) -> Path:
    """JSON lines of messages: questions that differ, with short answers."""
    lines = []
    for i in range(num):
        messages = [{"role": "user", "content": f"Write function number {i} that adds {i % 7}."}]
        if answers:
            messages.append({"role": "assistant", "content": f"def add{i}(a):\n    return a + {i}"})
        lines.append(json.dumps({"messages": messages}))
    path.write_text("\n".join(lines) + "\n")
    return path
