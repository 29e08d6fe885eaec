"""Many chains at once against one naive chain at a time."""

import pytest
import tiny_heads
import torch
from tiny_heads import FLAGS, Speculator
from torch import Tensor

from specfit.speculators import unroll as unroll_module
from specfit.speculators.batches import chain_starts, pack
from specfit.speculators.unroll import unroll
from specfit.targets.target import HiddenStates

NUM_STEPS = 4
# fp32 rounding through about ten products of width 32; the wrong key or position is off by 1e-1.
CLOSE = {"rtol": 1e-4, "atol": 2e-4}


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], dim=-1) * sin


class NaiveChain:
    """Drafts from one entry as decoding without any cache would: all entries anew each step."""

    def __init__(self, speculator: Speculator, document: HiddenStates) -> None:
        self.weights = {n: p.detach() for n, p in speculator.head.named_parameters()}
        self.config = speculator.head.config
        self.embeddings = speculator.embeddings
        self.target_ids = speculator.vocab.target_ids
        self.rotary = speculator.target.model.model.rotary_emb  # the target's, not the head's
        self.tokens = document.input_ids.tolist()
        self.fused = self._fuse(document.aux)

    def _fuse(self, aux: Tensor) -> Tensor:
        w, eps = self.weights, self.config.rms_norm_eps
        states = [aux[:, i] for i in range(aux.shape[1])]
        if self.config.fc_norm:
            states = [norm(s, w[f"fc_norm.{i}.weight"], eps) for i, s in enumerate(states)]
        joined = torch.cat(states, dim=-1)
        if self.config.norm_before_fc:
            joined = norm(joined, w["input_norm.weight"], eps)
        return joined @ w["fc.weight"].T

    def _layer(self, tokens: list[int], states: Tensor) -> tuple[Tensor, Tensor]:
        """The last entry's fed-back state and logits, of all entries 0..n-1."""
        w, c, eps = self.weights, self.config, self.config.rms_norm_eps
        n, group = len(tokens), self.config.num_heads // self.config.num_kv_heads
        normed = norm(states, w["layers.0.hidden_norm.weight"], eps)
        embedded = norm(self.embeddings[tokens], w["layers.0.input_layernorm.weight"], eps)
        read = torch.cat([embedded, normed], dim=-1)

        def heads(name: str) -> Tensor:
            projected = read @ w[f"layers.0.self_attn.{name}.weight"].T
            return projected.view(n, -1, c.head_dim).transpose(0, 1)

        cos, sin = (t[0] for t in self.rotary(read, torch.arange(n)[None]))
        q = rotate(heads("q_proj"), cos, sin)[:, -1:]
        k = rotate(heads("k_proj"), cos, sin).repeat_interleave(group, 0)
        v = heads("v_proj").repeat_interleave(group, 0)
        probs = torch.softmax(q @ k.transpose(1, 2) / c.head_dim**0.5, dim=-1)
        attended = (probs @ v).flatten()
        residual = (normed if c.norm_before_residual else states)[-1]
        x = residual + w["layers.0.self_attn.o_proj.weight"] @ attended
        y = norm(x, w["layers.0.post_attention_layernorm.weight"], eps)
        gate, up = (w[f"layers.0.mlp.{name}_proj.weight"] @ y for name in ("gate", "up"))
        x = x + w["layers.0.mlp.down_proj.weight"] @ (torch.nn.functional.silu(gate) * up)
        final = norm(x, w["norm.weight"], eps)
        return (final if c.norm_output else x), w["lm_head.weight"] @ final

    def draft(self, start: int, *, teacher_forced: bool) -> tuple[list[Tensor], list[int]]:
        tokens, states = self.tokens[1 : start + 2], self.fused[: start + 1]
        logits, drafted = [], []
        for step in range(NUM_STEPS):
            state, scores = self._layer(tokens, states)
            logits.append(scores)
            drafted.append(int(self.target_ids[scores.argmax()]))
            following = self.tokens[min(start + step + 2, len(self.tokens) - 1)]
            tokens = [*tokens, following if teacher_forced else drafted[-1]]
            states = torch.cat([states, state[None]])
        return logits, drafted


def check(speculator: Speculator, *, teacher_forced: bool) -> None:
    """Every step of every chain of a pack of two documents."""
    documents = [
        speculator.document(tiny_heads.random_tokens(14, seed=1), [(5, 14)]),
        speculator.document(tiny_heads.random_tokens(17, seed=2), [(4, 8), (12, 17)]),
    ]
    batch = pack(documents)
    starts = chain_starts(batch)
    with torch.no_grad():
        steps = list(
            unroll(
                speculator.head,
                batch,
                starts,
                num_steps=NUM_STEPS,
                teacher_forced=teacher_forced,
                **speculator.drafting,
            )
        )
    naive = [NaiveChain(speculator, document) for document in documents]
    for chain, start in enumerate(starts.tolist()):
        which = int(start >= 14)
        # A chain that runs on into the next document is fed that document's tokens; the loss does
        # not count it from there on.
        inside = NUM_STEPS if not teacher_forced or which else min(NUM_STEPS, 14 - start - 1)
        logits, drafted = naive[which].draft(start - 14 * which, teacher_forced=teacher_forced)
        for s in range(inside):
            torch.testing.assert_close(steps[s].logits[chain], logits[s], **CLOSE)
            assert int(steps[s].tokens[chain]) == drafted[s], (start, s)


@pytest.mark.parametrize("teacher_forced", [True, False], ids=["forced", "free"])
@pytest.mark.parametrize("flags", [(), *[(flag,) for flag in FLAGS], FLAGS], ids=" ".join)
def test_every_step_of_every_chain_is_what_naive_drafting_gives(flags, teacher_forced):
    target = tiny_heads.make_target("llama")  # tied, grouped queries, head_dim of its own
    speculator = tiny_heads.make_speculator(target, **dict.fromkeys(flags, True))
    check(speculator, teacher_forced=teacher_forced)


@pytest.mark.parametrize("architecture", ["llama3_rope", "yarn_rope", "qwen3", "qwen3_moe"])
def test_chains_rotate_as_the_target_does(architecture):
    speculator = tiny_heads.make_speculator(tiny_heads.make_target(architecture))
    check(speculator, teacher_forced=False)


def test_a_head_without_theta_10000_rotates_by_its_own_theta():
    head = tiny_heads.make_speculator(tiny_heads.make_target("qwen3")).head
    head.config.rope_parameters.update(rope_theta=500000.0)
    head = type(head)(head.config)
    position, dim = 77, head.config.head_dim
    angles = position / 500000.0 ** (torch.arange(0, dim, 2).double() / dim)
    cos, sin = head.rotation(torch.tensor([position]))
    torch.testing.assert_close(cos[0, : dim // 2].double(), angles.cos(), rtol=0, atol=1e-5)
    torch.testing.assert_close(sin[0, dim // 2 :].double(), angles.sin(), rtol=0, atol=1e-5)


def test_attention_in_blocks_changes_neither_loss_nor_gradient(monkeypatch):
    speculator = tiny_heads.make_speculator(tiny_heads.make_target())
    batch = pack([speculator.document(tiny_heads.random_tokens(20, seed=4), [(3, 20)])])
    objective = speculator.objective()

    def loss_and_gradients() -> list[Tensor]:
        speculator.head.zero_grad()
        loss = objective(batch).loss
        loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in speculator.head.parameters())]

    whole = loss_and_gradients()
    monkeypatch.setattr(unroll_module, "CHAINS_AT_ONCE", 3)
    for one, other in zip(whole, loss_and_gradients(), strict=True):
        # Sums in another order, over gradients of order 1.
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
