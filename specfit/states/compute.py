"""Hidden states of documents: the one way they are made, for the store and on the fly."""

from collections.abc import Sequence

import torch

from specfit.config import StateDtype
from specfit.states.codec import EncodedStates, decode, encode
from specfit.states.documents import Document
from specfit.targets.target import HiddenStates, Target


def compute(
    target: Target, documents: Sequence[Document], aux_layers: list[int], dtype: StateDtype
) -> list[tuple[HiddenStates, EncodedStates]]:
    """One forward pass over `documents`.

    The states have been through `dtype` and back, so that whoever stores them and whoever uses
    them at once see the same numbers. The target's distribution is that of the rounded last state.

    Raises:
        ValueError: a document is longer than the target's context.
    """
    longest = max(len(document.input_ids) for document in documents)
    context = target.info.max_position_embeddings
    if longest > context:
        raise ValueError(
            f"extract.max_tokens must be at most the target's context of {context}: a conversation "
            f"has {longest} tokens"
        )
    input_ids = torch.zeros(len(documents), longest, dtype=torch.int64)
    valid = torch.zeros(len(documents), longest, dtype=torch.bool)
    for i, document in enumerate(documents):
        input_ids[i, : len(document.input_ids)] = torch.tensor(document.input_ids)
        valid[i, : len(document.input_ids)] = True
    input_ids, valid = input_ids.to(target.device), valid.to(target.device)
    aux, last = target.states(input_ids, valid, aux_layers)
    stacked = torch.cat([aux, last[:, :, None]], dim=2)
    return [
        of_document(target, document, encode(stacked[i, : len(document.input_ids)], dtype))
        for i, document in enumerate(documents)
    ]


def of_document(
    target: Target, document: Document, encoded: EncodedStates
) -> tuple[HiddenStates, EncodedStates]:
    """States as they are kept, aux layers and the last, with the target's distribution there."""
    states = decode(encoded)
    loss_mask = document.loss_mask.to(states.device)
    log_normalizer = torch.zeros(len(loss_mask), device=states.device)
    top_token = torch.zeros(len(loss_mask), dtype=torch.int64, device=states.device)
    before_learned = loss_mask.roll(-1)
    before_learned[-1] = False
    with torch.inference_mode():
        for places in torch.split(before_learned.nonzero().flatten(), 256):
            logits = target.logits(states[places, -1])
            log_normalizer[places] = logits.logsumexp(-1)
            top_token[places] = logits.argmax(-1)
    input_ids = torch.tensor(document.input_ids, device=states.device)
    found = HiddenStates(
        input_ids, loss_mask, states[:, :-1], states[:, -1], log_normalizer, top_token
    )
    return found, encoded
