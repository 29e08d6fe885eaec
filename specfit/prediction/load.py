"""Real load on the decode loop, by the wall clock, and what the simulation says of the same."""

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from statistics import fmean
from time import perf_counter, sleep
from typing import Any

from specfit.checks import require
from specfit.engine import DecodeEngine
from specfit.prediction.loop_costs import ProposerFactory
from specfit.prediction.server import Acceptance, Costs, ServerConfig
from specfit.prediction.simulate import Served, Simulated, simulate
from specfit.traffic.draw import Session
from specfit_serve.arrivals import Request
from specfit_serve.decode import Decoded, DecodeSettings, decode
from specfit_serve.protocols import DecodeTarget, Proposer
from specfit_serve.stats import Round


class SessionArrivals:
    """Sessions on the wall clock, which starts when this is made, in the form `decode` takes.

    What is asked is made of the session's text, repeated as often as its lengths need, and of the
    answers so far; an answer is as long as the session says, whatever the target says.
    """

    def __init__(
        self,
        sessions: Sequence[Session],
        texts: Sequence[Sequence[int]],
        concurrency: int | None = None,
    ) -> None:
        self.served: list[Served] = []
        self.rounds: dict[str, list[tuple[Round, int]]] = {}  # with the tokens of their answers
        self._sessions = sessions
        self._texts = [cycle(texts[i % len(texts)]) for i in range(len(sessions))]
        self._asked: list[list[int]] = [[] for _ in sessions]  # each session's newest prompt
        self._due: list[tuple[float, int, int]] = []  # when, which session, which turn
        self._num_begun = 0
        self._closed = concurrency is not None
        self._started = perf_counter()
        for _ in sessions if concurrency is None else range(min(concurrency, len(sessions))):
            self._begin(self._started)

    def take(self) -> list[Request]:
        """Whose time has come."""
        taken, now = [], perf_counter()
        while self._due and self._due[0][0] <= now:
            due, i, turn_idx = heapq.heappop(self._due)
            session = self._sessions[i]
            turn = session.turns[turn_idx]
            new = turn.new_tokens + (0 if turn_idx else session.prefix_tokens)
            self._asked[i] = [*self._asked[i], *islice(self._texts[i], new)]
            taken.append(
                Request(
                    id=f"{i}/{turn_idx}",
                    prompt=self._asked[i],
                    temperature=0.0,
                    max_new_tokens=turn.output_tokens,
                    ignores_eos=True,
                    arrived_at=due,
                )
            )
        return taken

    def wait(self) -> bool:
        """Sleeps until somebody's time has come."""
        if self._due:
            sleep(max(0.0, self._due[0][0] - perf_counter()))
        return bool(self._due)

    def close(self) -> None:
        """Nothing to give back."""

    def answered(self, answer: Decoded) -> None:
        """Keeps its figures; the session's next request, or the next session, follows."""
        i, turn_idx = map(int, answer.id.split("/"))
        session = self._sessions[i]
        assert len(answer.tokens) == session.turns[turn_idx].output_tokens
        assert answer.arrived_at is not None
        self.served.append(
            Served(
                component=session.component,
                session=i,
                turn=turn_idx,
                prompt_tokens=len(self._asked[i]),
                output_tokens=len(answer.tokens),
                hit_tokens=0,
                arrived_seconds=answer.arrived_at - self._started,
                first_token_seconds=answer.first_token_at - self._started,
                finished_seconds=answer.finished_at - self._started,
            )
        )
        rounds = self.rounds.setdefault(session.component, [])
        rounds += [(r, len(answer.tokens)) for r in answer.rounds]
        self._asked[i] = [*self._asked[i], *answer.tokens]
        if turn_idx + 1 < len(session.turns):
            think = session.turns[turn_idx + 1].think_seconds
            heapq.heappush(self._due, (answer.finished_at + think, i, turn_idx + 1))
        elif self._closed and self._num_begun < len(self._sessions):
            self._begin(answer.finished_at)

    def _begin(self, now: float) -> None:
        i = self._num_begun
        self._num_begun += 1
        start = 0.0 if self._closed else self._sessions[i].start_seconds
        heapq.heappush(self._due, (now + start, i, 0))


@dataclass(frozen=True)
class Load:
    """What the loop did under load."""

    served: list[Served]  # in order of arrival
    acceptance: dict[str, Acceptance]  # of its own rounds, by component


def run_load(
    target: DecodeTarget,
    proposer: Proposer,
    sessions: Sequence[Session],
    texts: Sequence[Sequence[int]],
    *,
    num_draft_tokens: int,
    batch_size: int,
    concurrency: int | None = None,
    seed: int = 0,
) -> Load:
    """Answers `sessions` greedily as they arrive; takes as long as they do.

    Args:
        target: with slots for `batch_size` of the longest sequences and `num_draft_tokens` more.
        proposer: a fresh one.
        sessions: with times of their beginning.
        texts: tokens that requests are made of; session i has text i, or i modulo their number.
        num_draft_tokens: asked for each round.
        batch_size: sequences in flight at once.
        concurrency: of closed arrivals: sessions at any time.
        seed: of the loop.

    Raises:
        ValueError: a session is longer than a slot, or there is none; or as `decode`.
    """
    require(len(sessions) > 0, "predict.num_sessions", "be at least 1", 0)
    longest = longest_tokens(sessions)
    room = target.max_length - num_draft_tokens
    require(longest <= room, "sessions", f"have at most {room} tokens, as slots have", longest)
    settings = DecodeSettings(
        num_draft_tokens=num_draft_tokens,
        max_new_tokens=max(turn.output_tokens for s in sessions for turn in s.turns),
        batch_size=batch_size,
        seed=seed,
    )
    arrivals = SessionArrivals(sessions, texts, concurrency)
    for answer in decode(target, proposer, arrivals, settings):
        arrivals.answered(answer)
    served = sorted(arrivals.served, key=lambda s: (s.arrived_seconds, s.session))
    return Load(
        served, {n: acceptance_of(r, num_draft_tokens) for n, r in arrivals.rounds.items() if r}
    )


def longest_tokens(sessions: Sequence[Session]) -> int:
    """Of the longest sequence, with its answer."""
    return max(s.prompts()[-1] + s.turns[-1].output_tokens for s in sessions)


def acceptance_of(rounds: Sequence[tuple[Round, int]], num_draft_tokens: int) -> Acceptance:
    """Of rounds with the lengths of their answers.

    Where the end of an answer is near, drafts are cut; those rounds say less, and the simulation
    cuts its own, so they count only where there are no others.
    """
    whole = [r for r, length in rounds if r.start + num_draft_tokens < length]
    counts = Counter((r.num_drafted, r.num_kept) for r in whole or [r for r, _ in rounds])
    return Acceptance(counts, num_draft_tokens)


@dataclass(frozen=True)
class Compared:
    """One traffic, really served and simulated."""

    real: Load
    simulated: Simulated
    num_draft_tokens: int
    batch_size: int

    def row(self) -> dict[str, Any]:
        """For latency.json: figures of both, and those of the simulation over the real ones."""
        real, simulated = _figures(self.real.served), _figures(self.simulated.served)
        row: dict[str, Any] = {
            "kind": "load",
            "num_draft_tokens": self.num_draft_tokens,
            "batch_size": self.batch_size,
            "num_requests": len(self.real.served),
        }
        for name, value in real.items():
            row[f"{name}_real"] = value
            row[f"{name}_simulated"] = simulated[name]
            row[f"{name}_simulated_over_real"] = simulated[name] / value
        return row


def _figures(served: Sequence[Served]) -> dict[str, float]:
    seconds = max(s.finished_seconds for s in served) - served[0].arrived_seconds
    found = {
        "ttft_ms_mean": 1e3 * fmean(s.ttft_seconds for s in served),
        "latency_ms_mean": 1e3 * fmean(s.latency_seconds for s in served),
        "tokens_per_second": sum(s.output_tokens for s in served) / seconds,
    }
    itls = [s.itl_seconds for s in served if s.itl_seconds is not None]
    return found | ({"itl_ms_mean": 1e3 * fmean(itls)} if itls else {})


def compare_load(
    engine: DecodeEngine,
    proposer_factory: ProposerFactory,
    costs: Costs,
    sessions: Sequence[Session],
    *,
    num_draft_tokens: int,
    batch_size: int,
    texts: Sequence[Sequence[int]],
    seed: int,
    concurrency: int | None = None,
    aux_layers: list[int] | None = None,
) -> Compared:
    """Serves `sessions` for real, then simulates them with `costs` and the acceptance found.

    So it is the course of time that is compared, queues and batches among it, and not how well
    acceptance is foreseen. Arguments are those of `run_load` and `measure_costs`.
    """
    length = longest_tokens(sessions) + num_draft_tokens
    target = engine.slots(num_slots=batch_size, max_length=length, aux_layers=aux_layers)
    # What the first pass sets up is no part of the load.
    warm_up = DecodeSettings(num_draft_tokens, max_new_tokens=2, batch_size=1)
    first = [Request("warm-up", list(texts[0][:1]), 0.0)]
    list(decode(target, proposer_factory(batch_size, length), first, warm_up))
    real = run_load(
        target,
        proposer_factory(batch_size, length),
        sessions,
        texts,
        num_draft_tokens=num_draft_tokens,
        batch_size=batch_size,
        concurrency=concurrency,
        seed=seed,
    )
    simulated = simulate(
        sessions,
        costs,
        real.acceptance,
        ServerConfig(max_batch=batch_size, prefix_cache=False),  # the loop has none
        # Nothing is drafted where every answer is one token.
        num_draft_tokens=num_draft_tokens if real.acceptance else 0,
        concurrency=concurrency,
        seed=seed,
    )
    return Compared(real, simulated, num_draft_tokens, batch_size)
