"""`fit`: the draft vocabulary that the profile's answers ask for."""

import logging
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from specfit.artifacts import Artifact
from specfit.config import ProfileConfig
from specfit.draft_vocab import DraftVocab
from specfit.files import read_jsonl, write_json
from specfit.states.documents import Document, read_documents
from specfit.targets.info import TargetInfo

VERSION = 2
log = logging.getLogger(__name__)

TEXT_SHARE = 0.01  # what a token of a prompt counts, beside one of an answer


def run(
    folder: Path,
    *,
    profile: ProfileConfig,
    draft_vocab_size: int,
    max_tokens: int,
    prompts: Artifact,
    answers: Artifact,
    info: TargetInfo,
) -> None:
    """Writes draft_vocab.safetensors and fit.json.

    Tokens are counted in the training answers, a component's counts scaled so that each stands for
    its share of the profile's requests: rare traffic is not crowded out by talkative traffic.
    A few ten thousand answer tokens show a fraction of what traffic uses: tokens of the training
    prompts and of the data's own answers count too, at TEXT_SHARE. Tokens that never occur fill
    the rest, lowest ids first (byte and merge order: the commonest).
    """
    documents = read_documents(
        answers.file("answers.jsonl"), max_tokens=max_tokens, splits=("train", "validation")
    )
    texts = [
        row for row in read_jsonl(prompts.file("conversations.jsonl")) if row["split"] == "train"
    ]
    counts = torch.zeros(info.vocab_size, dtype=torch.float64)
    for component in profile.components:
        own = [d for d in documents if d.component == component.name and d.split == "train"]
        if not own:
            raise ValueError(f"profile component {component.name} has no answers to learn from")
        counts += component.weight * _counts(own, info.vocab_size) / len(own)
        asked = [row for row in texts if row["component"] == component.name]
        tokens = [t for row in asked for t in row["prompt_ids"] + (row["reference_ids"] or [])]
        around = torch.bincount(torch.tensor(tokens).long(), minlength=info.vocab_size)
        counts += TEXT_SHARE * component.weight * around / len(asked)
    vocab = DraftVocab.from_counts(counts, draft_vocab_size, always=info.eos_ids)
    vocab.save(folder / "draft_vocab.safetensors")
    groups = sorted({(d.component, d.split) for d in documents})
    rows = [_coverage(vocab, documents, component, split) for component, split in groups]
    write_json(
        folder / "fit.json",
        {
            "draft_vocab_size": draft_vocab_size,
            "target_vocab_size": info.vocab_size,
            "rows": rows,
        },
    )
    for row in rows:
        log.info(
            "fit: %s %s: %.2f %% of %d answer tokens can be drafted",
            *(row["component"], row["split"], 100 * row["coverage"], row["num_tokens"]),
        )


def _counts(documents: list[Document], vocab_size: int) -> Float[Tensor, "vocab"]:
    learned = torch.cat([torch.tensor(d.input_ids)[d.loss_mask] for d in documents])
    return torch.bincount(learned, minlength=vocab_size).double()


def _coverage(
    vocab: DraftVocab, documents: list[Document], component: str, split: str
) -> dict[str, Any]:
    own = [d for d in documents if (d.component, d.split) == (component, split)]
    counts = _counts(own, len(vocab.t2d))
    return {
        "component": component,
        "split": split,
        "coverage": float(counts[vocab.t2d].sum() / counts.sum()),
        "num_tokens": int(counts.sum()),
    }
