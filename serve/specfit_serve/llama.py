"""Llama and its relatives on the CPU kernels: packed weights, and a KV cache in pages."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Float32, Int
from torch import Tensor

from specfit_kernels import cpu
from specfit_kernels.cpu_layers import PAGE, DecoderLayer, LayerStack, PagedKV, Rope, Rows
from specfit_kernels.cpu_weights import CpuWeight
from specfit_serve.pages import PageTable
from specfit_serve.protocols import TargetOutput

MAX_ROWS = 256  # tokens that go through all layers at once: what lies between them stays in caches


@dataclass(frozen=True)
class LlamaWeights:
    """A model as the kernels read it."""

    embeddings: Float[Tensor, "vocab hidden"]  # float32 or bfloat16
    layers: tuple[DecoderLayer, ...]
    norm: Float32[Tensor, " hidden"]
    eps: float  # of that norm
    head: CpuWeight
    rope: Rope  # at every position of the context
    eos_ids: frozenset[int]

    @property
    def num_bytes(self) -> int:
        """Of the matrices that a pass reads; an embedding is one row."""
        matrices = [self.head]
        for layer in self.layers:
            matrices += [layer.qkv, layer.o, layer.gate_up, layer.down]
        return sum(m.tiles.nbytes + m.channel_scales.nbytes for m in matrices)


class LlamaTarget:
    """A `DecodeTarget` whose bits do not depend on who shares a pass, nor on how long it is.

    So a pass over a draft gives the very logits of passes over its tokens one by one, and greedy
    decoding with speculation the very tokens of decoding without. A prompt is read in parts.
    """

    device = torch.device("cpu")

    def __init__(
        self,
        weights: LlamaWeights,
        *,
        num_slots: int,
        max_length: int,
        aux_layers: list[int] | None,
        num_pages: int | None = None,
        kv_dtype: torch.dtype = torch.float32,
    ) -> None:
        """Allocates the cache.

        Args:
            weights: the model.
            num_slots: sequences in flight.
            max_length: columns a slot.
            aux_layers: the layers whose input is returned as features, `aux * hidden` wide, in
                this order; None: no features.
            num_pages: of 64 columns, for all slots together; None: as many as full slots take.
            kv_dtype: of keys and values, float32 or bfloat16.

        Raises:
            ValueError: `max_length` is beyond the model's context, or `num_pages` not even one.
        """
        self.pages = PageTable.of_target(
            context=len(weights.rope.cosines),
            num_slots=num_slots,
            max_length=max_length,
            page=PAGE,
            num_pages=num_pages,
        )
        self.weights = weights
        self.aux_layers = aux_layers
        self.num_slots = num_slots
        self.max_length = max_length
        self.num_columns = self.pages.num_columns
        self.vocab_size = weights.head.rows
        self.eos_ids = weights.eos_ids
        head_dim = 2 * weights.rope.cosines.shape[1]
        kvs = [
            PagedKV.empty(
                self.pages.num_pages,
                (layer.qkv.rows - layer.o.columns) // (2 * head_dim),
                head_dim,
                kv_dtype,
            )
            for layer in weights.layers
        ]
        self._stack = LayerStack(weights.layers, kvs, weights.rope)

    @property
    def column_bytes(self) -> int:
        """Of the keys and values of one token in all layers."""
        return sum(kv.keys[0, :, :, 0].nbytes + kv.values[0, :, 0].nbytes for kv in self._stack.kvs)

    @torch.inference_mode()
    def forward(
        self,
        tokens: Int[Tensor, "rows seq"],
        starts: Int[Tensor, " rows"],
        first_slot: int,
        last_only: bool = False,
    ) -> TargetOutput:
        """See `DecodeTarget.forward`.

        Raises:
            ValueError: the cache has no page left.
        """
        rows, seq = tokens.shape
        slots = torch.arange(first_slot, first_slot + rows)
        for slot, start in zip(slots.tolist(), starts.tolist(), strict=True):
            if not self.reserve(slot, start + seq):
                raise ValueError(f"slot {slot} has no page left for {start + seq} columns")
        positions = (starts[:, None] + torch.arange(seq)).flatten()
        states, features = self._run(tokens.flatten(), positions, slots.repeat_interleave(seq))
        states = states.view(rows, seq, -1)
        if last_only:
            states = states[:, -1:].contiguous()
        normed = cpu.rmsnorm(states.flatten(0, 1), self.weights.norm, self.weights.eps)
        logits = cpu.linear(normed, self.weights.head).view(*states.shape[:2], -1)
        return TargetOutput(logits, None if features is None else features.view(rows, seq, -1))

    def reserve(self, slot: int, length: int) -> bool:
        """See `DecodeTarget.reserve`."""
        return self.pages.reserve(slot, length)

    def release(self, slot: int) -> None:
        """See `DecodeTarget.release`."""
        self.pages.release(slot)

    def move(self, source: int, to: int) -> None:
        """See `DecodeTarget.move`. Pages change hands; nothing is copied."""
        self.pages.move(source, to)

    def _run(
        self, tokens: Int[Tensor, " n"], positions: Int[Tensor, " n"], slots: Int[Tensor, " n"]
    ) -> tuple[Float32[Tensor, "n hidden"], Float32[Tensor, "n width"] | None]:
        """The states behind the last layer, and the features; MAX_ROWS at a time."""
        layers = self.aux_layers or []
        states: list[Tensor] = []
        features: list[Tensor] = []
        for part in (slice(i, i + MAX_ROWS) for i in range(0, len(tokens), MAX_ROWS)):
            last, captured = cpu.forward_layers(
                self.weights.embeddings[tokens[part]].float(),
                self._stack,
                Rows(positions[part], slots[part], self.pages.table),
                capture=layers,
            )
            states.append(last)
            features.append(torch.cat([last[:, :0], *(captured[i] for i in layers)], dim=1))
        return torch.cat(states), None if self.aux_layers is None else torch.cat(features)
