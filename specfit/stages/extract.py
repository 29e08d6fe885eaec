"""`extract`: the target's hidden states on its own answers, kept in a store."""

import logging
from pathlib import Path
from time import perf_counter
from typing import Any

from tqdm import tqdm

from specfit.artifacts import Artifact
from specfit.config import ExtractConfig
from specfit.files import append_jsonl, require_free, write_json
from specfit.states.codec import bytes_per_token
from specfit.states.compute import compute
from specfit.states.documents import Document, read_documents
from specfit.states.store import index_rows, plan_shards, shard_name, write_shard
from specfit.targets.info import TargetInfo
from specfit.targets.target import Target
from specfit_kernels.floors import GFLOP, matmul_gflops

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
    # Neighbours of one length pad little.
    documents.sort(key=lambda d: (d.num_tokens, d.id))
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
            states = []
            for first in range(0, len(shards[i]), config.batch_size):
                batch = shards[i][first : first + config.batch_size]
                states += compute(target, batch, aux_layers, config.dtype)
                bar.update(sum(d.num_tokens for d in batch))
            write_shard(folder / shard_name(i), states)
    seconds = perf_counter() - started
    (folder / "documents.jsonl").unlink(missing_ok=True)
    append_jsonl(folder / "documents.jsonl", index_rows(shards))
    figures = {
        "num_tokens": num_tokens,
        "num_documents": len(documents),
        "bytes_per_token": size,
        "dtype": config.dtype,
        "aux_layers": aux_layers,
    }
    made = [document for i in missing for document in shards[i]]
    write_json(folder / "store.json", figures | _speed(target.info, made, seconds))


def _speed(info: TargetInfo, made: list[Document], seconds: float) -> dict[str, Any]:
    """Of this attempt: the body of the target on every token, its head where the loss is."""
    num_tokens = sum(d.num_tokens for d in made)
    learned = sum(int(d.loss_mask.sum()) for d in made)
    head = info.vocab_size * info.hidden_size
    body = info.num_parameters - head * (1 if info.tied_embeddings else 2)
    flops = 2.0 * (body * num_tokens + head * learned)
    rows = max(1, num_tokens // max(1, len(made)))
    return {
        "seconds": seconds,
        "tokens_per_second": num_tokens / seconds,
        "achieved_gflops": flops / seconds / GFLOP,
        "matmul_gflops": matmul_gflops(rows, info.intermediate_size, info.hidden_size),
    }
