"""The launches of a pass over all layers, and the memory between them.

A layer is ten launches, each of which does on the way what would otherwise take one of its own:

    rmsnorm_quant     the last product's sums join the stream; its norm, quantized
    product           queries, keys and values
    rope_append       their sums; queries turned, keys and values to the cache
    attn_verify       the draft over the columns that it sees, in splits
    attn_combine      the splits as one, quantized
    product           of what was attended to
    rmsnorm_quant     as above
    product           gate and up
    silu_mul_quant    their sums and SiLU, quantized
    product           down, whose sums the next layer's norm adds

Products of few tokens cut K into splits and read a weight once; those of many, a prompt's, have one
split and tiles of 128 tokens. Their bits differ. Within each kind a token's bits are the same
whoever else is in the pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

import torch
from jaxtyping import BFloat16, Float32, Int64
from torch import Tensor

from specfit_kernels.attention import attn_combine, attn_verify
from specfit_kernels.attention_twins import AttentionPartials
from specfit_kernels.gemm import gemm_w4a4, gemm_w4a16
from specfit_kernels.gemv_w4a16 import gemv_w4a16
from specfit_kernels.kv_pages import KVPages, Places
from specfit_kernels.linear_twins import Halves, Terms, TiledWeight
from specfit_kernels.norm_quant import rmsnorm_quant
from specfit_kernels.rope_append import rope_append
from specfit_kernels.silu_mul import silu_mul_quant
from specfit_kernels.skinny_w4a4 import skinny_w4a4
from specfit_serve.gpu_weights import GpuWeights, Matrix

MAX_DRAFT = 16  # tokens of a sequence up to which products are those of few
_ATTENDED = 128  # tokens that attention has partials for, unless those were larger than
_ATTENDED_BYTES = 1 << 28


@dataclass(frozen=True)
class Buffers:
    """What lies between the launches of a pass."""

    embedded: BFloat16[Tensor, "tokens hidden"]
    stream: Float32[Tensor, "tokens hidden"]
    hidden: Terms | Halves  # the stream's norm
    qkv: Float32[Tensor, "qkv_splits tokens qkv_rows"]
    queries: Float32[Tensor, "tokens heads_dim"]
    attended: Terms | Halves
    o: Float32[Tensor, "o_splits tokens hidden"]
    gate_up: Float32[Tensor, "gate_up_splits tokens twice_inner"]
    inner: Terms | Halves
    down: Float32[Tensor, "down_splits tokens hidden"]
    normed: Float32[Tensor, "tokens hidden"]  # that the head reads
    captured: Float32[Tensor, "aux tokens hidden"]
    attention: AttentionPartials  # of as many tokens as attention takes at a time, or fewer

    @classmethod
    def empty(
        cls, weights: GpuWeights, num_tokens: int, *, num_aux: int, max_length: int, is_prompt: bool
    ) -> "Buffers":
        """Memory for passes of up to `num_tokens`.

        Args:
            weights: the model.
            num_tokens: of all sequences together.
            num_aux: layers whose input is kept.
            max_length: columns of a sequence.
            is_prompt: whether its products are those of many tokens.
        """
        layer, device = weights.layers[0], weights.embeddings.device
        hidden = weights.embeddings.shape[1]
        heads = weights.num_heads, weights.head_dim

        def floats(*shape: int) -> Tensor:
            return torch.empty(shape, device=device)

        def tokens(columns: int) -> Terms | Halves:
            if weights.num_terms:
                return Terms.empty(num_tokens, columns, weights.num_terms, device)
            return Halves.empty(num_tokens, columns, device)

        def partials(weight: Matrix) -> Tensor:
            num_splits = 1 if is_prompt else weight.splits.num
            return floats(num_splits, num_tokens, len(weight.row_scales))

        most = _most_attended(*heads, max_length)
        return cls(
            embedded=torch.empty(num_tokens, hidden, dtype=torch.bfloat16, device=device),
            stream=floats(num_tokens, hidden),
            hidden=tokens(hidden),
            qkv=partials(layer.qkv),
            queries=floats(num_tokens, prod(heads)),
            attended=tokens(prod(heads)),
            o=partials(layer.o),
            gate_up=partials(layer.gate_up),
            inner=tokens(layer.down.columns),
            down=partials(layer.down),
            normed=floats(num_tokens, hidden),
            captured=floats(num_aux, num_tokens, hidden),
            attention=AttentionPartials.empty(min(num_tokens, most), *heads, max_length, device),
        )

    def first(self, num_tokens: int) -> "Buffers":
        """Those of fewer tokens, at the beginning of this memory."""
        few = slice(num_tokens)
        return Buffers(
            embedded=self.embedded[few],
            stream=self.stream[few],
            hidden=_some_tokens(self.hidden, few),
            qkv=_fewer(self.qkv, num_tokens),
            queries=self.queries[few],
            attended=_some_tokens(self.attended, few),
            o=_fewer(self.o, num_tokens),
            gate_up=_fewer(self.gate_up, num_tokens),
            inner=_some_tokens(self.inner, few),
            down=_fewer(self.down, num_tokens),
            normed=self.normed[few],
            captured=_fewer(self.captured, num_tokens),
            attention=self.attention,
        )


@dataclass(frozen=True)
class Pass:
    """Tokens that go through all layers together, by sequence, as many of each."""

    places: Places
    tokens_each: int
    buffers: Buffers
    aux_layers: Sequence[int]  # whose input is kept
    is_prompt: bool  # of one sequence
    pdl: bool  # launches overlap; not for a prompt, whose products know nothing of it

    def attended_at_a_time(self) -> list[tuple[slice, int]]:
        """Tokens, and how many of each sequence are among them: whole drafts, or a prompt's parts.

        No token's bits depend on it.
        """
        num_tokens = len(self.places.positions)
        step = len(self.buffers.attention.attended)
        if not self.is_prompt:
            step -= step % self.tokens_each
        ends = [*range(0, num_tokens, step), num_tokens]
        return [
            (slice(start, end), end - start if self.is_prompt else self.tokens_each)
            for start, end in pairwise(ends)
        ]


def embed(weights: GpuWeights, tokens: Int64[Tensor, " tokens"], buffers: Buffers) -> None:
    """Begins the stream. Ids are not checked on a GPU until it stops."""
    torch.index_select(weights.embeddings, 0, tokens, out=buffers.embedded)
    buffers.stream.copy_(buffers.embedded)


def forward_layers(weights: GpuWeights, kv: Sequence[KVPages], work: Pass) -> None:
    """From the stream's beginning to `normed`, with `captured` on the way.

    Args:
        weights: the model.
        kv: the cache of each layer.
        work: whose buffers hold embedded tokens in their stream.
    """
    x, pdl = work.buffers, work.pdl
    captured = dict(zip(work.aux_layers, x.captured, strict=True))
    sums: Tensor | None = None  # that the stream does not have yet
    for i, (layer, pages) in enumerate(zip(weights.layers, kv, strict=True)):
        rmsnorm_quant(
            x.stream,
            layer.input_norm,
            layer.eps,
            x.hidden,
            partials=sums,
            captured=captured.get(i),
            pdl=pdl and i > 0,  # the launch before the first is torch's
        )
        _multiply(layer.qkv, x.hidden, x.qkv, work)
        rope_append(
            x.qkv,
            work.places,
            pages,
            weights.rope,
            x.queries,
            bias=layer.qkv_bias,
            head_norms=layer.head_norms,
            pdl=pdl,
        )
        _attend(pages, work)
        _multiply(layer.o, x.attended, x.o, work)
        norm = layer.post_attention_norm
        rmsnorm_quant(x.stream, norm, layer.eps, x.hidden, partials=x.o, pdl=pdl)
        _multiply(layer.gate_up, x.hidden, x.gate_up, work)
        silu_mul_quant(x.gate_up, x.inner, pdl=pdl)
        _multiply(layer.down, x.inner, x.down, work)
        sums = x.down
    rmsnorm_quant(
        x.stream,
        weights.norm,
        weights.eps,
        x.hidden,
        partials=sums,
        normed=x.normed,
        captured=captured.get(len(weights.layers)),
        pdl=pdl,
    )


def _multiply(
    weight: Matrix, tokens: Terms | Halves, sums: Float32[Tensor, "splits tokens rows"], work: Pass
) -> None:
    if isinstance(weight, TiledWeight):
        assert isinstance(tokens, Terms)
        if work.is_prompt:
            gemm_w4a4(weight, tokens, sums[0])
        else:
            skinny_w4a4(weight, tokens, sums, pdl=work.pdl)
    else:
        assert isinstance(tokens, Halves)
        if work.is_prompt:
            gemm_w4a16(weight, tokens, sums[0])
        else:
            gemv_w4a16(weight, tokens, sums, pdl=work.pdl)


def _attend(kv: KVPages, work: Pass) -> None:
    x, places = work.buffers, work.places
    for some, each in work.attended_at_a_time():
        partials = _attention_of(x.attention, some.stop - some.start)
        of_some = Places(places.positions[some], places.sequences[some], places.block_table)
        attn_verify(x.queries[some], of_some, kv, partials, each, pdl=work.pdl)
        out = _some_tokens(x.attended, some)
        attn_combine(partials, of_some, out, each, pdl=work.pdl)


def _most_attended(num_heads: int, head_dim: int, max_length: int) -> int:
    meta = torch.device("meta")
    one = AttentionPartials.empty(1, num_heads, head_dim, max_length, meta)
    return max(MAX_DRAFT, min(_ATTENDED, _ATTENDED_BYTES // one.sums.nbytes))


def _attention_of(partials: AttentionPartials, num_tokens: int) -> AttentionPartials:
    return AttentionPartials(
        sums=_fewer(partials.sums, num_tokens),
        tops=_fewer(partials.tops, num_tokens),
        weights=_fewer(partials.weights, num_tokens),
        attended=partials.attended[:num_tokens],
        largest=partials.largest[:num_tokens],
        arrived=partials.arrived[:num_tokens],
    )


def _fewer(tensor: Tensor, num_tokens: int) -> Tensor:
    """[n, tokens, ...] of fewer tokens without gaps between them."""
    shape = (len(tensor), num_tokens, *tensor.shape[2:])
    return tensor.view(-1)[: prod(shape)].view(shape)


def _some_tokens(tokens: Terms | Halves, some: slice) -> Terms | Halves:
    if isinstance(tokens, Terms):
        return Terms(tokens.codes[some], tokens.scales[some], tokens.token_scales[some])
    return Halves(tokens.values[some], tokens.token_scales[some])
