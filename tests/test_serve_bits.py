"""Greedy decoding with speculation has the very logits of decoding without, bit by bit."""

import random
from typing import Any

import pytest
import tiny_runs
import torch
from tiny_architectures import random_tokens, tiny
from torch import Tensor

from specfit import pipeline
from specfit.latency.config import Format
from specfit.latency.formats import engine_in
from specfit_kernels.cpu_weights import Activations
from specfit_serve.decode import Decoded, DecodeSettings, Request, decode
from specfit_serve.ngram import NoProposer
from specfit_serve.protocols import Draft, Proposer
from specfit_serve.stats import Round

MAX_DRAFT = 6


class Recorded:
    """A target of one slot that keeps the logits of every position, the latest of each."""

    def __init__(self, target: Any) -> None:
        self._target = target
        self.logits: dict[int, Tensor] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def forward(self, tokens: Tensor, starts: Tensor, *args: Any, **kwargs: Any) -> Any:
        output = self._target.forward(tokens, starts, *args, **kwargs)
        last = int(starts) + tokens.shape[1]
        first = last - output.logits.shape[1]
        self.logits |= dict(zip(range(first, last), output.logits[0], strict=True))
        return output


class Forger(NoProposer):
    """Drafts what plain decoding said, of any length, with a wrong token now and then."""

    def __init__(self, answer: list[int], prompt: list[int], vocab_size: int) -> None:
        self._tokens = prompt + answer
        self._vocab_size = vocab_size
        self._random = random.Random(len(prompt))

    def propose(
        self, sequences: Any, num_draft_tokens: int, temperatures: Any, uniforms: Any
    ) -> Draft:
        del temperatures, uniforms
        [sequence] = sequences
        length = self._random.randint(0, num_draft_tokens)
        tokens = self._tokens[len(sequence) : len(sequence) + length]
        wrong = self._random.randint(0, 2 * MAX_DRAFT)
        if wrong < len(tokens):
            tokens[wrong] = (tokens[wrong] + 1) % self._vocab_size
        return Draft(torch.tensor([tokens], dtype=torch.long), torch.tensor([len(tokens)]))


def answer(
    target: Any, proposer: Proposer, prompt: list[int], num_tokens: int, num_draft_tokens: int
) -> tuple[Decoded, dict[int, Tensor]]:
    """One answer, which never ends early, and the logits behind each of its positions."""
    settings = DecodeSettings(
        num_draft_tokens=num_draft_tokens, max_new_tokens=num_tokens, batch_size=1
    )
    recorded = Recorded(target)
    (found,) = decode(recorded, proposer, [Request("a", prompt, 0.0)], settings)
    return found, recorded.logits


def compare(target: Any, prompts: list[list[int]], num_tokens: int) -> list[Round]:
    """The rounds with drafts; fails at any other bit."""
    rounds: list[Round] = []
    for prompt in prompts:
        plain, expected = answer(target, NoProposer(), prompt, num_tokens, 0)
        forger = Forger(plain.tokens, prompt, target.vocab_size)
        drafted, logits = answer(target, forger, prompt, num_tokens, MAX_DRAFT)
        assert drafted.tokens == plain.tokens
        for i in range(num_tokens):
            position = len(prompt) - 1 + i
            assert torch.equal(logits[position], expected[position])
        rounds += drafted.rounds
    return rounds


@pytest.mark.parametrize("activations", Activations)
def test_drafts_change_no_bit_of_a_logit(activations):
    engine = engine_in(Format.nvfp4, tiny("llama"), None, activations)
    target = engine.slots(num_slots=1, max_length=250, aux_layers=None)
    target.eos_ids = frozenset()
    prompts = [random_tokens(20 + 7 * i, seed=i).tolist() for i in range(8)]
    rounds = compare(target, prompts, 60)
    assert {r.num_drafted for r in rounds} == set(range(MAX_DRAFT + 1))
    assert {r.num_kept for r in rounds} == set(range(MAX_DRAFT + 1))
    assert sum(r.num_kept < r.num_drafted for r in rounds) > 20


@pytest.mark.slow
def test_hundred_answers_of_a_real_model_have_the_logits_of_plain_decoding(tmp_path):
    sizes = ["data.num_train=2", "data.num_validation=2", "data.num_test=100"]
    path = pipeline._Path(tiny_runs.composed([f"runtime.root={tmp_path}", *sizes]))
    rows = tiny_runs.read_lines(path.prompts, "conversations.jsonl")
    prompts = [row["prompt_ids"] for row in rows if row["split"] == "test"][:100]
    assert len(prompts) == 100
    engine = engine_in(Format.nvfp4, path.plain, None, Activations.int8)
    longest = max(map(len, prompts)) + 128 + MAX_DRAFT
    target = engine.slots(num_slots=1, max_length=longest, aux_layers=None)
    target.eos_ids = frozenset()
    rounds = compare(target, prompts, 128)
    assert sum(r.num_kept for r in rounds) > 5000
