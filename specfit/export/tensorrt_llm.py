"""TensorRT-LLM's layout: `EAGLE3LlamaForCausalLM`, d2t in 32 bits, aux layers counted by output.

Output i is the input of layer i + 1. It does not know `norm_before_residual`, and reads RoPE from
`rope_theta` and `rope_scaling`.
"""

from pathlib import Path

import torch

from specfit.draft_vocab import DraftVocab
from specfit.export import flat
from specfit.export.served import Served, needs, serve_text
from specfit.export.twins import Twin
from specfit.export.vllm import default_layers
from specfit.speculators.eagle3 import Eagle3, Eagle3Config

NAME = "tensorrt_llm"
ARCHITECTURE = "EAGLE3LlamaForCausalLM"


def refusal(config: Eagle3Config, _served: Served) -> str | None:
    """See `Translator.refusal`."""
    if config.aux_layers[0] == 0:
        return (
            f"speculator.aux_layers must begin at 1 for {NAME}, which reads outputs of layers, "
            f"got {list(config.aux_layers)}"
        )
    return needs({"norm_before_residual": config.norm_before_residual}, NAME)


def write(folder: Path, head: Eagle3, vocab: DraftVocab, served: Served) -> None:
    """See `Translator.write`."""
    flat.write_weights(folder, head, vocab, d2t_dtype=torch.int32)
    ids = [i - 1 for i in head.config.aux_layers]
    more = {flat.NESTED: {"use_aux_hidden_state": True, flat.IDS: ids}}
    flat.write_config(folder, head.config, served.info, ARCHITECTURE, more)


def twin(folder: Path, served: Served) -> Twin:
    """See `Translator.twin`."""
    config = flat.read_config(folder) | {"rope_parameters": None}
    ids = config.get(flat.NESTED, {}).get(flat.IDS)
    known = [flag for flag in flat.FLAGS if flag != "norm_before_residual"]
    return flat.twin(
        folder,
        config,
        aux_layers=default_layers(served.info) if ids is None else [i + 1 for i in ids],
        flags={flag: bool(config.get(flag, False)) for flag in known},
    )


def serving(_served: Served, num_draft_tokens: int) -> str:
    """See `Translator.serving`."""
    return serve_text(
        "trtllm-serve TARGET --backend pytorch --extra_llm_api_options options.yaml  "
        "# speculative_config: {decoding_type: Eagle, speculative_model_dir: HEAD, "
        f"max_draft_len: {num_draft_tokens}, eagle3_one_model: true}}",
        "Not run here, where there is no CUDA device; read in TensorRT-LLM's sources.",
        "TARGET is the target's folder or hub id, HEAD this folder.",
    )
