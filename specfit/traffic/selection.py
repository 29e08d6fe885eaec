"""Which training documents an epoch shows, and how often, so that it is the mixture asked for."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specfit.states.documents import Document
from specfit.traffic.config import FitConfig
from specfit.traffic.mixture import Share


@dataclass(frozen=True)
class Taken:
    """Of one component."""

    component: str
    documents: list[Document]  # as often as an epoch shows them
    num_there: int  # different documents that there are
    quota: int  # answer tokens that the mixture asks for
    total: int  # answer tokens of an epoch, of all components

    @property
    def num_tokens(self) -> int:
        """Answer tokens of an epoch."""
        return sum(d.num_answer_tokens for d in self.documents)

    def row(self) -> dict[str, Any]:
        """As it stands in fit.json."""
        different = len({d.id for d in self.documents})
        repeats = len(self.documents) / different
        short = self.num_tokens < 0.95 * self.quota
        return {
            "taken": self.num_tokens / self.total,
            "num_tokens": self.num_tokens,
            "quota_tokens": self.quota,
            "num_documents": different,
            "num_there": self.num_there,
            "repeats": repeats,
            "capped": f"capped at {self.num_tokens} of {self.quota} tokens" if short else "",
        }


def select(
    documents: Mapping[str, Sequence[Document]], shares: Sequence[Share], config: FitConfig
) -> list[Taken]:
    """Documents of each component, in the order of `shares`.

    `train_tokens` answer tokens (or as many as there are) are shared out as the mixture says. A
    component that has too few is repeated, up to `max_repeats` times, and its rest is not given to
    others: that would move the mixture. Within a component, documents are taken at even steps of
    their length, so that short and long ones keep their proportion.
    """
    there = {s.component: _num_tokens(documents[s.component]) for s in shares}
    total = config.train_tokens or sum(there.values())
    chosen = []
    for share in shares:
        own = documents[share.component]
        quota = share.training * total
        times = min(quota / there[share.component], config.max_repeats)
        chosen.append((share.component, _repeated(own, times), len(own), round(quota)))
    epoch = sum(_num_tokens(found) for _, found, _, _ in chosen)
    return [Taken(name, found, num, quota, epoch) for name, found, num, quota in chosen]


def _repeated(documents: Sequence[Document], times: float) -> list[Document]:
    """Each document floor(times) times, and of one more round an even share of the tokens."""
    whole = int(times)
    ordered = sorted(documents, key=lambda d: (d.num_answer_tokens, d.id))
    found = ordered * whole
    # Error diffusion over the tokens: a document is taken when as much as half of it is due.
    due = 0.0
    for document in ordered:
        due += (times - whole) * document.num_answer_tokens
        if due >= document.num_answer_tokens / 2:
            found.append(document)
            due -= document.num_answer_tokens
    # A quota of less than one document is one all the same: no component goes without.
    return found or [ordered[len(ordered) // 2]]


def _num_tokens(documents: Sequence[Document]) -> int:
    return sum(d.num_answer_tokens for d in documents)
