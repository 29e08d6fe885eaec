"""Loads a frozen target through transformers."""

import logging
import os
import struct
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from specfit.artifacts import Artifact
from specfit.config import TargetConfig
from specfit.quantization.loading import is_read_here, load_quantized
from specfit.quantization.reading import scheme_of
from specfit.targets.info import TargetInfo, read_info, read_info_file
from specfit.targets.locate import Location
from specfit.targets.target import Target

log = logging.getLogger(__name__)

# What transformers raises on a checkpoint that is broken or that it does not know.
_LOADING_ERRORS = (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError)


def device_of(name: str) -> torch.device:
    """`auto` is the first GPU, or the CPU where there is none.

    Raises:
        ValueError: there is no such device.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"runtime.device must be on this machine, got {name}; it has "
            f"{torch.cuda.device_count()} CUDA devices"
        )
    if device.index is not None:
        torch.cuda.set_device(device)  # for accelerate, which asks for the current one
    return device


def dtype_name(name: str, device: torch.device) -> str:
    """The type to compute in: `auto` is float32 on a CPU, the checkpoint's own elsewhere."""
    return "float32" if name == "auto" and device.type == "cpu" else name


def load(config: TargetConfig, location: Location, device: torch.device) -> Target:
    """The target at `location`, frozen, in evaluation mode.

    Raises:
        ValueError: the checkpoint is broken, or transformers does not know how to load it.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    prepare(device)
    options: dict[str, Any] = {"trust_remote_code": config.trust_remote_code}
    quantization = None
    if location.gguf_file:
        quantization = check_gguf(location.folder / location.gguf_file)
        options["gguf_file"] = location.gguf_file
    notes: dict[str, Any] = {"missing_keys": []}
    dtype = dtype_name(config.dtype, device)
    try:
        tokenizer = AutoTokenizer.from_pretrained(location.folder, **options)
        if location.gguf_file:
            options["quantization_config"] = _dequantize()
        # Code that comes with a checkpoint is transformers' to run.
        own = not location.gguf_file and not config.trust_remote_code
        if own and is_read_here(location.folder):
            model = load_quantized(location.folder, dtype)
        else:
            model, notes = AutoModelForCausalLM.from_pretrained(
                location.folder,
                dtype=dtype,
                use_safetensors=True,
                output_loading_info=True,
                **options,
            )
    except _LOADING_ERRORS as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"target.path: {location.folder} cannot be loaded by transformers: {reason}"
        ) from error
    if len(tokenizer) == len(set(tokenizer.all_special_ids)):
        raise ValueError(f"target.path: {location.folder} holds no tokenizer; copy its files there")
    if not location.gguf_file:
        quantization = scheme_of(location.folder)
    if (location.gguf_file or quantization is None) and notes["missing_keys"]:
        # transformers makes them up, with a warning.
        missing = sorted(notes["missing_keys"])
        raise ValueError(
            f"target.path: {location.folder} lacks {len(missing)} of the model's tensors, such as "
            f"{missing[0]}; copy or download it again"
        )
    model = model.to(device).eval().requires_grad_(False)
    info = read_info(
        model, name=_name(config, location), tokenizer=tokenizer, quantization=quantization
    )
    return Target(model, tokenizer, info)


def load_converted(folder: Path, info: TargetInfo, device: torch.device) -> Target:
    """A target from the safetensors copy that `convert` wrote of a GGUF file."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    prepare(device)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, info.dtype))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return Target(model.to(device).eval().requires_grad_(False), tokenizer, info)


def convert(target: Target, folder: Path) -> None:
    """Writes a loaded GGUF target as safetensors: the same numbers, quick to load."""
    target.model.save_pretrained(folder)
    target.tokenizer.save_pretrained(folder)


def check_gguf(path: Path) -> str:
    """The most frequent tensor type of a GGUF file, such as `gguf:Q4_1`.

    Raises:
        ValueError: the file is not GGUF, or ends before its last tensor does.
    """
    import gguf

    try:
        # Reading maps the tensors, so that one beyond the end of the file shows.
        tensors = gguf.GGUFReader(path).tensors
    except (ValueError, IndexError, KeyError, OverflowError, UnicodeError, struct.error) as error:
        raise ValueError(
            f"target.path: {path} is no whole GGUF file ({error}); copy or download it again"
        ) from error
    if not tensors:
        raise ValueError(f"target.path: {path} holds no tensors; copy or download it again")
    sizes: dict[str, int] = {}
    for tensor in tensors:
        name = tensor.tensor_type.name
        sizes[name] = sizes.get(name, 0) + int(tensor.n_elements)
    return f"gguf:{max(sizes, key=lambda name: sizes[name])}"


def prepare(device: torch.device) -> None:
    """Sets transformers up, before a model is made for `device`."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    if device.type == "cpu":
        # Grouped queries without copying keys and values once a head: eight times faster here.
        os.environ.setdefault("TRANSFORMERS_SDPA_FORCE_GQA", "1")


def _dequantize() -> Any:
    from transformers import GgufConfig

    return GgufConfig(dequantize=True)


def _name(config: TargetConfig, location: Location) -> str:
    return location.gguf_file or Path(config.path).name


def checkpoint_folder(artifact: Artifact, location: Location) -> Path:
    """Where the safetensors of a `target` artifact are: its converted copy, or the checkpoint."""
    folder = artifact.path / "model"
    return folder if folder.is_dir() else location.folder


def open_target(
    artifact: Artifact, config: TargetConfig, location: Location, device: torch.device
) -> Target:
    """The target of a `target` artifact, from its converted copy when it has one."""
    info = read_info_file(artifact.file("info.json"))
    converted = [name for name in artifact.files() if name.startswith("model/")]
    if not converted:
        return load(config, location, device)
    for name in converted:
        artifact.file(name)
    return load_converted(artifact.path / "model", info, device)
