"""Real servers load the target and the exported head: `make test-servers`.

python tests/real_servers.py ENVIRONMENTS [vllm,llama_cpp,openvino] [KEY=VALUE …]

ENVIRONMENTS has a Python environment of each server (`make test-servers` makes them). The head is
that of the default job, as KEY=VALUE change it; it is made first, unless it is there. Each server
answers held-out HumanEval prompts greedily without and with the head, and vLLM and llama.cpp also
at temperature 1. Printed is a row a server: whether its greedy answers are its own plain ones, its
counters beside those of our loop on the same prompts, and the mean of what sampled tokens cost over
the entropy of where they were drawn, in standard errors. A row that is not as it must be is an
error.
"""

import json
import logging
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from real_server_children import Answers, in_fp32, llama_cpp, openvino, vllm
from tiny_runs import composed

from specfit.export.imports import read_head
from specfit.files import read_jsonl, write_json
from specfit.pipeline import _Path
from specfit.targets.target import Target
from specfit_serve.decode import DecodeSettings, Request, decode
from specfit_serve.stats import Round

SERVERS = {"vllm": vllm, "llama_cpp": llama_cpp, "openvino": openvino}
SAMPLES_AT = ("vllm", "llama_cpp")  # OpenVINO GenAI drafts greedily only
NUM_PROMPTS, NUM_TOKENS, K = 40, 48, 4
MOST_SIGMAS = 4.0
MOST_DIFFERENCE = 0.01  # of acceptance lengths
log = logging.getLogger("real_servers")


@dataclass(frozen=True)
class Job:
    """What every server is given."""

    environment: Path  # the server's own
    target: Path  # a folder with safetensors
    target_gguf: Path  # the same numbers
    export: Path  # the folder of the exported head's artifact
    work: Path  # for what is made on the way
    prompts: list[list[int]] = field(default_factory=list)
    num_tokens: int = NUM_TOKENS
    num_draft_tokens: int = K


@dataclass(frozen=True)
class Counts:
    """Of rounds of one server, or of our loop."""

    num_rounds: int
    num_drafted: int
    num_accepted: int

    @classmethod
    def of(cls, rounds: Sequence[Round]) -> "Counts":
        drafted, kept = (sum(getattr(r, n) for r in rounds) for n in ("num_drafted", "num_kept"))
        return cls(len(rounds), drafted, kept)

    @property
    def acceptance_length(self) -> float:
        return 1 + self.num_accepted / self.num_rounds if self.num_rounds else math.nan


def main(environments: str, *words: str) -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(1)
    chosen, options = list(SERVERS), list(words)
    if options and "=" not in options[0]:
        chosen = options.pop(0).split(",")
    path = _Path(composed(tuple(options)))
    export = path.export.folder()
    work = export.parent / f"{export.name}.servers"
    work.mkdir(exist_ok=True)
    target = path.opened.engine.target
    prompts, rounds = ours(path, held_out(options), export)
    reference = {
        "clipped": Counts.of([r for r in rounds[0] if r.num_drafted]),
        "clipped, rounds without a draft too": Counts.of(rounds[0]),
        "unclipped": Counts.of(rounds[1]),
    }
    gguf = in_fp32(path.location.gguf_path, work / "target-f32.gguf")
    rows = []
    for name in chosen:
        job = Job(
            Path(environments) / name,
            path.opened.served_folder,
            gguf,
            export,
            work,
            prompts,
        )
        rows.append(served(name, job, reference, target))
        sys.stdout.write(json.dumps(rows[-1]) + "\n")
        sys.stdout.flush()
    write_json(work / "servers.json", {"rows": rows})
    faults = [fault for row in rows for fault in faults_of(row)]
    if faults:
        raise SystemExit("\n".join(faults))


def held_out(words: Sequence[str]) -> Iterator[list[int]]:
    """HumanEval prompts, through the target's chat template."""
    more = ["profile=coding", "data.num_test=80"]
    conversations = _Path(composed((*words, *more))).prompts
    for row in read_jsonl(conversations.file("conversations.jsonl")):
        if row["split"] == "test":
            yield row["prompt_ids"]


def ours(
    path: _Path, prompts: Iterator[list[int]], export: Path
) -> tuple[list[list[int]], tuple[list[Round], list[Round]]]:
    """Prompts whose answers do not end early, and our rounds over them: cut at the end, and not.

    Rounds that are not cut are of longer answers, as far as they begin before the end.
    """
    engine, room = path.opened.engine, {"num_slots": 1, "max_length": 1024}
    head = read_head(export / "vllm", engine.target)
    slots = engine.slots(**room, aux_layers=list(head[0].config.aux_layers))
    settings = DecodeSettings(K, NUM_TOKENS + K + 1, batch_size=1)
    kept: list[list[int]] = []
    whole: list[Round] = []
    for prompt in prompts:
        proposer = engine.eagle3(*head, **room)
        [answer] = decode(slots, proposer, [Request("0", prompt, 0.0)], settings)
        if answer.finish_reason == "length":
            kept.append(prompt)
            whole += [r for r in answer.rounds if r.start < NUM_TOKENS]
        if len(kept) == NUM_PROMPTS:
            break
    assert len(kept) == NUM_PROMPTS, f"only {len(kept)} prompts have answers of {NUM_TOKENS} tokens"
    rooms = [min(r.num_drafted, NUM_TOKENS - r.start - 1) for r in whole]
    cut = [
        Round(r.start, room, min(r.num_kept, room)) for r, room in zip(whole, rooms, strict=True)
    ]
    return kept, (cut, whole)


def served(name: str, job: Job, reference: dict[str, Counts], target: Target) -> dict[str, Any]:
    """The row of one server."""
    server = SERVERS[name]
    plain: Answers = server.answers(job, with_head=False, temperature=0.0)
    found: Answers = server.answers(job, with_head=True, temperature=0.0)
    ours = reference[server.CONVENTION]
    theirs = Counts(found.num_rounds, found.num_drafted, found.num_accepted)
    row = {
        "engine": name,
        "version": found.version,
        "num_prompts": len(job.prompts),
        "num_tokens": sum(len(tokens) for tokens in found.tokens),
        "num_draft_tokens": K,
        "outputs_equal_plain": found.tokens == plain.tokens,
        "convention": server.CONVENTION,
        **{f"{key}_theirs": value for key, value in asdict(theirs).items()},
        **{f"{key}_ours": value for key, value in asdict(ours).items()},
        "acceptance_length_theirs": theirs.acceptance_length,
        "acceptance_length_ours": ours.acceptance_length,
        "tokens_per_second_plain": plain.tokens_per_second,
        "tokens_per_second": found.tokens_per_second,
    }
    if name in SAMPLES_AT:
        sampled: Answers = server.answers(job, with_head=True, temperature=1.0)
        row["sampling_sigmas"] = sigmas(target, job.prompts, sampled.tokens)
    return row


@torch.no_grad()
def sigmas(target: Target, prompts: list[list[int]], answers: list[list[int]]) -> float:
    """Mean of -log p(token) less the entropy of p, over its standard error.

    Were tokens drawn from the target's distribution, that would be a sum of differences whose means
    are 0, each given those before it.
    """
    total, variance = 0.0, 0.0
    for prompt, answer in zip(prompts, answers, strict=True):
        logits = target.model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        logprobs = logits.double().log_softmax(-1)
        probs = logprobs.exp()
        entropy = -(probs * logprobs).sum(-1)
        drawn = logprobs.gather(1, torch.tensor(answer)[:, None])[:, 0]
        total += float((-drawn - entropy).sum())
        variance += float(((probs * logprobs.square()).sum(-1) - entropy.square()).sum())
    return total / math.sqrt(variance)


def faults_of(row: dict[str, Any]) -> Iterator[str]:
    """What is not as it must be."""
    name = row["engine"]
    if not row["outputs_equal_plain"]:
        yield f"{name}: greedy answers with the head must be its plain ones"
    apart = row["acceptance_length_theirs"] / row["acceptance_length_ours"] - 1
    if not abs(apart) <= MOST_DIFFERENCE:
        yield f"{name}: acceptance lengths must be within 1 %, got {100 * apart:+.2f} %"
    if not abs(row.get("sampling_sigmas", 0.0)) <= MOST_SIGMAS:
        yield f"{name}: sampled tokens must cost their entropy, got {row['sampling_sigmas']} sigma"


if __name__ == "__main__":
    main(*sys.argv[1:])
