"""Which conversations are trained on, which choose the checkpoint, and which are measured on."""

import hashlib
from collections.abc import Iterable, Iterator

from specfit_data.conversations import Conversation

TRAIN_PERCENT, VALIDATION_PERCENT = 80, 5  # the rest is for the test


def split_of(conversation_id: str, *, held_out: bool = False, seed: int = 0) -> str:
    """The split of a conversation, "train", "validation" or "test": the same on every machine.

    It depends on the opening in the id alone, so that the requests of one session, each of which
    repeats the ones before it, are never on both sides. What is held out is always in the test.
    """
    if held_out:
        return "test"
    opening = conversation_id.partition("-")[0]
    digest = hashlib.sha256(f"{seed}:{opening}".encode()).digest()
    percent = int.from_bytes(digest[:8], "big") % 100
    if percent < TRAIN_PERCENT:
        return "train"
    return "validation" if percent < TRAIN_PERCENT + VALIDATION_PERCENT else "test"


def without_duplicates(
    conversations: Iterable[Conversation], seen: set[str]
) -> Iterator[Conversation]:
    """Those whose id is not in `seen`, to which ids are added as they come.

    Read held-out sources first, with the same `seen`: nothing measured on is then trained on.
    """
    for conversation in conversations:
        if conversation.id not in seen:
            seen.add(conversation.id)
            yield conversation
