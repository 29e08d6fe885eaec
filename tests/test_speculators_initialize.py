"""What a head starts from."""

import pytest
import tiny_heads
import torch

from specfit.config import Init, SpeculatorConfig
from specfit.speculators.eagle3 import Eagle3
from specfit.speculators.initialize import aux_layers_of, head_config, initialize


def started(architecture="llama", init=Init.target, seed=0):
    """A target and its head as `initialize` leaves it."""
    speculator = tiny_heads.make_speculator(tiny_heads.make_target(architecture))
    target = speculator.target
    with torch.no_grad():
        for i, layer in enumerate(target.layers):  # norms that can be told apart
            layer.input_layernorm.weight.fill_(1.5 + i)
            layer.post_attention_layernorm.weight.fill_(2.25 + i)
        target.final_norm.weight.fill_(1.75)
    head = Eagle3(speculator.head.config)
    initialize(head, target, speculator.vocab, init, seed)
    return target, head, speculator.vocab


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])  # tied and untied
def test_lm_head_has_the_targets_rows_of_the_draft_vocabulary(architecture):
    target, head, vocab = started(architecture)
    weight = target.model.get_output_embeddings().weight
    for draft_id, offset in enumerate(vocab.d2t.tolist()):
        assert torch.equal(head.lm_head.weight[draft_id], weight[draft_id + offset])


def test_fc_averages_the_aux_states():
    _, head, _ = started()
    aux = torch.randn(5, 3, 32)
    torch.testing.assert_close(head.fuse(aux), aux.mean(1))


def test_the_layer_reads_the_state_as_the_targets_last_layer_does_and_ignores_the_embedding():
    target, head, _ = started()
    last = target.layers[-1].self_attn
    for name in ("q_proj", "k_proj", "v_proj"):
        of_embedding, of_state = getattr(head.layer.self_attn, name).weight.split(32, dim=1)
        assert torch.equal(of_state, getattr(last, name).weight)
        assert not of_embedding.any()
    assert torch.equal(head.layer.self_attn.o_proj.weight, last.o_proj.weight)


def test_feed_forward_and_norms_are_the_last_layers():
    target, head, _ = started()
    for name in ("gate_proj", "up_proj", "down_proj"):
        weight = getattr(target.layers[-1].mlp, name).weight
        assert torch.equal(getattr(head.layer.mlp, name).weight, weight)
    norms = (head.layer.hidden_norm, head.layer.input_layernorm, head.norm)
    assert [n.weight.unique().item() for n in norms] == pytest.approx([6.5, 1.5, 1.75])
    found = head.layer.post_attention_layernorm.weight.unique().item()
    assert found == pytest.approx(7.25)


def test_a_head_started_from_the_target_does_as_its_last_layer_and_head():
    # One token attends to itself alone, so the last layer on a state is all there is to compare.
    target, head, vocab = started()
    state = torch.randn(1, 32)
    with torch.no_grad():
        read, residual = head.entries(torch.randn(1, 32), state)
        _, value = head.keys_values(read, head.rotation(torch.zeros(1, dtype=torch.long)))
        _, normed = head.finish(residual, value.repeat_interleave(2, dim=1))
        layer = target.layers[-1]
        v = layer.self_attn.v_proj(layer.input_layernorm(state)).view(1, 2, 16)
        x = state + layer.self_attn.o_proj(v.repeat_interleave(2, dim=1).flatten(1))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
        expected = target.logits(x)[:, vocab.target_ids]
    torch.testing.assert_close(head.logits(normed), expected, rtol=1e-4, atol=1e-3)


def test_a_mixture_of_experts_leaves_the_feed_forward_random():
    target, head, _ = started("qwen3_moe")
    weights = [getattr(head.layer.mlp, n).weight for n in ("gate_proj", "up_proj", "down_proj")]
    assert head.config.intermediate_size == 2 * 24  # what one token runs through
    for weight in weights:
        assert 0.015 < weight.std().item() < 0.025
    last = target.layers[-1].self_attn
    assert torch.equal(head.layer.self_attn.q_proj.weight[:, 32:], last.q_proj.weight)


def test_random_heads_differ_by_seed_and_by_nothing_else():
    (one, same, other) = (started(init=Init.random, seed=s)[1] for s in (4, 4, 5))
    for name, parameter in one.named_parameters():
        assert torch.equal(parameter, same.state_dict()[name]), name
        if parameter.dim() > 1:
            assert not torch.equal(parameter, other.state_dict()[name]), name
        else:
            assert parameter.eq(1).all(), name


@pytest.mark.parametrize("layers", [[0, 3, 7], [-1, 2, 3]])
def test_aux_layers_outside_the_target_are_refused(layers):
    info = tiny_heads.make_target().info
    with pytest.raises(ValueError, match=r"^speculator\.aux_layers must .* within 0\.\.6"):
        aux_layers_of(SpeculatorConfig(aux_layers=layers), info)


def test_a_draft_vocabulary_beyond_the_targets_is_refused():
    info = tiny_heads.make_target().info
    with pytest.raises(ValueError, match=r"^speculator\.draft_vocab_size .* 320, got 321"):
        head_config(SpeculatorConfig(draft_vocab_size=321), info)


def test_a_head_has_its_targets_sizes_rope_and_context():
    target = tiny_heads.make_target("llama3_rope")
    found = head_config(SpeculatorConfig(draft_vocab_size=8), target.info)
    assert (found.num_heads, found.num_kv_heads, found.head_dim) == (4, 2, 16)
    assert found.rope_parameters == target.model.config.rope_parameters
    assert found.max_position_embeddings == 256
