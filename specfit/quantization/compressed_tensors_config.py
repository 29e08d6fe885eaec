"""The `quantization_config` of config.json that compressed-tensors, vLLM and SGLang read.

A checkpoint of one precision targets every `Linear` but the ignored ones, which all engines know.
One of several names what each group targets: vLLM prefers a class over the names of a fused layer,
so that `Linear` would take all of them.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from specfit.quantization.config import Activations, Precision
from specfit.quantization.units import unit_of

_IN_LAYER = re.compile(r"(?:^|\.)layers\.(?P<layer>\d+)\.(?P<block>.*\.)?(?P<leaf>\w+)$")
# vLLM asks for the matrices of experts by these names, whatever the checkpoint calls them.
_ENGINE_NAMES = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
_NVFP4 = {
    "num_bits": 4,
    "type": "float",
    "symmetric": True,
    "group_size": 16,
    "strategy": "tensor_group",
    "dynamic": False,
    "scale_dtype": "torch.float8_e4m3fn",
}
_FP8 = {
    "num_bits": 8,
    "type": "float",
    "symmetric": True,
    "group_size": None,
    "strategy": "tensor",
    "dynamic": False,
}
_WEIGHTS: dict[Precision, dict[str, Any]] = {
    Precision.nvfp4: _NVFP4,
    Precision.fp8: _FP8,
    Precision.fp8_block: _FP8 | {"strategy": "block", "block_structure": [128, 128]},
}
_FORMATS = {
    Precision.nvfp4: "nvfp4-pack-quantized",
    # Its name for FP8 weights whose inputs are not quantized.
    Precision.fp8: "naive-quantized",
    Precision.fp8_block: "naive-quantized",
}


def quantization_config(
    quantized: Mapping[str, Precision], others: Iterable[str], activations: Activations
) -> dict[str, Any]:
    """What config.json says of a checkpoint.

    Args:
        quantized: the modules whose weights are.
        others: the other modules with a matrix: those of decoder layers and any else, such as
            `lm_head` and routers.
        activations: of the NVFP4 modules.
    """
    precisions = [p for p in Precision if p in quantized.values()]
    groups = {}
    for i, precision in enumerate(precisions):
        modules = [module for module, p in quantized.items() if p is precision]
        groups[f"group_{i}"] = {
            "targets": ["Linear"] if len(precisions) == 1 else _patterns(modules),
            "weights": _WEIGHTS[precision],
            "input_activations": _inputs(precision, activations),
            "output_activations": None,
            "format": _FORMATS[precision],
        }
    formats = {_FORMATS[p] for p in precisions}
    return {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": _patterns({*others, "lm_head"}),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def _inputs(precision: Precision, activations: Activations) -> dict[str, Any] | None:
    if precision is not Precision.nvfp4 or activations is Activations.none:
        return None
    # Block scales are made from each input, the global scale is `input_global_scale`.
    return _NVFP4 | {"dynamic": "local", "observer": "static_minmax"}


def _patterns(modules: Iterable[str]) -> list[str]:
    """Names, and for units regular expressions, each for several layers and all experts.

    The expressions leave out what is before `layers.`, which transformers and vLLM may change. What
    they match beside, such as the layers of a vision tower, is ignored by its name.
    """
    layers_of: dict[tuple[str, str], set[int]] = defaultdict(set)
    names = []
    for module in modules:
        found = _IN_LAYER.search(module)
        if found is None or unit_of(f"{module}.weight") is None:
            names.append(module)
            continue
        block, leaf = found["block"] or "", found["leaf"]
        of_expert = re.search(r"\bexperts\.\d+\.$", block)
        if of_expert:
            block = f"{block[: of_expert.start()]}experts.*."
        for name in {leaf, _ENGINE_NAMES.get(leaf, leaf)} if of_expert else {leaf}:
            layers_of[block, name].add(int(found["layer"]))
    leaves_of: dict[tuple[str, tuple[int, ...]], list[str]] = defaultdict(list)
    for (block, leaf), layers in sorted(layers_of.items()):
        leaves_of[block, tuple(sorted(layers))].append(leaf)
    patterns = [_pattern(layers, block, leaves) for (block, layers), leaves in leaves_of.items()]
    return sorted(names) + patterns


def _pattern(layers: Iterable[int], block: str, leaves: Iterable[str]) -> str:
    within = re.escape(block).replace(r"\*", r"\d+")
    return rf"re:(.*\.)?layers\.({'|'.join(map(str, layers))})\.{within}({'|'.join(leaves)})$"
