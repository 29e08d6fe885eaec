"""What is quantized together: the matrices of a decoder layer that engines fuse."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from specfit.targets.target import Target

# By the last part of a matrix's name: with which it is fused. What is not here is never quantized:
# embeddings, heads, norms, routers (`gate`), convolutions, biases.
_UNIT_OF = {
    "q_proj": "qkv",
    "k_proj": "qkv",
    "v_proj": "qkv",
    "qkv_proj": "qkv",
    "q_a_proj": "qkv_a",  # DeepSeek's latent attention
    "kv_a_proj_with_mqa": "qkv_a",
    "q_b_proj": "q_b",
    "kv_b_proj": "kv_b",
    "o_proj": "o",
    "gate_proj": "gate_up",
    "up_proj": "gate_up",
    "gate_up_proj": "gate_up",
    "w1": "gate_up",  # Mixtral's experts
    "w3": "gate_up",
    "down_proj": "down",
    "w2": "down",
}
# Before `layers.` stand the names that checkpoints give the text model, and no others: towers for
# images or sound, and heads that predict more tokens, have layers too.
_NAME = re.compile(
    r"(?:(?:model|language_model|text_model|thinker)\.)*"
    r"layers\.(?P<layer>\d+)\.(?P<block>.*\.)?(?P<leaf>\w+)"
)


@dataclass(frozen=True, order=True)
class Unit:
    """Matrices that are quantized together or not at all."""

    layer: int
    name: str  # within the layer: qkv, o, gate_up, down; all of experts: experts

    def __str__(self) -> str:
        """As it stands in recipe.json."""
        return f"layers.{self.layer}.{self.name}"


def unit_of(tensor: str) -> Unit | None:
    """The unit of a tensor or parameter, by its name; None when it is never quantized."""
    found = _NAME.fullmatch(tensor.removesuffix(".weight"))
    if found is None:
        return None
    block, leaf = found["block"] or "", found["leaf"]
    name = _UNIT_OF.get(leaf)
    experts = ".experts." in f".{block}"
    # Fused experts are parameters of their own; any other weight is a module's.
    if name is None or not (experts or tensor.endswith(".weight")):
        return None
    if experts:
        name = "experts"  # vLLM serves them in one format or not at all
    elif "shared_expert" in block:
        name = f"shared.{name}"
    return Unit(int(found["layer"]), name)


def units_of(tensors: Iterable[str]) -> dict[Unit, list[str]]:
    """The units of a checkpoint or a model and the tensors of each, in order of the layers.

    Raises:
        ValueError: there are two text models, whose layers would be taken for one's.
    """
    found: dict[Unit, list[str]] = {}
    stacks = set()
    for tensor in tensors:
        unit = unit_of(tensor)
        if unit is not None:
            found.setdefault(unit, []).append(tensor)
            stacks.add(tensor.partition("layers.")[0])
    if len(stacks) > 1:
        raise ValueError(f"target.path must hold one text model, got {', '.join(sorted(stacks))}")
    return {unit: sorted(found[unit]) for unit in sorted(found)}


def units_of_target(target: Target) -> dict[Unit, list[str]]:
    """Those of the layers of a target's decoder, whatever else its model has."""
    modules = target.model.named_modules()
    (stack,) = [name for name, module in modules if module is target.layers]
    parameters = (name for name, _ in target.model.named_parameters())
    return units_of(name for name in parameters if name.startswith(f"{stack}."))


def fused(tensors: Iterable[str]) -> list[list[str]]:
    """The tensors of a unit in the groups that share a global scale: q, k, v; gate, up.

    Engines join these into one matrix, which has one global scale; each expert has its own.
    """
    groups: dict[tuple[str, str], list[str]] = {}
    for tensor in tensors:
        module, _, leaf = tensor.removesuffix(".weight").rpartition(".")
        groups.setdefault((module, _UNIT_OF[leaf]), []).append(tensor)
    return list(groups.values())
