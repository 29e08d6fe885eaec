"""What an engine makes of a head's files: small readings in plain torch, one a set of rules.

A twin has what the engine took from its own folder and the rules it applies to that. It shares no
code with the head that is trained, but for the frequencies of RoPE, which both have of
transformers: so the two say the same only if both mean the same.

Entry t of a head is the pair of token t + 1 and the target's state after token t, at position t;
it drafts token t + 2. See `specfit.speculators.eagle3`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

LAYER = "layers.0"


@dataclass(frozen=True)
class Frequencies:
    """Of a rotary embedding."""

    inverse: Float[Tensor, "half"]  # radians a position
    scaling: float = 1.0  # of cosines and sines


@dataclass(frozen=True)
class Twin:
    """A head as one engine reads it; flags that the engine does not know are false."""

    tensors: Mapping[str, Tensor]  # fp32, by vLLM's names without `model.`
    aux_layers: tuple[int, ...]  # whose inputs it reads, counted as design.md does
    target_ids: Int[Tensor, "draft"]  # what it takes each draft id for
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    frequencies: Frequencies
    rotates_neighbours: bool = False  # pairs of RoPE: (0, 1), (2, 3), ... instead of halves
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    is_tied: bool = False  # logits are of embeddings, over the target's whole vocabulary

    def to(self, device: torch.device) -> "Twin":
        """The same on a device."""
        return replace(
            self,
            tensors={name: tensor.to(device) for name, tensor in self.tensors.items()},
            target_ids=self.target_ids.to(device),
            frequencies=replace(self.frequencies, inverse=self.frequencies.inverse.to(device)),
        )

    @torch.no_grad()
    def draft(
        self,
        tokens: Int[Tensor, "seq"],
        aux: Float[Tensor, "seq aux hidden"],
        embeddings: Float[Tensor, "vocab hidden"],
        num_draft_tokens: int,
    ) -> tuple[Int[Tensor, "k entries"], Float[Tensor, "k entries draft"]]:
        """Greedy drafts from every entry of one document, and their logits.

        Args:
            tokens: of the document, one more than there are entries.
            aux: inputs of `aux_layers`.
            embeddings: the target's.
            num_draft_tokens: of each chain.
        """
        state = self._fused(aux)[:-1]
        ids = tokens[1:]
        positions = torch.arange(len(ids), device=ids.device)
        hidden = positions[None, :] > positions[:, None]
        entries: list[tuple[Tensor, Tensor]] = []  # keys and values: of all, then of own steps
        drafted, logits = [], []
        for step in range(num_draft_tokens):
            read, residual = self._read(embeddings[ids].float(), state)
            queries, *keys_values = self._projected(read, positions + step)
            entries.append((keys_values[0], keys_values[1]))
            attended = _attend(queries, entries, hidden)
            state, normed = self._finished(residual, attended)
            weight = embeddings.float() if self.is_tied else self.tensors["lm_head.weight"]
            logits.append(normed @ weight.T)
            ids = self.target_ids[logits[-1].argmax(-1)]
            drafted.append(ids)
        return torch.stack(drafted), torch.stack(logits)

    def _norm(self, x: Float[Tensor, "*n size"], name: str) -> Float[Tensor, "*n size"]:
        scale = (x.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return x * scale * self.tensors[name]

    def _fused(self, aux: Float[Tensor, "seq aux hidden"]) -> Float[Tensor, "seq hidden"]:
        parts = list(aux.float().unbind(1))
        if self.fc_norm:
            parts = [self._norm(part, f"fc_norm.{i}.weight") for i, part in enumerate(parts)]
        flat = torch.cat(parts, dim=-1)
        if self.norm_before_fc:
            flat = self._norm(flat, "input_norm.weight")
        return flat @ self.tensors["fc.weight"].T

    def _read(
        self, embedded: Float[Tensor, "n hidden"], state: Float[Tensor, "n hidden"]
    ) -> tuple[Float[Tensor, "n twice_hidden"], Float[Tensor, "n hidden"]]:
        normed = self._norm(state, f"{LAYER}.hidden_norm.weight")
        read = torch.cat([self._norm(embedded, f"{LAYER}.input_layernorm.weight"), normed], dim=-1)
        return read, normed if self.norm_before_residual else state

    def _projected(
        self, read: Float[Tensor, "n twice_hidden"], positions: Int[Tensor, "n"]
    ) -> tuple[Float[Tensor, "n heads dim"], ...]:
        """Queries, keys and values; keys and values as often as there are heads."""
        group = self.num_heads // self.num_kv_heads
        found = []
        for name, num, repeat in (
            ("q", self.num_heads, 1),
            ("k", self.num_kv_heads, group),
            ("v", self.num_kv_heads, group),
        ):
            x = read @ self.tensors[f"{LAYER}.self_attn.{name}_proj.weight"].T
            x = x.view(len(x), num, self.head_dim)
            x = x if name == "v" else self._rotated(x, positions)
            found.append(x.repeat_interleave(repeat, dim=1))
        return tuple(found)

    def _rotated(
        self, x: Float[Tensor, "n heads dim"], positions: Int[Tensor, "n"]
    ) -> Float[Tensor, "n heads dim"]:
        angles = positions[:, None, None] * self.frequencies.inverse
        cos, sin = (f(angles) * self.frequencies.scaling for f in (torch.cos, torch.sin))
        if self.rotates_neighbours:
            first, second = x[..., ::2], x[..., 1::2]
            turned = (first * cos - second * sin, second * cos + first * sin)
            return torch.stack(turned, dim=-1).flatten(-2)
        first, second = x.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

    def _finished(
        self, residual: Float[Tensor, "n hidden"], attended: Float[Tensor, "n heads dim"]
    ) -> tuple[Float[Tensor, "n hidden"], Float[Tensor, "n hidden"]]:
        """What the next step is fed, and what `lm_head` reads."""
        weight = {n: self.tensors[f"{LAYER}.mlp.{n}_proj.weight"].T for n in ("gate", "up", "down")}
        x = residual + attended.flatten(1) @ self.tensors[f"{LAYER}.self_attn.o_proj.weight"].T
        read = self._norm(x, f"{LAYER}.post_attention_layernorm.weight")
        x = (
            x
            + (torch.nn.functional.silu(read @ weight["gate"]) * (read @ weight["up"]))
            @ (weight["down"])
        )
        normed = self._norm(x, "norm.weight")
        return (normed if self.norm_output else x), normed


def _attend(
    queries: Float[Tensor, "n heads dim"],
    entries: Sequence[tuple[Tensor, Tensor]],
    hidden: Bool[Tensor, "n n"],
) -> Float[Tensor, "n heads dim"]:
    """Each chain over the entries up to its own, and over what it drafted itself."""
    scale = queries.shape[-1] ** -0.5
    (keys, values), *own = entries
    scores = torch.einsum("thd,shd->hts", queries, keys) * scale
    scores = scores.masked_fill(hidden, -torch.inf)
    private = [(queries * key).sum(-1).T[..., None] * scale for key, _ in own]
    probs = torch.cat([scores, *private], dim=-1).softmax(-1)
    num = len(keys)
    attended = torch.einsum("hts,shd->thd", probs[..., :num], values)
    for i, (_, value) in enumerate(own):
        attended = attended + probs[..., num + i].T[..., None] * value
    return attended


def frequencies(rope_parameters: Mapping[str, Any], head_dim: int, context: int) -> Frequencies:
    """As transformers computes them, and engines after it.

    Args:
        rope_parameters: `rope_type`, `rope_theta` and what the type takes.
        head_dim: of a head.
        context: tokens that the model is made for.
    """
    rotary = LlamaRotaryEmbedding(
        LlamaConfig(
            hidden_size=head_dim,
            num_attention_heads=1,
            head_dim=head_dim,
            max_position_embeddings=context,
            rope_parameters=dict(rope_parameters),
        )
    )
    return Frequencies(rotary.inv_freq.float(), float(rotary.attention_scaling))
