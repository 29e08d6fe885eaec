"""Reads quantized checkpoints of others, and ours, a matrix at a time.

                      compressed-tensors            ModelOpt
NVFP4   codes         X.weight_packed               X.weight
        block scales  X.weight_scale                X.weight_scale
        global scale  X.weight_global_scale         X.weight_scale_2
        input scale   X.input_global_scale          X.input_scale
FP8     values        X.weight                      X.weight
        scales        X.weight_scale                X.weight_scale

compressed-tensors' global and input scales divide, ModelOpt's multiply.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from jaxtyping import Float32
from torch import Tensor

from specfit.quantization.safetensors_stream import StoredTensor, read_shards
from specfit_kernels import fp8, nvfp4
from specfit_kernels.fp8 import FP8Tensor
from specfit_kernels.nvfp4 import FP4Tensor

_OF_MODELOPT = tuple(
    f"modelopt:{algorithm}" for algorithm in ("NVFP4", "W4A16_NVFP4", "FP8", "MIXED_PRECISION")
)
_SCALES = (
    "weight_scale",
    "weight_global_scale",
    "weight_scale_2",
    "input_global_scale",
    "input_scale",
    # Of a KV cache in FP8: for a server, which may use them.
    "k_scale",
    "v_scale",
)


def scheme_of(folder: Path) -> str | None:
    """How a checkpoint is quantized, such as `compressed-tensors:nvfp4-pack-quantized`."""
    config = json.loads((folder / "config.json").read_text())
    values = config.get("quantization_config") or (config.get("text_config") or {}).get(
        "quantization_config"
    )
    modelopt = folder / "hf_quant_config.json"
    if values is None and modelopt.is_file():
        values = json.loads(modelopt.read_text()).get("quantization", {})
        values["quant_method"] = "modelopt"
    if values is None:
        return None
    method = values.get("quant_method", "unknown")
    detail = values.get("format") or values.get("quant_algo") or values.get("bits")
    return f"{method}:{detail}" if detail else str(method)


def read_quantized(folder: Path) -> Iterator[tuple[str, FP4Tensor | FP8Tensor | Tensor]]:
    """The weights of a checkpoint in NVFP4 or FP8, by the names they had before: `X.weight`.

    Raises:
        ValueError: it is of another format, or incomplete.
    """
    scheme = scheme_of(folder) or "none"
    if not scheme.startswith("compressed-tensors:") and scheme not in _OF_MODELOPT:
        raise ValueError(
            "target.path must name a checkpoint of compressed-tensors, or one of ModelOpt in NVFP4 "
            f"or FP8, got {scheme}"
        )
    tensors = _tensors(folder)
    for name, stored in tensors.items():
        module, _, leaf = name.rpartition(".")
        if leaf in _SCALES:
            continue
        if leaf == "weight_packed":
            yield f"{module}.weight", _fp4(module, stored, tensors, divides=True)
        elif leaf == "weight" and stored.dtype is torch.uint8:
            yield name, _fp4(module, stored, tensors, divides=False)
        elif leaf == "weight" and stored.dtype is torch.float8_e4m3fn:
            yield name, _fp8(module, stored, tensors)
        elif stored.dtype.itemsize > 1 and leaf != "pre_quant_scale":
            yield name, stored.read()
        else:
            raise ValueError(f"{name} must be of NVFP4 or FP8 weights, got {stored.dtype}")


def input_global_scales(folder: Path) -> dict[str, Float32[Tensor, ""]]:
    """By module, what divides the input of NVFP4 matrices in W4A4; empty for W4A16."""
    scales = {}
    tensors = _tensors(folder)
    for name, stored in tensors.items():
        module, _, leaf = name.rpartition(".")
        if leaf == "input_global_scale":
            scales[module] = stored.read().view(())
        elif leaf == "input_scale" and f"{module}.weight_scale_2" in tensors:
            # Inverted here once, as engines do.
            scales[module] = 1 / stored.read().view(())
    return scales


def _tensors(folder: Path) -> dict[str, StoredTensor]:
    return {n: stored for shard in read_shards(folder) for n, stored in shard.tensors.items()}


def _fp4(
    module: str, codes: StoredTensor, tensors: Mapping[str, StoredTensor], *, divides: bool
) -> FP4Tensor:
    rows, columns = codes.shape[0], 2 * codes.shape[-1]
    shape = (rows, columns // nvfp4.BLOCK)
    block_scales = _companion(f"{module}.weight_scale", tensors, torch.float8_e4m3fn, [shape])
    name = f"{module}.weight_global_scale" if divides else f"{module}.weight_scale_2"
    scale = _companion(name, tensors, torch.float32, [(), (1,)])
    return FP4Tensor(codes.read(), block_scales, scale.view(()), divides, columns)


def _fp8(module: str, values: StoredTensor, tensors: Mapping[str, StoredTensor]) -> FP8Tensor:
    rows, columns = values.shape
    blocks = (-(-rows // fp8.BLOCK), -(-columns // fp8.BLOCK))
    scales = _companion(f"{module}.weight_scale", tensors, None, [(), (1,), blocks]).float()
    return FP8Tensor(values.read(), scales.view(1) if scales.ndim == 0 else scales)


def _companion(
    name: str,
    tensors: Mapping[str, StoredTensor],
    dtype: torch.dtype | None,
    shapes: list[tuple[int, ...]],
) -> Tensor:
    stored = tensors.get(name)
    if stored is None or stored.shape not in shapes or dtype not in (None, stored.dtype):
        got = "no such tensor" if stored is None else f"{stored.dtype} {list(stored.shape)}"
        raise ValueError(
            f"{name} must be {dtype or 'floats'} of shape "
            f"{' or '.join(str(list(shape)) for shape in shapes)}, got {got}"
        )
    return stored.read()
