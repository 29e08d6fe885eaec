"""A transformers model behind the decode loop's protocol: a KV cache of slots and columns."""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from specfit.targets.masks import attention_masks
from specfit.targets.target import Target
from specfit_serve.protocols import TargetOutput


class SlotTarget:
    """A target that holds `num_slots` sequences of up to `max_length` tokens.

    Keys and values of a token stand in the column of its position. A pass is over neighbouring
    slots, so the model sees a slice of the cache, never a copy.
    """

    def __init__(
        self, target: Target, *, num_slots: int, max_length: int, aux_layers: list[int] | None
    ) -> None:
        """Allocates nothing yet: the first pass shows what the layers keep.

        Args:
            target: the model.
            num_slots: sequences in flight.
            max_length: columns a slot.
            aux_layers: the layers whose input is returned as features, `aux * hidden` wide, in
                this order; None: no features.

        Raises:
            ValueError: `max_length` is beyond the target's context.
        """
        limit = target.info.max_position_embeddings
        if max_length > limit:
            raise ValueError(
                f"a sequence of {max_length} tokens does not fit the target's context of {limit}"
            )
        self.target = target
        self.aux_layers = aux_layers
        self.num_slots = num_slots
        self.max_length = max_length
        self.num_columns = num_slots * max_length
        self.vocab_size = target.info.vocab_size
        self.eos_ids = frozenset(target.info.eos_ids)
        self.device = target.device
        self._columns = torch.arange(max_length, device=target.device)
        self._layers = [_SlotLayer(num_slots, max_length) for _ in range(target.info.num_layers)]
        self._cache = Cache(layers=self._layers)

    @torch.inference_mode()
    def forward(
        self,
        tokens: Int[Tensor, "rows seq"],
        starts: Int[Tensor, "rows"],
        first_slot: int,
        last_only: bool = False,
    ) -> TargetOutput:
        """See `DecodeTarget.forward`."""
        rows, seq = tokens.shape
        positions = starts[:, None] + torch.arange(seq, device=self.device)
        num_columns = int(starts.max()) + seq
        for layer in self._layers:
            layer.window(first_slot, positions, num_columns)
        columns = self._columns[:num_columns].expand(rows, -1)
        masks = attention_masks(
            self.target.model.config,
            positions,
            columns,
            torch.ones_like(columns, dtype=torch.bool),
        )
        options: dict[str, Any] = {"logits_to_keep": 1} if last_only else {}
        with self.target.captured(self.aux_layers or []) as found:
            output = self.target.model(
                input_ids=tokens,
                attention_mask=masks,
                position_ids=positions,
                cache=self._cache,
                use_cache=True,
                **options,
            )
        features = None
        if self.aux_layers is not None:
            features = torch.cat([found.aux[i] for i in self.aux_layers], dim=-1)
        return TargetOutput(output.logits.float(), features)

    def reserve(self, slot: int, length: int) -> bool:  # noqa: ARG002
        """See `DecodeTarget.reserve`: every slot has all its columns."""
        return length <= self.max_length

    def release(self, slot: int) -> None:
        """See `DecodeTarget.release`: they stay its own."""

    @torch.inference_mode()
    def move(self, source: int, to: int) -> None:
        """See `DecodeTarget.move`."""
        for layer in self._layers:
            layer.move(source, to)


class _SlotLayer(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values of one layer, `slots heads columns head_dim`."""

    is_sliding = False

    def __init__(self, num_slots: int, max_length: int) -> None:
        super().__init__()
        self.num_slots = num_slots
        self.max_length = max_length

    def window(self, first_slot: int, positions: Int[Tensor, "rows seq"], num_columns: int) -> None:
        """Says where the next update writes, and how many columns it returns."""
        self.first_slot = first_slot
        self.positions = positions
        self.num_columns = num_columns

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocates for the heads that the model turns out to have."""

        def empty(like: Tensor) -> Tensor:
            # Zeros, since a masked NaN is still a NaN after its product with probability 0.
            shape = (self.num_slots, like.shape[1], self.max_length, like.shape[3])
            return torch.zeros(shape, dtype=like.dtype, device=like.device)

        self.keys, self.values = empty(key_states), empty(value_states)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[Float[Tensor, "rows heads columns dim"], Float[Tensor, "rows heads columns dim"]]:
        """Writes the new keys and values and returns all up to the last column in use."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        rows = key_states.shape[0]
        slots = slice(self.first_slot, self.first_slot + rows)
        keys, values = self.keys[slots], self.values[slots]
        row = torch.arange(rows, device=keys.device)[:, None]
        keys[row, :, self.positions] = key_states.transpose(1, 2)
        values[row, :, self.positions] = value_states.transpose(1, 2)
        return keys[:, :, : self.num_columns], values[:, :, : self.num_columns]

    def move(self, source: int, to: int) -> None:
        """Copies one slot over another."""
        if self.is_initialized:
            self.keys[to] = self.keys[source]
            self.values[to] = self.values[source]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:  # noqa: ARG002
        """Never decides anything: masks are passed in."""
        return self.num_columns, 0

    def get_seq_length(self) -> int:
        """Never decides anything: positions are passed in."""
        return 0

    def get_max_length(self) -> int:
        """The columns of a slot."""
        return self.max_length
