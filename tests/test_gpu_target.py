"""What needs a GPU: the target that the kernels make, its graphs, and speculation on it."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from gpu_device import DEVICE, IN_HALVES, IN_TERMS, MARKS, by_twins

from bench.synthetic import SMOLLM2, random_weights
from specfit_serve.decode import DecodeSettings, Request, decode
from specfit_serve.ngram import NoProposer
from specfit_serve.protocols import Draft

pytest.importorskip("triton", reason="Triton is made for Linux only")
pytestmark = MARKS
TARGET = replace(SMOLLM2, num_layers=4)
ROOM = {"num_slots": 3, "max_length": 1024, "aux_layers": [1, 4]}


@pytest.fixture(params=[IN_HALVES, IN_TERMS[-1]], scope="module")
def weights(request: pytest.FixtureRequest):
    torch.manual_seed(0)
    return random_weights(TARGET, request.param, DEVICE)


def served(weights: Any, **options: Any) -> Any:
    from specfit_serve.gpu import GpuTarget

    return GpuTarget(weights, **(ROOM | options))


def on_device(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, device=DEVICE)


def prepared(target: Any) -> Any:
    """Three prompts in its cache, and columns for drafts."""
    generator = torch.Generator().manual_seed(1)
    for slot, length in enumerate((70, 600, 17)):
        prompt = torch.randint(TARGET.vocab_size, (1, length), generator=generator)
        target.forward(prompt.to(DEVICE), on_device(0), slot, last_only=True)
        assert target.reserve(slot, length + 30)
    return target


STARTS = (70, 600, 17)


def distance(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got - expected).norm() / expected.norm())


def drafts(each: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(TARGET.vocab_size, (3, each), generator=generator).to(DEVICE)


def test_a_pass_is_that_of_its_twins(weights):
    target = prepared(served(weights))
    with by_twins():
        twin = prepared(served(weights, graphs=False))
        expected = twin.forward(drafts(5), on_device(*STARTS), 0)
    for _ in range(3):  # launched, captured and replayed
        found = target.forward(drafts(5), on_device(*STARTS), 0)
        assert distance(found.logits, expected.logits) < 0.02
        assert distance(found.features, expected.features) < 0.02


def test_a_replayed_graph_is_what_launches_are(weights):
    graphs, launches = (prepared(served(weights, graphs=on)) for on in (True, False))
    for seed in range(4):
        starts = on_device(*(start + seed for start in STARTS))
        outputs = [t.forward(drafts(4, seed), starts, 0) for t in (graphs, launches)]
        assert torch.equal(outputs[0].logits, outputs[1].logits)
        assert torch.equal(outputs[0].features, outputs[1].features)


def test_a_draft_has_the_bits_of_passes_over_one_token_of_one_sequence(weights):
    whole, single = (prepared(served(weights)) for _ in range(2))
    tokens = drafts(5)
    together = whole.forward(tokens, on_device(*STARTS), 0)
    for row, start in enumerate(STARTS):
        for i in range(5):
            one = single.forward(tokens[row : row + 1, i : i + 1], on_device(start + i), row)
            assert torch.equal(one.logits[0, 0], together.logits[row, i])
            assert torch.equal(one.features[0, 0], together.features[row, i])


def test_a_replay_waits_for_nobody_and_takes_no_memory(weights):
    target = prepared(served(weights, aux_layers=None))
    tokens, starts = drafts(5), on_device(*STARTS)
    for _ in range(2):
        target.forward(tokens, starts, 0)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        target.forward(tokens, starts, 0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


class Forger(NoProposer):
    """Drafts what plain decoding said, with a wrong token now and then."""

    def __init__(self, answers: list[list[int]]) -> None:
        self._answers = answers

    def propose(
        self, sequences: Any, num_draft_tokens: int, temperatures: Any, uniforms: Any
    ) -> Draft:
        del temperatures, uniforms
        rows = []
        for sequence in sequences:
            answer = next(a for a in self._answers if a[: len(sequence)] == list(sequence))
            row = answer[len(sequence) :][:num_draft_tokens]
            row += [0] * (num_draft_tokens - len(row))
            if len(sequence) % 3 == 0:
                row[len(sequence) % num_draft_tokens] ^= 1
            rows.append(row)
        return Draft(torch.tensor(rows), torch.full((len(rows),), num_draft_tokens))


def test_speculation_changes_no_token(weights):
    generator = torch.Generator().manual_seed(2)
    prompts = [
        torch.randint(TARGET.vocab_size, (length,), generator=generator).tolist()
        for length in (5, 40, 300, 16)
    ]
    requests = [Request(str(i), prompt, 0.0) for i, prompt in enumerate(prompts)]
    answers: list[list[int]] = []
    rounds = []
    for k in (0, 1, 4, 8):
        proposer = Forger([p + a for p, a in zip(prompts, answers, strict=True)]) if k else None
        settings = DecodeSettings(num_draft_tokens=k, max_new_tokens=96, batch_size=3)
        found = list(decode(served(weights), proposer or NoProposer(), requests, settings))
        tokens = [answer.tokens for answer in sorted(found, key=lambda answer: answer.id)]
        answers = answers or tokens
        assert tokens == answers
        rounds += [one for answer in found for one in answer.rounds if k]
    assert sum(one.num_kept for one in rounds) > len(rounds)
    assert any(one.num_kept < one.num_drafted for one in rounds)
