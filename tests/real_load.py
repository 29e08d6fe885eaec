"""A real run of the loop under Poisson load beside its simulation; on a quiet machine.

python tests/real_load.py TRAIN_ARTIFACT [KEY=VALUE …]

Sessions come at 40 and 70 % of what one request at a time would fill, NUM_BLOCKS times a few of
them. Machines that are shared change their speed from minute to minute, so that costs are measured
before and after each block, and their mean is simulated. Acceptance is the run's own. It prints
simulated over real, and how far costs drifted meanwhile.
"""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean

import torch
from tiny_runs import composed

from specfit.artifacts import artifact_at
from specfit.pipeline import _Path
from specfit.prediction.load import Compared, compare_load, longest_tokens
from specfit.prediction.loop_costs import MeasuredCosts, measure_costs
from specfit.traffic.config import ArrivalConfig, ComponentConfig, ProfileConfig, Quantiles
from specfit.traffic.draw import draw_sessions
from specfit.training.checkpoints import load_head
from specfit_serve.ngram import NoProposer

NUM_BLOCKS, NUM_SESSIONS, BATCH_SIZE = 4, 12, 4
LOADS = (0.4, 0.7)
REPETITIONS = 5  # of what costs are measured by


@dataclass
class Between:
    """Costs in the middle of two measurements, the second made when it is first asked for.

    That is when the real run is over.
    """

    before: MeasuredCosts
    measured: Callable[[], MeasuredCosts]

    @cached_property
    def after(self) -> MeasuredCosts:
        return self.measured()

    def step_seconds(self, *asked) -> float:
        return fmean(costs.step_seconds(*asked) for costs in (self.before, self.after))

    def draft_seconds(self, *asked) -> float:
        return fmean(costs.draft_seconds(*asked) for costs in (self.before, self.after))

    def prefill_seconds(self, *asked) -> float:
        return fmean(costs.prefill_seconds(*asked) for costs in (self.before, self.after))

    def drift(self) -> float:
        return self.after.prefill_seconds(35, 0) / self.before.prefill_seconds(35, 0) - 1


def pooled(blocks: Sequence[Compared]) -> dict:
    """Figures of all blocks together; they are as long as each other."""
    rows = [block.row() for block in blocks]
    found = {}
    for name in ("ttft_ms_mean", "itl_ms_mean", "latency_ms_mean", "tokens_per_second"):
        real, simulated = (
            fmean(row[f"{name}_{of}"] for row in rows) for of in ("real", "simulated")
        )
        found |= {f"{name}_real": real, f"{name}_simulated_over_real": simulated / real}
    return {name: round(value, 3) for name, value in found.items()}


def sessions(rate: float, seed: int) -> list:
    component = ComponentConfig(
        "load",
        1.0,
        ["none"],
        prompt_tokens=Quantiles(30.0, 60.0),
        output_tokens=Quantiles(12.0, 24.0),
    )
    profile = ProfileConfig("load", [component], ArrivalConfig(rate=rate, cv=1.0))
    return draw_sessions(profile, NUM_SESSIONS, seed)


def main(head_at: str, *words: str) -> None:
    torch.set_num_threads(1)
    path = _Path(composed(tuple(words)))
    engine = path.opened.engine
    artifact = artifact_at(head_at, "TRAIN_ARTIFACT")
    files = (artifact.file(name) for name in ("config.json", "model.safetensors"))
    head = load_head(*files, engine.target.device)
    layers = list(head[0].config.aux_layers)
    generator = torch.Generator().manual_seed(0)
    vocab = engine.target.info.vocab_size
    texts = [torch.randint(vocab, (600,), generator=generator).tolist() for _ in range(8)]
    for k in (0, 2):

        def proposer(num_slots, length, k=k):
            drafts = lambda: engine.eagle3(*head, num_slots=num_slots, max_length=length)  # noqa: E731
            return drafts() if k else NoProposer()

        settings = {"num_draft_tokens": k, "batch_size": BATCH_SIZE}
        settings["aux_layers"] = layers if k else None
        longest = k + max(longest_tokens(sessions(1.0, seed)) for seed in range(NUM_BLOCKS))

        def measured(longest=longest, proposer=proposer, settings=settings):
            settings = settings | {"repetitions": REPETITIONS}
            return measure_costs(engine, proposer, longest=longest, **settings)

        costs = measured()
        # Of one request alone: its prompt, and a round a token if nothing is kept.
        alone = costs.prefill_seconds(35, 0) + 13 * costs.step_seconds(1, k + 1, 40.0)
        for share in LOADS:
            rate = share / alone
            blocks, drifts = [], []
            for seed in range(NUM_BLOCKS):
                between = Between(costs, measured)
                block = sessions(rate, seed)
                blocks.append(
                    compare_load(
                        engine, proposer, between, block, texts=texts, seed=seed, **settings
                    )
                )
                drifts.append(round(between.drift(), 3))
                costs = between.after
            row = {"k": k, "load": share, "sessions_per_second": round(rate, 3), "drifts": drifts}
            sys.stdout.write(json.dumps(row | pooled(blocks)) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main(*sys.argv[1:])
