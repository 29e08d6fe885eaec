"""Measured divergences: each set on each text once, whatever asks for it and however often."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from math import isfinite, log, sqrt
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from tqdm import tqdm

from specfit.quantization.fidelity import CONFIDENCE, NUM_BOOTSTRAP
from specfit_serve.bootstrap import percentiles, resamples


class Text(Enum):
    """What a divergence is measured on; no two share a conversation."""

    units = 0  # what units alone do, and in pairs: long, since signs of pairs are faint
    calibration = 1  # what predictions of sets are fitted to
    selection = 2  # what decides
    report = 3  # what is published: nothing was chosen by it


@dataclass(frozen=True)
class UnitsAlone:
    """What quantizing each unit alone does on a part of the text of units."""

    kl_nats: Float[Tensor, "units sequences"]  # means over tokens
    gram_sums: Float[Tensor, "2 units units"]  # of two halves of the sequences; see gram.py
    num_tokens: tuple[int, int]  # in the halves

    @property
    def mean_kl_nats(self) -> Float[Tensor, " units"]:
        """A unit's, over the whole text."""
        return self.kl_nats.mean(1)

    @property
    def gram_halves(self) -> tuple[Float[Tensor, "units units"], Float[Tensor, "units units"]]:
        """G on each half of the text."""
        first, second = self.gram_sums
        return first / self.num_tokens[0], second / self.num_tokens[1]

    def to_list(self) -> list[float]:
        """For a journal."""
        sums = [*self.kl_nats.flatten().tolist(), *self.gram_sums.flatten().tolist()]
        return [float(n) for n in (*self.kl_nats.shape, *self.num_tokens)] + sums

    @classmethod
    def from_list(cls, values: list[float]) -> "UnitsAlone":
        """What `to_list` gave."""
        num_units, num_sequences, *num_tokens = (int(n) for n in values[:4])
        rest = torch.tensor(values[4:], dtype=torch.float64)
        kl = rest[: num_units * num_sequences].view(num_units, num_sequences)
        sums = rest[num_units * num_sequences :].view(2, num_units, num_units)
        return cls(kl, sums, (num_tokens[0], num_tokens[1]))

    @classmethod
    def joined(cls, parts: "Sequence[UnitsAlone]") -> "UnitsAlone":
        """Of all parts."""
        first, second = (sum(part.num_tokens[i] for part in parts) for i in (0, 1))
        sums = torch.stack([part.gram_sums for part in parts]).sum(0)
        return cls(torch.cat([part.kl_nats for part in parts], dim=1), sums, (first, second))


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

    @property
    def num_parts(self) -> int:
        """In which the text of units is read."""

    def alone(self, part: int) -> UnitsAlone:
        """What each unit alone does on a part of that text."""


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
            put_finite(self._journal, key, values, f"units {list(ids)}")
        return torch.tensor(values, dtype=torch.float64)

    def mean(self, chosen: Bool[Tensor, " units"], text: Text) -> float:
        """Nats a token over the whole text."""
        return float(self.kl(chosen, text).mean())

    def kls(
        self, sets: Iterable[Bool[Tensor, " units"]], text: Text, what: str
    ) -> Float[Tensor, "sets sequences"]:
        """`kl` of each set, behind a progress bar.

        Sets that begin alike follow each other, since a model can go on from where they part.
        """
        listed = list(sets)
        members = [set(self.ids(chosen)) for chosen in listed]
        num_units = len(self.costs)
        order = sorted(
            range(len(listed)), key=lambda i: [unit in members[i] for unit in range(num_units)]
        )
        for i in tqdm(order, unit="set", desc=f"quantize: {what}"):
            self.kl(listed[i], text)
        return torch.stack([self.kl(chosen, text) for chosen in listed])

    def alone(self) -> UnitsAlone:
        """What each unit alone does on the text of units."""
        values = self._journal.get("alone")
        if values is None:
            parts = []
            for i in tqdm(range(self._divergence.num_parts), unit="part", desc="quantize: units"):
                values = self._journal.get(f"alone {i}")
                if values is None:
                    part = self._divergence.alone(i)
                    _require_finite(part)
                    values = part.to_list()
                    self._journal.put(f"alone {i}", values)
                parts.append(UnitsAlone.from_list(values))
            values = UnitsAlone.joined(parts).to_list()
            self._journal.put("alone", values)
        found = UnitsAlone.from_list(values)
        sums = found.gram_sums[:, self._order][:, :, self._order]
        return UnitsAlone(found.kl_nats[self._order], sums, found.num_tokens)


def put_finite(journal: Journal, key: str, kl_nats: list[float], whose: str) -> None:
    """Keeps a divergence.

    Raises:
        ValueError: it is not finite; nothing is kept.
    """
    if not all(map(isfinite, kl_nats)):
        raise ValueError(f"the KL of {whose} must be finite, got {kl_nats}")
    journal.put(key, kl_nats)


def _require_finite(alone: UnitsAlone) -> None:
    own = alone.gram_sums.diagonal(dim1=1, dim2=2)  # which bounds a unit's pairs
    finite = alone.kl_nats.isfinite().all(1) & own.isfinite().all(0)
    if not finite.all():
        unit = int(finite.logical_not().nonzero()[0])
        got = alone.kl_nats[unit].tolist()
        raise ValueError(f"the KL of units [{unit}] must be finite, got {got}")


def luckiest(num_sets: int) -> float:
    """Standard errors by which the luckiest of as many equal sets looks better: √(2 ln n)."""
    return sqrt(2 * log(num_sets))


def mean_interval(values: Float[Tensor, " sequences"], seed: int) -> tuple[float, float]:
    """The percentile interval of the mean, sequences resampled."""
    drawn = resamples(len(values), NUM_BOOTSTRAP, seed)
    return percentiles(values[drawn].mean(1), CONFIDENCE)
