"""`fit`: the training mixture and the draft vocabulary that the profile asks for."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from specfit.artifacts import Artifact
from specfit.draft_vocab import DraftVocab
from specfit.export.imports import read_vocab
from specfit.files import read_jsonl, write_json, write_jsonl
from specfit.report import fitted
from specfit.states.documents import Document, read_documents
from specfit.targets.info import TargetInfo
from specfit.traffic import draft_length
from specfit.traffic.config import FitConfig, ProfileConfig
from specfit.traffic.mixture import Share, mixture
from specfit.traffic.selection import Taken, select

VERSION = 3
log = logging.getLogger(__name__)

TEXT_SHARE = 0.01  # what a token of a prompt counts, beside one of an answer


@dataclass(frozen=True)
class FitJob:
    """What the stage works on."""

    folder: Path
    config: FitConfig
    profile: ProfileConfig
    draft_vocab_size: int
    head: Path | None  # whose draft vocabulary it is, where the head is given
    max_tokens: int
    prompts: Artifact
    answers: Artifact
    info: TargetInfo
    measured: Sequence[Mapping[str, Any]] | None  # rows of an earlier head's acceptance.json


def run(job: FitJob) -> None:
    """Writes mixture.jsonl, draft_vocab.safetensors, fit.json and a page.

    mixture.jsonl names the training documents, each as often as an epoch shows it.

    Raises:
        ValueError: a component has no answers, or the mixture cannot be had.
    """
    documents = read_documents(
        job.answers.file("answers.jsonl"), max_tokens=job.max_tokens, splits=("train", "validation")
    )
    by_component = {
        c.name: [d for d in documents if (d.component, d.split) == (c.name, "train")]
        for c in job.profile.components
    }
    for name, own in by_component.items():
        if not own:
            raise ValueError(f"profile component {name} has no answers to learn from")
    tokens = {name: _tokens_a_request(own) for name, own in by_component.items()}
    shares = mixture(job.profile, job.config, measured_tokens=tokens, measured=job.measured)
    taken = select(by_component, shares, job.config)
    rows = [
        {"id": d.id, "component": d.component, "source": d.source}
        for t in taken
        for d in t.documents
    ]
    write_jsonl(job.folder / "mixture.jsonl", rows)
    given = None if job.head is None else read_vocab(job.head, job.info)
    vocab = given or _vocab(job, by_component, shares)
    vocab.save(job.folder / "draft_vocab.safetensors")
    groups = sorted({(d.component, d.split) for d in documents})
    figures = {
        "draft_vocab_size": job.draft_vocab_size,
        "target_vocab_size": job.info.vocab_size,
        "rows": [_coverage(vocab, documents, component, split) for component, split in groups],
        "mixture": [asdict(s) | t.row() for s, t in zip(shares, taken, strict=True)],
        "sources": _sources(taken),
        "num_draft_tokens": None,
        "config": asdict(job.config) | {"mixture": job.config.mixture.name},
    }
    if job.measured is not None:
        figures["num_draft_tokens"] = draft_length.chosen(job.measured, shares)
    write_json(job.folder / "fit.json", figures)
    fitted.write_page(job.folder, figures)
    _log(figures)


def _vocab(
    job: FitJob, by_component: Mapping[str, list[Document]], shares: Sequence[Share]
) -> DraftVocab:
    """The commonest tokens of the profile's answers.

    Tokens are counted in the training answers, a component's counts scaled so that they stand for
    its share of the profile's output tokens. A few ten thousand answer tokens show a fraction of
    what traffic uses: tokens of the training prompts and of the data's own answers count too, at
    TEXT_SHARE. Tokens that never occur fill the rest, lowest ids first (byte and merge order: the
    commonest).
    """
    texts = [
        row
        for row in read_jsonl(job.prompts.file("conversations.jsonl"))
        if row["split"] == "train"
    ]
    size = job.info.vocab_size
    counts = torch.zeros(size, dtype=torch.float64)
    for share in shares:
        answered = _counts(by_component[share.component], size)
        counts += share.tokens * answered / answered.sum()
        asked = [row for row in texts if row["component"] == share.component]
        tokens = [t for row in asked for t in row["prompt_ids"] + (row["reference_ids"] or [])]
        around = torch.bincount(torch.tensor(tokens).long(), minlength=size).double()
        counts += TEXT_SHARE * share.tokens * around / around.sum().clamp(min=1)
    return DraftVocab.from_counts(counts, job.draft_vocab_size, always=job.info.eos_ids)


def _tokens_a_request(documents: Sequence[Document]) -> float:
    spans = [end - start for d in documents for start, end in d.loss_spans]
    return sum(spans) / len(spans)


def _counts(documents: Sequence[Document], vocab_size: int) -> Float[Tensor, "vocab"]:
    learned = torch.cat([torch.tensor(d.input_ids)[d.loss_mask] for d in documents])
    return torch.bincount(learned, minlength=vocab_size).double()


def _coverage(
    vocab: DraftVocab, documents: Sequence[Document], component: str, split: str
) -> dict[str, Any]:
    own = [d for d in documents if (d.component, d.split) == (component, split)]
    counts = _counts(own, len(vocab.t2d))
    return {
        "component": component,
        "split": split,
        "coverage": float(counts[vocab.t2d].sum() / counts.sum()),
        "num_tokens": int(counts.sum()),
    }


def _sources(taken: Sequence[Taken]) -> list[dict[str, Any]]:
    """By source: its documents in an epoch, and their share of the answer tokens."""
    total = sum(d.num_answer_tokens for t in taken for d in t.documents)
    rows = []
    for t in taken:
        for source in sorted({d.source for d in t.documents}):
            own = [d for d in t.documents if d.source == source]
            tokens = sum(d.num_answer_tokens for d in own)
            row = {"source": source, "component": t.component, "num_documents": len(own)}
            rows.append(row | {"num_tokens": tokens, "weight": tokens / total})
    return rows


def _log(figures: Mapping[str, Any]) -> None:
    for row in figures["mixture"]:
        log.info(
            "fit: %s is %.1f %% of the requests, %.1f %% of the tokens, %.1f %% of the training%s",
            *(row["component"], 100 * row["requests"], 100 * row["tokens"]),
            *(100 * row["taken"], f", {row['capped']}" if row["capped"] else ""),
        )
    for row in figures["rows"]:
        log.info(
            "fit: %s %s: %.2f %% of %d answer tokens can be drafted",
            *(row["component"], row["split"], 100 * row["coverage"], row["num_tokens"]),
        )
