"""Traffic for simulated servers, and what their passes cost."""

import numpy as np

from specfit.prediction.server import Acceptance
from specfit.traffic.config import (
    ArrivalConfig,
    ComponentConfig,
    ProfileConfig,
    Quantiles,
    SloConfig,
)
from specfit.traffic.draw import Session, Turn

PLAIN = {"x": Acceptance({(0, 0): 1}, 0)}


class Costs:
    """By constants, or by whatever is called for each pass."""

    def __init__(self, step=1.0, draft=0.0, prefill=0.0):
        self.step, self.draft, self.prefill = step, draft, prefill
        self.steps = []

    def step_seconds(self, batch, tokens_per_sequence, context_tokens):
        self.steps.append((batch, tokens_per_sequence, context_tokens))
        return self.step() if callable(self.step) else self.step

    def draft_seconds(self, _batch, num_draft_tokens):
        return self.draft * num_draft_tokens

    def prefill_seconds(self, num_tokens, _context_tokens):
        return self.prefill * num_tokens


class Linear:
    """A server that grows slower with all that it has to do."""

    def step_seconds(self, batch, tokens_per_sequence, context_tokens):
        return 0.01 + 1e-4 * batch * tokens_per_sequence + 1e-7 * batch * context_tokens

    def draft_seconds(self, _batch, num_draft_tokens):
        return 0.001 * num_draft_tokens

    def prefill_seconds(self, num_tokens, _context_tokens):
        return 0.01 + 1e-4 * num_tokens


def session(start=0.0, *turns, prefix=0, component="x"):
    return Session(component, start, prefix, tuple(Turn(*turn) for turn in turns))


def poisson(rate, num, output_tokens, seed=0):
    times = np.cumsum(np.random.default_rng(seed).exponential(1 / rate, num)).tolist()
    return [session(t, (1, n, 0.0)) for t, n in zip(times, output_tokens, strict=True)]


def profile(rate=4.0, **settings):
    components = [
        ComponentConfig(
            "chat",
            0.7,
            ["s"],
            prompt_tokens=Quantiles(200.0, 800.0),
            output_tokens=Quantiles(60.0, 200.0),
            turns=Quantiles(2.0, 5.0),
            think_seconds=Quantiles(1.0, 4.0),
            shared_prefix_tokens=100,
        ),
        ComponentConfig(
            "edit",
            0.3,
            ["s"],
            prompt_tokens=Quantiles(500.0, 1500.0),
            output_tokens=Quantiles(40.0, 90.0),
        ),
    ]
    arrival = ArrivalConfig(rate=rate, cv=1.5)
    return ProfileConfig("p", components, arrival, SloConfig(600.0, 30.0), **settings)


HEAD = {
    "chat": Acceptance.from_positions([0.7, 0.45, 0.3, 0.2]),
    "edit": Acceptance.from_positions([0.8, 0.6, 0.5, 0.4]),
}
