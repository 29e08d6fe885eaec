"""The configuration of `bench`."""

from dataclasses import dataclass, field
from enum import Enum

from specfit.checks import require, require_positive


class Format(Enum):
    """Of the layers' matrices; the head is in INT8 where they have 8 bits or 4, as in Q4 files."""

    fp32 = "fp32"
    bf16 = "bf16"
    fp8 = "fp8"
    nvfp4 = "nvfp4"


@dataclass
class BenchConfig:
    """Latency of the decode loop on the machine at hand: one request at a time, greedy."""

    # Weights that plain decoding is timed in; speculation is timed in the last of them.
    formats: list[Format] = field(default_factory=lambda: list(Format))
    # What matrices in NVFP4 and INT8 are multiplied with, and whether draft heads are in INT8:
    # quick, and off by 5e-3.
    int8_activations: bool = True
    num_draft_tokens: list[int] = field(default_factory=lambda: [1, 2, 4])  # of the head
    max_draft_tokens: int = 8  # where k adapts to what drafts cost and bring
    num_prompts: int = 4  # held-out prompts of each component, and as many edits
    max_prompt_tokens: int = 400  # longer prompts are passed over
    max_new_tokens: int = 64
    repetitions: int = 5  # figures are their medians
    # A folder with libllama.so and ggml's libraries (`npm pack @node-llama-cpp/linux-x64` has
    # them), for a target that comes as a GGUF file.
    llama_cpp: str | None = None

    def __post_init__(self) -> None:
        require(bool(self.formats), "bench.formats", "name a format", self.formats)
        ks = self.num_draft_tokens
        distinct = len(set(ks)) == len(ks) and all(k >= 1 for k in ks)
        require(distinct, "bench.num_draft_tokens", "be distinct numbers from 1 on", ks)
        counts = ("num_prompts", "max_prompt_tokens", "max_new_tokens", "repetitions")
        require_positive(self, "bench", *counts, "max_draft_tokens")
