"""A head that drafts in the decode loop."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from specfit.draft_vocab import DraftVocab
from specfit.speculators.eagle3 import Eagle3
from specfit_serve.protocols import Draft
from specfit_serve.verify import sample


class Eagle3Proposer:
    """EAGLE-3 over slots: entry j of a sequence has its key and value in column j.

    Each round starts by writing the entries whose states the target has shown since the last one
    (over whatever was drafted there), then drafts from the last of them. So the cache holds true
    states up to the own token, always.
    """

    name = "eagle3"

    def __init__(
        self,
        head: Eagle3,
        vocab: DraftVocab,
        embeddings: Float[Tensor, "vocab hidden"],
        *,
        num_slots: int,
        max_length: int,
    ) -> None:
        c = head.config
        device = head.fc.weight.device
        self.head = head
        self.embeddings = embeddings
        self.target_ids = vocab.target_ids.to(device)
        shape = (num_slots, c.num_kv_heads, max_length, c.head_dim)
        self._keys = torch.zeros(shape, dtype=head.fc.weight.dtype, device=device)
        self._values = torch.zeros_like(self._keys)
        self._columns = torch.arange(max_length, device=device)
        # Of each slot: fused states that have no entry yet, and the column of the first of them.
        self._pending: list[Tensor] = [torch.empty(0)] * num_slots
        self._first: list[int] = [0] * num_slots

    @torch.inference_mode()
    def start(
        self, slot: int, tokens: Sequence[int], features: Float[Tensor, "prompt width"] | None
    ) -> None:
        """See `Proposer.start`. All entries but the last get their keys and values here."""
        assert features is not None
        states = self._fuse(features)
        num_done = len(states) - 1
        if num_done:
            positions = torch.arange(num_done, device=states.device)
            read, _ = self.head.entries(self._embed([tokens[1 : num_done + 1]])[0], states[:-1])
            keys, values = self.head.keys_values(read, self.head.rotation(positions))
            self._keys[slot, :, :num_done] = keys.transpose(0, 1)
            self._values[slot, :, :num_done] = values.transpose(0, 1)
        self._pending[slot] = states[num_done:]
        self._first[slot] = num_done

    @torch.inference_mode()
    def propose(
        self,
        sequences: Sequence[Sequence[int]],
        num_draft_tokens: int,
        temperatures: Float[Tensor, "rows"],
        uniforms: Float[Tensor, "rows k"],
    ) -> Draft:
        """See `Proposer.propose`."""
        rows = len(sequences)
        states, positions, newest = self._new_entries(rows)
        longest = states.shape[1]
        tokens = self._embed(
            [
                list(sequence[first + 1 : first + 1 + longest]) + [0] * (longest - n - 1)
                for sequence, first, n in zip(sequences, self._first, newest.tolist(), strict=False)
            ]
        )
        row = torch.arange(rows, device=states.device)
        state, normed = self._step(tokens, states, positions)
        state, normed = state[row, newest], normed[row, newest]
        position = positions[row, newest]
        drafted: list[Tensor] = []
        probs: list[Tensor] = []
        sampled = bool((temperatures > 0).any())
        for i in range(num_draft_tokens):
            if i > 0:
                embedded = self.embeddings[drafted[-1]][:, None].to(state.dtype)
                position = position + 1
                state, normed = self._step(embedded, state[:, None], position[:, None])
                state, normed = state[:, 0], normed[:, 0]
            logits = self.head.logits(normed)
            if sampled:
                draft_probs = _distribution(logits, temperatures.to(logits.device))
                ids = sample(draft_probs, uniforms[:, i].to(logits.device))
                over_target = draft_probs.new_zeros(rows, self.head.config.vocab_size)
                probs.append(over_target.index_copy_(1, self.target_ids, draft_probs))
            else:
                ids = logits.argmax(-1)
            drafted.append(self.target_ids[ids])
        lengths = torch.full((rows,), num_draft_tokens, device=states.device)
        tokens_of = torch.stack(drafted, 1) if drafted else lengths.new_zeros(rows, 0)
        return Draft(tokens_of, lengths, torch.stack(probs, 1) if probs else None)

    @torch.inference_mode()
    def observe(
        self, features: Float[Tensor, "rows seq width"] | None, num_kept: Int[Tensor, "rows"]
    ) -> None:
        """See `Proposer.observe`."""
        assert features is not None
        states = self._fuse(features)
        for slot, kept in enumerate(num_kept.tolist()):
            self._first[slot] += len(self._pending[slot])
            self._pending[slot] = states[slot, : kept + 1]

    def move(self, source: int, to: int) -> None:
        """See `Proposer.move`."""
        self._keys[to] = self._keys[source]
        self._values[to] = self._values[source]
        self._pending[to] = self._pending[source]
        self._first[to] = self._first[source]

    def _fuse(self, features: Float[Tensor, "*n width"]) -> Float[Tensor, "*n hidden"]:
        weight = self.head.fc.weight
        aux = features.view(*features.shape[:-1], len(self.head.config.aux_layers), -1)
        return self.head.fuse(aux.to(weight.device, weight.dtype))

    def _embed(self, tokens: Sequence[Sequence[int]]) -> Float[Tensor, "rows seq hidden"]:
        ids = torch.tensor(tokens, device=self._keys.device)
        return self.embeddings[ids].to(self._keys.dtype)

    def _new_entries(
        self, rows: int
    ) -> tuple[Float[Tensor, "rows seq hidden"], Int[Tensor, "rows seq"], Int[Tensor, "rows"]]:
        """Pending states, padded on the right; their columns; the index of each row's newest."""
        pending = self._pending[:rows]
        states = torch.nn.utils.rnn.pad_sequence(pending, batch_first=True)
        device = states.device
        first = torch.tensor(self._first[:rows], device=device)
        positions = first[:, None] + torch.arange(states.shape[1], device=device)
        newest = torch.tensor([len(p) - 1 for p in pending], device=device)
        return states, positions.clamp(max=len(self._columns) - 1), newest

    def _step(
        self,
        embedded: Float[Tensor, "rows seq hidden"],
        states: Float[Tensor, "rows seq hidden"],
        positions: Int[Tensor, "rows seq"],
    ) -> tuple[Float[Tensor, "rows seq hidden"], Float[Tensor, "rows seq hidden"]]:
        """Writes entries at `positions` and runs the layer on them."""
        rows = len(embedded)
        rotation = self.head.rotation(positions)
        read, residual = self.head.entries(embedded, states)
        keys, values = self.head.keys_values(read, rotation)
        row = torch.arange(rows, device=positions.device)[:, None]
        self._keys[row, :, positions] = keys
        self._values[row, :, positions] = values
        num_columns = int(positions.max()) + 1
        visible = self._columns[:num_columns] <= positions[..., None]
        attended = functional.scaled_dot_product_attention(
            self.head.queries(read, rotation).transpose(1, 2),
            self._keys[:rows, :, :num_columns],
            self._values[:rows, :, :num_columns],
            attn_mask=visible[:, None],
            enable_gqa=True,
        )
        return self.head.finish(residual, attended.transpose(1, 2))


def _distribution(
    logits: Float[Tensor, "rows draft"], temperatures: Float[Tensor, "rows"]
) -> Float[Tensor, "rows draft"]:
    """At temperature 0 all mass is on the largest logit."""
    greedy = functional.one_hot(logits.argmax(-1), logits.shape[-1]).float()
    warm = (logits / temperatures.clamp(min=1e-6)[:, None]).softmax(-1)
    return torch.where((temperatures > 0)[:, None], warm, greedy)
