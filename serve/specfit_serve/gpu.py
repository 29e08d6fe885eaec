"""Llama and its relatives on a GPU's Triton kernels: NVFP4 weights, and a KV cache in pages."""

from dataclasses import dataclass

import torch
from jaxtyping import Float32, Int, Int32, Int64
from torch import Tensor

from specfit_kernels.kv_pages import PAGE, KVPages, Places
from specfit_kernels.skinny_bf16 import skinny_bf16
from specfit_serve.gpu_layers import MAX_DRAFT, Buffers, Pass, embed, forward_layers
from specfit_serve.gpu_weights import GpuWeights
from specfit_serve.pages import PageTable
from specfit_serve.protocols import TargetOutput

PROMPT_ROWS = 512  # tokens of a prompt that go through all layers at once


class GpuTarget:
    """A `DecodeTarget` whose drafts have the bits of passes over their tokens one by one.

    Up to MAX_DRAFT tokens of each sequence are a draft: a token's bits depend neither on who shares
    the pass nor on how long it is. So greedy decoding with speculation emits the very tokens of
    decoding without, as long as it drafts fewer than MAX_DRAFT. What is longer is a prompt, and has
    bits of its own, the same however it is cut; so a sequence that is put back and read again may
    go on with other bits than it would have.

    A draft of a shape seen before is one replay of a CUDA graph: no memory is allocated but for
    features, and nobody waits. In Triton's interpreter all is launched one by one.

    What drafts return as logits is valid until the next pass. Features are the caller's own.
    """

    def __init__(
        self,
        weights: GpuWeights,
        *,
        num_slots: int,
        max_length: int,
        aux_layers: list[int] | None,
        num_pages: int | None = None,
        graphs: bool = True,
    ) -> None:
        """Allocates the cache.

        Args:
            weights: the model.
            num_slots: sequences in flight.
            max_length: columns a slot.
            aux_layers: the layers whose input is returned as features, `aux * hidden` wide, in
                this order, none twice; None: no features.
            num_pages: of 64 columns, for all slots together; None: as many as full slots take.
            graphs: False launches kernels one by one on a GPU, too.

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
        self.device = weights.embeddings.device
        self.aux_layers = aux_layers
        self.num_slots = num_slots
        self.max_length = max_length
        self.num_columns = self.pages.num_columns
        self.vocab_size = len(weights.head)
        self.eos_ids = weights.eos_ids
        self._kv = [
            KVPages.empty(self.pages.num_pages, weights.num_kv_heads, weights.head_dim, self.device)
            for _ in weights.layers
        ]
        self._table = self.pages.table.int().to(self.device)
        self._table_is_old = False
        self._graphs = graphs and self.device.type == "cuda"
        self._memory: dict[int, _Memory] = {}  # by the tokens that it is for
        self._drafts: dict[tuple[int, int], _Draft] = {}  # by rows and tokens of each

    @property
    def column_bytes(self) -> int:
        """Of the keys and values of one token in all layers."""
        return sum(kv.keys[0, :, 0].nbytes + kv.values[0, :, 0].nbytes for kv in self._kv)

    @torch.inference_mode()
    def forward(
        self,
        tokens: Int[Tensor, "rows seq"],
        starts: Int[Tensor, " rows"],
        first_slot: int,
        last_only: bool = False,
    ) -> TargetOutput:
        """See `DecodeTarget.forward`.

        A draft whose `starts` are on a GPU must have its columns reserved, as `decode` does: to
        look at them here would be to wait. All others get them here.

        Raises:
            ValueError: the cache has no page left.
        """
        rows, seq = tokens.shape
        is_prompt = seq > MAX_DRAFT
        if is_prompt or starts.is_cpu:
            for slot, start in enumerate(starts.tolist(), first_slot):
                if not self.reserve(slot, start + seq):
                    raise ValueError(f"slot {slot} has no page left for {start + seq} columns")
        if self._table_is_old:
            # Nobody waits, and yet the table may change right after: since it lies in memory that a
            # GPU cannot read, it has been copied once when this returns.
            self._table.copy_(self.pages.table, non_blocking=True)
            self._table_is_old = False
        if is_prompt:
            return self._read(tokens, starts.tolist(), first_slot, last_only)
        draft = self._drafts.get((rows, seq))
        if draft is None:
            draft = self._drafts[rows, seq] = self._draft(rows, seq)
        draft.run(tokens, starts, first_slot)
        logits = draft.logits.view(rows, seq, -1)
        features = None
        if self.aux_layers is not None:
            captured = draft.work.buffers.captured
            features = logits.new_empty(rows, seq, len(captured) * captured.shape[2])
            _copy_features(captured, features.view(rows * seq, -1))
        return TargetOutput(logits[:, -1:] if last_only else logits, features)

    def reserve(self, slot: int, length: int) -> bool:
        """See `DecodeTarget.reserve`."""
        num_free = self.pages.num_free
        has_room = self.pages.reserve(slot, length)
        self._table_is_old |= self.pages.num_free != num_free
        return has_room

    def release(self, slot: int) -> None:
        """See `DecodeTarget.release`."""
        self.pages.release(slot)
        self._table_is_old = True

    def move(self, source: int, to: int) -> None:
        """See `DecodeTarget.move`. Pages change hands; nothing is copied."""
        self.pages.move(source, to)
        self._table_is_old = True

    def _draft(self, rows: int, seq: int) -> "_Draft":
        num_tokens = rows * seq
        for_tokens = max(MAX_DRAFT, 1 << (num_tokens - 1).bit_length())
        if for_tokens not in self._memory:
            self._memory[for_tokens] = _Memory(
                self._buffers(for_tokens, is_prompt=False),
                torch.empty(for_tokens, self.vocab_size, device=self.device),
            )
        memory = self._memory[for_tokens]
        positions, sequences = torch.zeros(2, num_tokens, dtype=torch.int32, device=self.device)
        work = Pass(
            places=Places(positions, sequences, self._table),
            tokens_each=seq,
            buffers=memory.buffers.first(num_tokens),
            aux_layers=self.aux_layers or [],
            is_prompt=False,
            pdl=self.device.type == "cuda",
        )
        return _Draft(self.weights, self._kv, work, memory.logits[:num_tokens], self._graphs)

    def _buffers(self, num_tokens: int, *, is_prompt: bool) -> Buffers:
        return Buffers.empty(
            self.weights,
            num_tokens,
            num_aux=len(self.aux_layers or []),
            max_length=self.max_length,
            is_prompt=is_prompt,
        )

    def _read(
        self, tokens: Int[Tensor, "rows seq"], starts: list[int], first_slot: int, last_only: bool
    ) -> TargetOutput:
        """A prompt a row, PROMPT_ROWS at a time."""
        rows, seq = tokens.shape
        hidden = self.weights.embeddings.shape[1]
        buffers = self._buffers(min(seq, PROMPT_ROWS), is_prompt=True)
        width = len(buffers.captured) * hidden
        logits = torch.empty(rows, 1 if last_only else seq, self.vocab_size, device=self.device)
        features = torch.empty(rows, seq, width, device=self.device)
        for row, start in enumerate(starts):
            for at in range(0, seq, PROMPT_ROWS):
                part = slice(at, min(at + PROMPT_ROWS, seq))
                some = buffers.first(part.stop - at)
                self._read_part(tokens[row, part], start + at, first_slot + row, some)
                _copy_features(some.captured, features[row, part])
                if not last_only:
                    skinny_bf16(self.weights.head, some.normed, logits[row, part])
            if last_only:
                skinny_bf16(self.weights.head, some.normed[-1:], logits[row])
        return TargetOutput(logits, None if self.aux_layers is None else features)

    def _read_part(
        self, tokens: Int[Tensor, " tokens"], start: int, slot: int, buffers: Buffers
    ) -> None:
        num_tokens = len(tokens)
        positions = torch.arange(start, start + num_tokens, device=self.device).int()
        sequences = torch.full_like(positions, slot)
        work = Pass(
            places=Places(positions, sequences, self._table),
            tokens_each=num_tokens,
            buffers=buffers,
            aux_layers=self.aux_layers or [],
            is_prompt=True,
            pdl=False,
        )
        embed(self.weights, tokens, buffers)
        forward_layers(self.weights, self._kv, work)


@dataclass(frozen=True)
class _Memory:
    """Of drafts of up to so many tokens, which never run at the same time."""

    buffers: Buffers
    logits: Float32[Tensor, "tokens vocab"]


class _Draft:
    """Passes of one shape."""

    def __init__(
        self,
        weights: GpuWeights,
        kv: list[KVPages],
        work: Pass,
        logits: Float32[Tensor, "tokens vocab"],
        graphs: bool,
    ) -> None:
        self.weights = weights
        self.kv = kv
        self.work = work
        self.logits = logits
        num_tokens, device = len(logits), logits.device
        rows = num_tokens // work.tokens_each
        self.tokens: Int64[Tensor, " tokens"] = torch.zeros(
            num_tokens, dtype=torch.int64, device=device
        )
        self.starts: Int64[Tensor, " rows"] = torch.zeros(rows, dtype=torch.int64, device=device)
        self.offsets = torch.arange(work.tokens_each, device=device)
        self.rows: Int32[Tensor, " tokens"] = (
            torch.arange(rows, device=device).repeat_interleave(work.tokens_each).int()
        )
        self.first_slot = -1
        self.graphs = graphs
        self.graph: torch.cuda.CUDAGraph | None = None

    def run(
        self, tokens: Int[Tensor, "rows seq"], starts: Int[Tensor, " rows"], first_slot: int
    ) -> None:
        """Fills the logits and what is captured."""
        self.tokens.copy_(tokens.flatten(), non_blocking=True)
        self.starts.copy_(starts, non_blocking=True)
        if self.first_slot != first_slot:
            torch.add(self.rows, first_slot, out=self.work.places.sequences)
            self.first_slot = first_slot
        if self.graph is not None:
            self.graph.replay()
            return
        self._launch()  # also compiles, which no capture allows
        if self.graphs:
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self._launch()

    def _launch(self) -> None:
        positions = self.work.places.positions.view(len(self.starts), -1)
        torch.add(self.starts[:, None], self.offsets, out=positions)
        embed(self.weights, self.tokens, self.work.buffers)
        forward_layers(self.weights, self.kv, self.work)
        normed = self.work.buffers.normed
        skinny_bf16(self.weights.head, normed, self.logits, pdl=self.work.pdl)


def _copy_features(
    captured: Float32[Tensor, "aux tokens hidden"], features: Float32[Tensor, "tokens width"]
) -> None:
    """Each token's layers one after another."""
    features.view(len(features), *captured.shape[::2]).copy_(captured.transpose(0, 1))
