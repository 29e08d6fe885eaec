"""Real load on the loop, by a clock that only passes move, against the simulation of it."""

from dataclasses import replace

import numpy as np
import pytest
from hash_target import HashTarget, StatelessProposer, proposer

from specfit.engine import DecodeEngine
from specfit.prediction import load, loop_costs
from specfit.prediction.load import SessionArrivals, acceptance_of, compare_load, run_load
from specfit.prediction.loop_costs import interpolated, measure_costs
from specfit.prediction.server import ServerConfig
from specfit.prediction.simulate import simulate
from specfit.traffic.draw import Session, Turn
from specfit_serve.stats import Round

TEXTS = [[1, 2, 3], [4, 5, 6, 7, 8]]


class Linear:
    """Costs that are linear in everything, so that what lies between two of them is known."""

    def step_seconds(self, batch, tokens_per_sequence, context_tokens):
        return 0.02 + 0.001 * batch * tokens_per_sequence + 1e-4 * context_tokens

    def draft_seconds(self, batch, num_draft_tokens):
        return 0.002 * num_draft_tokens + 5e-4 * batch

    def prefill_seconds(self, num_tokens, context_tokens):
        del context_tokens
        return 0.01 + 0.002 * num_tokens


class Timed(HashTarget):
    """A target whose passes take what costs say, and drafts that do."""

    def __init__(self, monkeypatch, num_slots=5, max_length=60):
        super().__init__(eos_ids=(0,), num_slots=num_slots, max_length=max_length)
        self.now = 100.0
        self.costs = Linear()
        for module in ("specfit_serve.decode", load.__name__, loop_costs.__name__):
            monkeypatch.setattr(f"{module}.perf_counter", lambda: self.now)
        monkeypatch.setattr(load, "sleep", self.sleep)

    def slots(self, num_slots, max_length, aux_layers):
        """As an engine's: with the same clock."""
        assert aux_layers is None
        super().__init__(eos_ids=(0,), num_slots=num_slots, max_length=max_length)
        return self

    def sleep(self, seconds):
        self.now += seconds

    def forward(self, tokens, starts, first_slot, last_only=False):
        if last_only:
            self.now += self.costs.prefill_seconds(tokens.shape[1], 0)
        else:
            context = float(starts.float().mean()) + 1
            self.now += self.costs.step_seconds(*tokens.shape, context)
        return super().forward(tokens, starts, first_slot, last_only)

    def proposer(self, kind):
        """Right about the target, eos or not."""
        endless = HashTarget(eos_ids=(), max_length=10**4)
        inner = proposer(kind, endless)
        if kind == "none":
            return inner

        def draft_row(tokens, k):
            return inner.draft_row(tokens, k)

        timed = StatelessProposer(draft_row)

        def propose(sequences, num_draft_tokens, *rest):
            self.now += self.costs.draft_seconds(len(sequences), num_draft_tokens)
            return StatelessProposer.propose(timed, sequences, num_draft_tokens, *rest)

        timed.propose = propose
        return timed


def sessions(num=14, gap=0.1, think=0.05):
    """Of one to three turns, that come in bursts and overlap."""
    generator = np.random.default_rng(0)
    times = np.cumsum(generator.exponential(gap, num))
    return [
        Session(
            "xy"[i % 2],
            float(time),
            i % 3,
            tuple(
                Turn(3 + (i + j) % 5, 1 + (3 * i + 5 * j) % 11, j * (think + 0.013 * i))
                for j in range(1 + i % 3)
            ),
        )
        for i, time in enumerate(times)
    ]


@pytest.mark.parametrize(("kind", "k"), [("none", 0), ("right", 3), ("wrong", 2)])
@pytest.mark.parametrize(("batch_size", "concurrency"), [(1, None), (3, None), (1, 3), (3, 3)])
def test_the_loop_and_the_simulation_are_one_to_the_token(
    monkeypatch, kind, k, batch_size, concurrency
):
    target = Timed(monkeypatch)
    real = run_load(
        target,
        target.proposer(kind),
        sessions(),
        TEXTS,
        num_draft_tokens=k,
        batch_size=batch_size,
        concurrency=concurrency,
    )
    simulated = simulate(
        sessions(),
        Linear(),
        real.acceptance,
        ServerConfig(max_batch=batch_size, prefix_cache=False),
        num_draft_tokens=k,
        concurrency=concurrency,
    )
    assert len(real.served) == sum(len(s.turns) for s in sessions())
    for mine, other in zip(real.served, simulated.served, strict=True):
        times = ("arrived_seconds", "first_token_seconds", "finished_seconds")
        for name in times:
            assert getattr(mine, name) == pytest.approx(getattr(other, name), abs=1e-4)
        still = dict.fromkeys(times, 0.0)
        assert replace(mine, **still) == replace(other, **still)


def test_a_session_asks_its_text_and_what_was_answered(monkeypatch):
    target = Timed(monkeypatch)
    session = Session("x", 0.0, 2, (Turn(3, 2, 0.0), Turn(4, 1, 1.0)))
    arrivals = SessionArrivals([session], [[1, 2, 3, 4]])
    (first,) = arrivals.take()
    assert first.prompt == [1, 2, 3, 4, 1]
    assert arrivals.take() == []
    assert not arrivals.wait()
    target.now += 5
    arrivals.answered(answer_of(first, [8, 7], finished_at=103.0))
    # The answer was there at 103; a second to think.
    assert arrivals.take()[0].prompt == [1, 2, 3, 4, 1, 8, 7, 2, 3, 4, 1]
    assert arrivals.served[0].finished_seconds == 3


def answer_of(request, tokens, finished_at):
    from specfit_serve.decode import Decoded

    return Decoded(
        request.id, 0, tokens, "length", [], None, 0.0, 0.0, 0.0, request.arrived_at, 101.0,
        finished_at,
    )  # fmt: skip


def test_it_sleeps_until_the_next_session_begins(monkeypatch):
    target = Timed(monkeypatch)
    starts = [0.5, 0.75]
    arrivals = SessionArrivals([Session("x", s, 0, (Turn(1, 1, 0.0),)) for s in starts], TEXTS)
    assert arrivals.take() == []
    assert arrivals.wait()
    assert target.now == 100.5
    (request,) = arrivals.take()
    assert request.arrived_at == 100.5
    target.now = 101.0
    # It came while nobody looked, and has been waiting since then.
    assert arrivals.take()[0].arrived_at == 100.75


def test_rounds_that_the_end_of_an_answer_cut_say_nothing_of_drafts():
    # Of ten tokens: a round at 6 may draft three, one at 7 no more than two.
    rounds = [(Round(1, 3, 3), 10), (Round(6, 3, 1), 10), (Round(7, 2, 2), 10)]
    found = acceptance_of(rounds, 3)
    assert found.counts == {(3, 3): 1, (3, 1): 1}
    assert found.acceptance_length == 3
    assert acceptance_of(rounds[2:], 3).counts == {(2, 2): 1}


@pytest.mark.parametrize("batch_size", [1, 4, 5])
@pytest.mark.parametrize("k", [0, 3])
def test_costs_are_those_of_the_loop(monkeypatch, batch_size, k):
    target, longest = Timed(monkeypatch), 200
    costs = measure_costs(
        target_engine(target),
        lambda *_: target.proposer("wrong" if k else "none"),
        longest=longest,
        num_draft_tokens=k,
        batch_size=batch_size,
        repetitions=2,
    )
    expected = Linear()
    for context in (1.0, 50.5, float(longest)):
        for batch in range(1, batch_size + 1):
            for width in range(1, k + 2):
                found = costs.step_seconds(batch, width, context)
                known = expected.step_seconds(batch, width, context)
                # Contexts grow by up to 12 tokens while a round is timed, of 1e-4 s each.
                assert found == pytest.approx(known, abs=12e-4)
    for num, context in [(1, 0), (7, 0), (200, 0), (3, 100)]:
        known = expected.prefill_seconds(num, context)
        assert costs.prefill_seconds(num, context) == pytest.approx(known)
    if k:
        known = [expected.draft_seconds(b, k) for b in range(1, batch_size + 1)]
        found = [costs.draft_seconds(b, k) for b in range(1, batch_size + 1)]
        assert found == pytest.approx(known)


def target_engine(target):
    """Duck-typed: what makes slots is all that is asked of an engine."""
    engine = object.__new__(DecodeEngine)
    object.__setattr__(engine, "slots", target.slots)
    return engine


@pytest.mark.parametrize(("kind", "k"), [("none", 0), ("right", 3)])
def test_a_comparison_is_of_the_same_traffic(monkeypatch, kind, k):
    target = Timed(monkeypatch)
    engine, own = target_engine(target), sessions(num=20)
    costs = measure_costs(
        engine,
        lambda *_: target.proposer(kind),
        longest=60,
        num_draft_tokens=k,
        batch_size=4,
        repetitions=2,
    )
    compared = compare_load(
        engine,
        lambda *_: target.proposer(kind),
        costs,
        own,
        num_draft_tokens=k,
        batch_size=4,
        texts=TEXTS,
        seed=0,
    )
    row = compared.row()
    assert row["kind"] == "load"
    assert row["num_requests"] == sum(len(s.turns) for s in own)
    for name in ("ttft_ms_mean", "itl_ms_mean", "latency_ms_mean", "tokens_per_second"):
        ratio = row[f"{name}_simulated"] / row[f"{name}_real"]
        assert row[f"{name}_simulated_over_real"] == ratio
        assert ratio == pytest.approx(1, rel=0.05)


def test_between_what_was_measured_lies_a_line_and_beyond_nothing():
    table = {1: {2: 10.0, 4: 20.0}, 3: {2: 30.0, 4: 60.0}}
    assert interpolated(table, 1, 2) == 10
    assert interpolated(table, 3, 3) == 45
    assert interpolated(table, 2, 3) == 30
    for point in [(0.5, 2), (4, 2), (2, 1), (2, 5)]:
        with pytest.raises(ValueError, match=r"costs must be asked from \d to \d, got"):
            interpolated(table, *point)


def test_a_session_that_no_slot_holds_is_refused(monkeypatch):
    target = Timed(monkeypatch, max_length=20)
    long = [Session("x", 0.0, 0, (Turn(10, 8, 0.0),))]
    with pytest.raises(
        ValueError, match="sessions must have at most 17 tokens, as slots have, got"
    ):
        run_load(target, target.proposer("none"), long, TEXTS, num_draft_tokens=3, batch_size=1)
    with pytest.raises(ValueError, match=r"predict.num_sessions must be at least 1, got 0"):
        run_load(target, target.proposer("none"), [], TEXTS, num_draft_tokens=3, batch_size=1)
