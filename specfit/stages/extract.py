"""`extract`: the target's hidden states on its own answers, kept in a store."""

import logging
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any

from tqdm import tqdm

from specfit.artifacts import Artifact
from specfit.config import ExtractConfig
from specfit.files import append_jsonl, require_free, write_json
from specfit.states.codec import EncodedStates, bytes_per_token
from specfit.states.compute import compute
from specfit.states.documents import Document, read_documents
from specfit.states.store import (
    Place,
    kept_places,
    next_shard,
    plan_shards,
    shards_in,
    write_shard,
)
from specfit.targets.target import HiddenStates, Target
from specfit_kernels.floors import speed

VERSION = 1
log = logging.getLogger(__name__)


def run(
    folder: Path,
    *,
    config: ExtractConfig,
    aux_layers: list[int],
    answers: Artifact,
    target: Target,
) -> None:
    """Writes shards, documents.jsonl and store.json.

    Shards that are there already are kept: an earlier run was killed, or the states were recorded
    while the answers were made.

    Raises:
        ValueError: no answer begins within `config.max_tokens`.
        DiskFull: the disk cannot hold the whole; said before anything is written.
    """
    documents = _documents(answers, config)
    places = _kept(folder, documents)
    missing = [d for d in documents if d.id not in places]
    num_tokens = sum(d.num_tokens for d in documents)
    to_come = sum(d.num_tokens for d in missing)
    size = bytes_per_token(len(aux_layers) + 1, target.info.hidden_size, config.dtype)
    log.info(
        "extract: %d documents, %d tokens at %d bytes: %.2f GB, %d tokens of them there",
        *(len(documents), num_tokens, size, num_tokens * size / 1e9, num_tokens - to_come),
    )
    require_free(folder, to_come * size, f"the hidden states of {to_come} tokens")
    started = perf_counter()
    with tqdm(total=to_come, unit="tok", desc="extract") as bar:
        for shard in plan_shards(missing, config.shard_tokens):
            states = _states(target, shard, aux_layers, config, bar)
            written = write_shard(next_shard(folder), shard, states)
            places |= {place.id: place for place in written}
    seconds = perf_counter() - started
    (folder / "documents.jsonl").unlink(missing_ok=True)
    append_jsonl(folder / "documents.jsonl", [asdict(places[d.id]) for d in documents])
    figures: dict[str, object] = {
        "num_tokens": num_tokens,
        "num_documents": len(documents),
        "num_kept_tokens": num_tokens - to_come,
        "bytes_per_token": size,
        "dtype": config.dtype,
        "aux_layers": aux_layers,
    }
    learned = sum(int(d.loss_mask.sum()) for d in missing)
    figures |= speed(
        num_tokens=to_come,
        flops=target.info.forward_flops(to_come, learned),
        seconds=seconds,
        shape=(
            num_tokens // len(documents),
            target.info.intermediate_size,
            target.info.hidden_size,
        ),
        device=target.device,
        dtype=target.model.dtype,
    )
    write_json(folder / "store.json", figures)


def _states(
    target: Target,
    documents: list[Document],
    aux_layers: list[int],
    config: ExtractConfig,
    bar: Any,
) -> list[tuple[HiddenStates, EncodedStates]]:
    states = []
    for first in range(0, len(documents), config.batch_size):
        batch = documents[first : first + config.batch_size]
        states += compute(target, batch, aux_layers, config.dtype)
        bar.update(sum(d.num_tokens for d in batch))
    return states


def _kept(folder: Path, documents: list[Document]) -> dict[str, Place]:
    """Where the documents stand that need no pass, by id; shards of anything else are deleted."""
    by_id = {d.id: d for d in documents}
    kept: dict[str, Place] = {}
    for path in shards_in(folder):
        places = kept_places(path, by_id)
        if places is None:
            log.warning("extract: %s is of other answers, or broken; it is made again", path)
            path.unlink()
        else:
            kept |= {place.id: place for place in places}
    return kept


def _documents(answers: Artifact, config: ExtractConfig) -> list[Document]:
    documents = read_documents(
        answers.file("answers.jsonl"),
        max_tokens=config.max_tokens,
        splits=("train", "validation"),
    )
    if not documents:
        raise ValueError(
            f"extract.max_tokens must reach into the answers, got {config.max_tokens}: nothing of "
            "them is left to learn from"
        )
    return documents
