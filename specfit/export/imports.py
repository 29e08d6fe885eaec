"""Heads that were made elsewhere, as ours: names, flags and ids translated back.

Read are safetensors beside a config, in the layouts of vLLM, SGLang, SpecForge, EAGLE, ModelOpt and
TensorRT-LLM, or of `speculators`; and llama.cpp's GGUF. Where a layout does not say which layers a
head reads, the default of all of them holds, [2, n // 2, n - 3] as we count.
"""

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specfit.config import SpeculatorConfig
from specfit.draft_vocab import DraftVocab
from specfit.export import flat, llama_cpp, sglang, speculators, tensorrt_llm
from specfit.export.served import Served
from specfit.export.vllm import default_layers
from specfit.speculators.eagle3 import Eagle3, Eagle3Config
from specfit.targets.info import TargetInfo, check_aux_layers
from specfit.targets.target import Target

KEY = "speculator.from_checkpoint"
ARCHITECTURES = (
    "LlamaForCausalLMEagle3",
    "EAGLE3LlamaForCausalLM",
    "Eagle3LlamaForCausalLM",
    "Eagle3DraftModel",
    "Eagle3Speculator",
    "LlamaForCausalLM",  # EAGLE's own, told by its d2t or fc
)
# Of a tensor that a head copied from the target, over the largest of it: bf16's rounding.
COPY_TOLERANCE = 2.0**-8
log = logging.getLogger(__name__)
Config = dict[str, Any]


def read_config(path: Path, info: TargetInfo) -> Eagle3Config:
    """The sizes and flags of a head, without its weights.

    Raises:
        ValueError: it is none that a server loads, or not for this target; the message names the
            file and the key.
    """
    if is_gguf(path):
        config, _ = llama_cpp.read_head(_gguf_file(path), info)
    else:
        config = _from_flat(path, info)
    return _checked(config, info, path)


def read_head(path: Path, target: Target) -> tuple[Eagle3, DraftVocab]:
    """A head in fp32, on the target's device.

    Args:
        path: a folder, or a GGUF file.
        target: whose head and embeddings stand in for what the head does not have of its own.

    Raises:
        ValueError: as `read_config`; a tensor is missing, of another shape or not finite; there is
            no map of draft ids although they are fewer; or it has embeddings of its own.
    """
    tensors, config, file = _read(path, target.info)
    vocab = _vocab(tensors, config, file)
    tensors = {name: t for name, t in tensors.items() if name not in ("d2t", "t2d")}
    _drop_embeddings(tensors, target, file)
    if "lm_head.weight" not in tensors and config.draft_vocab_size == config.vocab_size:
        tensors["lm_head.weight"] = target.head_weight.detach().float().cpu()
    head = Eagle3(config)
    expected = {name: tuple(p.shape) for name, p in head.state_dict().items()}
    for name, shape in expected.items():
        got = tuple(tensors[name].shape) if name in tensors else "none"
        if got != shape:
            raise ValueError(f"{file}: {name} must have shape {list(shape)}, got {got}")
    unknown = sorted(set(tensors) - set(expected))
    if unknown:
        raise ValueError(
            f"{file} must hold the tensors of one EAGLE-3 layer only, got {', '.join(unknown)}"
        )
    head.load_state_dict(tensors)
    log.info("speculator: %s reads layers %s", path, list(config.aux_layers))
    return head.to(target.device).eval(), vocab


def read_vocab(path: Path, info: TargetInfo) -> DraftVocab:
    """What a head can draft.

    Raises:
        ValueError: as `read_head`.
    """
    return _vocab(*_read(path, info))


def adopted(config: SpeculatorConfig, info: TargetInfo) -> SpeculatorConfig:
    """The configuration of the head at `from_checkpoint`; as it came, without one.

    Raises:
        ValueError: as `read_config`.
    """
    if config.from_checkpoint is None:
        return config
    head = read_config(Path(config.from_checkpoint), info)
    return replace(
        config,
        draft_vocab_size=head.draft_vocab_size,
        aux_layers=list(head.aux_layers),
        **{flag: getattr(head, flag) for flag in flat.FLAGS},
    )


def is_gguf(path: Path) -> bool:
    """Whether it is a GGUF file, or a folder with one and no config."""
    return path.suffix == ".gguf" or (
        path.is_dir() and not (path / flat.CONFIG).exists() and any(path.glob("*.gguf"))
    )


def files_of(path: Path) -> dict[str, Path]:
    """What a head is read from, by what it is.

    Raises:
        ValueError: it is not there.
    """
    if is_gguf(path) and _gguf_file(path).is_file():
        return {"gguf": _gguf_file(path)}
    if not path.is_dir():
        raise ValueError(f"{KEY} must be a folder or a GGUF file, got {path}")
    flat.read_config(path)
    return {"config": path / flat.CONFIG, "weights": flat.weights_in(path)}


def _read(path: Path, info: TargetInfo) -> tuple[dict[str, Tensor], Eagle3Config, Path]:
    """Tensors, what the config says, and the file that the tensors are from."""
    if is_gguf(path):
        file = _gguf_file(path)
        config, tensors = llama_cpp.read_head(file, info)
        return tensors, _checked(config, info, path), file
    config = read_config(path, info)
    return flat.read_tensors(path), config, path / flat.WEIGHTS


def _gguf_file(path: Path) -> Path:
    if path.suffix == ".gguf":
        return path
    found = sorted(path.glob("*.gguf"))
    if len(found) != 1:
        raise ValueError(f"{KEY} must name one of {', '.join(f.name for f in found)}, got {path}")
    return found[0]


def _from_flat(path: Path, info: TargetInfo) -> Eagle3Config:
    file, config = path / flat.CONFIG, flat.read_config(path)
    if speculators.LAYER_CONFIG in config:
        kind = config.get("speculators_model_type")
        if kind != "eagle3":
            raise ValueError(f"{file}: speculators_model_type must be eagle3, got {kind}")
        config = speculators.flattened(config, path)
    named = config.get("architectures") or ["none"]
    if not set(named) & set(ARCHITECTURES):
        known = ", ".join(ARCHITECTURES)
        raise ValueError(f"{file}: architectures must have one of {known}, got {named}")
    _refuse_other_layers(config, file)
    try:
        heads = config["num_attention_heads"]
        return Eagle3Config(
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_heads=heads,
            num_kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            vocab_size=config["vocab_size"],
            draft_vocab_size=config.get("draft_vocab_size") or config["vocab_size"],
            aux_layers=tuple(_aux_layers(config, info)),
            max_position_embeddings=config["max_position_embeddings"],
            rms_norm_eps=config["rms_norm_eps"],
            hidden_act=config.get("hidden_act", "silu"),
            rope_parameters=flat.rope_of(config, file),
            **{flag: bool(config.get(flag, False)) for flag in flat.FLAGS},
        )
    except KeyError as error:
        raise ValueError(f"{file}: {error.args[0]} must be there, got none") from error


def _aux_layers(config: Config, info: TargetInfo) -> list[int]:
    """At the top level ids are inputs of layers; in `eagle_config` alone they are outputs."""
    if config.get(flat.IDS):
        return list(config[flat.IDS])
    nested = (config.get(flat.NESTED) or {}).get(flat.IDS)
    if nested and tensorrt_llm.ARCHITECTURE in (config.get("architectures") or []):
        return [i + 1 for i in nested]
    if nested:
        return sglang.read_ids(list(nested), Served(info))
    return default_layers(info)


def _refuse_other_layers(config: Config, file: Path) -> None:
    one = config.get("num_hidden_layers", 1)
    if one != 1:
        raise ValueError(f"{file}: num_hidden_layers must be 1, got {one}")
    for key in ("attention_bias", "mlp_bias", "qkv_bias"):
        if config.get(key):
            raise ValueError(f"{file}: {key} must be false, got {config[key]}")
    kinds = set(config.get("layer_types") or ["full_attention"])
    if kinds != {"full_attention"} or config.get("use_sliding_window"):
        raise ValueError(f"{file}: layer_types must be full_attention, got {sorted(kinds)}")


def _checked(config: Eagle3Config, info: TargetInfo, path: Path) -> Eagle3Config:
    """The same, if it is a head for this target."""
    for name in ("hidden_size", "vocab_size"):
        ours, targets = getattr(config, name), getattr(info, name)
        if ours != targets:
            raise ValueError(f"{path}: {name} must be the target's {targets}, got {ours}")
    if config.hidden_act != "silu":
        raise ValueError(f"{path}: hidden_act must be silu, got {config.hidden_act}")
    try:
        check_aux_layers(list(config.aux_layers), info)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return config


def _vocab(tensors: Mapping[str, Tensor], config: Eagle3Config, file: Path) -> DraftVocab:
    num, size = config.draft_vocab_size, config.vocab_size
    if "d2t" not in tensors:
        if num != size:
            raise ValueError(
                f"{file}: d2t must map the {num} draft ids to the target's {size}, got none; "
                "without it engines take them for the first ids of the target"
            )
        return DraftVocab(torch.zeros(num, dtype=torch.int64), torch.ones(size, dtype=torch.bool))
    d2t = tensors["d2t"].long()
    if d2t.shape != (num,):
        raise ValueError(f"{file}: d2t must have shape [{num}], got {list(d2t.shape)}")
    ids = torch.arange(num) + d2t
    num_distinct = len(set(ids.tolist()))
    if bool((ids < 0).any() or (ids >= size).any()) or num_distinct != num:
        raise ValueError(
            f"{file}: d2t must hold offsets to distinct ids below {size}, got ids from "
            f"{int(ids.min())} to {int(ids.max())}, {num_distinct} of {num} distinct"
        )
    t2d = torch.zeros(size, dtype=torch.bool)
    t2d[ids] = True
    return DraftVocab(d2t, t2d)


def _drop_embeddings(tensors: dict[str, Tensor], target: Target, file: Path) -> None:
    """Removes a copy of the target's."""
    own = tensors.pop("embed_tokens.weight", None)
    if own is None:
        return
    theirs = target.embeddings.weight.detach().float().cpu()
    largest = float(theirs.abs().max())
    same = own.shape == theirs.shape
    if not same or float((own - theirs).abs().max()) > COPY_TOLERANCE * largest:
        raise ValueError(
            f"{file}: embed_tokens.weight must be the target's, whose embeddings drafts are made "
            "with here, got others; was the head made for another target?"
        )
