"""The requests between HTTP and the decode loop."""

import asyncio
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from time import perf_counter

from specfit_serve.arrivals import Request
from specfit_serve.emitted import Emitted
from specfit_serve.server.choices import Choice, Part, Parts
from specfit_serve.server.errors import ApiError
from specfit_serve.server.metrics import Metrics

RETRY_AFTER_SECONDS = 1  # where the queue is full
RETRY_LATER_SECONDS = 5  # where another server may be there by then


class LiveRequests:
    """Every request that has come and has not ended; the decode loop's `Revocable` arrivals.

    HTTP's thread calls `submit`, `give_up`, `drain` and `stop`; the loop's calls `take`, `wait`,
    `close`, `is_revoked`, `emitted` and `fail`.
    """

    def __init__(self, metrics: Metrics, *, capacity: int) -> None:
        """`capacity` is how many there may be, those in slots and those that wait."""
        self.metrics = metrics
        self.capacity = capacity
        self._changed = threading.Condition()
        self._new: deque[Request] = deque()
        self._live: dict[str, Choice] = {}
        self._revoked: set[str] = set()  # still live: the loop has not looked since
        self._closed: tuple[int, str] | None = None  # status and reason for who comes now
        self._is_stopped = False
        self._http: asyncio.AbstractEventLoop | None = None
        metrics.watch(self._num_running, self._num_waiting)

    def __len__(self) -> int:
        return len(self._live)

    def _num_running(self) -> int:
        # Whoever was given up has its slot until the loop has looked.
        return sum(choice.last_at is not None for choice in list(self._live.values()))

    def _num_waiting(self) -> int:
        live = list(self._live.items())
        return sum(c.last_at is None and id not in self._revoked for id, c in live)

    @property
    def refusal(self) -> ApiError | None:
        """Why nobody may come any more, if so."""
        if self._closed is None:
            return None
        return ApiError(*self._closed, retry_after_seconds=RETRY_LATER_SECONDS)

    # --- From HTTP ---

    def open(self, http: asyncio.AbstractEventLoop) -> None:
        """Parts go to queues of this loop."""
        self._http = http

    def submit(self, choices: Sequence[Choice]) -> None:
        """Takes all of them in, or none.

        Raises:
            ApiError: there is no room (429), or the server is about to stop (503).
        """
        with self._changed:
            if (refusal := self.refusal) is not None:
                raise refusal
            num_wanted = len(self._live) - len(self._revoked)
            if num_wanted + len(choices) > self.capacity:
                raise ApiError(
                    429,
                    f"the queue is full: {num_wanted} of {self.capacity} answers are in flight or "
                    f"waited for, {len(choices)} more asked for",
                    code="queue_full",
                    retry_after_seconds=RETRY_AFTER_SECONDS,
                )
            for choice in choices:
                self._live[choice.request.id] = choice
                self._new.append(choice.request)
            self._changed.notify()

    def give_up(self, ids: Iterable[str]) -> None:
        """Nobody wants these any more; those that have ended are passed over."""
        with self._changed:
            wanted = [id for id in ids if id in self._live and id not in self._revoked]
            self._revoked.update(wanted)
            for _ in wanted:
                self.metrics.finished("abort")
            # The loop looks at those that it has taken; the others need not wait for that.
            for request in [r for r in self._new if r.id in self._revoked]:
                self._new.remove(request)
                self._revoked.remove(request.id)
                del self._live[request.id]

    def drain(self) -> None:
        """Nobody new is taken in."""
        if self._closed is None:
            self._closed = (503, "the server is shutting down")

    def stop(self) -> None:
        """Ends all that is left, with an error for whoever waits for it, and then the loop."""
        self.drain()
        with self._changed:
            left = [c for id, c in self._live.items() if id not in self._revoked]
            self._is_stopped = True
            self._changed.notify()
        self.give_up([choice.request.id for choice in left])
        self._refuse(left)

    # --- From the loop ---

    def take(self) -> list[Request]:
        """See `Arrivals`."""
        with self._changed:
            taken = list(self._new)
            self._new.clear()
        return taken

    def wait(self) -> bool:
        """See `Arrivals`."""
        with self._changed:
            self._changed.wait_for(lambda: self._new or self._is_stopped)
            return bool(self._new)

    def close(self) -> None:
        """See `Arrivals`."""

    def is_revoked(self, id: str) -> bool:
        """See `Revocable`."""
        if id not in self._revoked:
            return False
        with self._changed:
            self._revoked.remove(id)
            del self._live[id]
        return True

    def emitted(self, batch: Sequence[Emitted]) -> None:
        """What a pass gave, on to who waits for it; one hand-over for all."""
        now = perf_counter()
        out: list[tuple[Parts, Part | ApiError]] = []
        for emitted in batch:
            choice, is_whole = self._live[emitted.id], emitted.finish_reason is not None
            if emitted.id in self._revoked:
                if is_whole:
                    self._ended(choice, "abort", is_whole=True)
                continue
            before = choice.num_tokens
            part, round_ = choice.take(emitted)
            if choice.last_at is None:
                assert choice.request.arrived_at is not None
                self.metrics.first_token(choice.num_prompt_tokens, now - choice.request.arrived_at)
            elif round_ is not None:
                self.metrics.more_tokens(round_, now - choice.last_at)
            choice.last_at = now
            self.metrics.generated(choice.num_tokens - before)
            if part is not None:
                out.append((choice.parts, part))
                if part.finish_reason is not None:
                    self._ended(choice, part.finish_reason, is_whole=is_whole)
        self._send(out)

    def fail(self) -> None:
        """The loop has failed: nothing is answered any more."""
        self._closed = (500, "the decode loop has failed; see the server's log")
        with self._changed:
            left = list(self._live.values())
            self._live.clear()
            self._revoked.clear()
        self._refuse(left)

    def _refuse(self, left: Sequence[Choice]) -> None:
        refusal = self.refusal
        assert refusal is not None
        self._send([(choice.parts, refusal) for choice in left])

    def _ended(self, choice: Choice, reason: str, *, is_whole: bool) -> None:
        """Counts it, unless it counts as given up. Not whole: the loop would go on."""
        id = choice.request.id
        with self._changed:
            if id not in self._revoked:
                self.metrics.finished(reason)
            if is_whole:
                self._revoked.discard(id)
                del self._live[id]
            else:
                self._revoked.add(id)

    def _send(self, out: list[tuple[Parts, Part | ApiError]]) -> None:
        if out and self._http is not None and not self._http.is_closed():
            self._http.call_soon_threadsafe(_deliver, out)


def _deliver(out: list[tuple[Parts, Part | ApiError]]) -> None:
    for parts, part in out:
        parts.put_nowait(part)
