"""The loss and the figures of a pack, chain by chain."""

from dataclasses import replace

import pytest
import tiny_heads
import torch

from specfit.speculators.batches import pack
from specfit.speculators.unroll import unroll
from specfit.targets.target import HiddenStates

NUM_STEPS = 3
SPANS = [[(5, 14)], [(4, 8), (12, 17)]]


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def speculator(request):
    return tiny_heads.make_speculator(tiny_heads.make_target(request.param))


def make_documents(speculator, fitted=False):
    random = tiny_heads.random_tokens
    documents = [speculator.document(random(s[-1][1], i), s) for i, s in enumerate(SPANS)]
    if fitted:
        tiny_heads.overfit(speculator, documents, num_steps=15)
    return documents


def brute_force(speculator, documents, step_decay):
    """Chain by chain, with the target's distribution from the model itself, in float64."""
    drafted_ids = speculator.vocab.target_ids.tolist()
    loss, weight = 0.0, 0.0
    counted, correct, kept = ([0] * NUM_STEPS for _ in range(3))
    for document in documents:
        tokens = document.input_ids
        logits = speculator.target.model(tokens[None]).logits[0].double()
        log_p = logits.log_softmax(-1)
        for t in range(len(tokens) - 2):
            steps = unroll(
                speculator.head,
                pack([document]),
                torch.tensor([t]),
                num_steps=NUM_STEPS,
                teacher_forced=True,
                **speculator.drafting,
            )
            right = True
            for s, step in enumerate(steps):
                place = t + 2 + s
                if place >= len(tokens) or not document.loss_mask[place]:
                    break
                p = log_p[place - 1, drafted_ids]
                q = step.logits[0].detach().double().log_softmax(-1)
                loss += step_decay**s * (p.exp() * (p - q)).sum().item()
                weight += step_decay**s
                hit = drafted_ids[int(q.argmax())] == int(logits[place - 1].argmax())
                right = right and hit
                counted[s] += 1
                correct[s] += hit
                kept[s] += right
    return loss, weight, counted, correct, kept


@pytest.mark.parametrize("fitted", [False, True], ids=["untrained", "fitted"])
def test_figures_are_those_of_a_loop_over_all_chains(speculator, fitted):
    documents = make_documents(speculator, fitted)
    with torch.no_grad():
        found = speculator.objective(num_steps=NUM_STEPS, step_decay=0.7)(pack(documents))
        expected = brute_force(speculator, documents, 0.7)
    loss, weight, counted, correct, kept = expected
    assert found.loss.item() == pytest.approx(loss, rel=1e-4)
    assert found.weight.item() == pytest.approx(weight, rel=1e-6)
    assert found.counted.tolist() == counted == [9 + 9, 8 + 7, 7 + 5]
    assert found.correct.tolist() == correct
    assert found.kept.tolist() == kept
    assert not fitted or kept[1] > 0


def test_a_top_token_outside_the_draft_vocabulary_is_wrong_and_breaks_its_chain(speculator):
    documents = make_documents(speculator, fitted=True)
    objective = speculator.objective(num_steps=NUM_STEPS)
    outside = int((~speculator.vocab.t2d).nonzero()[0])
    before = objective(pack(documents))
    assert before.correct[0] > 0
    changed = [
        replace(d, top_token=d.top_token.masked_fill(d.loss_mask.roll(-1), outside))
        for d in documents
    ]
    found = objective(pack(changed))
    assert found.counted.tolist() == before.counted.tolist()  # counted, and counted as wrong
    assert found.correct.tolist() == found.kept.tolist() == [0] * NUM_STEPS


def gradient(speculator, documents):
    speculator.head.zero_grad()
    figures = speculator.objective()(pack(documents))
    (figures.loss / figures.weight).backward()
    return figures, [p.grad.clone() for p in speculator.head.parameters()]


def test_nothing_after_the_last_learned_token_matters(speculator):
    tokens = tiny_heads.random_tokens(12, seed=3)
    alone = speculator.document(tokens, [(4, 12)])
    longer = speculator.document([*tokens, *tiny_heads.random_tokens(20, seed=4)], [(4, 12)])
    (one, gradients), (other, others) = (gradient(speculator, [d]) for d in (alone, longer))
    assert one.weight == other.weight
    torch.testing.assert_close(one.loss, other.loss, rtol=1e-5, atol=0)
    for a, b in zip(gradients, others, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def test_a_document_without_learned_tokens_leaves_the_mean_loss_as_it_is(speculator):
    documents = make_documents(speculator)
    silent = replace(documents[0], loss_mask=torch.zeros_like(documents[0].loss_mask))
    one, _ = gradient(speculator, documents[1:])
    other, _ = gradient(speculator, [silent, documents[1]])
    assert one.weight == other.weight
    torch.testing.assert_close(one.loss, other.loss, rtol=1e-5, atol=0)


def test_the_targets_opinion_of_prompt_tokens_is_not_asked(speculator):
    def spoiled(document: HiddenStates) -> HiddenStates:
        unasked = ~document.loss_mask.roll(-1)
        last = document.last.masked_fill(unasked[:, None], 1e3)
        top = document.top_token.masked_fill(unasked, 7)
        return replace(document, last=last, top_token=top)

    documents = make_documents(speculator)
    one, _ = gradient(speculator, documents)
    other, _ = gradient(speculator, [spoiled(d) for d in documents])
    assert torch.equal(one.loss, other.loss)
    assert torch.equal(one.correct, other.correct)


def test_only_the_head_is_trained(speculator):
    objective = speculator.objective()
    assert [id(p) for p in objective.parameters()] == [id(p) for p in speculator.head.parameters()]
    _, gradients = gradient(speculator, make_documents(speculator))
    assert all(g.abs().sum() > 0 for g in gradients)
    assert all(p.grad is None for p in speculator.target.model.parameters())
