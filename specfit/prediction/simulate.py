"""Traffic on a simulated server: latencies, goodput, and the best k at each rate."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from random import Random
from statistics import mean, stdev
from typing import Any

import numpy as np
import simpy
from tqdm import tqdm

from specfit.checks import require
from specfit.prediction.server import Acceptance, Costs, Job, Server, ServerConfig, Steps
from specfit.traffic.config import ArrivalKind, ProfileConfig, SloConfig
from specfit.traffic.draw import Session, draw_sessions

ALL = "all"  # the components together
NUM_BATCHES = 20
T_95 = 2.093  # two-sided 95 % of Student's t with NUM_BATCHES - 1 degrees of freedom
PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Served:
    """A request that was answered; times are from the beginning of the traffic."""

    component: str
    session: int  # its index
    turn: int
    prompt_tokens: int
    output_tokens: int
    hit_tokens: int  # of the prompt, found in the cache
    arrived_seconds: float
    first_token_seconds: float
    finished_seconds: float

    @property
    def ttft_seconds(self) -> float:
        """To the first token."""
        return self.first_token_seconds - self.arrived_seconds

    @property
    def itl_seconds(self) -> float | None:
        """Between tokens, on average; None of one token."""
        if self.output_tokens == 1:
            return None
        return (self.finished_seconds - self.first_token_seconds) / (self.output_tokens - 1)

    @property
    def latency_seconds(self) -> float:
        """To the last token."""
        return self.finished_seconds - self.arrived_seconds

    def meets(self, slo: SloConfig) -> bool:
        """Whether both promises are kept."""
        in_time = 1e3 * self.ttft_seconds <= slo.ttft_ms
        return in_time and 1e3 * (self.itl_seconds or 0.0) <= slo.itl_ms


@dataclass(frozen=True)
class Simulated:
    """What became of the traffic."""

    served: list[Served]  # in order of arrival
    seconds: float  # from the first arrival to the last token
    round_seconds: float  # that rounds took
    prefill_seconds: float  # that prefills took, on the same device unless disaggregated
    rounds_by_batch: Mapping[int, int]
    mean_in_flight: float  # requests that have arrived and are not answered, over time
    disaggregated: bool

    def rows(self, slo: SloConfig) -> list[dict[str, Any]]:
        """Figures of all requests, with the server's, and of each component."""
        components = list(dict.fromkeys(s.component for s in self.served))
        rows = [
            {"component": name} | figures(self.served, self.seconds, slo, name)
            for name in [ALL, *components]
        ]
        num_rounds = sum(self.rounds_by_batch.values())
        in_rounds = sum(batch * num for batch, num in self.rounds_by_batch.items())
        busy = self.round_seconds + (0.0 if self.disaggregated else self.prefill_seconds)
        rows[0] |= {
            "utilization": busy / self.seconds,
            "prefill_utilization": self.prefill_seconds / self.seconds,
            "mean_batch": in_rounds / num_rounds if num_rounds else 0.0,
            "mean_in_flight": self.mean_in_flight,
        }
        return rows


def simulate(
    sessions: Sequence[Session],
    costs: Costs,
    acceptance: Mapping[str, Acceptance],
    server: ServerConfig,
    *,
    num_draft_tokens: int,
    concurrency: int | None = None,
    seed: int = 0,
) -> Simulated:
    """Serves `sessions` until all is answered.

    What is kept of a request's drafts is drawn from the request's own numbers, so that it depends
    neither on the load nor on who shares the batch: runs of one seed differ by what was changed.

    Args:
        sessions: their turns follow each other, each `think_seconds` after the answer before.
        costs: what passes take.
        acceptance: by component.
        server: its rules.
        num_draft_tokens: asked for each round; 0: no speculation.
        concurrency: of closed arrivals: sessions at any time, begun in their order.
        seed: of what is kept.

    Raises:
        ValueError: there is no session, a request is larger than the cache, or k is not what was
            measured.
    """
    require(len(sessions) > 0, "predict.num_sessions", "be at least 1", 0)
    _check_cache(sessions, server)
    _check_draft_tokens({s.component for s in sessions}, acceptance, num_draft_tokens)
    known = concurrency is None or concurrency >= 1
    require(known, "profile.arrival.concurrency", "be at least 1", concurrency)
    env = simpy.Environment(0.0)
    simulated = Server(env, costs, acceptance, server, num_draft_tokens)
    places = None if concurrency is None else simpy.Resource(env, concurrency)
    served: list[Served] = []
    for i, session in enumerate(sessions):
        env.process(_session(env, simulated, session, i, places, seed, served))
    env.run()
    assert len(served) == sum(len(session.turns) for session in sessions)
    served.sort(key=lambda s: (s.arrived_seconds, s.session))
    first = served[0].arrived_seconds
    seconds = max(s.finished_seconds for s in served) - first
    return Simulated(
        served=served,
        seconds=seconds,
        round_seconds=simulated.round_seconds,
        prefill_seconds=simulated.prefill_seconds,
        rounds_by_batch=dict(simulated.rounds_by_batch),
        mean_in_flight=simulated.request_seconds / seconds,
        disaggregated=server.disaggregated,
    )


def sweep(
    profile: ProfileConfig,
    costs: Costs,
    acceptance: Mapping[str, Acceptance],
    server: ServerConfig,
    *,
    rates: Sequence[float],
    num_draft_tokens: Sequence[int],
    num_sessions: int,
    seed: int,
) -> list[dict[str, Any]]:
    """Rows for latency.json: the same sessions at each rate of sessions a second, and with each k.

    `is_best_k` marks, of each rate, the k by which most requests meet the SLOs, and of those with
    as many the one with the least mean latency.

    Raises:
        ValueError: as `simulate` and `draw_sessions`; a rate is not positive; arrivals have none.
    """
    gamma = profile.arrival.kind is ArrivalKind.gamma
    require(gamma, "profile.arrival.kind", "be gamma for a sweep", profile.arrival.kind.name)
    for rate in rates:
        require(0 < rate < float("inf"), "predict.rates[]", "be positive", rate)
    rows = []
    for rate in tqdm(rates, unit="rate", desc="simulate"):
        # A gamma's draws scale with its mean: only the times differ.
        sessions = draw_sessions(
            replace(profile, arrival=replace(profile.arrival, rate=rate)), num_sessions, seed
        )
        by_k = {
            k: simulate(sessions, costs, acceptance, server, num_draft_tokens=k, seed=seed).rows(
                profile.slo
            )
            for k in num_draft_tokens
        }
        best = max(
            by_k, key=lambda k: (by_k[k][0]["goodput_share"], -by_k[k][0]["latency_ms_mean"])
        )
        for k, found in by_k.items():
            head = {"kind": "simulated", "sessions_per_second": rate, "num_draft_tokens": k}
            rows += [head | {"is_best_k": k == best} | row for row in found]
    return rows


def figures(
    served: Sequence[Served], seconds: float, slo: SloConfig, component: str = ALL
) -> dict[str, Any]:
    """Of the requests of a component, or of all, in `seconds`.

    `_low` and `_high` are 95 % intervals of means, by batch means: requests that follow each other
    wait for the same reasons, so that 20 runs of them are compared and not single ones. There are
    none of fewer than two requests a batch.
    """
    own = [s for s in served if component in (ALL, s.component)]
    met = [float(s.meets(slo)) for s in own]
    itls = [s.itl_seconds for s in own]
    found: dict[str, Any] = {
        "num_requests": len(own),
        "num_tokens": sum(s.output_tokens for s in own),
        "tokens_per_second": sum(s.output_tokens for s in own) / seconds,
        "requests_per_second": len(own) / seconds,
        "goodput_requests_per_second": sum(met) / seconds,
        "prefix_hit_rate": sum(s.hit_tokens for s in own) / sum(s.prompt_tokens for s in own),
    }
    found |= _with_interval("goodput_share", met)
    found |= _distribution("ttft_ms", [1e3 * s.ttft_seconds for s in own])
    found |= _distribution("itl_ms", [1e3 * itl for itl in itls if itl is not None])
    return found | _distribution("latency_ms", [1e3 * s.latency_seconds for s in own])


def _distribution(name: str, values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    found = np.percentile(values, PERCENTILES).tolist()
    percentiles = {f"{name}_p{p}": x for p, x in zip(PERCENTILES, found, strict=True)}
    return _with_interval(f"{name}_mean", values) | percentiles


def _with_interval(name: str, values: Sequence[float]) -> dict[str, float]:
    found = {name: mean(values)}
    if len(values) < 2 * NUM_BATCHES:
        return found
    means = [float(batch.mean()) for batch in np.array_split(np.array(values), NUM_BATCHES)]
    half = T_95 * stdev(means) / sqrt(NUM_BATCHES)
    return found | {f"{name}_low": found[name] - half, f"{name}_high": found[name] + half}


def _session(
    env: simpy.Environment,
    server: Server,
    session: Session,
    index: int,
    places: simpy.Resource | None,
    seed: int,
    served: list[Served],
) -> Steps:
    if places is None:
        yield env.timeout(session.start_seconds)
        yield from _turns(env, server, session, index, seed, served)
        return
    with places.request() as place:
        yield place
        yield from _turns(env, server, session, index, seed, served)


def _turns(
    env: simpy.Environment,
    server: Server,
    session: Session,
    index: int,
    seed: int,
    served: list[Served],
) -> Steps:
    for i, (turn, prompt_tokens) in enumerate(zip(session.turns, session.prompts(), strict=True)):
        if turn.think_seconds:
            yield env.timeout(turn.think_seconds)
        job = Job(
            component=session.component,
            session=index,
            prefix_tokens=session.prefix_tokens,
            prompt_tokens=prompt_tokens,
            output_tokens=turn.output_tokens,
            random=Random(f"{seed}/{index}/{i}"),
            done=env.event(),
            arrived_at=env.now,
        )
        server.submit(job)
        yield job.done
        served.append(
            Served(
                component=job.component,
                session=index,
                turn=i,
                prompt_tokens=prompt_tokens,
                output_tokens=job.num_emitted,
                hit_tokens=job.hit_tokens,
                arrived_seconds=job.arrived_at,
                first_token_seconds=job.first_token_at,
                finished_seconds=job.finished_at,
            )
        )


def _check_cache(sessions: Sequence[Session], server: ServerConfig) -> None:
    if server.cache_tokens is None:
        return
    for session in sessions:
        largest = session.prompts()[-1] + session.turns[-1].output_tokens
        require(
            largest <= server.cache_tokens,
            "predict.server.cache_tokens",
            f"be at least the {largest} tokens of a request of {session.component}",
            server.cache_tokens,
        )


def _check_draft_tokens(
    components: Iterable[str], acceptance: Mapping[str, Acceptance], num_draft_tokens: int
) -> None:
    key = "predict.num_draft_tokens"
    require(num_draft_tokens >= 0, key, "be at least 0", num_draft_tokens)
    for name in sorted(components):
        measured = acceptance[name].num_draft_tokens if name in acceptance else 0
        known = num_draft_tokens <= measured
        require(known, key, f"be at most {measured}, measured of {name}", num_draft_tokens)
