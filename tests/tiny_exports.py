"""Heads exported for every engine, and what its rules make of them."""

from pathlib import Path
from typing import Any

import tiny_heads
import torch
from gguf import GGUFWriter

from specfit.export.config import EngineName
from specfit.export.engines import ENGINES
from specfit.export.parity import compare
from specfit.export.served import Served
from specfit.speculators.batches import pack
from specfit.training.checkpoints import rounded

NAMES = list(ENGINES)
TOKENS = tiny_heads.random_tokens(24, seed=0)
# The head has one decoder layer over three of six: all that every engine expresses.
PORTABLE: dict[str, Any] = {"aux_layers": [2, 3, 5]}


def target_gguf(path: Path, num_tokens: int = 320) -> Path:
    """A GGUF file of which only the tokenizer is read."""
    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([f"t{i}" for i in range(num_tokens)])
    writer.add_token_types([1] * num_tokens)
    writer.add_token_merges(["t 0", "t 1"])
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(False)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


class Exported:
    """A head as it is kept (bf16), and folders of it."""

    def __init__(self, folder: Path, architecture: str = "llama", **config: Any) -> None:
        self.folder = folder
        target = tiny_heads.make_target(architecture)
        self.speculator = tiny_heads.make_speculator(target, **(PORTABLE | config))
        self.trained = rounded(self.speculator.head), self.speculator.vocab
        self.served = Served(target.info, target_gguf(folder / "target.gguf"))

    def write(self, engine: EngineName) -> Path:
        """The engine's folder."""
        folder = self.folder / engine.name
        folder.mkdir(exist_ok=True)
        ENGINES[engine].write(folder, *self.trained, self.served)
        return folder

    def parity(self, folder: Path, engine: EngineName) -> dict[str, Any]:
        """What the rules of `engine` make of a folder, beside the trained head."""
        twin = ENGINES[engine].twin(folder, self.served)
        return compare(
            self.trained,
            pack([self.speculator.document(TOKENS, [(2, len(TOKENS))])]),
            twin,
            self.aux(list(twin.aux_layers)),
            self.speculator.embeddings,
            3,
        )

    def aux(self, layers: list[int]) -> torch.Tensor:
        """Inputs of the target's layers."""
        ids = torch.tensor([TOKENS])
        mask = torch.ones_like(ids, dtype=torch.bool)
        return self.speculator.target.states(ids, mask, layers)[0][0].float()
