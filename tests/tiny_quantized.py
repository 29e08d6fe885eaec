"""A small run that quantizes a tiny target."""

from pathlib import Path

import tiny_runs
import tiny_targets

SMALL = [
    "stage=quantize",
    "data.num_train=16",
    "quantize.budget=0.5",
    "quantize.num_passages=3",
    "quantize.num_unit_passages=4",
    "quantize.context_tokens=6",
    "quantize.counted_tokens=6",
    "quantize.batch_size=2",
    "quantize.sets_per_unit=1",
    "quantize.num_random=2",
    "quantize.curve_points=4",
    "quantize.gate=report",
]


def overrides(folder: Path) -> list[str]:
    """Of the run; everything is below `folder`."""
    target = tiny_targets.write_target(folder / "target", "llama")
    data = tiny_targets.write_conversations(folder / "data.jsonl", 60)
    return tiny_runs.overrides(folder / "root", target, data, *SMALL)
