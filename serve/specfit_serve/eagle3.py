"""EAGLE-3 on the CPU kernels: a head that drafts, with its keys and values in pages.

Entry j of a sequence is the pair of its token j + 1 and the fused state of its token j. It stands
in column j and drafts token j + 2. Where a state is not known yet, the head's own output of the
entry before stands in for it.

Source: Li et al. 2025, arXiv:2503.01840.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Float32, Int, Int64
from torch import Tensor

from specfit_kernels import cpu
from specfit_kernels.cpu_layers import PAGE, PagedKV, Rope, Rows
from specfit_kernels.cpu_weights import CpuWeight
from specfit_serve.pages import PageTable
from specfit_serve.protocols import Draft
from specfit_serve.verify import sample, target_distribution


@dataclass(frozen=True)
class Eagle3Weights:
    """A head as the kernels read it; flags as in its checkpoint."""

    embeddings: Float[Tensor, "vocab hidden"]  # the target's
    fuse: CpuWeight
    qkv: CpuWeight  # of a normed embedding, then a normed state
    o: CpuWeight
    gate_up: CpuWeight
    down: CpuWeight
    head: CpuWeight
    target_ids: Int64[Tensor, " draft"]  # of the draft vocabulary
    embedding_norm: Float32[Tensor, " hidden"]
    state_norm: Float32[Tensor, " hidden"]
    post_attention_norm: Float32[Tensor, " hidden"]
    norm: Float32[Tensor, " hidden"]
    aux_norms: Float32[Tensor, "aux hidden"] | None  # one an aux state
    all_aux_norm: Float32[Tensor, " width"] | None  # one over all of them
    eps: float
    rope: Rope
    norm_before_residual: bool
    norm_output: bool


class Eagle3Proposer:
    """Each round writes the entries whose states the target has shown, then drafts from the last.

    They are written over whatever was drafted there: up to the own token the cache holds true
    states, always.
    """

    name = "eagle3"

    def __init__(self, weights: Eagle3Weights, *, num_slots: int, max_length: int) -> None:
        """Allocates a cache for full slots.

        What writes past `max_length` raises a ValueError.
        """
        self.weights = weights
        num_pages = 1 + num_slots * -(-max_length // PAGE)
        self._pages = PageTable(
            num_slots=num_slots, max_length=max_length, page=PAGE, num_pages=num_pages
        )
        head_dim = 2 * weights.rope.cosines.shape[1]
        num_kv_heads = (weights.qkv.rows - weights.o.columns) // (2 * head_dim)
        self._kv = PagedKV.empty(num_pages, num_kv_heads, head_dim)
        # Of each slot: fused states that have no entry yet, and the column of the first of them.
        self._pending: list[Tensor] = [torch.empty(0)] * num_slots
        self._first: list[int] = [0] * num_slots

    @torch.inference_mode()
    def start(
        self, slot: int, tokens: Sequence[int], features: Float[Tensor, "prompt width"] | None
    ) -> None:
        """See `Proposer.start`. All entries but the last get their keys and values here."""
        assert features is not None
        self._pages.release(slot)
        states = self._fuse(features)
        num_done = len(states) - 1
        if num_done:
            positions = torch.arange(num_done)
            slots = torch.full((num_done,), slot)
            self._append(list(tokens[1 : num_done + 1]), states[:-1], positions, slots)
        self._pending[slot] = states[num_done:]
        self._first[slot] = num_done

    @torch.inference_mode()
    def propose(
        self,
        sequences: Sequence[Sequence[int]],
        num_draft_tokens: int,
        temperatures: Float[Tensor, " rows"],
        uniforms: Float[Tensor, "rows k"],
    ) -> Draft:
        """See `Proposer.propose`."""
        rows = len(sequences)
        counts = [len(pending) for pending in self._pending[:rows]]
        firsts = self._first[:rows]
        tokens = [
            token
            for sequence, first, count in zip(sequences, firsts, counts, strict=True)
            for token in sequence[first + 1 : first + 1 + count]
        ]
        positions = torch.cat([torch.arange(f, f + c) for f, c in zip(firsts, counts, strict=True)])
        slots = torch.arange(rows).repeat_interleave(torch.tensor(counts))
        newest = torch.tensor(counts).cumsum(0) - 1
        states = torch.cat(self._pending[:rows])
        state, normed = self._step(tokens, states, positions, slots, newest)
        position, slots = positions[newest], slots[newest]
        every = torch.arange(rows)
        drafted: list[Tensor] = []
        probs: list[Tensor] = []
        sampled = bool((temperatures > 0).any())
        for i in range(num_draft_tokens):
            if i > 0:
                position = position + 1
                state, normed = self._step(drafted[-1].tolist(), state, position, slots, every)
            logits = cpu.linear(normed, self.weights.head)
            if sampled:
                draft_probs = target_distribution(logits[:, None], temperatures, 1.0)[:, 0]
                ids = sample(draft_probs, uniforms[:, i])
                over_target = draft_probs.new_zeros(rows, len(self.weights.embeddings))
                probs.append(over_target.index_copy_(1, self.weights.target_ids, draft_probs))
            else:
                ids = cpu.argmax(logits)
            drafted.append(self.weights.target_ids[ids])
        lengths = torch.full((rows,), num_draft_tokens)
        tokens_of = torch.stack(drafted, 1) if drafted else torch.zeros(rows, 0, dtype=torch.int64)
        return Draft(tokens_of, lengths, torch.stack(probs, 1) if probs else None)

    @torch.inference_mode()
    def observe(
        self, features: Float[Tensor, "rows seq width"] | None, num_kept: Int[Tensor, " rows"]
    ) -> None:
        """See `Proposer.observe`."""
        assert features is not None
        for slot, kept in enumerate(num_kept.tolist()):
            self._first[slot] += len(self._pending[slot])
            self._pending[slot] = self._fuse(features[slot, : kept + 1])

    def move(self, source: int, to: int) -> None:
        """See `Proposer.move`."""
        self._pages.move(source, to)
        self._pending[to] = self._pending[source]
        self._first[to] = self._first[source]

    def _fuse(self, features: Float[Tensor, "n width"]) -> Float32[Tensor, "n hidden"]:
        w = self.weights
        flat = features.contiguous()
        if w.aux_norms is not None:
            parts = flat.view(len(flat), len(w.aux_norms), -1).unbind(1)
            normed = [
                cpu.rmsnorm(part.contiguous(), weight, w.eps)
                for part, weight in zip(parts, w.aux_norms, strict=True)
            ]
            flat = torch.cat(normed, dim=1)
        if w.all_aux_norm is not None:
            flat = cpu.rmsnorm(flat, w.all_aux_norm, w.eps)
        return cpu.linear(flat, w.fuse)

    def _append(
        self,
        tokens: list[int],
        states: Float32[Tensor, "n hidden"],
        positions: Int[Tensor, " n"],
        slots: Int[Tensor, " n"],
    ) -> tuple[Rows, Tensor, Tensor]:
        """Writes entries; returns their places, queries and residuals."""
        w = self.weights
        for slot, position in zip(slots.tolist(), positions.tolist(), strict=True):
            if not self._pages.reserve(slot, position + 1):
                raise ValueError(
                    f"max_length must be at least {position + 1}, got {self._pages.max_length}"
                )
        embedded = w.embeddings[torch.tensor(tokens)].float()
        states = states.contiguous()
        normed = cpu.rmsnorm(states, w.state_norm, w.eps)
        read = torch.cat([cpu.rmsnorm(embedded, w.embedding_norm, w.eps), normed], dim=1)
        places = Rows(positions, slots, self._pages.table)
        queries = cpu.rope_append(cpu.linear(read, w.qkv), places, self._kv, w.rope)
        return places, queries, normed if w.norm_before_residual else states

    def _step(
        self,
        tokens: list[int],
        states: Float32[Tensor, "n hidden"],
        positions: Int[Tensor, " n"],
        slots: Int[Tensor, " n"],
        wanted: Int[Tensor, " rows"],
    ) -> tuple[Float32[Tensor, "rows hidden"], Float32[Tensor, "rows hidden"]]:
        """Writes entries and runs the layer on those that are `wanted`.

        Returns:
            The states that the next drafting step is fed, and the normalized ones that the head
            reads.
        """
        w = self.weights
        places, queries, residual = self._append(tokens, states, positions, slots)
        if len(wanted) < len(positions):
            places = Rows(positions[wanted], slots[wanted], self._pages.table)
            queries, residual = queries[wanted], residual[wanted]
        attended = cpu.linear(cpu.attention(queries, places, self._kv), w.o)
        x, normed = cpu.add_rmsnorm(residual, attended, w.post_attention_norm, w.eps)
        fed_forward = cpu.linear(cpu.silu_mul(cpu.linear(normed, w.gate_up)), w.down)
        output, normed = cpu.add_rmsnorm(x, fed_forward, w.norm, w.eps)
        return (normed if w.norm_output else output), normed
