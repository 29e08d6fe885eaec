"""What quantizing does to a head that was fitted to the target as it came."""

from pathlib import Path
from typing import Any

from specfit.acceptance import Measured, changes
from specfit.artifacts import Artifact
from specfit.engine import DecodeEngine
from specfit.files import read_jsonl
from specfit.measure_config import MeasureConfig
from specfit.measuring import Bench, Way, decode_all, held_out
from specfit.traffic.config import ProfileConfig

HEAD = "given"  # its name in the journals


def acceptance_changes(
    folder: Path,
    speculator: Artifact,
    *,
    before: DecodeEngine,
    after: DecodeEngine,
    config: MeasureConfig,
    profile: ProfileConfig,
    prompts: Artifact,
    seed: int,
) -> list[dict[str, Any]]:
    """Rows of how acceptance length changes on the held-out conversations, by k and component.

    Args:
        folder: keeps what was decoded, so that a killed run goes on where it was.
        speculator: an artifact of `train`.
        before: of the target as it came.
        after: of the quantized one.
        config: how to decode, as for `measure`; each component at its own temperature.
        profile: weighs the components.
        prompts: has the conversations.
        seed: of what is sampled, and of the intervals.

    Raises:
        ValueError: the head is of another kind of target, or no conversation is held out.
    """
    conversations = held_out(prompts)
    ways = [Way(HEAD, k, None) for k in config.num_draft_tokens]
    measured: list[list[Measured]] = []
    for name, engine in (("before", before), ("after", after)):
        bench = Bench(config, profile, seed, conversations, engine, {HEAD: speculator})
        journal = folder / f"acceptance_{name}.jsonl"
        for way in ways:
            decode_all(journal, bench, way)
        measured.append([Measured(**row) for row in read_jsonl(journal)])
    rows = []
    for k in config.num_draft_tokens:
        at_k = [[m for m in side if m.num_draft_tokens == k] for side in measured]
        found = changes(at_k[0], at_k[1], bench.weights, bench.intervals)
        rows += [{"num_draft_tokens": k} | row for row in found]
    return rows
