"""Both threads of a server, from start to drain."""

import asyncio
import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from time import monotonic

import uvicorn

from specfit_serve.arrivals import max_length
from specfit_serve.decode import DecodeSettings, decode
from specfit_serve.protocols import DecodeTarget, Proposer
from specfit_serve.repetition import TokenClass
from specfit_serve.server.app import Api
from specfit_serve.server.live import LiveRequests
from specfit_serve.server.metrics import Metrics
from specfit_serve.server.settings import ServerSettings
from specfit_serve.server.text import Text

FLUSH_SECONDS = 5  # for responses that are on their way when all is answered
LOOK_SECONDS = 0.02  # between looks at what is left
log = logging.getLogger(__name__)


class Server:
    """A target, what drafts for it, and the API over both."""

    def __init__(
        self,
        target: DecodeTarget,
        proposer: Proposer,
        text: Text,
        settings: ServerSettings,
        *,
        token_classes: Sequence[TokenClass],
    ) -> None:
        self._target, self._proposer, self._settings = target, proposer, settings
        self._token_classes = token_classes
        metrics = Metrics(settings.model, settings.num_draft_tokens)
        capacity = settings.batch_size + settings.max_queue
        self.live = LiveRequests(metrics, capacity=capacity)
        self._app = Api(target, text, settings, self.live).app()
        self._http: asyncio.AbstractEventLoop | None = None
        self._told = 0  # how often to stop

    def run(self, listener: socket.socket, on_ready: Callable[[], None]) -> None:
        """Serves on `listener`, decoding in this thread, until `shut_down` or a signal says so.

        SIGTERM and SIGINT are `shut_down`, where this is the main thread. `on_ready` is called
        when requests are taken, from another thread.
        """
        settings = DecodeSettings(
            num_draft_tokens=self._settings.num_draft_tokens,
            max_new_tokens=min(
                self._settings.max_new_tokens,
                max_length(self._target, self._settings.num_draft_tokens),
            ),
            batch_size=self._settings.batch_size,
        )
        with ThreadPoolExecutor(1, "http") as threads, self._signals():
            http = threads.submit(lambda: asyncio.run(self._serve(listener, on_ready)))
            try:
                for _ in decode(
                    self._target,
                    self._proposer,
                    self.live,
                    settings,
                    token_classes=self._token_classes,
                    on_emitted=self.live.emitted,
                ):
                    pass
            except BaseException:
                self.live.fail()
                self._told = 2
                raise
            http.result()

    def shut_down(self) -> None:
        """Refuses who comes now and gives the others `drain_seconds`; said twice, none."""
        self._told += 1

    async def _serve(self, listener: socket.socket, on_ready: Callable[[], None]) -> None:
        self.live.open(asyncio.get_running_loop())
        config = uvicorn.Config(
            self._app,
            log_config=None,
            log_level=logging.WARNING,
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_graceful_shutdown=FLUSH_SECONDS,
        )
        server = uvicorn.Server(config)
        serving = asyncio.ensure_future(server.serve(sockets=[listener]))
        try:
            while not (server.started or serving.done()):
                await asyncio.sleep(LOOK_SECONDS)
            if server.started:
                on_ready()
            while not (self._told or serving.done()):
                await asyncio.sleep(LOOK_SECONDS)
            await self._drain()
        finally:
            self.live.stop()
            server.should_exit = True
            await serving

    async def _drain(self) -> None:
        self.live.drain()
        until = monotonic() + self._settings.drain_seconds
        log.info("serve drains requests=%d", len(self.live))
        while len(self.live) and self._told < 2 and monotonic() < until:
            await asyncio.sleep(LOOK_SECONDS)
        log.info("serve stops requests=%d", len(self.live))

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """SIGTERM and SIGINT shut down; only the main thread may say so."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        numbers = (signal.SIGTERM, signal.SIGINT)
        before = [signal.signal(n, lambda *_: self.shut_down()) for n in numbers]
        try:
            yield
        finally:
            for number, handler in zip(numbers, before, strict=True):
                signal.signal(number, handler)
