"""Measured divergences: each set on each text once, whatever asks for it and however often."""

from collections.abc import Iterable, Sequence
from enum import Enum
from math import isfinite
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from tqdm import tqdm

from specfit.quantization.fidelity import CONFIDENCE, NUM_BOOTSTRAP
from specfit_serve.bootstrap import percentiles, resamples


class Text(Enum):
    """What a divergence is measured on; no two share a conversation."""

    calibration = 1  # what predictions are fitted to
    selection = 2  # what decides
    report = 3  # what is published: nothing was chosen by it


@runtime_checkable
class Divergence(Protocol):
    """A target with units that can be quantized. Its tensors may be on any device."""

    @property
    def costs(self) -> Float[Tensor, " units"]:
        """Weight bytes of each unit, above 0; in float64, which holds them exactly."""

    def kl(self, chosen: Bool[Tensor, " units"], text: Text) -> Float[Tensor, " sequences"]:
        """Divergence of the target with `chosen` quantized from the target as it is.

        Mean nats a token of each sequence of `text`; all sequences have as many tokens. `chosen`
        is on the CPU.
        """

    def gram(self) -> tuple[Float[Tensor, "units units"], Float[Tensor, "units units"]]:
        """G (gram.py) on the two halves of the calibration text."""


@runtime_checkable
class Journal(Protocol):
    """What was measured before a kill. One journal goes with one target and its two texts."""

    def get(self, key: str) -> list[float] | None:
        """What was put, if anything was."""

    def put(self, key: str, values: list[float]) -> None:
        """Keeps `values`; they are not asked for again before they would be found."""


class Measured:
    """A divergence seen through its journal, with its units in another order.

    Everything that looks for a set does so in that order. It is one of the units' properties, not
    of their numbers, so that the numbers cannot change what is found; ids are those numbers.
    """

    def __init__(self, divergence: Divergence, journal: Journal, order: Sequence[int]) -> None:
        self._divergence = divergence
        self._journal = journal
        self._order = torch.tensor(order)
        self.costs = divergence.costs.cpu().double()[self._order]

    def ids(self, chosen: Bool[Tensor, " units"]) -> tuple[int, ...]:
        """The units of a set, ascending."""
        return tuple(sorted(self._order[chosen].tolist()))

    def ordered(self, values: Sequence[float]) -> Float[Tensor, " units"]:
        """What is given by id, in the order of this."""
        return torch.tensor(values, dtype=torch.float64)[self._order]

    def kl(self, chosen: Bool[Tensor, " units"], text: Text) -> Float[Tensor, " sequences"]:
        """In float64.

        Raises:
            ValueError: one is not finite; the message names the units.
        """
        ids = self.ids(chosen)
        key = " ".join([text.name, *map(str, ids)])
        values = self._journal.get(key)
        if values is None:
            in_own_order = torch.zeros(len(chosen), dtype=torch.bool)
            in_own_order[list(ids)] = True
            values = self._divergence.kl(in_own_order, text).double().tolist()
            if not all(map(isfinite, values)):
                raise ValueError(f"the KL of units {list(ids)} must be finite, got {values}")
            self._journal.put(key, values)
        return torch.tensor(values, dtype=torch.float64)

    def mean(self, chosen: Bool[Tensor, " units"], text: Text) -> float:
        """Nats a token over the whole text."""
        return float(self.kl(chosen, text).mean())

    def means(
        self, sets: Iterable[Bool[Tensor, " units"]], text: Text, what: str
    ) -> Float[Tensor, " sets"]:
        """`mean` of each set, behind a progress bar.

        Sets that begin alike follow each other, since a model can go on from where they part.
        """
        listed = list(sets)
        members = [set(self.ids(chosen)) for chosen in listed]
        num_units = len(self.costs)
        order = sorted(
            range(len(listed)), key=lambda i: [unit in members[i] for unit in range(num_units)]
        )
        found = torch.zeros(len(listed), dtype=torch.float64)
        for i in tqdm(order, unit="set", desc=f"quantize: {what}"):
            found[i] = self.mean(listed[i], text)
        return found

    def gram(self) -> tuple[Float[Tensor, "units units"], Float[Tensor, "units units"]]:
        """The two halves of G, in float64."""
        num_units = len(self.costs)
        values = self._journal.get("gram")
        if values is None:
            halves = [half.double().flatten().tolist() for half in self._divergence.gram()]
            values = halves[0] + halves[1]
            self._journal.put("gram", values)
        both = torch.tensor(values, dtype=torch.float64).reshape(2, num_units, num_units)
        ordered = both[:, self._order][:, :, self._order]
        return ordered[0], ordered[1]


def mean_interval(values: Float[Tensor, " sequences"], seed: int) -> tuple[float, float]:
    """The percentile interval of the mean, sequences resampled."""
    drawn = resamples(len(values), NUM_BOOTSTRAP, seed)
    return percentiles(values[drawn].mean(1), CONFIDENCE)
