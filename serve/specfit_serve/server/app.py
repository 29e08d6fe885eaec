"""Routes, errors and streams: what HTTP sees of the server."""

import asyncio
import hmac
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable
from http import HTTPStatus
from time import perf_counter
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from specfit_serve import arrivals
from specfit_serve.protocols import DecodeTarget
from specfit_serve.server.choices import Choice, Part, Parts
from specfit_serve.server.errors import ApiError, wrong
from specfit_serve.server.live import LiveRequests
from specfit_serve.server.replies import Reply
from specfit_serve.server.schema import ChatRequest, CommonRequest, CompletionRequest, parse
from specfit_serve.server.settings import ServerSettings
from specfit_serve.server.text import Text

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"  # of Prometheus' text format
log = logging.getLogger(__name__)


class Api:
    """The routes, over one decode loop."""

    def __init__(
        self, target: DecodeTarget, text: Text, settings: ServerSettings, live: LiveRequests
    ) -> None:
        self._target, self._text, self._settings, self._live = target, text, settings, live
        self._started = int(time.time())

    def app(self) -> FastAPI:
        """As ASGI."""
        app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
        app.add_exception_handler(ApiError, _answer_api_error)
        app.add_exception_handler(HTTPException, _answer_http_error)
        app.add_exception_handler(ClientDisconnect, _answer_nobody)
        app.add_exception_handler(Exception, _answer_own_error)
        app.add_api_route("/health", self.health, response_model=None)
        app.add_api_route("/metrics", self.metrics, response_model=None)
        routes = APIRouter(prefix="/v1", dependencies=[Depends(self.authorize)])
        routes.add_api_route("/models", self.models, response_model=None)
        for path, endpoint in (("chat/completions", self.chat), ("completions", self.complete)):
            routes.add_api_route(f"/{path}", endpoint, methods=["POST"], response_model=None)
        app.include_router(routes)
        return app

    async def authorize(self, request: Request) -> None:
        """Raises ApiError unless the request has the key, if there is one."""
        key = self._settings.api_key
        given = request.headers.get("Authorization", "").encode()
        if key is not None and not hmac.compare_digest(given, f"Bearer {key}".encode()):
            raise ApiError(401, "the API key is wrong or missing", code="invalid_api_key")

    async def health(self) -> Response:
        """200 while requests are taken."""
        if self._live.refusal is not None:
            raise self._live.refusal
        return JSONResponse({})

    async def metrics(self) -> Response:
        """For Prometheus."""
        return Response(self._live.metrics.text(), media_type=METRICS_TYPE)

    async def models(self) -> Response:
        """The one there is."""
        model = {
            "id": self._settings.model,
            "object": "model",
            "created": self._started,
            "owned_by": "specfit",
            "max_model_len": self._room,
        }
        return JSONResponse({"object": "list", "data": [model]})

    async def chat(self, request: Request) -> Response:
        """An answer to a conversation."""
        came_at = perf_counter()
        asked = parse(ChatRequest, await self._body(request))
        self._check(asked, 1)
        if asked.tools and not self._text.reads_tools:
            raise wrong("tools", "be absent: the target's chat template has none", asked.tools)
        messages = [message.model_dump(exclude_none=True) for message in asked.messages]
        try:
            prompt = await asyncio.to_thread(self._text.render, messages, asked.tools)
        except ValueError as error:
            raise ApiError(422, f"messages: {error}", param="messages") from error
        choices = self._choices(asked, [prompt], "messages", came_at)
        return await self._answer(request, asked, choices)

    async def complete(self, request: Request) -> Response:
        """What comes after a text, or after tokens."""
        came_at = perf_counter()
        asked = parse(CompletionRequest, await self._body(request))
        self._check(asked, len(asked.prompt))
        encode = self._text.encode
        prompts = [
            await asyncio.to_thread(encode, p) if isinstance(p, str) else p for p in asked.prompt
        ]
        choices = self._choices(asked, prompts, "prompt", came_at)
        return await self._answer(request, asked, choices)

    @property
    def _room(self) -> int:
        return arrivals.max_length(self._target, self._settings.num_draft_tokens)

    async def _body(self, request: Request) -> bytes:
        most, body = self._settings.max_body_bytes, bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > most:
                raise ApiError(413, f"the body must have at most {most} bytes")
        return bytes(body)

    def _check(self, asked: CommonRequest, num_prompts: int) -> None:
        """Raises ApiError for what the schema does not know."""
        settings = self._settings
        if asked.model != settings.model:
            reason = f"model must be {settings.model}, got {asked.model!r}"
            raise ApiError(404, reason, param="model", code="model_not_found")
        most = settings.max_choices
        if num_prompts * asked.n > most:
            prompts = "" if num_prompts == 1 else f" for each of {num_prompts} prompts"
            raise wrong("n", f"ask for at most {most} answers in all{prompts}", asked.n)
        if asked.most_tokens is not None and asked.most_tokens > settings.max_new_tokens:
            field = "max_tokens" if asked.max_tokens is not None else "max_completion_tokens"
            raise wrong(field, f"be at most {settings.max_new_tokens}", asked.most_tokens)

    def _choices(
        self, asked: CommonRequest, prompts: list[list[int]], field: str, came_at: float
    ) -> list[Choice]:
        """`asked.n` of each prompt, which came as `field`."""
        parts: Parts = asyncio.Queue()
        return [
            Choice(
                idx=i * asked.n + j,
                request=self._checked(_request(asked, prompt, j, came_at), field),
                parts=parts,
                decode=self._text.decode,
                stops=asked.stop,
            )
            for i, prompt in enumerate(prompts)
            for j in range(asked.n)
        ]

    async def _answer(
        self, request: Request, asked: CommonRequest, choices: list[Choice]
    ) -> Response:
        self._live.submit(choices)
        parts, ids = choices[0].parts, [choice.request.id for choice in choices]
        prompts = [choice.request.prompt for choice in choices[:: asked.n]]
        reply = Reply(asked, self._settings.model, self._text, prompts)
        if asked.stream:
            chunks = _stream(reply, parts, len(choices))
            return _EventStream(chunks, on_close=lambda: self._live.give_up(ids))
        try:
            return await _unless_gone(request, _whole(reply, parts, len(choices)))
        finally:
            self._live.give_up(ids)

    def _checked(self, request: arrivals.Request, field: str) -> arrivals.Request:
        try:
            arrivals.check(request, self._target, self._settings.num_draft_tokens)
        except ValueError as error:
            # "request ID: the prompt must have 1 to … tokens, got …"
            reason = f"{field}: {str(error).partition(': ')[2]}"
            is_long = len(request.prompt) >= self._room
            code = "context_length_exceeded" if is_long else None
            raise ApiError(400, reason, param=field, code=code) from error
        return request


def _request(
    asked: CommonRequest, prompt: list[int], choice_idx: int, came_at: float
) -> arrivals.Request:
    return arrivals.Request(
        id=uuid.uuid4().hex,
        prompt=prompt,
        temperature=asked.temperature,
        max_new_tokens=asked.most_tokens,
        ignores_eos=asked.ignore_eos,
        arrived_at=came_at,
        top_p=asked.top_p,
        # Without one, draws depend on the id, which is random.
        seed=None if asked.seed is None else f"{asked.seed}/{choice_idx}",
        stop_ids=frozenset(asked.stop_token_ids),
        num_logprobs=asked.num_logprobs,
    )


async def _all(parts: Parts, num_choices: int) -> AsyncIterator[Part]:
    """Parts until each choice has ended.

    Raises:
        ApiError: they were given up.
    """
    while num_choices:
        part = await parts.get()
        if isinstance(part, ApiError):
            raise part
        num_choices -= part.finish_reason is not None
        yield part


async def _whole(reply: Reply, parts: Parts, num_choices: int) -> Response:
    return JSONResponse(reply.whole([part async for part in _all(parts, num_choices)]))


async def _stream(reply: Reply, parts: Parts, num_choices: int) -> AsyncIterator[bytes]:
    for chunk in reply.begin():
        yield _event(chunk)
    try:
        async for part in _all(parts, num_choices):
            yield _event(reply.chunk(part))
    except ApiError as error:
        yield _event(error.body())
        return
    for chunk in reply.end():
        yield _event(chunk)
    yield b"data: [DONE]\n\n"


def _event(value: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n".encode()


async def _unless_gone(request: Request, answering: Any) -> Response:
    """What `answering` gives, unless the client goes first."""
    tasks = [asyncio.ensure_future(answering), asyncio.ensure_future(_gone(request))]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if tasks[0].done():
            response: Response = tasks[0].result()
            return response
        return Response(status_code=HTTPStatus.NO_CONTENT)  # which nobody reads
    finally:
        for task in tasks:
            task.cancel()


async def _gone(request: Request) -> None:
    """Returns when the client has closed the connection. Its body has been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


class _EventStream(StreamingResponse):
    """Server-sent events; `on_close` is called when they end, however that comes."""

    def __init__(self, chunks: AsyncIterator[bytes], *, on_close: Callable[[], None]) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(chunks, headers=headers, media_type="text/event-stream")
        self._on_close = on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Cancelled, or done, when the client has gone."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_close()


async def _answer_api_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return JSONResponse(error.body(), status_code=error.status, headers=error.headers)


async def _answer_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    found = ApiError(error.status_code, f"{error.detail}: {request.method} {request.url.path}")
    return JSONResponse(found.body(), status_code=error.status_code, headers=error.headers)


async def _answer_nobody(_request: Request, _error: Exception) -> Response:
    # The client went before its request was whole.
    return Response(status_code=HTTPStatus.NO_CONTENT)


async def _answer_own_error(_request: Request, _error: Exception) -> Response:
    # Starlette raises it again after this, and the log has it.
    return JSONResponse(ApiError(500, "internal error").body(), status_code=500)
