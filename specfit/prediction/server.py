"""A simulated server: a queue, prefills, rounds of a batch, and the cache they share.

Its rules are those of `specfit_serve.decode`, so that one can be held against the other: who waits
is prefilled in order of arrival as soon as a slot is free, before the next round, and a round is
one pass over all sequences, as wide as the longest draft. Beyond that loop it can do what servers
on GPUs do: prefill in chunks, of which at most one budget is run between two rounds; keep what a
session, or a component's prefix, has in the cache; and prefill on a device of its own.
"""

from bisect import bisect_right
from collections import Counter, OrderedDict, deque
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from random import Random
from typing import Any, Protocol, runtime_checkable

import simpy

from specfit.checks import require, require_positive

Steps = Generator[simpy.Event, Any, None]  # what a process of simpy is


@runtime_checkable
class Costs(Protocol):
    """What passes take."""

    def step_seconds(self, batch: int, tokens_per_sequence: int, context_tokens: float) -> float:
        """Of a pass over `tokens_per_sequence` of each of `batch` sequences.

        `context_tokens` is the mean of what they have before these.
        """

    def draft_seconds(self, batch: int, num_draft_tokens: int) -> float:
        """Of drafting for all of them."""

    def prefill_seconds(self, num_tokens: int, context_tokens: int) -> float:
        """Of `num_tokens` of one prompt, after what is in the cache of it."""


@dataclass
class ServerConfig:
    """How requests are served."""

    max_batch: int = 32  # sequences that are decoded at once
    prefill_chunk_tokens: int | None = None  # run at most between two rounds; null: whole prompts
    cache_tokens: int | None = None  # that keys and values are held of; null: as many as come
    prefix_cache: bool = True  # keep what has been answered, and prefixes, as far as there is room
    disaggregated: bool = False  # prefill on another device, which holds up no round
    transfer_us_per_token: float = 0.0  # from there: of each token that was run, not found cached

    def __post_init__(self) -> None:
        require_positive(self, "predict.server", "max_batch")
        for name in ("prefill_chunk_tokens", "cache_tokens"):
            value = getattr(self, name)
            known = value is None or value >= 1
            require(known, f"predict.server.{name}", "be at least 1, or null", value)
        took = self.transfer_us_per_token
        known = 0 <= took < float("inf")
        require(known, "predict.server.transfer_us_per_token", "be at least 0", took)
        whole = not self.disaggregated or self.prefill_chunk_tokens is None
        key = "predict.server.prefill_chunk_tokens"
        require(whole, key, "be null where prefill is disaggregated", self.prefill_chunk_tokens)


class Acceptance:
    """What becomes of rounds: how many tokens were drafted and how many of them kept."""

    def __init__(
        self, counts: Mapping[tuple[int, int], int | float], num_draft_tokens: int
    ) -> None:
        """`counts` weighs pairs of tokens drafted and kept; `num_draft_tokens` were asked for."""
        self.num_draft_tokens = num_draft_tokens
        self.counts = {pair: weight for pair, weight in counts.items() if weight > 0}
        assert self.counts, "something must become of a round"
        assert all(0 <= kept <= drafted <= num_draft_tokens for drafted, kept in self.counts)
        total = sum(self.counts.values())
        self._pairs = sorted(self.counts)
        self._until = list(accumulate(self.counts[pair] / total for pair in self._pairs))

    @classmethod
    def from_positions(cls, acceptance_by_position: Sequence[float]) -> "Acceptance":
        """Of drafts that are always as long as the list, by P(position i is kept)."""
        k = len(acceptance_by_position)
        survival = [1.0, *acceptance_by_position, 0.0]
        return cls({(k, kept): a - b for kept, (a, b) in enumerate(pairwise(survival))}, k)

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> "Acceptance":
        """Of a row of acceptance.json.

        The shares by position are those of all rounds, so that drafts that are short, or missing,
        count as what they are. A row of a mix has only a length: there every position is kept with
        one probability, given those before it.

        Raises:
            ValueError: the row has no round.
        """
        k, by_position = row["num_draft_tokens"], row.get("acceptance_by_position")
        if by_position is None:
            name, length = row["component"], row.get("acceptance_length")
            known = length is not None and 1 <= length <= k + 1
            require(known, f"acceptance_length of {name}", f"lie in [1, {k + 1}]", length)
            p = _geometric(row["acceptance_length"], k)
            by_position = [p ** (i + 1) for i in range(k)]
        return cls.from_positions(by_position)

    @property
    def acceptance_length(self) -> float:
        """Tokens a round."""
        total = sum(self.counts.values())
        return 1 + sum(kept * weight for (_, kept), weight in self.counts.items()) / total

    def cut(self, num_draft_tokens: int) -> "Acceptance":
        """Of the same drafts, cut."""
        counts: dict[tuple[int, int], float] = {}
        for (drafted, kept), weight in self.counts.items():
            pair = min(drafted, num_draft_tokens), min(kept, num_draft_tokens)
            counts[pair] = counts.get(pair, 0) + weight
        return Acceptance(counts, num_draft_tokens)

    def draw(self, random: Random) -> tuple[int, int]:
        """Tokens drafted and kept, of one round."""
        at = bisect_right(self._until, random.random())
        return self._pairs[min(at, len(self._pairs) - 1)]


def _geometric(acceptance_length: float, num_draft_tokens: int) -> float:
    """The p of which 1 + p + ... + p^k is the length."""
    low, high = 0.0, 1.0
    for _ in range(60):
        p = (low + high) / 2
        if sum(p**i for i in range(num_draft_tokens + 1)) < acceptance_length:
            low = p
        else:
            high = p
    return p


@dataclass
class Job:
    """A request on its way through the server; times are of the simulation, in seconds."""

    component: str
    session: int  # its index
    prefix_tokens: int  # of the prompt, shared with all of the component
    prompt_tokens: int  # all of it
    output_tokens: int
    random: Random
    done: simpy.Event
    arrived_at: float
    hit_tokens: int = 0  # found in the cache
    run_tokens: int = 0  # of the prompt that are in the cache, hits included
    num_emitted: int = 0
    first_token_at: float = 0.0
    finished_at: float = 0.0

    @property
    def total_tokens(self) -> int:
        """When it is answered."""
        return self.prompt_tokens + self.output_tokens

    @property
    def num_left(self) -> int:
        """Tokens still to emit."""
        return self.output_tokens - self.num_emitted


class KvCache:
    """Who holds how many tokens: requests in flight, and what they and prefixes left behind.

    A request has room for its whole answer from the beginning, so nobody is ever put back. What is
    left of sessions gives way, the one longest out of use first, and a prefix after its sessions.
    """

    def __init__(self, capacity: int | None, keeps: bool) -> None:
        self.capacity = float("inf") if capacity is None else capacity
        self.keeps = keeps
        self.held: OrderedDict[int | str, int] = OrderedDict()  # least recently used first
        self.num_held = 0  # tokens
        self.in_use: Counter[int | str] = Counter()

    def admit(self, job: Job) -> bool:
        """Takes it in and counts its hits; False, and nothing happens, without room.

        At least the prompt's last token is run: it gives the answer's first one.
        """
        keys = self._keys(job)
        needed = dict(zip(keys, self._tokens(job, job.total_tokens), strict=True))
        others = sum(self.held[key] for key in self.in_use if key not in needed)
        if others + sum(needed.values()) > self.capacity:
            return False
        job.hit_tokens = min(sum(self.held.get(key, 0) for key in keys), job.prompt_tokens - 1)
        for key, num in needed.items():
            self._hold(key, num)
            self.in_use[key] += 1
        while self.num_held > self.capacity:
            self._drop(next(key for key in self.held if key not in self.in_use))
        return True

    def leave(self, job: Job) -> None:
        """It is answered; the newest token has never been in the cache."""
        left = self._tokens(job, job.total_tokens - 1)
        for key, num in zip(self._keys(job), left, strict=True):
            self.in_use[key] -= 1
            if not self.in_use[key]:
                del self.in_use[key]
            self._hold(key, num)
            self.held.move_to_end(key)
            if not self.keeps:
                self._drop(key)

    def _hold(self, key: int | str, num: int) -> None:
        self.num_held += num - self.held.get(key, 0)
        self.held[key] = num

    def _drop(self, key: int | str) -> None:
        self.num_held -= self.held.pop(key)

    def _keys(self, job: Job) -> tuple[int | str, ...]:
        # A session's first: then its prefix is the one used last, and goes after it. The indices
        # of sessions and the names of components do not meet.
        return (job.session, job.component) if self.keeps else (id(job),)

    def _tokens(self, job: Job, total: int) -> tuple[int, ...]:
        return (total - job.prefix_tokens, job.prefix_tokens) if self.keeps else (total,)


@dataclass
class Server:
    """The server; `submit` to it, then run `env`."""

    env: simpy.Environment
    costs: Costs
    acceptance: Mapping[str, Acceptance]  # by component, as long as `num_draft_tokens` at least
    config: ServerConfig
    num_draft_tokens: int
    waiting: deque[Job] = field(default_factory=deque)
    ready: deque[Job] = field(default_factory=deque)  # prefilled elsewhere
    active: list[Job] = field(default_factory=list)
    prefill_seconds: float = 0.0
    round_seconds: float = 0.0
    rounds_by_batch: Counter[int] = field(default_factory=Counter)
    num_in_flight: int = 0
    request_seconds: float = 0.0  # integral of `num_in_flight`
    _counted_until: float = 0.0

    def __post_init__(self) -> None:
        self.acceptance = {n: a.cut(self.num_draft_tokens) for n, a in self.acceptance.items()}
        self.cache = KvCache(self.config.cache_tokens, self.config.prefix_cache)
        self._prefilling: Job | None = None
        self._changed = self.env.event()
        self.env.process(self._decode())
        if self.config.disaggregated:
            self.env.process(self._prefill_elsewhere())

    def submit(self, job: Job) -> None:
        """It has arrived."""
        self._count(1)
        self.waiting.append(job)
        self._notify()

    def _decode(self) -> Steps:
        while True:
            if not self.config.disaggregated:
                yield from self._prefill(self.config.prefill_chunk_tokens)
            while self.ready and len(self.active) < self.config.max_batch:
                self.active.append(self.ready.popleft())
            if self.active:
                yield from self._round()
                yield from self._settled()
            elif self._prefilling is None:
                yield self._changed

    def _prefill(self, budget: int | None) -> Steps:
        """Prompts in order of arrival, at most `budget` tokens, as long as slots are free."""
        left = float("inf") if budget is None else budget
        while left > 0:
            if self._prefilling is None and len(self.active) < self.config.max_batch:
                self._prefilling = self._admitted()
            job = self._prefilling
            if job is None:
                return
            num = int(min(left, job.prompt_tokens - job.run_tokens))
            yield from self._run(job, num)
            yield from self._settled()
            left -= num
            if job.run_tokens == job.prompt_tokens:
                self._prefilling = None
                if job.num_left:
                    self.active.append(job)

    def _prefill_elsewhere(self) -> Steps:
        while True:
            job = self._admitted()
            if job is None:
                yield self._changed
                continue
            yield from self._run(job, job.prompt_tokens - job.run_tokens)
            if job.num_left:
                self.env.process(self._transfer(job))

    def _transfer(self, job: Job) -> Steps:
        run = job.prompt_tokens - job.hit_tokens
        yield self.env.timeout(1e-6 * self.config.transfer_us_per_token * run)
        self.ready.append(job)
        self._notify()

    def _admitted(self) -> Job | None:
        if not self.waiting or not self.cache.admit(self.waiting[0]):
            return None
        job = self.waiting.popleft()
        job.run_tokens = job.hit_tokens
        return job

    def _run(self, job: Job, num: int) -> Steps:
        """Tokens of a prompt; its last gives the answer's first."""
        seconds = self.costs.prefill_seconds(num, job.run_tokens)
        yield self.env.timeout(seconds)
        self.prefill_seconds += seconds
        job.run_tokens += num
        if job.run_tokens == job.prompt_tokens:
            job.first_token_at = self.env.now
            self._emit(job, 1)

    def _round(self) -> Steps:
        batch, width = len(self.active), 1
        kept_by_row = []
        for job in self.active:
            drafted, kept = 0, 0
            if self.num_draft_tokens:
                drafted, kept = self.acceptance[job.component].draw(job.random)
            room = job.num_left - 1  # the own token needs one
            width = max(width, 1 + min(drafted, room))
            kept_by_row.append(min(kept, room))
        context = sum(job.prompt_tokens + job.num_emitted for job in self.active) / batch
        seconds = self.costs.step_seconds(batch, width, context)
        if self.num_draft_tokens:
            seconds += self.costs.draft_seconds(batch, self.num_draft_tokens)
        yield self.env.timeout(seconds)
        self.round_seconds += seconds
        self.rounds_by_batch[batch] += 1
        for job, kept in zip(self.active, kept_by_row, strict=True):
            self._emit(job, kept + 1)
        self.active = [job for job in self.active if job.num_left]

    def _settled(self) -> Steps:
        """Lets all happen that happens now: who asks again at once is there for the next pass."""
        while self.env.peek() == self.env.now:
            yield self.env.timeout(0)

    def _emit(self, job: Job, num: int) -> None:
        job.num_emitted += num
        if job.num_left == 0:
            job.finished_at = self.env.now
            self._count(-1)
            self.cache.leave(job)
            job.done.succeed()
            self._notify()

    def _count(self, change: int) -> None:
        self.request_seconds += self.num_in_flight * (self.env.now - self._counted_until)
        self._counted_until = self.env.now
        self.num_in_flight += change

    def _notify(self) -> None:
        changed, self._changed = self._changed, self.env.event()
        changed.succeed()
