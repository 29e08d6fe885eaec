"""Targets on the CPU kernels: transformers' logits, and the same bits however a pass is cut."""

import pytest
import tiny_heads
import torch
from tiny_architectures import random_tokens, tiny

from specfit.speculators.packed import eagle3_weights
from specfit.speculators.proposer import Eagle3Proposer
from specfit.targets.packed import check_kernels, llama_weights
from specfit.targets.slots import SlotTarget
from specfit_kernels.cpu_weights import Activations, WeightFormat
from specfit_kernels.nvfp4 import quantize
from specfit_serve import eagle3, llama
from specfit_serve.decode import DecodeSettings, Request, decode
from specfit_serve.llama import LlamaTarget
from specfit_serve.ngram import NgramProposer, NoProposer

MAX_LENGTH = 150
ARCHITECTURES = ["llama", "llama3_rope", "yarn_rope", "qwen2", "qwen3"]
LAYERS = [0, 3, 6]


def served(architecture, *, num_slots=3, num_pages=None, aux_layers=LAYERS, weights=None):
    return LlamaTarget(
        weights or llama_weights(tiny(architecture)),
        num_slots=num_slots,
        max_length=MAX_LENGTH,
        aux_layers=aux_layers,
        num_pages=num_pages,
    )


def prompt(length, seed=0):
    return random_tokens(length, seed=seed)[None]


START = torch.tensor([0])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_and_features_are_those_of_transformers(architecture):
    reference = SlotTarget(
        tiny(architecture), num_slots=3, max_length=MAX_LENGTH, aux_layers=LAYERS
    )
    target = served(architecture)
    tokens = torch.stack([random_tokens(9, seed=row) for row in range(3)])
    for slot, length in enumerate((80, 5, 64)):
        outputs = [t.forward(prompt(length, slot), START, slot) for t in (reference, target)]
        for name in ("logits", "features"):
            expected, found = (getattr(output, name) for output in outputs)
            torch.testing.assert_close(
                found, expected, rtol=0, atol=2e-5 * float(expected.abs().max())
            )
    starts = torch.tensor([80, 5, 64])
    outputs = [t.forward(tokens, starts, 0) for t in (reference, target)]
    scale = float(outputs[0].logits.abs().max())
    torch.testing.assert_close(outputs[1].logits, outputs[0].logits, rtol=0, atol=2e-5 * scale)


@pytest.mark.parametrize("activations", Activations)
def test_a_pass_over_many_tokens_gives_the_bits_of_passes_over_one(activations):
    model = tiny("llama")
    stored = {
        name: quantize(p.detach()) if name.endswith("_proj.weight") else p.detach()
        for name, p in model.model.named_parameters()
    }
    weights = llama_weights(model, stored, activations=activations)
    whole, single = (served("llama", weights=weights) for _ in range(2))
    tokens = torch.stack([random_tokens(70, seed=row) for row in range(3)])
    together = whole.forward(tokens, torch.zeros(3, dtype=torch.int64), 0)
    for row in range(3):
        for at in range(70):
            one = single.forward(tokens[row : row + 1, at : at + 1], torch.tensor([at]), row)
            assert torch.equal(one.logits[0, 0], together.logits[row, at])
            assert torch.equal(one.features[0, 0], together.features[row, at])


def test_a_prompt_in_parts_gives_the_same_bits(monkeypatch):
    tokens = prompt(90)
    whole = served("qwen3").forward(tokens, START, 0)
    monkeypatch.setattr(llama, "MAX_ROWS", 16)
    parts = served("qwen3").forward(tokens, START, 0)
    assert torch.equal(parts.logits, whole.logits)
    assert torch.equal(parts.features, whole.features)
    last = served("qwen3").forward(tokens, START, 0, last_only=True)
    assert torch.equal(last.logits, whole.logits[:, -1:])


def test_a_moved_sequence_goes_on_where_it_was():
    target = served("llama")
    for slot in range(3):
        target.forward(prompt(20 + slot, slot), START, slot)
    next_token = torch.tensor([[5]])
    expected = target.forward(next_token, torch.tensor([22]), 2).logits
    target.move(2, 0)
    assert torch.equal(target.forward(next_token, torch.tensor([22]), 0).logits, expected)


def test_a_cache_without_pages_refuses():
    target = served("llama", num_pages=2)
    assert target.reserve(0, 64)
    assert target.reserve(1, 64)
    assert not target.reserve(0, 65)
    with pytest.raises(ValueError, match="slot 0 has no page left for 65 columns"):
        target.forward(prompt(65), START, 0)
    target.release(1)
    assert target.reserve(0, 65)


def requests():
    return [Request(f"r{i}", random_tokens(8 + 5 * i, seed=i).tolist(), 0.0) for i in range(5)]


def answers(target, proposer, num_draft_tokens):
    settings = DecodeSettings(num_draft_tokens, max_new_tokens=60, batch_size=3)
    return {a.id: a.tokens for a in decode(target, proposer, requests(), settings)}


def test_greedy_answers_are_those_of_plain_decoding_whatever_is_drafted():
    plain = answers(served("llama"), NoProposer(), 0)
    assert answers(served("llama"), NgramProposer(1, 3), 4) == plain
    reference = SlotTarget(tiny("llama"), num_slots=3, max_length=MAX_LENGTH, aux_layers=None)
    assert answers(reference, NoProposer(), 0) == plain


@pytest.mark.parametrize("num_draft_tokens", [0, 4])
@pytest.mark.parametrize("num_pages", [2, 3, 4])
def test_few_pages_change_no_answer(num_draft_tokens, num_pages):
    target = served("llama", num_pages=num_pages)
    drafter = NgramProposer(1, 3)
    entered = []
    start = drafter.start
    drafter.start = lambda *arguments: (entered.append(arguments), start(*arguments))
    found = answers(target, drafter, num_draft_tokens)
    assert found == answers(served("llama"), NoProposer(), 0)
    assert target.pages.num_free == num_pages
    assert len(entered) > len(requests())


def test_a_head_refuses_to_write_behind_its_last_column():
    speculator = tiny_heads.make_speculator(tiny("llama"))
    weights = eagle3_weights(speculator.head, speculator.vocab, speculator.embeddings)
    proposer = eagle3.Eagle3Proposer(weights, num_slots=1, max_length=8)
    tokens = tiny_heads.random_tokens(10, seed=5)
    features = speculator.document(tokens, [(4, 10)]).aux.flatten(1)
    with pytest.raises(ValueError, match="max_length must be at least 9, got 8"):
        proposer.start(0, [*tokens, 1], features)
    proposer.start(0, tokens[:9], features[:8])
    with pytest.raises(ValueError, match="max_length must be at least 9, got 8"):
        proposer.propose([tokens[:9]], 2, torch.zeros(1), torch.zeros(1, 2))


@pytest.mark.parametrize("flag", [None, *tiny_heads.FLAGS])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_head_drafts_what_it_drafts_in_torch(flag, temperature):
    speculator = tiny_heads.make_speculator(tiny("llama"), **({flag: True} if flag else {}))
    with torch.no_grad():
        for parameter in speculator.head.parameters():
            parameter.copy_(parameter.bfloat16())
    sizes = {"num_slots": 3, "max_length": MAX_LENGTH}
    weights = eagle3_weights(speculator.head, speculator.vocab, speculator.embeddings)
    proposers = [
        eagle3.Eagle3Proposer(weights, **sizes),
        Eagle3Proposer(speculator.head, speculator.vocab, speculator.embeddings, **sizes),
    ]
    layers = list(speculator.head.config.aux_layers)
    asked = [
        Request(f"r{i}", random_tokens(8 + 5 * i, seed=i).tolist(), temperature) for i in range(5)
    ]
    found = []
    for proposer in proposers:
        target = served("llama", aux_layers=layers)
        settings = DecodeSettings(num_draft_tokens=3, max_new_tokens=40, batch_size=3)
        decoded = decode(target, proposer, asked, settings)
        found.append({a.id: (a.tokens, a.rounds) for a in decoded})
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("architecture", "message"),
    [
        ("qwen3_moe", "the model must be one of .* got qwen3_moe"),
        ("mistral_window", "sliding_window must be null for the CPU kernels, got 7"),
        ("qwen3_window", "sliding_window must be null"),
        ("gemma2", "the model must be one of"),
    ],
)
def test_a_model_that_the_kernels_cannot_run_is_refused(architecture, message):
    with pytest.raises(ValueError, match=rf"{message}.*runtime\.engine=torch"):
        check_kernels(tiny(architecture))


def test_a_head_in_int8_drafts_nearly_what_it_drafts_in_bf16():
    speculator = tiny_heads.make_speculator(tiny("llama"))
    drafts = []
    for in_int8 in (False, True):
        weights = eagle3_weights(
            speculator.head, speculator.vocab, speculator.embeddings, in_int8=in_int8
        )
        assert weights.head.format is (WeightFormat.int8 if in_int8 else WeightFormat.bf16)
        proposer = eagle3.Eagle3Proposer(weights, num_slots=1, max_length=80)
        found = []
        for seed in range(40):
            tokens = tiny_heads.random_tokens(30, seed=seed)
            features = speculator.document(tokens, [(4, 30)]).aux.flatten(1)
            proposer.start(0, [*tokens, 1], features)
            draft = proposer.propose([[*tokens, 1]], 2, torch.zeros(1), torch.zeros(1, 2))
            found += draft.tokens[0].tolist()
        drafts.append(found)
    same = sum(a == b for a, b in zip(*drafts, strict=True)) / len(drafts[0])
    assert 0.75 < same <= 1
