"""One safetensors file beside a flat Llama config: what four engines share, with their differences.

Tensors have vLLM's names, the layer is `midlayer`. Embeddings are the target's and not written.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from specfit.draft_vocab import DraftVocab
from specfit.export.twins import LAYER, Twin, frequencies
from specfit.files import read_json, write_json
from specfit.speculators.eagle3 import Eagle3, Eagle3Config
from specfit.targets.info import TargetInfo

FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
IDS = "eagle_aux_hidden_state_layer_ids"
NESTED = "eagle_config"
CONFIG, WEIGHTS = "config.json", "model.safetensors"
ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters")


def write_weights(
    folder: Path,
    head: Eagle3,
    vocab: DraftVocab,
    *,
    layer: str = "midlayer",
    d2t_dtype: torch.dtype = torch.int64,
) -> None:
    """Writes model.safetensors in bf16, with d2t as offsets."""
    tensors = {
        name.replace(LAYER, layer): p.detach().cpu().bfloat16().contiguous()
        for name, p in head.state_dict().items()
    }
    tensors |= {"d2t": vocab.d2t.cpu().to(d2t_dtype), "t2d": vocab.t2d.cpu()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def layer_config(c: Eagle3Config, info: TargetInfo) -> dict[str, Any]:
    """The keys of a Llama config for the one layer."""
    scaling = {name: value for name, value in c.rope_parameters.items() if name != "rope_theta"}
    return {
        "model_type": "llama",
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "vocab_size": c.vocab_size,
        "max_position_embeddings": c.max_position_embeddings,
        "rms_norm_eps": c.rms_norm_eps,
        "hidden_act": c.hidden_act,
        "rope_parameters": c.rope_parameters,
        "rope_theta": c.rope_parameters["rope_theta"],
        # Where it was before transformers 5, and where some engines still look for it.
        "rope_scaling": None if scaling.get("rope_type") in (None, "default") else scaling,
        "attention_bias": False,
        "mlp_bias": False,
        # The head's own rows, also where the target ties its embeddings.
        "tie_word_embeddings": False,
        "bos_token_id": info.bos_id,
        "eos_token_id": info.eos_ids,
    }


def write_config(
    folder: Path, c: Eagle3Config, info: TargetInfo, architecture: str, more: Mapping[str, Any]
) -> None:
    """Writes config.json; `more` are the engine's own keys."""
    write_json(
        folder / CONFIG,
        {
            "architectures": [architecture],
            "dtype": "bfloat16",
            "torch_dtype": "bfloat16",
            **layer_config(c, info),
            "target_hidden_size": info.hidden_size,
            "draft_vocab_size": c.draft_vocab_size,
            # Always written: where a key is missing, engines do not agree on what that means.
            **{flag: getattr(c, flag) for flag in FLAGS},
            **more,
        },
    )


def read_config(folder: Path) -> dict[str, Any]:
    """config.json.

    Raises:
        ValueError: there is none, or it is no JSON object.
    """
    path = folder / CONFIG
    try:
        return read_json(path)
    except FileNotFoundError:
        raise ValueError(f"{folder} must hold {CONFIG}, got none") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} must be JSON, got {error}") from error


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors of model.safetensors by vLLM's names: floats in fp32, none of them not finite.

    Raises:
        ValueError: the file is missing, cut off, pickled, or holds what is no number.
    """
    path = weights_in(folder)
    tensors: dict[str, Tensor] = {}
    try:
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                tensors[_common_name(name)] = file.get_tensor(name)
    except SafetensorError as error:
        raise ValueError(f"{path} must be a whole safetensors file, got {error}") from error
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            tensors[name] = tensor.float()
            if not bool(tensors[name].isfinite().all()):
                raise ValueError(f"{path}: {name} must be finite, got NaN or infinity")
    return tensors


def weights_in(folder: Path) -> Path:
    """model.safetensors.

    Raises:
        ValueError: there is none; the message says what is there instead.
    """
    path = folder / WEIGHTS
    if not path.is_file():
        others = [p.name for pattern in ("*.bin", "*.safetensors") for p in folder.glob(pattern)]
        found = ", ".join(sorted(others)) or "nothing of the kind"
        raise ValueError(
            f"{folder} must hold {WEIGHTS}, got {found}; pickles are not read, convert them to one "
            "file of safetensors"
        )
    return path


def _common_name(name: str) -> str:
    name = name.removeprefix("model.").removeprefix("draft_model.")
    return name.replace("midlayer.", f"{LAYER}.")


def rope_of(config: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """`rope_parameters`, also of configs that have `rope_theta` and `rope_scaling` instead.

    Raises:
        ValueError: there is neither; the message says what is.
    """
    found = dict(config.get("rope_parameters") or {})
    if not found:
        scaling = dict(config.get("rope_scaling") or {})
        if "type" in scaling:  # the older name
            scaling.setdefault("rope_type", scaling.pop("type"))
        found = scaling
    if "rope_theta" not in found:
        if "rope_theta" not in config:
            raise ValueError(f"{file}: one of {', '.join(ROPE_KEYS)} must say the rope_theta")
        found["rope_theta"] = config["rope_theta"]
    found.setdefault("rope_type", "default")
    return found


def offsets(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> Tensor:
    """Target ids by d2t's offsets; without it the first ids of the target, as engines take them."""
    num = config.get("draft_vocab_size") or config["vocab_size"]
    ids = torch.arange(num)
    return ids + tensors["d2t"].long() if "d2t" in tensors else ids


def twin(
    folder: Path, config: Mapping[str, Any], *, aux_layers: list[int], flags: Mapping[str, bool]
) -> Twin:
    """Of a folder's tensors and its Llama config, with what the engine makes of ids and flags."""
    tensors = read_tensors(folder)
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    return Twin(
        tensors={name: t for name, t in tensors.items() if t.is_floating_point()},
        aux_layers=tuple(aux_layers),
        target_ids=offsets(tensors, config),
        num_heads=heads,
        num_kv_heads=config["num_key_value_heads"],
        head_dim=head_dim,
        eps=config["rms_norm_eps"],
        frequencies=frequencies(
            rope_of(config, folder / CONFIG), head_dim, config["max_position_embeddings"]
        ),
        **flags,
    )
