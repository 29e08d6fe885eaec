"""SGLang's layout: vLLM's, but aux layers are counted by their output and lie in `eagle_config`.

SGLang adds one to the ids it reads, so that output i is the input of layer i + 1; it does not for
gpt-oss, and for DeepSeek only where the first id is 1. It captures inputs of layers, and so neither
the embeddings' output, which no id names, nor the state after the last layer. It does not know
`norm_before_residual`, skips `fc` where the aux states are as wide as an embedding, and takes the
embeddings for `lm_head` where the config ties them.
"""

from dataclasses import replace
from pathlib import Path

import torch

from specfit.draft_vocab import DraftVocab
from specfit.export import flat
from specfit.export.served import Served, needs, serve_text
from specfit.export.twins import Twin
from specfit.export.vllm import ARCHITECTURE, default_layers
from specfit.speculators.eagle3 import Eagle3, Eagle3Config

NAME = "sglang"


def refusal(config: Eagle3Config, served: Served) -> str | None:
    """See `Translator.refusal`."""
    layers, n = list(config.aux_layers), served.info.num_layers
    if len(layers) == 1:
        return f"speculator.aux_layers must be more than one layer for {NAME}, got {layers}"
    if n in layers or read_ids(_written_ids(layers, served), served) != layers:
        return (
            f"speculator.aux_layers must be layers whose inputs {NAME} captures, 1..{n - 1} (of "
            f"DeepSeek not from 1 on), got {layers}"
        )
    return needs({"norm_before_residual": config.norm_before_residual}, NAME)


def write(folder: Path, head: Eagle3, vocab: DraftVocab, served: Served) -> None:
    """See `Translator.write`."""
    flat.write_weights(folder, head, vocab)
    ids = _written_ids(list(head.config.aux_layers), served)
    more = {flat.NESTED: {"use_aux_hidden_state": True, flat.IDS: ids}}
    flat.write_config(folder, head.config, served.info, ARCHITECTURE, more)


def twin(folder: Path, served: Served) -> Twin:
    """See `Translator.twin`."""
    config = flat.read_config(folder)
    ids = config.get(flat.NESTED, {}).get(flat.IDS)
    known = [flag for flag in flat.FLAGS if flag != "norm_before_residual"]
    found = flat.twin(
        folder,
        config,
        aux_layers=default_layers(served.info) if ids is None else read_ids(ids, served),
        flags={flag: bool(config.get(flag, False)) for flag in known},
    )
    if config.get("tie_word_embeddings"):
        return replace(found, is_tied=True, target_ids=torch.arange(config["vocab_size"]))
    return found


def read_ids(ids: list[int], served: Served) -> list[int]:
    """The layers whose inputs SGLang captures for ids in a config."""
    kind = served.info.model_type
    if kind == "gpt_oss" or (kind.startswith("deepseek") and ids[0] != 1):
        return list(ids)
    return [i + 1 for i in ids]


def _written_ids(layers: list[int], served: Served) -> list[int]:
    """Ids that SGLang takes for `layers`, where there are any."""
    less = [i - 1 for i in layers]
    return less if less[0] >= 0 and read_ids(less, served) == layers else layers


def serving(_served: Served, num_draft_tokens: int) -> str:
    """See `Translator.serving`."""
    return serve_text(
        "python -m sglang.launch_server --model-path TARGET --speculative-algorithm EAGLE3 "
        f"--speculative-draft-model-path HEAD --speculative-num-steps {num_draft_tokens} "
        f"--speculative-eagle-topk 1 --speculative-num-draft-tokens {num_draft_tokens + 1}",
        "Not run here, where there is no CUDA device; read in the source of SGLang 0.5.23. With "
        "EAGLE instead of EAGLE3 `fc` is skipped and nothing is accepted.",
        "TARGET is the target's folder or hub id, HEAD this folder.",
    )
