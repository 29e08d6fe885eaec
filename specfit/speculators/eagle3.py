"""EAGLE-3: one decoder layer that drafts from the target's own hidden states.

The target reads tokens x_0, x_1, …; f_j is its fused state after x_j (its aux layers through `fc`).
Entry j of the head is the pair (x_{j+1}, f_j), at RoPE position j, and drafts x_{j+2}. Where f_j
is not known yet, the head's own output of entry j - 1 stands in for it: that is how a chain of
drafts is made.

Source: Li et al. 2025, arXiv:2503.01840. Names of tensors and flags as the engines read them.
"""

from dataclasses import asdict, dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding


@dataclass(frozen=True)
class Eagle3Config:
    """The sizes and flags of a head; JSON values only."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int  # of the target
    draft_vocab_size: int
    aux_layers: tuple[int, ...]
    max_position_embeddings: int
    rms_norm_eps: float
    hidden_act: str
    rope_parameters: dict[str, Any]
    norm_before_residual: bool = False  # the residual is the normalized state
    norm_before_fc: bool = False  # one norm over the concatenated aux states
    fc_norm: bool = False  # one norm an aux state
    norm_output: bool = False  # the next drafting step is fed the output after the final norm

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self) | {"aux_layers": list(self.aux_layers)}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Eagle3Config":
        """Reads what `to_json` gave."""
        return cls(**(values | {"aux_layers": tuple(values["aux_layers"])}))


class RMSNorm(nn.Module):
    """x / rms(x) · weight, computed in fp32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Float[Tensor, "*n size"]) -> Float[Tensor, "*n size"]:
        """The normalized vectors, in the type of `x`."""
        return functional.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(
            x.dtype
        )


class _Attention(nn.Module):
    def __init__(self, c: Eagle3Config) -> None:
        super().__init__()
        width = 2 * c.hidden_size
        self.q_proj = nn.Linear(width, c.num_heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(width, c.num_kv_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(width, c.num_kv_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.num_heads * c.head_dim, c.hidden_size, bias=False)


class _FeedForward(nn.Module):
    def __init__(self, c: Eagle3Config) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)
        self.act = ACT2FN[c.hidden_act]

    def forward(self, x: Float[Tensor, "*n hidden"]) -> Float[Tensor, "*n hidden"]:
        y: Tensor = self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))
        return y


class _Layer(nn.Module):
    def __init__(self, c: Eagle3Config) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)  # on embeddings
        self.hidden_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)  # on fused states
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = _Attention(c)
        self.mlp = _FeedForward(c)


class Eagle3(nn.Module):
    """The head, in the pieces that training (many chains at once) and decoding (a KV cache) share.

    Embeddings are the target's, frozen, and no part of the head.
    """

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        c = self.config = config
        num_aux = len(c.aux_layers)
        self.fc = nn.Linear(num_aux * c.hidden_size, c.hidden_size, bias=False)
        self.layers = nn.ModuleList([_Layer(c)])
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.lm_head = nn.Linear(c.hidden_size, c.draft_vocab_size, bias=False)
        if c.norm_before_fc:
            self.input_norm = RMSNorm(num_aux * c.hidden_size, c.rms_norm_eps)
        if c.fc_norm:
            norms = [RMSNorm(c.hidden_size, c.rms_norm_eps) for _ in range(num_aux)]
            self.fc_norm = nn.ModuleList(norms)
        self.rotary = LlamaRotaryEmbedding(
            LlamaConfig(
                hidden_size=c.hidden_size,
                num_attention_heads=c.num_heads,
                head_dim=c.head_dim,
                max_position_embeddings=c.max_position_embeddings,
                rope_parameters=dict(c.rope_parameters),
            )
        )

    @property
    def layer(self) -> _Layer:
        """The one decoder layer."""
        layer = self.layers[0]
        assert isinstance(layer, _Layer)
        return layer

    def fuse(self, aux: Float[Tensor, "*n aux hidden"]) -> Float[Tensor, "*n hidden"]:
        """The state that stands for the target's aux states."""
        if self.config.fc_norm:
            parts = zip(self.fc_norm, aux.unbind(-2), strict=True)
            aux = torch.stack([norm(state) for norm, state in parts], dim=-2)
        flat = aux.flatten(-2)
        if self.config.norm_before_fc:
            flat = self.input_norm(flat)
        fused: Tensor = self.fc(flat)
        return fused

    def entries(
        self, embeddings: Float[Tensor, "*n hidden"], states: Float[Tensor, "*n hidden"]
    ) -> tuple[Float[Tensor, "*n twice_hidden"], Float[Tensor, "*n hidden"]]:
        """What the projections read of each entry, and its residual."""
        normed = self.layer.hidden_norm(states)
        read = torch.cat([self.layer.input_layernorm(embeddings), normed], dim=-1)
        return read, normed if self.config.norm_before_residual else states

    def rotation(
        self, positions: Int[Tensor, "*n"]
    ) -> tuple[Float[Tensor, "*n dim"], Float[Tensor, "*n dim"]]:
        """Cosines and sines at `positions`."""
        like = torch.empty(0, device=positions.device)
        cos, sin = self.rotary(like, positions.reshape(1, -1))
        shape = (*positions.shape, self.config.head_dim)
        return cos.view(shape), sin.view(shape)

    def queries(
        self, read: Float[Tensor, "*n w"], rotation: tuple[Tensor, Tensor]
    ) -> Float[Tensor, "*n heads dim"]:
        """Rotated queries."""
        q = self.layer.self_attn.q_proj(read).unflatten(-1, (-1, self.config.head_dim))
        return _rotate(q, rotation)

    def keys_values(
        self, read: Float[Tensor, "*n w"], rotation: tuple[Tensor, Tensor]
    ) -> tuple[Float[Tensor, "*n kv_heads dim"], Float[Tensor, "*n kv_heads dim"]]:
        """Rotated keys, and values."""
        attention = self.layer.self_attn
        k = attention.k_proj(read).unflatten(-1, (-1, self.config.head_dim))
        v = attention.v_proj(read).unflatten(-1, (-1, self.config.head_dim))
        return _rotate(k, rotation), v

    def finish(
        self, residual: Float[Tensor, "*n hidden"], attended: Float[Tensor, "*n heads dim"]
    ) -> tuple[Float[Tensor, "*n hidden"], Float[Tensor, "*n hidden"]]:
        """The rest of the layer.

        Returns:
            The state that the next drafting step is fed, and the normalized one that `lm_head`
            reads.
        """
        x = residual + self.layer.self_attn.o_proj(attended.flatten(-2))
        output = x + self.layer.mlp(self.layer.post_attention_layernorm(x))
        normed = self.norm(output)
        return (normed if self.config.norm_output else output), normed

    def logits(self, normed: Float[Tensor, "*n hidden"]) -> Float[Tensor, "*n draft"]:
        """Over the draft vocabulary, in fp32."""
        logits: Tensor = self.lm_head(normed)
        return logits.float()


def _rotate(
    x: Float[Tensor, "*n heads dim"], rotation: tuple[Tensor, Tensor]
) -> Float[Tensor, "*n heads dim"]:
    cos, sin = rotation
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return (x * cos.unsqueeze(-2) + turned * sin.unsqueeze(-2)).to(x.dtype)
