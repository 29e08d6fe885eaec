"""How far a target with quantized units is from the target as it is, token by token."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from specfit.quantization.config import Precision
from specfit.quantization.fidelity import TokenFigures
from specfit.quantization.gram import GramSum
from specfit.quantization.measured import Text, UnitsAlone
from specfit.quantization.switch import UnitSwitch
from specfit.quantization.units import Unit
from specfit.targets.target import Target
from specfit_kernels.rules import ScaleRule

CHUNK_LOGITS = 1 << 26  # logits of all units together that are worked on at once


@dataclass(frozen=True)
class Passages:
    """Text that a target wrote, padded on the left.

    What counts is the prediction of the last `num_counted` tokens of each.
    """

    input_ids: Int[Tensor, "sequences seq"]
    valid: Bool[Tensor, "sequences seq"]
    num_counted: int

    @classmethod
    def of(
        cls, conversations: Sequence[tuple[list[int], list[int]]], context: int, num_counted: int
    ) -> "Passages":
        """Of each prompt up to `context` tokens of its end, of its answer the first tokens."""
        shape = (len(conversations), context + num_counted)
        input_ids = torch.zeros(shape, dtype=torch.int64)
        valid = torch.zeros(shape, dtype=torch.bool)
        for i, (prompt, answer) in enumerate(conversations):
            assert len(answer) >= num_counted
            tokens = prompt[-context:] + answer[:num_counted]
            input_ids[i, -len(tokens) :] = torch.tensor(tokens)
            valid[i, -len(tokens) :] = True
        return cls(input_ids, valid, num_counted)

    def split(self, num_sequences: int) -> "list[Passages]":
        """The same, some sequences at a time, each part as wide as its longest one."""
        starts = range(0, len(self.input_ids), num_sequences)
        return [self._part(slice(start, start + num_sequences)) for start in starts]

    def _part(self, rows: slice) -> "Passages":
        width = int(self.valid[rows].sum(1).max())
        return Passages(self.input_ids[rows, -width:], self.valid[rows, -width:], self.num_counted)


@dataclass(frozen=True)
class _Reference:
    """A batch of passages as the target without quantized units reads it."""

    input_ids: Int[Tensor, "sequences seq"]  # without the last token, after which nothing counts
    valid: Bool[Tensor, "sequences seq"]
    following: Int[Tensor, "sequences counted"]
    entering: list[Float[Tensor, "sequences seq hidden"]]  # each layer, then the final norm
    log_probs: Float[Tensor, "sequences counted vocab"]


class ModelDivergence:
    """`Divergence` of a model in memory.

    What enters each layer of the target as it is, and its log-probabilities, are kept, so that a
    pass starts at the first layer with a quantized unit; so is what the latest set made of it, for
    the next one that begins alike: 2 * layers * hidden numbers for each token that is read, and
    vocab for each that counts. Nothing is made in inference mode, since gradients flow through the
    same tensors in `loss`.
    """

    def __init__(
        self,
        target: Target,
        switch: UnitSwitch,
        texts: dict[Text, Passages],
        *,
        groups: Sequence[Sequence[Unit]],
        batch_size: int,
    ) -> None:
        """Reads the texts once.

        Args:
            target: whose units `switch` sets.
            switch: all units as they came, again after every measurement.
            texts: which to measure on.
            groups: of units that are decided on together; `Divergence` calls each a unit.
            batch_size: sequences a pass.
        """
        self.target = target
        self.switch = switch
        self.groups = groups
        sizes = [sum(switch.num_weights(unit) for unit in group) for group in groups]
        self.costs = torch.tensor(sizes, dtype=torch.float64)
        switch.restore()
        self._batch_size = batch_size
        self._latest: dict[int, tuple[frozenset[tuple[Unit, Precision]], list[Tensor]]] = {}
        self._reference: dict[Text, list[_Reference]] = {
            text: [self._read(part) for part in passages.split(batch_size)]
            for text, passages in texts.items()
            if text is not Text.units
        }
        # That one is long, and read once only, a batch at a time.
        self._units_text = texts[Text.units].split(batch_size) if Text.units in texts else []

    @property
    def names(self) -> list[str]:
        """Of the groups, as records have them."""
        return [" ".join(str(unit) for unit in group) for group in self.groups]

    def requantize(self, rule: ScaleRule, factors: Mapping[str, float]) -> None:
        """See `UnitSwitch.requantize`."""
        self.switch.requantize(rule, factors)
        self.forget()

    def forget(self) -> None:
        """Does without what the latest set made of the text: someone changed what sets make."""
        self._latest.clear()

    def units(self, chosen: Bool[Tensor, "units"]) -> list[Unit]:
        """Of the groups that are chosen."""
        return [unit for i in chosen.nonzero().flatten().tolist() for unit in self.groups[i]]

    @torch.no_grad()
    def kl(self, chosen: Bool[Tensor, "units"], text: Text) -> Float[Tensor, "sequences"]:
        """See `Divergence.kl`."""
        return self.tokens(chosen, text).kl.mean(-1)

    @torch.no_grad()
    def tokens(self, chosen: Bool[Tensor, "units"], text: Text) -> TokenFigures:
        """All figures of every token, with `chosen` quantized."""
        units = self.units(chosen)
        return self._figures(text, lambda reference: self._last(reference, units), self.target)

    @torch.no_grad()
    def tokens_of(self, target: Target, text: Text, *, one_by_one: bool = False) -> TokenFigures:
        """Of another target with this one's vocabulary; or of this, after someone changed it.

        `one_by_one`: a passage a pass, which moves figures by the rounding of other batch shapes.
        """

        def last(reference: _Reference) -> Float[Tensor, "sequences counted hidden"]:
            size = 1 if one_by_one else len(reference.input_ids)
            starts = range(0, len(reference.input_ids), size)
            parts = [slice(start, start + size) for start in starts]
            states = torch.cat(
                [target.states(reference.input_ids[p], reference.valid[p], [])[1] for p in parts]
            )
            return states[:, -reference.log_probs.shape[1] :]

        return self._figures(text, last, target)

    def _figures(
        self,
        text: Text,
        last: Callable[[_Reference], Float[Tensor, "sequences counted hidden"]],
        target: Target,
    ) -> TokenFigures:
        parts = []
        for reference in self._reference[text]:
            for log_p, states, following in zip(
                reference.log_probs, last(reference), reference.following, strict=True
            ):
                log_q = target.logits(states).log_softmax(-1)
                parts.append(TokenFigures.of(log_p, log_q, following))
        self.switch.restore()
        return TokenFigures.joined(parts)

    def num_batches(self, text: Text) -> int:
        """For `loss`."""
        return len(self._reference[text])

    def loss(self, units: Collection[Unit], text: Text, batch: int) -> Float[Tensor, ""]:
        """KL of one batch with `units` quantized, in nats a token, for gradients to start from.

        The units stay quantized: the backward pass reads their weights again.
        """
        reference = self._reference[text][batch]
        last = self._last(reference, units)
        log_p = reference.log_probs
        log_q = self.target.logits(last).log_softmax(-1)
        return (log_p.exp() * (log_p - log_q)).sum(-1).mean()

    @property
    def num_parts(self) -> int:
        """See `Divergence.num_parts`: batches."""
        return len(self._units_text)

    @torch.no_grad()
    def alone(self, part: int) -> UnitsAlone:
        """See `Divergence.alone`; the text's sequences go to the halves in turn, over all parts."""
        num_groups = len(self.groups)
        halves = GramSum(num_groups), GramSum(num_groups)
        reference = self._read(self._units_text[part])
        moved = torch.stack([self._last(reference, group, keep=False) for group in self.groups])
        kl = torch.zeros(num_groups, len(moved[0]), dtype=torch.float64)
        before = part * self._batch_size
        for i, log_p in enumerate(reference.log_probs):
            half = halves[(before + i) % 2]
            step = max(1, CHUNK_LOGITS // (num_groups * log_p.shape[-1]))
            plain = reference.entering[-1][i, -len(log_p) :]
            for first in range(0, len(log_p), step):
                rows = slice(first, first + step)
                change = self.target.logits(moved[:, i, rows]) - self.target.logits(plain[rows])
                kl[:, i] += half.add(log_p[rows], change) / len(log_p)
        self.switch.restore()
        sums = torch.stack([half.sum for half in halves])
        return UnitsAlone(kl, sums, (halves[0].num_tokens, halves[1].num_tokens))

    def _last(
        self, reference: _Reference, units: Collection[Unit], *, keep: bool = True
    ) -> Float[Tensor, "sequences counted hidden"]:
        """The states before the final norm where something counts, with `units` quantized.

        The pass starts where it first differs from the target as it is, or from the latest set,
        which this one becomes unless it is not to be kept.
        """
        self.switch.choose(units)
        now = self.switch.precisions(units)
        top = self.target.info.num_layers
        known = [(frozenset[tuple[Unit, Precision]](), reference.entering)]
        inference = not torch.is_grad_enabled()
        if inference and id(reference) in self._latest:
            known.append(self._latest[id(reference)])

        def first_differing(other: tuple[frozenset[tuple[Unit, Precision]], list[Tensor]]) -> int:
            return min((unit.layer for unit, _ in other[0] ^ now), default=top)

        nearest = max(known, key=first_differing)
        layer, entering = first_differing(nearest), nearest[1]
        states = entering[:layer] + self.target.states_from(
            layer, entering[layer], reference.input_ids, reference.valid
        )
        if inference and keep:
            self._latest[id(reference)] = (now, states)
        return states[-1][:, -reference.log_probs.shape[1] :]

    @torch.no_grad()
    def _read(self, passages: Passages) -> _Reference:
        device = self.target.device
        input_ids = passages.input_ids[:, :-1].to(device)
        valid = passages.valid[:, :-1].to(device)
        aux, last = self.target.states(input_ids, valid, list(range(self.target.info.num_layers)))
        aux, last = aux.clone(), last.clone()
        log_probs = [
            self.target.logits(states).log_softmax(-1)
            for states in last[:, -passages.num_counted :]
        ]
        following = passages.input_ids[:, -passages.num_counted :].to(device)
        entering = [*aux.unbind(2), last]
        return _Reference(input_ids, valid, following, entering, torch.stack(log_probs))
