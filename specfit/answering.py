"""Answers requests behind a progress bar; whoever decodes many of them does it through here."""

from collections.abc import Iterator, Sequence

from tqdm import tqdm

from specfit_serve.decode import Decoded, DecodeSettings, Request, decode
from specfit_serve.protocols import DecodeTarget, Proposer
from specfit_serve.repetition import TokenClass


def answer(
    target: DecodeTarget,
    proposer: Proposer,
    requests: Sequence[Request],
    settings: DecodeSettings,
    *,
    token_classes: Sequence[TokenClass],
    label: str | None,
) -> Iterator[Decoded]:
    """Each answer as soon as it is finished; see `decode`, which this is.

    Longest prompts first: neighbours in the batch are alike, and the end of the job is not one
    long one. Without a label there is no bar.
    """
    ordered = sorted(requests, key=lambda request: (-len(request.prompt), request.id))
    limit = settings.max_new_tokens
    with tqdm(total=len(ordered) * limit, unit="tok", desc=label, disable=label is None) as bar:
        for answered in decode(
            target,
            proposer,
            ordered,
            settings,
            token_classes=token_classes,
            on_progress=bar.update,
        ):
            # An answer that ended early will not take the rest of its share.
            bar.total -= limit - len(answered.tokens)
            yield answered
