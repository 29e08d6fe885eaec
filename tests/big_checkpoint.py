"""A synthetic checkpoint of any size, and the memory that quantizing it takes.

python big_checkpoint.py SOURCE FOLDER RULE   quantizes every unit; ends with its memory in bytes
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from specfit.quantization.checkpoint import write_checkpoint
from specfit.quantization.config import Precision
from specfit.quantization.plan import QuantizationPlan
from specfit.quantization.safetensors_stream import (
    INDEX,
    TensorSpec,
    arrange,
    read_shards,
    write_shard,
)
from specfit.quantization.units import units_of
from specfit_kernels.nvfp4 import quantize
from specfit_kernels.rules import ScaleRule


def write_big(
    folder: Path, *, num_shards: int, layers_a_shard: int, hidden: int, inner: int, vocab: int
) -> int:
    """Writes shards of decoder layers in bfloat16; the bytes of the largest matrix in float32."""
    folder.mkdir()
    rows = {"self_attn.q_proj": hidden, "self_attn.k_proj": hidden, "self_attn.v_proj": hidden}
    rows |= {"self_attn.o_proj": hidden, "mlp.gate_proj": inner, "mlp.up_proj": inner}
    columns = {"mlp.down_proj": inner}
    largest = max(vocab, inner) * hidden
    values = torch.randn(largest, generator=torch.Generator().manual_seed(0)).bfloat16()

    def filled(shapes: dict[str, tuple[int, ...]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, shape in shapes.items():
            yield name, values[: shape[0] * shape[1]].view(shape)

    weight_map = {}
    for i in range(num_shards):
        shapes = {} if i else {"model.embed_tokens.weight": (vocab, hidden)}
        for layer in range(i * layers_a_shard, (i + 1) * layers_a_shard):
            for module in [*rows, *columns]:
                name = f"model.layers.{layer}.{module}.weight"
                shapes[name] = (rows.get(module, hidden), columns.get(module, hidden))
        file = f"model-{i + 1:05}-of-{num_shards:05}.safetensors"
        specs = {name: TensorSpec(torch.bfloat16, shape) for name, shape in shapes.items()}
        write_shard(folder / file, arrange(specs, {"format": "pt"}), filled(shapes))
        weight_map |= dict.fromkeys(shapes, file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text("{}")
    return 4 * inner * hidden


def memory_of_quantizing(source: Path, folder: Path, rule: ScaleRule) -> int:
    """Bytes at the peak, beyond what a process has that has quantized something small."""
    command = [sys.executable, __file__, str(source), str(folder), rule.name]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return int(done.stdout)


def _peak_bytes() -> int:
    """Of this process. getrusage() would count what its parent had."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("VmHWM:")[1].split()[0])


def _main(source: Path, folder: Path, rule: ScaleRule) -> None:
    torch.set_num_threads(1)
    quantize(torch.randn(64, 64).bfloat16(), rule)
    before = _peak_bytes()
    units = units_of(name for shard in read_shards(source) for name in shard.tensors)
    plan = QuantizationPlan(dict.fromkeys(units, Precision.nvfp4), rule)
    write_checkpoint(source, folder, plan, on_progress=lambda _done, _total: None)
    sys.stdout.write(f"{_peak_bytes() - before}\n")


if __name__ == "__main__":
    _main(Path(sys.argv[1]), Path(sys.argv[2]), ScaleRule[sys.argv[3]])
