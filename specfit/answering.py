"""Answers requests behind a progress bar; whoever decodes many of them does it through here."""

from collections.abc import Iterator, Sequence

from tqdm import tqdm

from specfit.engine import DecodeEngine
from specfit.states.record import StateRecorder
from specfit.targets.vocabulary import token_classes
from specfit_serve.decode import Decoded, DecodeSettings, Request, decode
from specfit_serve.ngram import NoProposer
from specfit_serve.protocols import DecodeTarget, Proposer
from specfit_serve.repetition import TokenClass


def answer(
    target: DecodeTarget,
    proposer: Proposer,
    requests: Sequence[Request],
    settings: DecodeSettings,
    *,
    classes: Sequence[TokenClass],
    label: str | None,
) -> Iterator[Decoded]:
    """Each answer as soon as it is finished; see `decode`, which this is.

    Longest prompts first: neighbours in the batch are alike, and the end of the job is not one
    long one. Without a label there is no bar.
    """
    ordered = sorted(requests, key=lambda request: (-len(request.prompt), request.id))
    limit = settings.max_new_tokens
    total = sum(len(request.prompt) + limit for request in ordered)
    with tqdm(total=total, unit="tok", desc=label, disable=label is None) as bar:
        for answered in decode(
            target, proposer, ordered, settings, token_classes=classes, on_progress=bar.update
        ):
            # An answer that ended early will not take the rest of its share.
            bar.total -= limit - len(answered.tokens)
            yield answered


def answer_plainly(
    engine: DecodeEngine,
    requests: Sequence[Request],
    *,
    max_new_tokens: int,
    batch_size: int,
    label: str,
    top_p: float = 1.0,
    seed: int = 0,
    recorder: StateRecorder | None = None,
) -> Iterator[Decoded]:
    """Answers without speculation; the target's context ends those that reach it."""
    if not requests:
        return
    longest = max(len(request.prompt) for request in requests) + max_new_tokens
    slots = engine.slots(
        num_slots=min(batch_size, len(requests)),
        max_length=min(longest, engine.target.info.max_position_embeddings),
        aux_layers=recorder.layers if recorder else None,
    )
    settings = DecodeSettings(
        num_draft_tokens=0,
        max_new_tokens=max_new_tokens,
        batch_size=slots.num_slots,
        top_p=top_p,
        seed=seed,
    )
    proposer = recorder or NoProposer()
    yield from answer(
        slots, proposer, requests, settings, classes=token_classes(engine.target), label=label
    )
