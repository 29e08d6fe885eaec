"""Whether two models compute with the same numbers, without both in memory."""

import hashlib

import torch
from torch import Tensor, nn

INPUT_SCALE = "nvfp4_input_global_scale"  # a buffer of modules whose inputs are quantized


def digests(model: nn.Module) -> dict[str, str]:
    """SHA-256 of each parameter and input scale, by its name; equal ones are equal bit for bit."""
    found = {name: digest(parameter) for name, parameter in model.named_parameters()}
    scales = {n: b for n, b in model.named_buffers() if n.endswith(f".{INPUT_SCALE}")}
    return found | {name: digest(scale) for name, scale in scales.items()}


def digest(tensor: Tensor) -> str:
    """Of type, shape and bytes."""
    found = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)} ".encode())
    found.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()
