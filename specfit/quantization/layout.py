"""What becomes of each tensor of a checkpoint, known from the headers of its shards alone."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import torch

from specfit.quantization.compressed_tensors_config import quantization_config
from specfit.quantization.config import Activations, Precision
from specfit.quantization.plan import QuantizationPlan
from specfit.quantization.reading import scheme_of
from specfit.quantization.safetensors_stream import (
    INDEX,
    Arrangement,
    Shard,
    StoredTensor,
    TensorSpec,
    arrange,
    read_shards,
)
from specfit.quantization.units import Unit, fused, unit_of, units_of
from specfit.targets.locate import PATTERNS
from specfit_kernels import fp8, nvfp4

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# Named templates of a tokenizer that has several lie in a folder of their own.
_CARRIED = [*PATTERNS, "additional_chat_templates/*.jinja"]
_NOT_CARRIED = ("config.json", "*.safetensors", "*.index.json", "*.py")


@dataclass(frozen=True)
class Matrix:
    """A matrix that is quantized."""

    module: str  # its name in the result
    stored: StoredTensor
    unit: Unit
    precision: Precision

    @property
    def name(self) -> str:
        return f"{self.module}.weight"

    def parts(self, activations: Activations) -> dict[str, TensorSpec]:
        """The tensors that it becomes."""
        rows, columns = self.stored.shape
        if self.precision is not Precision.nvfp4:
            blocks: tuple[int, ...] = (1,)
            if self.precision is Precision.fp8_block:
                blocks = (-(-rows // fp8.BLOCK), -(-columns // fp8.BLOCK))
            return {
                self.name: TensorSpec(torch.float8_e4m3fn, (rows, columns)),
                f"{self.module}.weight_scale": TensorSpec(torch.float32, blocks),
            }
        scale = TensorSpec(torch.float32, (1,))
        parts = {
            f"{self.module}.weight_packed": TensorSpec(torch.uint8, (rows, columns // 2)),
            f"{self.module}.weight_scale": TensorSpec(
                torch.float8_e4m3fn, (rows, columns // nvfp4.BLOCK)
            ),
            f"{self.module}.weight_global_scale": scale,
        }
        if activations is Activations.nvfp4:
            parts[f"{self.module}.input_global_scale"] = scale
        return parts


@dataclass(frozen=True)
class ShardLayout:
    """A file of the result."""

    source: Path
    matrices: list[Matrix]
    copied: dict[str, StoredTensor]
    arrangement: Arrangement

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def num_source_bytes(self) -> int:
        """Of what it is made from."""
        stored = [*self.copied.values(), *(matrix.stored for matrix in self.matrices)]
        return sum(tensor.num_bytes for tensor in stored)


@dataclass(frozen=True)
class Layout:
    """The whole result, before anything is read or written."""

    shards: list[ShardLayout]
    texts: dict[str, str]  # files that are new
    carried: dict[str, Path]  # files that are copied

    @property
    def matrices(self) -> list[Matrix]:
        return [matrix for shard in self.shards for matrix in shard.matrices]

    @cached_property
    def fused(self) -> list[list[Matrix]]:
        """The NVFP4 matrices in the groups that share their scales."""
        found = {m.name: m for m in self.matrices if m.precision is Precision.nvfp4}
        groups = [group for names in units_of(found).values() for group in fused(names)]
        return [[found[name] for name in group] for group in groups]

    @property
    def num_bytes(self) -> int:
        """Of all files."""
        return (
            sum(shard.arrangement.num_bytes for shard in self.shards)
            + sum(len(text.encode()) for text in self.texts.values())
            + sum(path.stat().st_size for path in self.carried.values())
        )


def lay_out(source: Path, plan: QuantizationPlan) -> Layout:
    """The result of `plan`.

    Raises:
        ValueError: the source is quantized, incomplete, or lacks a unit; a matrix cannot have the
            format; the plan lacks the size of an input, or scales a matrix that it should not.
    """
    scheme = scheme_of(source)
    if scheme is not None:
        raise ValueError(
            f"target.path must name unquantized weights, got {scheme}; to use {source} as the "
            "target as it is, leave quantizing out"
        )
    shards = read_shards(source)
    tensors = {name: stored for shard in shards for name, stored in shard.tensors.items()}
    units = units_of(tensors)
    for unit in plan.precision:
        if unit not in units:
            names = ", ".join(map(str, units)) or "none"
            raise ValueError(f"precision must name units of {source}, got {unit}; it has {names}")
    shard_layouts = [_shard(shard, tensors, plan) for shard in shards]
    layout = Layout(shard_layouts, _texts(source, shard_layouts, plan), _carried(source))
    _check_scales(layout, plan)
    return layout


def unfit_units(source: Path) -> dict[Unit, str]:
    """The units that NVFP4 cannot hold, each with the reason."""
    tensors = {
        name: stored for shard in read_shards(source) for name, stored in shard.tensors.items()
    }
    found = {}
    for unit, names in units_of(tensors).items():
        try:
            for name in names:
                for module, matrix in _matrices(name, tensors[name], tensors):
                    _check_matrix(Matrix(module, matrix, unit, Precision.nvfp4))
        except ValueError as error:
            found[unit] = str(error)
    return found


@dataclass(frozen=True)
class UnitSize:
    """Of a unit's matrices in a checkpoint."""

    num_bytes: int  # scales included
    num_weights: int

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.num_bytes / self.num_weights


def unit_sizes(source: Path, plan: QuantizationPlan) -> dict[Unit, UnitSize]:
    """What each unit of the source takes in the result of `plan`; raises what `lay_out` does."""
    found: dict[Unit, UnitSize] = {}
    for shard in lay_out(source, plan).shards:
        for unit, num_bytes, num_weights in _sizes(shard, plan.activations):
            size = found.get(unit, UnitSize(0, 0))
            found[unit] = UnitSize(size.num_bytes + num_bytes, size.num_weights + num_weights)
    return found


def _sizes(shard: ShardLayout, activations: Activations) -> Iterator[tuple[Unit, int, int]]:
    """Of each matrix of a unit: its bytes and its weights."""
    for matrix in shard.matrices:
        num_bytes = sum(part.num_bytes for part in matrix.parts(activations).values())
        yield matrix.unit, num_bytes, prod(matrix.stored.shape)
    for name, stored in shard.copied.items():
        unit = unit_of(name)
        if unit is not None:
            yield unit, stored.num_bytes, prod(stored.shape)


def _shard(
    shard: Shard, tensors: Mapping[str, StoredTensor], plan: QuantizationPlan
) -> ShardLayout:
    matrices: list[Matrix] = []
    copied: dict[str, StoredTensor] = {}
    for name, stored in shard.tensors.items():
        unit = unit_of(name)
        if unit is None or unit not in plan.precision:
            copied[name] = stored
            continue
        for module, matrix in _matrices(name, stored, tensors):
            matrices.append(Matrix(module, matrix, unit, plan.precision[unit]))
            _check_matrix(matrices[-1])
    specs: dict[str, TensorSpec] = dict(copied)
    for m in matrices:
        specs |= m.parts(plan.activations)
    return ShardLayout(shard.path, matrices, copied, arrange(specs, shard.metadata))


def _matrices(
    name: str, stored: StoredTensor, tensors: Mapping[str, StoredTensor]
) -> Iterator[tuple[str, StoredTensor]]:
    """The modules of a tensor; of fused experts, those that engines load.

    Raises:
        ValueError: the tensor is no matrix, or its experts are transposed.
    """
    module = name.removesuffix(".weight")
    if len(stored.shape) == 2:
        yield module, stored
        return
    parent, _, leaf = module.rpartition(".")
    pair = [tensors.get(f"{parent}.{x}", stored).shape for x in ("gate_up_proj", "down_proj")]
    # [experts, 2 * inner, outer] and [experts, outer, inner]. Transposed ones, as those of gpt-oss
    # and Llama 4, have another order, and some of them gate and up interleaved.
    if not (
        [len(shape) for shape in pair] == [3, 3]
        and pair[0][1] == 2 * pair[1][2]
        and pair[0][2] == pair[1][1]
    ):
        raise ValueError(
            f"{name} must be a matrix, or experts as [experts, out, in] with a gate_up_proj and a "
            f"down_proj, got {list(stored.shape)}"
        )
    for i in range(stored.shape[0]):
        if leaf == "down_proj":
            yield f"{parent}.{i}.down_proj", stored[i]
        else:
            inner = stored.shape[1] // 2
            yield f"{parent}.{i}.gate_proj", stored[i].part(0, inner)
            yield f"{parent}.{i}.up_proj", stored[i].part(inner, 2 * inner)


def _check_matrix(matrix: Matrix) -> None:
    columns = matrix.stored.shape[1]
    if matrix.stored.dtype not in _FLOATS:
        raise ValueError(
            f"{matrix.name} must hold floats of 16 bits or more, got {matrix.stored.dtype}"
        )
    if matrix.precision is Precision.nvfp4 and columns % nvfp4.BLOCK:
        raise ValueError(
            f"{matrix.name} must have a multiple of {nvfp4.BLOCK} columns to be served in NVFP4, "
            f"got {columns}; leave {matrix.unit} out"
        )


def _check_scales(layout: Layout, plan: QuantizationPlan) -> None:
    unknown = set(plan.scale_factors) - {matrix.name for matrix in layout.matrices}
    if unknown:
        raise ValueError(f"scale_factors must name quantized matrices, got {min(unknown)}")
    for group in layout.fused:
        for matrix in group:
            if plan.activations is Activations.nvfp4 and matrix.module not in plan.input_amax:
                raise ValueError(
                    f"input_amax must have the input of {matrix.module}, got "
                    f"{len(plan.input_amax)} other modules"
                )
        factors = {m.name: plan.scale_factors.get(m.name, 1.0) for m in group}
        if len(set(factors.values())) > 1:
            raise ValueError(
                f"scale_factors must be equal for matrices that engines fuse, got {factors}"
            )


def _texts(source: Path, shards: Iterable[ShardLayout], plan: QuantizationPlan) -> dict[str, str]:
    config = json.loads((source / "config.json").read_text())
    config.pop("auto_map", None)  # names code, which is never carried
    quantized = {m.module: m.precision for shard in shards for m in shard.matrices}
    if quantized:
        others = [module for shard in shards for module in _other_modules(shard.copied)]
        config["quantization_config"] = quantization_config(quantized, others, plan.activations)
    texts = {"config.json": _text(config)}
    if (source / INDEX).is_file():
        index = json.loads((source / INDEX).read_text())
        specs = [spec for shard in shards for spec in shard.arrangement.tensors.values()]
        index["metadata"] = index.get("metadata", {}) | {
            "total_size": sum(spec.num_bytes for spec in specs)
        }
        files = {name: shard.name for shard in shards for name in shard.arrangement.tensors}
        index["weight_map"] = {name: files[name] for name in sorted(files)}
        texts[INDEX] = _text(index)
    return texts


def _other_modules(copied: Mapping[str, StoredTensor]) -> Iterator[str]:
    """The modules of matrices that stay as they are, fused experts one by one."""
    for name, stored in copied.items():
        if len(stored.shape) == 2 and name.endswith(".weight"):
            yield name.removesuffix(".weight")
        elif len(stored.shape) == 3 and unit_of(name) is not None:
            parent, _, leaf = name.rpartition(".")
            leaves = ["gate_proj", "up_proj"] if leaf == "gate_up_proj" else [leaf]
            yield from (f"{parent}.{i}.{x}" for i in range(stored.shape[0]) for x in leaves)


def _carried(source: Path) -> dict[str, Path]:
    """Tokenizer, templates and settings; never code."""
    paths = sorted({path for pattern in _CARRIED for path in source.glob(pattern)})
    return {
        path.relative_to(source).as_posix(): path
        for path in paths
        if path.is_file() and not any(path.match(pattern) for pattern in _NOT_CARRIED)
    }


def _text(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"
