"""A target without a network: logits to which each quantized unit adds its own perturbation."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from specfit.quantization.gram import GramSum
from specfit.quantization.measured import Text, UnitsAlone


@dataclass
class Journal:
    """Measurements in memory. With `most`, the run dies before it measures one more."""

    values: dict[str, list[float]] = field(default_factory=dict)
    most: int | None = None

    def get(self, key: str) -> list[float] | None:
        """What was put, if anything was."""
        if key not in self.values and len(self.values) == self.most:
            raise KeyboardInterrupt
        return self.values.get(key)

    def put(self, key: str, values: list[float]) -> None:
        """Keeps `values`, which were not there yet."""
        assert key not in self.values
        self.values[key] = values


class SyntheticTarget:
    """Texts, independent draws of the same statistics, and their exact divergences.

    Args:
        scales: size of each unit's perturbation; alone its KL is near scale² / 2.
        correlations: of the units' perturbations.
        costs: bytes of each unit.
        saturation: size to which perturbations are held, whatever is quantized; None: none.
        seed: of everything.
        num_sequences: of each text, of 32 tokens over 24 words.
        order: the units in another order: unit i here is unit order[i] of the same target there.
    """

    def __init__(
        self,
        scales: Tensor,
        correlations: Tensor,
        costs: Tensor,
        *,
        saturation: float | None = None,
        seed: int = 0,
        num_sequences: int = 16,
        order: list[int] | None = None,
    ) -> None:
        self.costs = costs if order is None else costs[order]
        self.calls: list[tuple[tuple[int, ...], Text]] = []
        self._num_sequences, self._saturation = num_sequences, saturation
        generator = torch.Generator().manual_seed(seed)
        factor = torch.linalg.cholesky(correlations.double() + 1e-9 * torch.eye(len(scales)))
        self.log_probs, self.perturbations = {}, {}
        for text in Text:
            shape = (num_sequences * 32, 24)
            logits = 2 * torch.randn(shape, generator=generator, dtype=torch.float64)
            noise = torch.randn((len(scales), *shape), generator=generator, dtype=torch.float64)
            moved = torch.einsum("ij,jtv->itv", scales[:, None] * factor, noise)
            self.log_probs[text] = logits.log_softmax(-1)
            self.perturbations[text] = moved if order is None else moved[order]

    def kl(self, chosen: Tensor, text: Text) -> Tensor:
        """KL from the target to itself perturbed, by sequence."""
        self.calls.append((tuple(chosen.nonzero().flatten().tolist()), text))
        log_probs = self.log_probs[text]
        moved = self.perturbations[text][chosen].sum(0)
        if self._saturation is not None:
            size = moved.square().mean(-1, keepdim=True)
            moved = moved / (1 + size / self._saturation**2).sqrt()
        quantized = (log_probs + moved).log_softmax(-1)
        by_token = (log_probs.exp() * (log_probs - quantized)).sum(-1)
        return by_token.reshape(self._num_sequences, -1).mean(1)

    num_parts = 1

    def alone(self, part: int) -> UnitsAlone:
        """Each unit's KL, and G of the halves of the text of units."""
        assert part == 0
        halves = []
        for tokens in torch.arange(self._num_sequences * 32).chunk(2):
            half = GramSum(len(self.costs))
            half.add(self.log_probs[Text.units][tokens], self.perturbations[Text.units][:, tokens])
            halves.append(half)
        units = torch.eye(len(self.costs), dtype=torch.bool)
        kl = torch.stack([self.kl(unit, Text.units) for unit in units])
        sums = torch.stack([half.sum for half in halves])
        return UnitsAlone(kl, sums, (halves[0].num_tokens, halves[1].num_tokens))

    def gram(self) -> tuple[Tensor, Tensor]:
        """G on the halves."""
        return self.alone(0).gram_halves


def mixed_units(seed: int, num_units: int = 8, **changes: Any) -> SyntheticTarget:
    """Units of very different costs and sizes, some of which cancel; their errors saturate."""
    generator = torch.Generator().manual_seed(seed)
    mixing = 0.35 * torch.randn(num_units, num_units, generator=generator)
    mixing += torch.eye(num_units)
    covariance = mixing @ mixing.T
    deviations = covariance.diagonal().sqrt()
    correlations = covariance / deviations / deviations[:, None]
    costs = 1024 * torch.randint(3, 17, (num_units,), generator=generator).double()
    scales = 0.1 + 0.3 * torch.rand(num_units, generator=generator)
    settings = {"saturation": 0.8, "seed": seed} | changes
    return SyntheticTarget(scales, correlations, costs, **settings)
