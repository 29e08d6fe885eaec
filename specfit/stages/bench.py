"""`bench`: tokens/s of the decode loop on this machine, by weight format, proposer and k."""

import logging
import platform
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from specfit.artifacts import Artifact
from specfit.engine import DecodeEngine
from specfit.files import read_jsonl, write_json
from specfit.latency import speeds
from specfit.latency.config import BenchConfig, Format
from specfit.latency.costs import PassCosts, draft_seconds, pass_costs
from specfit.latency.formats import divergence, engine_in
from specfit.latency.llama_cpp import llama_cpp
from specfit.latency.speeds import Prompt, Timed, Way, looped, time_all
from specfit.latency.transformers_loop import transformers_loop
from specfit.report import latency
from specfit.targets.packed import stored_weights
from specfit.targets.target import Target
from specfit.training.checkpoints import load_head
from specfit_kernels import cpu_build
from specfit_kernels.cpu_weights import Activations
from specfit_kernels.floors import read_bytes_per_second
from specfit_serve.hybrid import HybridProposer, LateHead
from specfit_serve.ngram import NgramProposer, NoProposer
from specfit_serve.protocols import DecodeTarget, Proposer
from specfit_serve.suffix import SuffixProposer

VERSION = 2
FIGURES = "bench.json"
EDITS = "edits"  # the component of prompts whose answers copy
EDIT = """Add the comment '# checked' as the first line of this file and show the whole file:

```
{}
```"""
WIDTHS = (1, 2, 3, 5, 9)  # tokens a pass
MAX_ANSWER_TOKENS = 1 << 16  # that suffixes are looked for in
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class BenchJob:
    """What the stage works on."""

    folder: Path
    config: BenchConfig
    prompts: Artifact
    measured: Artifact  # has plain answers, which edits are of
    speculator: Artifact
    target: Target
    source: Path  # the folder of its checkpoint
    gguf: Path | None  # the file that llama.cpp reads


def processor() -> str:
    """What this machine's processor is called."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        names = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        if names:
            return names[0].partition(":")[2].strip()
    return platform.processor() or platform.machine()


def run(job: BenchJob) -> None:
    """Writes bench.json, and a page with its table and plot.

    Raises:
        ValueError: the kernels cannot run the target, or no held-out prompt is short enough.
        FileNotFoundError: `bench.llama_cpp` names no library.
    """
    config = job.config
    prompts = _prompts(job)
    longest = max(len(prompt.tokens) for prompt in prompts)
    room = longest + config.max_new_tokens + max(config.max_draft_tokens, *WIDTHS) + 1
    stored = stored_weights(job.source)
    activations = Activations.int8 if config.int8_activations else Activations.fp32
    engines = {form: engine_in(form, job.target, stored, activations) for form in config.formats}
    slots = {form.value: _slots(engine, room, None) for form, engine in engines.items()}
    bandwidth = read_bytes_per_second()
    context = round(sum(len(p.tokens) for p in prompts) / len(prompts) + config.max_new_tokens / 2)
    times = 4 * config.repetitions
    costs = {name: pass_costs(target, WIDTHS, context, times) for name, target in slots.items()}
    most = config.max_new_tokens
    plain = {name: _plain(name, target, most) for name, target in slots.items()}
    drafting = _Drafting(job, engines[config.formats[-1]], room, plain[config.formats[-1].value])
    with ExitStack() as stack:
        peers = dict(_peers(job, room, stack))
        ways = [*plain.values(), *peers.values(), *drafting.ways(context, times)]
        found = time_all(ways, prompts, config.repetitions)
    rows = [row for name, cost in costs.items() for row in _passes(name, cost, bandwidth)]
    rows += [row | drafting.predicted(row, found) for row in speeds.rows(found, peers)]
    _add_divergences(rows, engines, slots, prompts, found[plain[config.formats[0].value]])
    write_json(
        job.folder / FIGURES,
        {
            "rows": rows,
            "target": job.target.info.name,
            "num_threads": torch.get_num_threads(),
            "processor": processor(),
            "cpu_path": cpu_build.paths()[0].value,
            "read_bytes_per_second": bandwidth,
            "draft_ms": 1e3 * drafting.seconds,
            "config": asdict(config),
        },
    )
    latency.write_page(job.folder)
    _log(rows)


def _plain(name: str, target: DecodeTarget, max_new_tokens: int) -> Way:
    opened = looped(
        target, NoProposer, num_draft_tokens=0, max_new_tokens=max_new_tokens, costs=None
    )
    return Way(name, "none", 0, open=opened)


def _log(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        if "speculative_over_plain" in row:
            log.info(
                "bench %s %s k=%d%s: %.1f tokens/s, %.2f x plain",
                *(row["component"], row["proposer"], row["num_draft_tokens"]),
                *(" adaptive" if row["adaptive"] else "", row["tokens_per_second"]),
                row["speculative_over_plain"],
            )


def _prompts(job: BenchJob) -> list[Prompt]:
    """Held-out prompts of each component, and edits."""
    config = job.config
    rows = read_jsonl(job.prompts.file("conversations.jsonl"))
    rows = [row for row in rows if row["split"] == "test"]
    rows = [row for row in rows if len(row["prompt_ids"]) <= config.max_prompt_tokens]
    by_component: dict[str, list[Prompt]] = {}
    for row in sorted(rows, key=lambda row: str(row["id"])):
        prompt = Prompt(row["id"], row["component"], row["prompt_ids"])
        by_component.setdefault(prompt.component, []).append(prompt)
    if not by_component:
        raise ValueError(
            f"bench.max_prompt_tokens must be at least the length of a held-out prompt, got "
            f"{config.max_prompt_tokens}"
        )
    by_component[EDITS] = _edits(job)
    return [p for found in by_component.values() for p in found[: config.num_prompts]]


def _edits(job: BenchJob) -> list[Prompt]:
    """The target is to change what it has answered before: a file that an agent edits."""
    tokenizer = job.target.tokenizer
    answers = read_jsonl(job.measured.file("requests.jsonl"))
    found = []
    for row in sorted(answers, key=lambda row: (-len(row["tokens"]), row["id"])):
        if row["proposer"] != "none" or row["loop_start"] is not None:
            continue
        text = tokenizer.decode(row["tokens"], skip_special_tokens=True)
        message = [{"role": "user", "content": EDIT.format(text)}]
        ids = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False)
        if len(ids) <= job.config.max_prompt_tokens:
            found.append(Prompt(f"edit-{row['id']}", EDITS, [int(i) for i in ids]))
    return found


def _slots(engine: DecodeEngine, room: int, aux_layers: list[int] | None) -> DecodeTarget:
    return engine.slots(num_slots=1, max_length=room, aux_layers=aux_layers)


class _Drafting:
    """The ways that draft, in one format."""

    def __init__(self, job: BenchJob, engine: DecodeEngine, room: int, plain: Way) -> None:
        self.config, self.room, self.plain, self.engine = job.config, room, plain, engine
        self.head = load_head(
            job.speculator.file("config.json"),
            job.speculator.file("model.safetensors"),
            job.target.device,
        )
        self.slots = _slots(engine, room, None)
        self.featured = _slots(engine, room, list(self.head[0].config.aux_layers))
        self.seconds = 0.0  # of a token that the head drafts
        self.costs: PassCosts

    def ways(self, context: int, repetitions: int) -> Iterator[Way]:
        """Fixed k of the head, and k that adapts to costs, which are measured here."""
        self.costs = pass_costs(self.featured, WIDTHS, context, repetitions)
        self.seconds = draft_seconds(self.featured, self._head(), 4, context, repetitions)
        for k in self.config.num_draft_tokens:
            yield self._way("eagle3", k, adaptive=False)
        for name in ("ngram", "suffix", "eagle3", "hybrid"):
            yield self._way(name, self.config.max_draft_tokens, adaptive=True)

    def predicted(
        self, row: dict[str, Any], found: Mapping[Way, Mapping[str, Timed]]
    ) -> dict[str, float]:
        """What a row's speed-up should be by its rounds and the costs of passes and drafts."""
        if "speculative_over_plain" not in row:
            return {}
        [by_component] = [
            by_component
            for way, by_component in found.items()
            if (way.proposer, way.num_draft_tokens, way.adaptive)
            == (row["proposer"], row["num_draft_tokens"], row["adaptive"])
        ]
        timed = speeds.of_component(by_component, row["component"])
        prediction = speeds.predicted(timed, self.costs, row["num_draft_tokens"])
        return {"predicted_over_plain": prediction}

    def _way(self, name: str, k: int, *, adaptive: bool) -> Way:
        drafts = name in ("eagle3", "hybrid")
        of_model = self.seconds if drafts else 0.0
        opened = looped(
            self.featured if drafts else self.slots,
            lambda: self._proposer(name, adaptive=adaptive),
            num_draft_tokens=k,
            max_new_tokens=self.config.max_new_tokens,
            costs=(self.costs, of_model) if adaptive else None,
        )
        return Way(self.plain.format, name, k, adaptive, self.plain, opened)

    def _proposer(self, name: str, *, adaptive: bool) -> Proposer:
        match name:
            case "ngram":
                return NgramProposer(2, 4)
            case "suffix":
                return SuffixProposer(max_answer_tokens=MAX_ANSWER_TOKENS)
            case "hybrid":
                suffix = SuffixProposer(max_answer_tokens=MAX_ANSWER_TOKENS)
                return HybridProposer(suffix, self._head())
            case _:
                return LateHead(self._head()) if adaptive else self._head()

    def _head(self) -> Proposer:
        return self.engine.eagle3(*self.head, num_slots=1, max_length=self.room)


def _peers(job: BenchJob, room: int, stack: ExitStack) -> Iterator[tuple[str, Way]]:
    most = job.config.max_new_tokens
    opened = transformers_loop(job.target, most)
    yield "transformers", Way("fp32", "transformers", 0, open=opened)
    if job.config.llama_cpp is None:
        return
    if job.gguf is None:
        raise ValueError("bench.llama_cpp must be null for a target that is no GGUF file")
    child = stack.enter_context(
        llama_cpp(
            Path(job.config.llama_cpp),
            job.gguf,
            num_threads=torch.get_num_threads(),
            num_columns=room,
        )
    )

    def answer(prompt: Prompt) -> speeds.Answer:
        found = child.answer(prompt.tokens, most)
        return speeds.Answer(found.tokens, found.seconds)

    yield "llama_cpp", Way("gguf", "llama.cpp", 0, open=lambda: answer)


def _passes(name: str, costs: PassCosts, bandwidth: float) -> Iterator[dict[str, Any]]:
    floor = costs.num_bytes / bandwidth
    for width, seconds in costs.seconds.items():
        yield {
            "kind": "pass",
            "format": name,
            "num_tokens": width,
            "context": costs.context,
            "ms": 1e3 * seconds,
            "over_one_token": seconds / costs.seconds[1],
            "bytes_moved": costs.num_bytes,
            "floor_ms": 1e3 * floor,
            "bandwidth_share": floor / seconds,
        }


def _add_divergences(
    rows: list[dict[str, Any]],
    engines: Mapping[Format, DecodeEngine],
    slots: Mapping[str, DecodeTarget],
    prompts: list[Prompt],
    reference: Mapping[str, Timed],
) -> None:
    """To the row of each format without drafts: how far it is from the first one."""
    answers = [a for timed in reference.values() for a in timed.answers]
    texts = [(p.tokens, a.tokens) for p, a in zip(prompts, answers, strict=True)]
    first = slots[next(iter(engines)).value]
    for form in engines:
        kl, same = divergence(first, slots[form.value], texts)
        for row in rows:
            plain = (row["format"], row.get("proposer")) == (form.value, "none")
            if plain and row["component"] == speeds.ALL:
                row |= {"kl_mean_nats": kl, "top1_agreement": same}
