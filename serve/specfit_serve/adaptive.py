"""How many tokens to draft in a round: the number that costs least for each token it emits.

A round that drafts k tokens takes t_verify(k + 1) + k t_draft seconds and emits 1 + Σ s_i tokens a
row, where s_i is the probability that the i-th drafted token and all before it are kept. The k of
the smallest quotient is chosen, 0 included: plain decoding. Costs are given, or measured as rounds
pass; where no round was plain of late, some are, to be measured. The s_i are estimated for each
request and each grade of its drafts (`GradedProposer`). The first of them has the benefit of the
doubt, since plain rounds show nothing: what is thought too little of would stay so.

Two accounts bound what a mistake costs. Both are in plain passes, and are only so full.

- `lead`: what the rounds so far saved, a row, plus MAX_LOSS for each token of a row. A round that
  would cost more than the lead if nothing of its draft were kept is not run. So whatever the text
  does, the rows together take at most 1 + MAX_LOSS times as long for their tokens as plain passes
  over as many rows, and FIRST_LEAD passes more. (At the costs that rounds are planned with; tokens
  kept behind the end of an answer count.) One row may pay for what others gain: were each row
  bounded by itself, one that keeps nothing would hold back all that share its batch.
- `curiosity`: EXPLORED for each round. Once it pays for one more column, a round drafts one token
  more than seems best; where that token is kept, what it saved goes back into the account. So in
  hostile text one token is drafted now and then, and at once again where it is kept.
"""

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod, sqrt
from operator import mul
from statistics import median

FIRST_GUESS = 0.5  # that a token is kept, before anything was drafted
PRIOR_WEIGHT = 8.0  # rounds that a prior counts for
REQUEST_MEMORY = 16.0  # rounds that an estimate remembers
SHARED_MEMORY = 100.0
BENEFIT = 1.0  # of the doubt, in standard deviations
NUM_TIMED = 15  # latest passes of one width that count
MIN_TIMED = 3  # of them before they count
MAX_AGE = 256  # rounds until a pass no longer counts
MAX_LOSS = 0.015
FIRST_LEAD = 4.0
MAX_LEAD = 8.0
EXPLORED = 0.01
MAX_CURIOSITY = 1.0


class Costs:
    """Seconds of a verification pass and of drafting a token.

    `verify_seconds[rows][m - 1]` is of a pass over m tokens in each of `rows` sequences; other
    numbers of rows are read at the next larger one. No more tokens are drafted than there are
    columns for. The table is where measuring starts from: each width has the median of how much
    longer its latest passes took than the table says, or the nearest width's if it had none.

    With `fixed` nothing is measured, and the same text gets the same drafts, always.

    Raises:
        ValueError: the table is empty or ragged, or a time is not positive.
    """

    def __init__(
        self,
        verify_seconds: Mapping[int, Sequence[float]],
        draft_seconds: float,  # of one token by a model; graded drafts are looked up, for nothing
        *,
        fixed: bool,
    ) -> None:
        widths = {len(row) for row in verify_seconds.values()}
        if len(widths) != 1 or widths == {0}:
            raise ValueError(f"verify_seconds must be rows of one length, got {sorted(widths)}")
        least = min(min(row) for row in verify_seconds.values())
        if least <= 0:
            raise ValueError(f"verify_seconds must be positive, got {least}")
        if draft_seconds < 0:
            raise ValueError(f"draft_seconds must be at least 0, got {draft_seconds}")
        self.max_width = widths.pop()  # tokens a row
        self._table = dict(sorted(verify_seconds.items()))
        self._fixed = fixed
        self._draft = deque([draft_seconds], maxlen=NUM_TIMED)
        # [m - 1]: of the latest passes over m tokens, the round and the ratio to the table
        self._timed = [deque[tuple[int, float]](maxlen=NUM_TIMED) for _ in range(self.max_width)]
        self._ratios = [1.0] * self.max_width
        self._num_rounds = 0

    def verify(self, rows: int) -> list[float]:
        """Of passes over 1, 2, ... `max_width` tokens in each of `rows` sequences."""
        return [t * ratio for t, ratio in zip(self._row(rows), self._ratios, strict=True)]

    @property
    def draft(self) -> float:
        """Of one token."""
        return median(self._draft)

    @property
    def knows_plain(self) -> bool:
        """Whether passes over one token have been timed of late: all others are held against it."""
        return self._fixed or len(self._timed[0]) >= MIN_TIMED

    def record(self, rows: int, width: int, verify_seconds: float) -> None:
        """Takes in one pass over `width` tokens a row."""
        if self._fixed:
            return
        self._num_rounds += 1
        ratio = verify_seconds / self._row(rows)[width - 1]
        self._timed[width - 1].append((self._num_rounds, ratio))
        known: dict[int, float] = {}
        for i, timed in enumerate(self._timed):
            while timed and timed[0][0] <= self._num_rounds - MAX_AGE:
                timed.popleft()
            if len(timed) >= MIN_TIMED:
                known[i] = median(r for _, r in timed)
        if known:
            nearest = [min(known, key=lambda j: abs(i - j)) for i in range(self.max_width)]
            self._ratios = [known[j] for j in nearest]

    def record_draft(self, seconds: float) -> None:
        """Takes in the time of one drafted token."""
        if not self._fixed:
            self._draft.append(seconds)

    def _row(self, rows: int) -> Sequence[float]:
        return next((t for n, t in self._table.items() if n >= rows), [*self._table.values()][-1])


class Survival:
    """Estimates how many of some things in a row come true before the first that does not.

    For each position, the probability that it comes true if all before did: the mean of a Beta
    distribution whose counts fade, those of `memory` rounds ago to 1/e. Its prior is worth
    PRIOR_WEIGHT counts. Alone, it says that a position is like the one before it. Beside `shared`,
    the rates of many such rows, it says that this one is worse, or better, in the same ratio as at
    the position before. So what the first position shows, which every round tests, soon holds for
    those that few rounds reach.
    """

    def __init__(self, memory: float, *, first_guess: float = FIRST_GUESS) -> None:
        self._keep = 1 - 1 / memory
        self._first_guess = first_guess
        self._tested: list[float] = []
        self._true: list[float] = []

    def record(self, num_asked: int, num_true: int) -> None:
        """Of `num_asked` in a row, the first `num_true` came true and the next, if any, did not."""
        missing = [0.0] * (num_asked - len(self._tested))
        self._tested += missing
        self._true += missing
        for i in range(num_asked):
            self._tested[i] = self._keep * self._tested[i] + (i <= num_true)
            self._true[i] = self._keep * self._true[i] + (i < num_true)

    def conditional(self, num: int, shared: Sequence[float] | None = None) -> list[float]:
        """For each of the first `num`: that it comes true if all before it did."""
        rates: list[float] = []
        rate = before = self._first_guess  # of the position before: here, and in `shared`
        for i in range(num):
            mean = rate
            if shared:
                mean, before = _shifted(shared[i], before, rate), shared[i]
            tested, true = (self._tested[i], self._true[i]) if i < len(self._tested) else (0.0, 0.0)
            rate = (true + PRIOR_WEIGHT * mean) / (tested + PRIOR_WEIGHT)
            rates.append(rate)
        return rates

    def curve(
        self, num: int, *, shared: Sequence[float] | None = None, benefit: float = 0.0
    ) -> list[float]:
        """For each of the first `num`: that it and all before it come true.

        The first is taken to be `benefit` standard deviations likelier than its mean.
        """
        rates = self.conditional(num, shared)
        if rates and benefit > 0:
            weight = PRIOR_WEIGHT + sum(self._tested[:1])
            rates[0] = min(rates[0] + benefit * sqrt(rates[0] * (1 - rates[0]) / weight), 1.0)
        return list(accumulate(rates, mul))


def _shifted(rate: float, from_: float, to: float) -> float:
    """`rate`, made lower or higher as much as it takes to make `to` of `from_`."""
    if to <= from_:
        return rate * to / from_
    return 1 - (1 - rate) * (1 - to) / (1 - from_)


@dataclass(frozen=True)
class _Plan:
    """A number of draft tokens, and what a round with them is expected to take and to bring."""

    num_draft_tokens: int
    seconds: float
    num_tokens: float  # of all rows
    most_seconds: float  # where some row drafts all that it is asked for

    @property
    def seconds_per_token(self) -> float:
        return self.seconds / self.num_tokens


class AdaptiveDraftLength:
    """A `DraftLength` of the fewest seconds a token; see the module's docstring.

    One object serves one target and one proposer, for as many calls of `decode` as there are:
    requests start from what earlier ones showed. What it chooses depends on the other requests and,
    unless the costs are fixed, on the clock; like drafts, it changes no greedy answer, and not the
    distribution of a sampled one, as long as ids and seed do not recur (see `SuffixProposer`).

    A proposer with states of its own must be able to sit out rounds of 0 tokens: `hybrid.LateHead`.
    """

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._kept = defaultdict[int, Survival](lambda: Survival(SHARED_MEMORY))  # by grade
        # By request and grade.
        self._kept_of = defaultdict[tuple[str, int], Survival](lambda: Survival(REQUEST_MEMORY))
        # By grade: proposers may draft fewer than asked.
        self._drafted = defaultdict[int, Survival](lambda: Survival(SHARED_MEMORY, first_guess=1.0))
        self._lead = FIRST_LEAD
        self._curiosity = 0.0
        self._rows: list[tuple[str, int]] = []  # of the round at hand: ids and grades
        self._has_model = True  # some row's draft is none that is looked up
        self._best: _Plan
        self._chosen: _Plan  # the best one, or that of one token more

    def choose(self, ids: Sequence[str], grades: Sequence[int], limit: int) -> int:
        """See `DraftLength.choose`."""
        for over in [row for row in self._kept_of if row[0] not in ids]:
            del self._kept_of[over]
        self._rows = list(zip(ids, grades, strict=True))
        self._has_model = 0 in grades
        limit = min(limit, self._costs.max_width - 1) if self._costs.knows_plain else 0
        plans = self._plans(limit)
        plain = plans[0].seconds
        most = plain + max(self._lead, 0.0) * plain
        allowed = [plan for plan in plans if plan.most_seconds <= most]
        self._best = self._chosen = min(allowed, key=lambda plan: plan.seconds_per_token)
        for plan in allowed:
            price = plan.most_seconds - self._best.most_seconds
            one_more = plan.num_draft_tokens == self._best.num_draft_tokens + 1
            if one_more and price <= self._curiosity * plain:
                self._chosen = plan
        return self._chosen.num_draft_tokens

    def record(
        self,
        *,
        num_asked: Sequence[int],
        num_drafted: Sequence[int],
        num_kept: Sequence[int],
        draft_seconds: float,
        verify_seconds: float,
    ) -> None:
        """See `DraftLength.record`."""
        width = max(num_drafted) + 1
        self._settle(width, num_kept)
        rows = zip(self._rows, num_asked, num_drafted, num_kept, strict=True)
        for row, asked, drafted, kept in rows:
            self._kept_of[row].record(asked, kept)
            self._kept[row[1]].record(asked, kept)
            self._drafted[row[1]].record(asked, drafted)
        self._costs.record(len(self._rows), width, verify_seconds)
        if self._has_model and self._chosen.num_draft_tokens > 0:
            self._costs.record_draft(draft_seconds / self._chosen.num_draft_tokens)

    def _plans(self, limit: int) -> list[_Plan]:
        """Those of 0, 1, ... `limit` draft tokens."""
        verify, draft = self._costs.verify(len(self._rows)), self._draft_seconds()
        grades = {grade for _, grade in self._rows}
        shared = {grade: self._kept[grade].conditional(limit) for grade in grades}
        kept = [
            self._kept_of[row].curve(limit, shared=shared[row[1]], benefit=BENEFIT)
            for row in self._rows
        ]
        lengths = {grade: self._drafted[grade].curve(limit) for grade in grades}
        drafted = [lengths[grade] for _, grade in self._rows]
        seconds, num_tokens = verify[0], float(len(self._rows))
        plans = [_Plan(0, seconds, num_tokens, seconds)]
        for i in range(limit):
            # A pass is as wide as the longest draft in it.
            used = 1 - prod(1 - curve[i] for curve in drafted)
            seconds += used * (verify[i + 1] - verify[i]) + draft
            num_tokens += sum(curve[i] for curve in kept)
            plans.append(_Plan(i + 1, seconds, num_tokens, verify[i + 1] + (i + 1) * draft))
        return plans

    def _settle(self, width: int, num_kept: Sequence[int]) -> None:
        """Books what the round took and brought, at the costs it was planned with."""
        verify, draft = self._costs.verify(len(num_kept)), self._draft_seconds()
        plain, spent = verify[0], verify[width - 1] + self._chosen.num_draft_tokens * draft
        num_emitted = sum(num_kept) / len(num_kept) + 1
        self._lead = min(self._lead + (1 + MAX_LOSS) * num_emitted - spent / plain, MAX_LEAD)
        self._curiosity += EXPLORED
        if self._chosen is not self._best:
            k = self._best.num_draft_tokens
            gained = sum(kept > k for kept in num_kept) * self._best.seconds_per_token
            paid = spent - verify[min(width - 1, k)] - k * draft
            self._curiosity += (gained - paid) / plain
        self._curiosity = min(self._curiosity, MAX_CURIOSITY)

    def _draft_seconds(self) -> float:
        return self._costs.draft if self._has_model else 0.0
