"""The head in the real decode loop of a real target."""

from dataclasses import replace

import pytest
import tiny_heads
import torch
from tiny_heads import FLAGS, Speculator

from specfit.speculators.batches import pack
from specfit.speculators.proposer import Eagle3Proposer
from specfit.speculators.unroll import unroll
from specfit.training.replay import replay
from specfit_serve.decode import Decoded, Request
from specfit_serve.stats import DecodeStats

MAX_NEW_TOKENS = 14


class Overheard:
    """A proposer that keeps what it was asked and what it drafted."""

    def __init__(self, proposer: Eagle3Proposer, heard: list) -> None:
        self._proposer = proposer
        self._heard = heard

    def __getattr__(self, name: str):
        return getattr(self._proposer, name)

    def propose(self, sequences, *arguments):
        draft = self._proposer.propose(sequences, *arguments)
        rows = zip(sequences, draft.tokens.tolist(), strict=True)
        self._heard += [(list(sequence), tokens) for sequence, tokens in rows]
        return draft


def stopping(target):
    """The same target, whose answers also end with tokens that it says now and then."""
    target.info = replace(target.info, eos_ids=[1, 175, 257])
    return target


def documents(speculator: Speculator, requests: list[Request], answers: dict[str, Decoded]):
    for request in requests:
        whole = list(request.prompt) + answers[request.id].tokens
        yield speculator.document(whole, [(len(request.prompt), len(whole))])


def fitted(speculator: Speculator, requests: list[Request]) -> Speculator:
    plain = plain_answers(speculator, requests)
    tiny_heads.overfit(speculator, list(documents(speculator, requests, plain)), num_steps=50)
    return speculator


def plain_answers(speculator: Speculator, requests: list[Request]) -> dict[str, Decoded]:
    settings = {"num_draft_tokens": 0, "max_new_tokens": MAX_NEW_TOKENS, "batch_size": 1}
    return tiny_heads.answer(speculator, requests, **settings)


@pytest.fixture(scope="module", params=["untrained", "overfitted"])
def speculator(request) -> Speculator:
    found = tiny_heads.make_speculator(stopping(tiny_heads.make_target()))
    if request.param == "overfitted":
        fitted(found, tiny_heads.greedy_requests(6))
    return found


@pytest.fixture(scope="module")
def plain() -> dict[str, Decoded]:
    speculator = tiny_heads.make_speculator(stopping(tiny_heads.make_target()))
    return plain_answers(speculator, tiny_heads.greedy_requests(6))


@pytest.mark.parametrize(
    ("batch_size", "num_draft_tokens"),
    [(1, 4), (2, 2), (3, 1), (3, 3), (4, 5)],
)
def test_greedy_answers_with_the_head_are_the_targets_own(
    speculator, plain, batch_size, num_draft_tokens
):
    found = tiny_heads.answer(
        speculator,
        tiny_heads.greedy_requests(6),
        num_draft_tokens=num_draft_tokens,
        max_new_tokens=MAX_NEW_TOKENS,
        batch_size=batch_size,
    )
    for name, answer in plain.items():
        assert found[name].tokens == answer.tokens, name
        assert found[name].finish_reason == answer.finish_reason, name


@pytest.mark.parametrize("num_draft_tokens", [1, 4])
def test_replay_of_greedy_answers_has_the_rounds_that_decoding_had(speculator, num_draft_tokens):
    requests = tiny_heads.greedy_requests(6)
    found = tiny_heads.answer(
        speculator,
        requests,
        num_draft_tokens=num_draft_tokens,
        max_new_tokens=MAX_NEW_TOKENS,
        batch_size=3,
    )
    assert {a.finish_reason for a in found.values()} == {"stop", "length"}
    replayed = replay(
        speculator.head,
        documents(speculator, requests, found),
        num_draft_tokens=num_draft_tokens,
        **speculator.drafting,
    )
    for request, stats in zip(requests, replayed, strict=True):
        rounds = found[request.id].rounds
        decoded = DecodeStats.from_rounds(rounds, num_draft_tokens)
        assert stats.rounds_by_accepted == decoded.rounds_by_accepted, request.id
        assert stats.kept_by_position == decoded.kept_by_position, request.id
        # The answer's first token is the prefill's, all others a round's.
        assert stats.num_tokens == len(found[request.id].tokens) - 1
    pooled = sum(replayed[1:], replayed[0])
    assert pooled.acceptance_length == pytest.approx(1 + sum(pooled.acceptance_by_position))


@pytest.mark.parametrize("speculator", ["overfitted"], indirect=True)
def test_a_head_fitted_to_the_answers_is_accepted(speculator, plain):
    requests = tiny_heads.greedy_requests(6)
    replayed = replay(
        speculator.head,
        documents(speculator, requests, plain),
        num_draft_tokens=4,
        **speculator.drafting,
    )
    assert sum(replayed[1:], replayed[0]).acceptance_length > 1.5


@pytest.mark.parametrize(
    ("architecture", "batch_size", "flags"), [("llama", 3, FLAGS), ("qwen3", 2, ())]
)
def test_decoding_drafts_what_chains_draft(architecture, batch_size, flags):
    speculator = tiny_heads.make_speculator(
        stopping(tiny_heads.make_target(architecture)), **dict.fromkeys(flags, True)
    )
    requests = tiny_heads.greedy_requests(4)
    fitted(speculator, requests)
    heard: list[tuple[list[int], list[int]]] = []
    found = tiny_heads.answer(
        speculator,
        requests,
        num_draft_tokens=3,
        max_new_tokens=MAX_NEW_TOKENS,
        batch_size=batch_size,
        wrap=lambda proposer: Overheard(proposer, heard),
    )
    assert len(heard) == sum(len(a.rounds) for a in found.values())
    assert any(r.num_kept > 1 for a in found.values() for r in a.rounds)
    for request, document in zip(requests, documents(speculator, requests, found), strict=True):
        whole = document.input_ids.tolist()
        rounds = [(s, t) for s, t in heard if whole[: len(s)] == s]
        assert len(rounds) == len(found[request.id].rounds)
        # The newest token of a sequence of n is x_{n-1}, which entry n - 2 pairs with f_{n-2}.
        starts = torch.tensor(sorted(len(sequence) - 2 for sequence, _ in rounds))
        with torch.no_grad():
            steps = unroll(
                speculator.head,
                pack([document]),
                starts,
                num_steps=3,
                teacher_forced=False,
                **speculator.drafting,
            )
            drafted = torch.stack([step.tokens for step in steps], dim=1).tolist()
        assert drafted == [tokens for _, tokens in sorted(rounds, key=lambda r: len(r[0]))]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_round_of_no_draft_tokens_takes_in_what_was_shown(temperature):
    speculator = tiny_heads.make_speculator(tiny_heads.make_target())
    tokens = tiny_heads.random_tokens(12, seed=5)
    features = speculator.document(tokens, [(4, 12)]).aux.flatten(1)
    temperatures, uniforms = torch.tensor([temperature]), torch.rand(1, 3, dtype=torch.float64)
    drafts = []
    for length in (12, 11):  # started with all, or shown the last in a round without a draft
        proposer = Eagle3Proposer(
            speculator.head, speculator.vocab, speculator.embeddings, num_slots=1, max_length=64
        )
        proposer.start(0, tokens[:length], features[: length - 1])
        if length < 12:
            draft = proposer.propose([tokens[:length]], 0, temperatures, uniforms[:, :0])
            assert (draft.tokens.shape, draft.lengths.tolist()) == ((1, 0), [0])
            assert draft.probs is None
            proposer.observe(features[None, length - 1 : length], torch.tensor([0]))
        drafts.append(proposer.propose([tokens], 3, temperatures, uniforms).tokens)
    assert torch.equal(*drafts)


def test_sampled_drafts_come_with_a_distribution_over_the_draft_vocabulary_alone():
    speculator = tiny_heads.make_speculator(tiny_heads.make_target())
    proposer = Eagle3Proposer(
        speculator.head, speculator.vocab, speculator.embeddings, num_slots=1, max_length=64
    )
    tokens = tiny_heads.random_tokens(9, seed=5)
    document = speculator.document(tokens, [(4, 9)])
    proposer.start(0, tokens, document.aux[:8].flatten(1))
    uniforms = torch.rand(1, 4, dtype=torch.float64)
    draft = proposer.propose([tokens], 4, torch.tensor([0.7]), uniforms)
    with torch.no_grad():
        (step,) = unroll(
            speculator.head,
            pack([document]),
            torch.tensor([7]),
            num_steps=1,
            teacher_forced=False,
            **speculator.drafting,
        )
    expected = torch.zeros(speculator.target.info.vocab_size)
    expected[speculator.vocab.target_ids] = (step.logits[0] / 0.7).softmax(-1)
    torch.testing.assert_close(draft.probs[0, 0], expected)
    assert speculator.vocab.t2d[draft.tokens].all()
    torch.testing.assert_close(draft.probs.sum(-1), torch.ones(1, 4))
