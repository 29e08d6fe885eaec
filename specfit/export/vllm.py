"""vLLM's own EAGLE-3 layout: `LlamaForCausalLMEagle3`.

vLLM counts aux layers as design.md does and reads them, for every runner, from the top level of the
config. Embeddings are the target's when the file has none. It knows all four norm flags.
"""

from pathlib import Path

from specfit.draft_vocab import DraftVocab
from specfit.export import flat
from specfit.export.served import Served, serve_text
from specfit.export.twins import Twin
from specfit.speculators.eagle3 import Eagle3, Eagle3Config
from specfit.targets.info import TargetInfo

ARCHITECTURE = "LlamaForCausalLMEagle3"


def refusal(_config: Eagle3Config, _served: Served) -> None:
    """See `Translator.refusal`. vLLM expresses whatever a head here can be."""


def write(folder: Path, head: Eagle3, vocab: DraftVocab, served: Served) -> None:
    """See `Translator.write`."""
    flat.write_weights(folder, head, vocab)
    more = {flat.IDS: list(head.config.aux_layers), flat.NESTED: {"use_aux_hidden_state": True}}
    flat.write_config(folder, head.config, served.info, ARCHITECTURE, more)


def twin(folder: Path, served: Served) -> Twin:
    """See `Translator.twin`."""
    config = flat.read_config(folder)
    return flat.twin(
        folder,
        config,
        aux_layers=config.get(flat.IDS) or default_layers(served.info),
        flags={flag: bool(config.get(flag, False)) for flag in flat.FLAGS},
    )


def default_layers(info: TargetInfo) -> list[int]:
    """What vLLM and llama.cpp read of a target where a head does not say."""
    n = info.num_layers
    return [2, n // 2, n - 3]


def serving(_served: Served, num_draft_tokens: int) -> str:
    """See `Translator.serving`."""
    return serve_text(
        f"""vllm serve TARGET --speculative-config '{{"method": "eagle3", "model": "HEAD", """
        f""""num_speculative_tokens": {num_draft_tokens}}}'""",
        "Tried with vLLM 0.32.0 on a CPU, whose release is lossy at temperatures above 0.",
        "TARGET is the target's folder or hub id, HEAD this folder.",
    )
