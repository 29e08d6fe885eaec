"""Many chains of drafts at once: what a head is trained on, and how it is judged while training.

Chain t is what drafting from entry t would do: step 1 is entry t itself, (x_{t+1}, f_t); step s is
the pair of the token drafted last and the head's own output, at position t + s - 1. The chain sees
the entries 0..t of its document as the target's states make them, and its own later steps as it
made them. So every step of a chain has the same mask over the entries (j <= t) and one private
key a step: the diagonal attention of EAGLE-3's training-time test. Nothing else is computed: keys
and values for all entries, the rest for chains only.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from specfit.speculators.batches import TrainBatch
from specfit.speculators.eagle3 import Eagle3

# Chains whose attention probabilities are held at once; more are computed again for the gradient.
CHAINS_AT_ONCE = 2048


@dataclass(frozen=True)
class Step:
    """One drafting step of every chain."""

    logits: Float[Tensor, "chains draft"]
    tokens: Int[Tensor, "chains"]  # what the head drafts: the target ids of the largest logits


def unroll(
    head: Eagle3,
    batch: TrainBatch,
    starts: Int[Tensor, "chains"],
    *,
    num_steps: int,
    embeddings: Float[Tensor, "vocab hidden"],
    target_ids: Int[Tensor, "draft"],
    teacher_forced: bool,
) -> Iterator[Step]:
    """Drafts `num_steps` tokens from every chain start.

    Args:
        head: the speculator.
        batch: packed documents.
        starts: ascending entries, as `chain_starts` gives them.
        num_steps: drafting steps.
        embeddings: the target's.
        target_ids: of the draft vocabulary.
        teacher_forced: feed the document's tokens, not the drafted ones.
    """
    next_tokens = batch.tokens.roll(-1)
    embedded = embeddings[next_tokens].to(head.fc.weight.dtype)
    states = head.fuse(batch.aux.to(head.fc.weight.dtype))
    read, residual = head.entries(embedded, states)
    keys, values = head.keys_values(read, head.rotation(batch.positions))
    read, residual = read[starts], residual[starts]
    own_keys: list[Tensor] = []
    own_values: list[Tensor] = []
    tokens = next_tokens[starts]
    state = residual
    for step in range(num_steps):
        rotation = head.rotation(batch.positions[starts] + step)
        if step > 0:
            read, residual = head.entries(embeddings[tokens].to(states.dtype), state)
            own_key, own_value = head.keys_values(read, rotation)
            own_keys.append(own_key)
            own_values.append(own_value)
        queries = head.queries(read, rotation)
        attended = _attend(queries, keys, values, own_keys, own_values, batch.lengths, starts)
        state, normed = head.finish(residual, attended)
        logits = head.logits(normed)
        drafted = target_ids[logits.detach().argmax(-1)]
        yield Step(logits, drafted)
        following = (starts + step + 2).clamp(max=len(batch.tokens) - 1)
        tokens = batch.tokens[following] if teacher_forced else drafted


def _attend(
    queries: Float[Tensor, "chains heads dim"],
    keys: Float[Tensor, "seq kv_heads dim"],
    values: Float[Tensor, "seq kv_heads dim"],
    own_keys: list[Tensor],
    own_values: list[Tensor],
    lengths: tuple[int, ...],
    starts: Int[Tensor, "chains"],
) -> Float[Tensor, "chains heads dim"]:
    """Document by document, so that none can see another and no product is computed in vain."""
    ends = torch.tensor(lengths).cumsum(0)
    bounds = torch.searchsorted(starts.cpu(), ends).tolist()
    attended = []
    first, chain = 0, 0
    for length, bound in zip(lengths, bounds, strict=True):
        entries = slice(first, first + length)
        for begin in range(chain, bound, CHAINS_AT_ONCE):
            chains = slice(begin, min(begin + CHAINS_AT_ONCE, bound))
            arguments = (
                queries[chains],
                keys[entries],
                values[entries],
                [k[chains] for k in own_keys],
                [v[chains] for v in own_values],
                starts[chains] - first,
            )
            if bound - chain > CHAINS_AT_ONCE and torch.is_grad_enabled():
                attended.append(checkpoint(_attend_block, *arguments, use_reentrant=False))
            else:
                attended.append(_attend_block(*arguments))
        first += length
        chain = bound
    return torch.cat(attended)


def _attend_block(
    queries: Float[Tensor, "chains heads dim"],
    keys: Float[Tensor, "seq kv_heads dim"],
    values: Float[Tensor, "seq kv_heads dim"],
    own_keys: list[Tensor],
    own_values: list[Tensor],
    starts: Int[Tensor, "chains"],
) -> Float[Tensor, "chains heads dim"]:
    chains, _, dim = queries.shape
    seq, kv_heads, _ = keys.shape
    # Queries of one key head side by side: a product a key head, keys never copied.
    q = queries.view(chains, kv_heads, -1, dim).permute(1, 2, 0, 3) * dim**-0.5
    group = q.shape[1]
    scores = q.reshape(kv_heads, group * chains, dim) @ keys.permute(1, 2, 0)
    scores = scores.view(kv_heads, group, chains, seq).float()
    hidden = torch.arange(seq, device=starts.device) > starts[:, None]
    scores = scores.masked_fill(hidden, -torch.inf)
    own = [(q * k.transpose(0, 1)[:, None]).sum(-1, keepdim=True).float() for k in own_keys]
    probs = torch.cat([scores, *own], dim=-1).softmax(-1).to(values.dtype)
    shared = probs[..., :seq].reshape(kv_heads, group * chains, seq) @ values.transpose(0, 1)
    attended = shared.view(kv_heads, group, chains, dim)
    for i, value in enumerate(own_values):
        attended = attended + probs[..., seq + i, None] * value.transpose(0, 1)[:, None]
    return attended.permute(2, 0, 1, 3).reshape(chains, kv_heads * group, dim)
