"""`export`: the speculator as servers load it, proven by reading it back."""

import logging
from pathlib import Path

import torch

from specfit.artifacts import Artifact
from specfit.export import vllm
from specfit.export.parity import compare
from specfit.files import write_json
from specfit.speculators.batches import pack
from specfit.targets.target import HiddenStates, Target
from specfit.training.checkpoints import load_head

VERSION = 1
log = logging.getLogger(__name__)

NUM_DRAFT_TOKENS = 4  # of the comparison
NUM_TOKENS = 256


def run(folder: Path, *, seed: int, speculator: Artifact, target: Target) -> None:
    """Writes vllm/, parity.json and manifest.json.

    Raises:
        ValueError: what was read back does not draft as the trained head does.
    """
    trained = load_head(
        speculator.file("config.json"), speculator.file("model.safetensors"), target.device
    )
    vllm.write(folder / "vllm", *trained, target.info)
    batch = pack([_random_states(target, list(trained[0].config.aux_layers), seed)])
    row = compare(
        trained,
        vllm.read(folder / "vllm"),
        batch,
        target.embeddings.weight.detach(),
        NUM_DRAFT_TOKENS,
    )
    if row["drafted_tokens_equal"] < 1 or row["max_logit_difference"] > 0:
        raise ValueError(f"the exported head is not the trained one: {row}")
    write_json(folder / "parity.json", {"rows": [{"engine": "vllm"} | row]})
    files = sorted(str(p.relative_to(folder)) for p in folder.glob("vllm/*"))
    write_json(folder / "manifest.json", {"engines": ["vllm"], "files": files})
    log.info("export vllm: %d of %d drafted tokens equal", *(2 * [row["num_drafted_tokens"]]))


def _random_states(target: Target, aux_layers: list[int], seed: int) -> HiddenStates:
    """The target's states on random tokens: the same batch for every export of this target."""
    generator = torch.Generator().manual_seed(seed)
    length = min(NUM_TOKENS, target.info.max_position_embeddings)
    ids = torch.randint(target.info.vocab_size, (1, length), generator=generator).to(target.device)
    aux, last = target.states(ids, torch.ones_like(ids, dtype=torch.bool), aux_layers)
    mask = torch.ones(length, dtype=torch.bool, device=target.device)
    nothing = torch.zeros(length, device=target.device)
    return HiddenStates(ids[0], mask, aux[0].float(), last[0].float(), nothing, nothing.long())
