"""The configuration of `export`."""

from dataclasses import dataclass, field
from enum import Enum

from specfit.checks import require, require_positive


class EngineName(Enum):
    """Whose rules a folder follows; `auto`: of all that can serve the head."""

    auto = 0
    vllm = 1
    speculators = 2
    sglang = 3
    tensorrt_llm = 4
    llama_cpp = 5
    openvino = 6


@dataclass
class ExportConfig:
    """What the head is translated for, and how the translations are compared with it."""

    engines: list[EngineName] = field(default_factory=lambda: [EngineName.auto])
    target_gguf: str | None = None  # the target's file for llama.cpp; null: the target's own
    num_draft_tokens: int = 4  # compared from every token, and in the commands of SERVE.md
    num_tokens: int = 256  # of held-out conversations, that are compared over

    def __post_init__(self) -> None:
        names = [engine.name for engine in self.engines]
        require(len(names) > 0, "export.engines", "name at least one", names)
        alone = EngineName.auto not in self.engines or len(names) == 1
        require(alone, "export.engines", "be auto, or a list without auto", names)
        require(len(set(names)) == len(names), "export.engines", "name each once", names)
        require_positive(self, "export", "num_draft_tokens")
        require(self.num_tokens >= 3, "export.num_tokens", "be at least 3", self.num_tokens)
