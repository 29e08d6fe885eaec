"""Loads NVFP4 and FP8 checkpoints as targets that compute with the dequantized weights.

transformers 5.24 does not do it: it refuses ModelOpt's; of compressed-tensors' it makes bfloat16,
whatever type was asked for, and experts in NVFP4 without their global scales, silently wrong.
"""

import json
import logging
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float32
from torch import Tensor, nn

from specfit.quantization.digests import INPUT_SCALE
from specfit.quantization.reading import input_global_scales, read_quantized, scheme_of
from specfit_kernels.fp8 import FP8Tensor
from specfit_kernels.nvfp4 import FP4Tensor, fake_quantize_activations

# In lower case, how schemes begin.
_READ_HERE = (
    "compressed-tensors:nvfp4-pack-quantized",
    "modelopt:nvfp4",
    "modelopt:fp8",
)
_MIXED = ("nvfp4-pack-quantized", "float-quantized", "naive-quantized")

log = logging.getLogger(__name__)


def is_read_here(folder: Path) -> bool:
    """Whether a checkpoint is for `load_quantized`, rather than for transformers."""
    scheme = (scheme_of(folder) or "").lower()
    if scheme.startswith("compressed-tensors:mixed-precision"):
        config = json.loads((folder / "config.json").read_text())
        groups = config["quantization_config"]["config_groups"].values()
        return all(group.get("format") in _MIXED for group in groups)
    return scheme.startswith(_READ_HERE)


def load_quantized(folder: Path, dtype: torch.dtype | str) -> Any:
    """A transformers model in evaluation mode; W4A4 quantizes its inputs as engines do.

    `dtype` may be a name of torch's; `auto` is the one that config.json names.

    Inputs of FP8 matrices stay as they are, and those of experts, which transformers fuses; it is
    logged where engines would quantize them.

    Raises:
        ValueError: the checkpoint is of another format, or lacks tensors of the model.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    config = AutoConfig.from_pretrained(folder)
    if isinstance(dtype, str):
        named = config.get_text_config().dtype if dtype == "auto" else getattr(torch, dtype)
        dtype = named or torch.float32
    scheme = config.__dict__.pop("quantization_config", None) or {}
    groups = scheme.get("config_groups", {}).values()
    if any((group.get("input_activations") or {}).get("num_bits") == 8 for group in groups):
        log.warning("quantize: inputs of FP8 matrices stay as they are")
    with torch.device("meta"):
        model_class = type(AutoModelForCausalLM.from_config(config))
    weights = {name: _plain(weight, dtype) for name, weight in read_quantized(folder)}
    model, notes = model_class.from_pretrained(
        None, config=config, state_dict=weights, dtype=dtype, output_loading_info=True
    )
    if notes["missing_keys"]:
        missing = sorted(notes["missing_keys"])
        raise ValueError(
            f"target.path: {folder} must hold all of the model's tensors, got none for "
            f"{len(missing)}, such as {missing[0]}"
        )
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    _quantize_inputs(model, input_global_scales(folder))
    return model.eval()


def _plain(weight: FP4Tensor | FP8Tensor | Tensor, dtype: torch.dtype) -> Tensor:
    match weight:
        case FP4Tensor():
            return weight.dequantize(dtype)
        case FP8Tensor():
            return weight.dequantized(dtype)
        case _:
            return weight


def _quantize_inputs(model: nn.Module, global_scales: dict[str, Float32[Tensor, ""]]) -> None:
    modules = dict(model.named_modules())
    left_out = sorted(set(global_scales) - set(modules))
    for name, scale in global_scales.items():
        if name in modules:
            # A buffer goes where the model goes.
            modules[name].register_buffer(INPUT_SCALE, scale, persistent=False)
            modules[name].register_forward_pre_hook(_quantized_input)
    if left_out:
        log.warning(
            "quantize: inputs of %d matrices stay as they are, such as %s",
            *(len(left_out), left_out[0]),
        )


def _quantized_input(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return fake_quantize_activations(args[0], module.get_buffer(INPUT_SCALE)), *args[1:]
