"""The layout of the library `speculators`, which vLLM loads by its folder alone.

The layer's config lies in `transformer_layer_config`, and there is no `model_type` at the top:
with one vLLM takes the folder for a model of its own. Where `norm_before_residual` is missing, this
layout means true, and every other one false.
"""

from pathlib import Path
from typing import Any

from specfit.draft_vocab import DraftVocab
from specfit.export import flat
from specfit.export.served import Served, serve_text
from specfit.export.twins import LAYER, Twin
from specfit.export.vllm import default_layers
from specfit.files import write_json
from specfit.speculators.eagle3 import Eagle3, Eagle3Config

ARCHITECTURE = "Eagle3DraftModel"
VERSION = "0.9.0"
LAYER_CONFIG = "transformer_layer_config"
NUM_DRAFT_TOKENS = 4  # what a server proposes unless it is told


def refusal(_config: Eagle3Config, _served: Served) -> None:
    """See `Translator.refusal`. It expresses whatever a head here can be."""


def write(folder: Path, head: Eagle3, vocab: DraftVocab, served: Served) -> None:
    """See `Translator.write`."""
    c, info = head.config, served.info
    flat.write_weights(folder, head, vocab, layer=LAYER)
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": NUM_DRAFT_TOKENS,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURE],
        "speculators_model_type": "eagle3",
        "speculators_version": VERSION,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": info.name, "architectures": [info.architecture]},
        },
        LAYER_CONFIG: flat.layer_config(c, info),
        "draft_vocab_size": c.draft_vocab_size,
        "target_hidden_size": info.hidden_size,
        flat.IDS: list(c.aux_layers),
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        **{flag: getattr(c, flag) for flag in flat.FLAGS},
    }
    write_json(folder / flat.CONFIG, config)


def twin(folder: Path, served: Served) -> Twin:
    """See `Translator.twin`."""
    config = flattened(flat.read_config(folder), folder)
    return flat.twin(
        folder,
        config,
        aux_layers=config.get(flat.IDS) or default_layers(served.info),
        flags={flag: bool(config[flag]) for flag in flat.FLAGS},
    )


def flattened(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """With the layer's keys at the top, and flags that are missing as this layout means them.

    Raises:
        ValueError: it has no layer config.
    """
    if LAYER_CONFIG not in config:
        raise ValueError(f"{folder / flat.CONFIG}: {LAYER_CONFIG} must be there, got none")
    layer: dict[str, Any] = config[LAYER_CONFIG]
    flags = dict.fromkeys(flat.FLAGS, False) | {"norm_before_residual": True}
    return {**flags, **layer, **config}


def serving(_served: Served, num_draft_tokens: int) -> str:
    """See `Translator.serving`."""
    return serve_text(
        f"""vllm serve TARGET --speculative-config '{{"method": "eagle3", "model": "HEAD", """
        f""""num_speculative_tokens": {num_draft_tokens}}}'""",
        "The layout of speculators 0.9.0; vLLM 0.32.0 loaded such a head on a CPU.",
        "TARGET is the target's folder or hub id, HEAD this folder. `vllm serve HEAD` alone works "
        "where `verifier.name_or_path` in its config.json names the target.",
    )
