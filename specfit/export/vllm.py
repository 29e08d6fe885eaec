"""vLLM's own EAGLE-3 layout: `LlamaForCausalLMEagle3`, a flat Llama config, one safetensors file.

vLLM counts aux layers as we do and reads them, for every runner, from the top level of the config;
d2t holds offsets; embeddings are the target's when the file has none.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from specfit.draft_vocab import DraftVocab
from specfit.files import write_json
from specfit.speculators.eagle3 import Eagle3, Eagle3Config
from specfit.targets.info import TargetInfo

ARCHITECTURE = "LlamaForCausalLMEagle3"
_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


def write(folder: Path, head: Eagle3, vocab: DraftVocab, info: TargetInfo) -> None:
    """Writes config.json and model.safetensors (bf16, no embeddings)."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name.replace("layers.0.", "midlayer."): p.detach().cpu().bfloat16().contiguous()
        for name, p in head.state_dict().items()
    }
    tensors |= {"d2t": vocab.d2t.cpu(), "t2d": vocab.t2d.cpu()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    write_json(folder / "config.json", _config(head.config, info))


def _config(c: Eagle3Config, info: TargetInfo) -> dict[str, Any]:
    aux_layers = list(c.aux_layers)
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "hidden_size": c.hidden_size,
        "target_hidden_size": info.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "vocab_size": c.vocab_size,
        "draft_vocab_size": c.draft_vocab_size,
        "max_position_embeddings": c.max_position_embeddings,
        "rms_norm_eps": c.rms_norm_eps,
        "hidden_act": c.hidden_act,
        "rope_parameters": c.rope_parameters,
        "rope_theta": c.rope_parameters["rope_theta"],
        "attention_bias": False,
        "mlp_bias": False,
        # The head's own rows, also where the target ties its embeddings.
        "tie_word_embeddings": False,
        "bos_token_id": info.bos_id,
        "eos_token_id": info.eos_ids,
        "eagle_aux_hidden_state_layer_ids": aux_layers,
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": aux_layers,
        },
        # Always written: where a key is missing, engines do not agree on what that means.
        **{flag: getattr(c, flag) for flag in _FLAGS},
    }


def read(folder: Path) -> tuple[Eagle3, DraftVocab]:
    """A head read back from `write`'s folder alone, as vLLM reads it, in fp32.

    Raises:
        ValueError: a tensor or key that vLLM needs is missing or of another shape.
    """
    config = _read_config(folder / "config.json")
    path = folder / "model.safetensors"
    tensors = {}
    with safe_open(path, "pt") as file:
        for name in file.keys():  # noqa: SIM118
            tensors[name.replace("midlayer.", "layers.0.")] = file.get_tensor(name)
    for name, size in (("d2t", config.draft_vocab_size), ("t2d", config.vocab_size)):
        if name not in tensors:
            raise ValueError(f"{path}: {name} missing")
        if tensors[name].shape != (size,):
            shape = list(tensors[name].shape)
            raise ValueError(f"{path}: {name} must have shape [{size}], got {shape}")
    vocab = DraftVocab(tensors.pop("d2t"), tensors.pop("t2d"))
    head = Eagle3(config)
    try:
        head.load_state_dict({name: t.to(torch.float32) for name, t in tensors.items()})
    except RuntimeError as error:
        raise ValueError(f"{path}: {' '.join(str(error).split())}") from error
    return head.eval(), vocab


def _read_config(path: Path) -> Eagle3Config:
    values = json.loads(path.read_text())
    if values.get("architectures") != [ARCHITECTURE]:
        raise ValueError(f"{path}: architectures must be [{ARCHITECTURE}]")
    try:
        return Eagle3Config(
            hidden_size=values["hidden_size"],
            intermediate_size=values["intermediate_size"],
            num_heads=values["num_attention_heads"],
            num_kv_heads=values["num_key_value_heads"],
            head_dim=values["head_dim"],
            vocab_size=values["vocab_size"],
            draft_vocab_size=values["draft_vocab_size"],
            aux_layers=tuple(values["eagle_aux_hidden_state_layer_ids"]),
            max_position_embeddings=values["max_position_embeddings"],
            rms_norm_eps=values["rms_norm_eps"],
            hidden_act=values["hidden_act"],
            rope_parameters=values["rope_parameters"],
            **{flag: values[flag] for flag in _FLAGS},
        )
    except KeyError as error:
        raise ValueError(f"{path}: {error.args[0]} missing") from error
