"""Tiny targets as checkpoints of many shards, and what is in a folder."""

import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny_targets import SIZES, write_tokenizer
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config, Qwen3MoeConfig

from specfit.quantization.checkpoint import write_checkpoint
from specfit.quantization.config import Activations, Precision
from specfit.quantization.plan import QuantizationPlan
from specfit.quantization.safetensors_stream import read_shards
from specfit.quantization.units import Unit, units_of


def write_sharded(
    folder: Path,
    architecture: str = "llama",
    *,
    dtype: torch.dtype = torch.float32,
    shard_bytes: int = 9000,
    **sizes: Any,
) -> Any:
    """Writes a random target of two layers, whose q and k lie in different shards; the model.

    llama has tied embeddings, qwen3 and qwen3_moe have not.
    """
    sizes = SIZES | {"num_hidden_layers": 2} | sizes
    match architecture:
        case "llama":
            config = LlamaConfig(**sizes, tie_word_embeddings=True)
        case "qwen3":
            config = Qwen3Config(**sizes, tie_word_embeddings=False)
        case _:
            sizes = {
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 32,
            } | sizes
            config = Qwen3MoeConfig(**sizes, tie_word_embeddings=False)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    model.save_pretrained(folder, max_shard_size=shard_bytes)
    write_tokenizer(folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def units(folder: Path) -> list[Unit]:
    return list(units_of(name for shard in read_shards(folder) for name in shard.tensors))


def plan_of(folder: Path, precision: Precision = Precision.nvfp4, **options: Any) -> Any:
    """All units in one precision."""
    return QuantizationPlan(dict.fromkeys(units(folder), precision), **options)


def mixed(folder: Path) -> QuantizationPlan:
    """Every precision, and a unit that stays as it is."""
    kinds = [Precision.nvfp4, Precision.fp8, None, Precision.fp8_block]
    pairs = zip(units(folder), kinds * 4, strict=False)
    return QuantizationPlan({unit: kind for unit, kind in pairs if kind is not None})


def w4a4(folder: Path, plan: QuantizationPlan, amax: float = 7.0) -> QuantizationPlan:
    """The plan with inputs in NVFP4 too, each module's with another size."""
    modules = sorted(
        name.removesuffix(".weight") for name in tensors(folder) if name.endswith("_proj.weight")
    )
    sizes = {module: amax + i / 8 for i, module in enumerate(modules)}
    return QuantizationPlan(
        plan.precision, plan.rule, activations=Activations.nvfp4, input_amax=sizes
    )


def written(source: Path, folder: Path, plan: QuantizationPlan) -> Path:
    """The folder, with the quantized checkpoint in it."""
    write_checkpoint(source, folder, plan, on_progress=lambda _done, _total: None)
    return folder


def copy_with(source: Path, folder: Path, **changed: torch.Tensor) -> Path:
    """The source with other weights of some modules."""
    shutil.copytree(source, folder)
    new = {f"{module}.weight": value for module, value in changed.items()}
    for path in folder.glob("*.safetensors"):
        stored = load_file(path)
        save_file(stored | {name: new[name] for name in stored if name in new}, path)
    return folder


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All that the shards hold, by safetensors itself."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found


def contents(folder: Path) -> dict[str, bytes]:
    """The bytes of every file."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Type, shape and bytes."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.flatten().view(torch.uint8), b.flatten().view(torch.uint8))
