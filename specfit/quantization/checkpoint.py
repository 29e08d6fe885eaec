"""Writes quantized checkpoints as compressed-tensors lays them out, in the memory of one matrix.

A first pass over the source finds the largest size in each of the matrices that engines fuse: they
share a global scale, and may lie in different shards. A second one writes the shards, each under
the name of the one that it comes from. A run that was killed goes on after the sizes and the shards
that it has; the sizes are in `.quantizing.json` until all is there.
"""

import hashlib
import json
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from jaxtyping import Float32
from torch import Tensor

from specfit.files import dumps, require_free, write_json, write_text
from specfit.quantization.config import Activations, Precision
from specfit.quantization.layout import Layout, Matrix, ShardLayout, lay_out
from specfit.quantization.plan import QuantizationPlan
from specfit.quantization.safetensors_stream import StoredTensor, is_written, write_shard
from specfit_kernels import fp8, nvfp4
from specfit_kernels.rules import ScaleRule
from specfit_kernels.weights import finite_amax

log = logging.getLogger(__name__)

_STATE = ".quantizing.json"


def quantized_size(source: Path, plan: QuantizationPlan) -> int:
    """Bytes of what `write_checkpoint` writes; raises what that raises before it writes."""
    return lay_out(source, plan).num_bytes


def is_complete(folder: Path) -> bool:
    """Whether `write_checkpoint` got to its end there."""
    return (folder / "config.json").is_file() and not (folder / _STATE).exists()


def write_checkpoint(
    source: Path, folder: Path, plan: QuantizationPlan, *, on_progress: Callable[[int, int], None]
) -> None:
    """Writes the checkpoint in `source` to `folder`, quantized.

    Args:
        source: a folder of safetensors shards, as the hub has them.
        folder: where; it may hold what a killed run left.
        plan: what becomes of which units.
        on_progress: gets the bytes of the source that are done and those there are. What is read
            in both passes counts twice.

    Raises:
        ValueError: the source or the plan does not fit, or a weight to quantize holds a NaN or an
            infinity.
        DiskFull: less is free than the result takes.
    """
    layout = lay_out(source, plan)
    folder.mkdir(parents=True, exist_ok=True)
    state = _State.resumed(folder / _STATE, layout, plan)
    written = {s.name for s in layout.shards if is_written(folder / s.name, s.arrangement)}
    there = sum(s.arrangement.num_bytes for s in layout.shards if s.name in written)
    require_free(folder, layout.num_bytes - there, "the quantized checkpoint")
    progress = _Progress(layout, on_progress)
    _measure(layout, state, progress)
    scales = _Scales.of(layout, state.amax, plan)
    for shard in layout.shards:
        if shard.name in written:
            progress.add(shard.num_source_bytes)
            continue
        tensors = _tensors(shard, plan, scales, progress)
        write_shard(folder / shard.name, shard.arrangement, tensors)
        log.info("quantized shard=%s bytes=%d", shard.name, shard.arrangement.num_bytes)
    for name, path in layout.carried.items():
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(path, folder / name)
    for name, text in layout.texts.items():
        write_text(folder / name, text)
    state.path.unlink()


@dataclass
class _State:
    """What a killed run leaves beside the shards."""

    path: Path
    made_of: str  # what the shards beside it come from
    amax: dict[str, float] = field(default_factory=dict)  # by module

    @classmethod
    def resumed(cls, path: Path, layout: Layout, plan: QuantizationPlan) -> "_State":
        """That of a killed run; shards of any other plan or source are deleted."""
        stats = [(shard.name, shard.source.stat()) for shard in layout.shards]
        files = [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]
        made_of = hashlib.sha256(dumps([plan.to_json(), files]).encode()).hexdigest()
        if path.is_file():
            kept = cls(path, **json.loads(path.read_text()))
            if kept.made_of == made_of:
                return kept
        for shard in layout.shards:
            (path.parent / shard.name).unlink(missing_ok=True)
        state = cls(path, made_of)
        state.write()
        return state

    def write(self) -> None:
        """Keeps it."""
        write_json(self.path, {"made_of": self.made_of, "amax": self.amax})


class _Progress:
    """Bytes of the source."""

    def __init__(self, layout: Layout, report: Callable[[int, int], None]) -> None:
        self._report = report
        self._done = 0
        self._total = sum(m.stored.num_bytes for m in _measured(layout))
        self._total += sum(shard.num_source_bytes for shard in layout.shards)

    def add(self, num_bytes: int) -> None:
        self._done += num_bytes
        self._report(self._done, self._total)


def _measured(layout: Layout) -> list[Matrix]:
    """Those whose size others must know, in order of the shards."""
    names = {matrix.name for group in layout.fused if len(group) > 1 for matrix in group}
    return [matrix for matrix in layout.matrices if matrix.name in names]


def _measure(layout: Layout, state: _State, progress: _Progress) -> None:
    """The first pass."""
    shard = None
    for matrix in _measured(layout):
        if matrix.stored.path != shard:
            shard = matrix.stored.path
            state.write()
        if matrix.module not in state.amax:
            state.amax[matrix.module] = float(finite_amax(matrix.stored.read(), matrix.name))
        progress.add(matrix.stored.num_bytes)
    state.write()


@dataclass(frozen=True)
class _Scales:
    """What fused matrices share, before any factor; by module."""

    weight: dict[str, Float32[Tensor, ""]]  # of those that are not alone
    input: dict[str, Float32[Tensor, ""]]  # empty for W4A16

    @classmethod
    def of(cls, layout: Layout, amax: Mapping[str, float], plan: QuantizationPlan) -> "_Scales":
        weight: dict[str, Tensor] = {}
        inputs: dict[str, Tensor] = {}
        for group in layout.fused:
            modules = [matrix.module for matrix in group]
            if len(group) > 1:
                scale = _global_scale(max(amax[module] for module in modules), plan.rule)
                weight |= dict.fromkeys(modules, scale)
            if plan.activations is Activations.nvfp4:
                largest = max(plan.input_amax[module] for module in modules)
                inputs |= dict.fromkeys(modules, _global_scale(largest, ScaleRule.amax))
        return cls(weight, inputs)


def _global_scale(amax: float, rule: ScaleRule) -> Float32[Tensor, ""]:
    return nvfp4.shared_global_scale([torch.tensor([[amax]])], rule)


def _tensors(
    shard: ShardLayout, plan: QuantizationPlan, scales: _Scales, progress: _Progress
) -> Iterator[tuple[str, Tensor | StoredTensor]]:
    """The second pass."""
    for name, stored in shard.copied.items():
        yield name, stored
        progress.add(stored.num_bytes)
    for matrix in shard.matrices:
        factor = plan.scale_factors.get(matrix.name, 1.0)
        if matrix.precision is Precision.nvfp4:
            yield from _nvfp4(matrix, plan.rule, scales, factor)
        else:
            yield from _fp8(matrix, factor)
        progress.add(matrix.stored.num_bytes)


def _nvfp4(
    matrix: Matrix, rule: ScaleRule, scales: _Scales, factor: float
) -> Iterator[tuple[str, Tensor]]:
    quantized = nvfp4.quantize(
        matrix.stored.read(), rule, global_scale=scales.weight.get(matrix.module), name=matrix.name
    )
    yield f"{matrix.module}.weight_packed", quantized.codes
    yield f"{matrix.module}.weight_scale", quantized.block_scales
    yield f"{matrix.module}.weight_global_scale", (quantized.global_scale / factor).view(1)
    if matrix.module in scales.input:
        yield f"{matrix.module}.input_global_scale", scales.input[matrix.module].view(1)


def _fp8(matrix: Matrix, factor: float) -> Iterator[tuple[str, Tensor]]:
    per_block = matrix.precision is Precision.fp8_block
    quantize = fp8.quantize_blocks if per_block else fp8.quantize_tensor
    quantized = quantize(matrix.stored.read(), name=matrix.name)
    yield matrix.name, quantized.values
    yield f"{matrix.module}.weight_scale", quantized.scales * factor
