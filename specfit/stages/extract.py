"""`extract`: the target's hidden states on its own answers, kept in a store."""

import logging
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
from specfit.states.store import index_rows, plan_shards, shard_name, write_shard
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
    """Writes shards, documents.jsonl and store.json; shards that are there already are kept.

    Raises:
        ValueError: no answer begins within `config.max_tokens`.
        DiskFull: the disk cannot hold the whole; said before anything is written.
    """
    documents = _documents(answers, config)
    shards = plan_shards(documents, config.shard_tokens)
    num_tokens = sum(d.num_tokens for d in documents)
    size = bytes_per_token(len(aux_layers) + 1, target.info.hidden_size, config.dtype)
    missing = [i for i in range(len(shards)) if not (folder / shard_name(i)).exists()]
    to_come = sum(d.num_tokens for i in missing for d in shards[i])
    log.info(
        "extract: %d documents, %d tokens at %d bytes: %.2f GB in %d shards, %d of them there",
        *(len(documents), num_tokens, size, num_tokens * size / 1e9),
        *(len(shards), len(shards) - len(missing)),
    )
    require_free(folder, to_come * size, f"the hidden states of {to_come} tokens")
    started = perf_counter()
    with tqdm(total=to_come, unit="tok", desc="extract") as bar:
        for i in missing:
            write_shard(folder / shard_name(i), _states(target, shards[i], aux_layers, config, bar))
    seconds = perf_counter() - started
    (folder / "documents.jsonl").unlink(missing_ok=True)
    append_jsonl(folder / "documents.jsonl", index_rows(shards))
    figures: dict[str, object] = {
        "num_tokens": num_tokens,
        "num_documents": len(documents),
        "bytes_per_token": size,
        "dtype": config.dtype,
        "aux_layers": aux_layers,
    }
    made = [document for i in missing for document in shards[i]]
    learned = sum(int(d.loss_mask.sum()) for d in made)
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
