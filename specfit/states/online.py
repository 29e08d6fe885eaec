"""Hidden states made while they are needed: no store, memory of one batch."""

from collections.abc import Sequence

from specfit.config import StateDtype
from specfit.states.compute import compute
from specfit.states.documents import Document
from specfit.targets.target import HiddenStates, Target


class OnlineStates:
    """Looks like a `StateStore`; every read is a forward pass of the target."""

    def __init__(
        self,
        target: Target,
        documents: Sequence[Document],
        aux_layers: list[int],
        dtype: StateDtype,
    ) -> None:
        self.target = target
        self.documents = list(documents)
        self.aux_layers = aux_layers
        self.dtype = dtype

    def read(self, index: int) -> HiddenStates:
        """The states of document `index`: the numbers that `extract` would store in this dtype."""
        document = self.documents[index]
        (states, _), *_ = compute(self.target, [document], self.aux_layers, self.dtype)
        return states
