"""`target`: what the target is; of a GGUF file also a copy that loads quickly."""

import logging
from pathlib import Path
from typing import Any

import torch

from specfit.config import TargetConfig
from specfit.files import require_free, write_json
from specfit.targets.load import convert, load
from specfit.targets.locate import Location

VERSION = 2
log = logging.getLogger(__name__)


def run(folder: Path, *, config: TargetConfig, location: Location, device: torch.device) -> None:
    """Writes info.json, and model/ when the target is a GGUF file."""
    target = load(config, location, device)
    if location.gguf_file:
        size = sum(p.numel() * p.element_size() for p in target.model.parameters())
        require_free(folder, size, "the dequantized copy of the target")
        convert(target, folder / "model")
    info: dict[str, Any] = target.info.to_json()
    write_json(folder / "info.json", info)
    log.info(
        "target %s: %s, %.1fM parameters, %d layers, quantization %s, context %d",
        *(info["name"], info["architecture"], info["num_parameters"] / 1e6, info["num_layers"]),
        *(info["quantization"], info["max_position_embeddings"]),
    )
