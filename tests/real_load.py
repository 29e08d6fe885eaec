"""A real run of the loop under Poisson load beside its simulation; on a quiet machine.

python tests/real_load.py TRAIN_ARTIFACT [KEY=VALUE …]

Sessions come at 40 and 70 % of what one request at a time would fill; costs are measured before,
and acceptance is the run's own. It prints simulated over real.
"""

import json
import sys
from pathlib import Path

import torch
from tiny_runs import composed

from specfit.artifacts import artifact_at
from specfit.pipeline import _Path
from specfit.prediction.load import compare_load, longest_tokens
from specfit.prediction.loop_costs import measure_costs
from specfit.traffic.config import ArrivalConfig, ComponentConfig, ProfileConfig, Quantiles
from specfit.traffic.draw import draw_sessions
from specfit.training.checkpoints import load_head
from specfit_serve.ngram import NoProposer

NUM_SESSIONS, BATCH_SIZE, SEED = 40, 4, 0
LOADS = (0.4, 0.7)


def sessions(rate: float) -> list:
    component = ComponentConfig(
        "load",
        1.0,
        ["none"],
        prompt_tokens=Quantiles(30.0, 60.0),
        output_tokens=Quantiles(12.0, 24.0),
    )
    profile = ProfileConfig("load", [component], ArrivalConfig(rate=rate, cv=1.0))
    return draw_sessions(profile, NUM_SESSIONS, SEED)


def main(head_at: str, *words: str) -> None:
    torch.set_num_threads(1)
    path = _Path(composed(tuple(words)))
    engine = path.opened.engine
    artifact = artifact_at(head_at, "TRAIN_ARTIFACT")
    files = (artifact.file(name) for name in ("config.json", "model.safetensors"))
    head = load_head(*files, engine.target.device)
    layers = list(head[0].config.aux_layers)
    generator = torch.Generator().manual_seed(SEED)
    vocab = engine.target.info.vocab_size
    texts = [torch.randint(vocab, (600,), generator=generator).tolist() for _ in range(8)]
    for k in (0, 2):

        def proposer(num_slots, length, k=k):
            drafts = lambda: engine.eagle3(*head, num_slots=num_slots, max_length=length)  # noqa: E731
            return drafts() if k else NoProposer()

        settings = {"num_draft_tokens": k, "batch_size": BATCH_SIZE}
        settings["aux_layers"] = layers if k else None
        longest = longest_tokens(sessions(1.0)) + k
        costs = measure_costs(engine, proposer, longest=longest, **settings)
        # Of one request alone: its prompt, and a round a token if nothing is kept.
        alone = costs.prefill_seconds(35, 0) + 13 * costs.step_seconds(1, k + 1, 40.0)
        for share in LOADS:
            rate = share / alone
            found = compare_load(
                engine, proposer, costs, sessions(rate), texts=texts, seed=SEED, **settings
            ).row()
            row = {"k": k, "load": share, "sessions_per_second": round(rate, 3)}
            sys.stdout.write(json.dumps(row | found) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main(*sys.argv[1:])
