"""The inference route: raw body in, answer out; before the framework, whose routing costs more than a small forward."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from app.http.answers import NO_STORE, as_error
from app.http.compression import LEAST_BYTES, coding_asked, deflate
from app.http.gate import Gate
from app.http.incoming import REQUEST_ID, Incoming
from app.http.wire import JSON_BYTES, Encoded, decode, encode
from app.logs import frames, log
from app.paths import ModelPath
from app.servable import Answer, Question, Rejected, Servable

# Decoding more than this takes longer than a probe may wait for the event loop.
INLINE_BYTES = 256 * 1024

# A servable in the request's scope, put there by this program and by nobody outside: the gate is not open yet.
REHEARSED = "warmgate.rehearsed"

T = TypeVar("T")
# Name and version of a model, as a path gives them.
Asked = tuple[str, str | None]


@dataclass(frozen=True, slots=True)
class Spent:
    """Where the time of an answered request went, in seconds; `items`: how many of the model's items it held."""

    decode_s: float
    encode_s: float
    queue_s: float
    compute_s: float
    items: int

    @property
    def codec_s(self) -> float:
        """From bytes to arrays and back."""
        return self.decode_s + self.encode_s


# Called when a request has ended: its status, why it was not run in one word, seconds in all, and where they went.
Ended = Callable[[int, str | None, float, Spent | None], None]


@dataclass(frozen=True, slots=True)
class Observer:
    """Where inferences are counted: each one received, and how it ended."""

    received: Callable[[], None]
    ended: Ended


@dataclass(frozen=True, slots=True)
class Inferences:
    """What inference requests are answered from."""

    name: str
    version: str
    paths: tuple[ModelPath, ...]
    raw: Callable[[], ModelPath | None]
    gate: Gate
    authorize: Callable[[Headers], None]
    max_body_bytes: int
    receive_timeout_s: float
    observer: Observer
    clock: Callable[[], float]

    def known(self, model: str, version: str | None) -> None:
        """Raise Rejected (404) for a model or a version that this server does not have."""
        if model != self.name:
            raise Rejected(404, f"unknown model {model}; this server has {self.name}")
        if version not in (None, self.version):
            raise Rejected(404, f"unknown version {version} of {model}; this server has {self.version}")


class InferenceRoute:
    """Answers inference requests for the one model; everything else goes on to the application."""

    def __init__(self, app: ASGIApp, inferences: Inferences) -> None:
        self._app, self._inferences = app, inferences
        model = f"/v2/models/{inferences.name}"
        self._paths = frozenset({f"{model}/infer", f"{model}/versions/{inferences.version}/infer"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or pass the request on."""
        if scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in self._paths:
            response = await infer(self._inferences, scope, receive)
            await response(scope, receive, send)
        else:
            await self._app(scope, receive, send)


async def infer(inferences: Inferences, scope: Scope, receive: Receive, asked: Asked | None = None) -> Response:
    """Run one inference; whatever goes wrong is an answer, and counted. `asked`: a model that may be another one."""
    if REHEARSED in scope:
        return (await _answer(inferences, scope, receive, asked)).response
    began, observer = inferences.clock(), inferences.observer
    observer.received()
    found = await _answer(inferences, scope, receive, asked)
    observer.ended(found.response.status_code, found.reason, inferences.clock() - began, found.spent)
    return found.response


@dataclass(frozen=True, slots=True)
class _Answered:
    response: Response
    reason: str | None = None
    spent: Spent | None = None


async def _answer(inferences: Inferences, scope: Scope, receive: Receive, asked: Asked | None) -> _Answered:
    incoming = Incoming(scope, receive)
    found = await _try(inferences, incoming, asked)
    found.response.headers[REQUEST_ID] = incoming.id
    return found


async def _try(inferences: Inferences, incoming: Incoming, asked: Asked | None) -> _Answered:
    try:
        return await _run(inferences, incoming, asked)
    except Rejected as rejected:
        return _Answered(as_error(rejected), rejected.reason)
    except asyncio.CancelledError:  # by a server that leaves and waits no longer; the answer still goes out
        told = "the server is shutting down and has not come to this request in time"
        return _Answered(as_error(Rejected(503, told, "draining")), "draining")
    except Exception as error:  # noqa: BLE001 - it is answered, and told by kind and place
        # Kind and place only, here and in the log: the message of an exception may hold what was asked.
        log.error("inference failed", request_id=incoming.id, error=type(error).__name__, frames=frames(error))
        told = f"the inference failed: {type(error).__name__}; the log has the details"
        return _Answered(as_error(Rejected(500, told)))


async def _run(inferences: Inferences, incoming: Incoming, asked: Asked | None) -> _Answered:
    rehearsed: Servable | None = incoming.scope.get(REHEARSED)
    if rehearsed is None:
        inferences.authorize(Headers(scope=incoming.scope))
    if asked is not None:
        inferences.known(*asked)
    servable = rehearsed or inferences.gate.enter()
    body = await incoming.body(inferences.max_body_bytes, inferences.receive_timeout_s)
    head = incoming.head
    started = inferences.clock()
    # How much a compressed body holds is not known before it is inflated.
    size = inferences.max_body_bytes if head.coding else len(body)
    ask = await _off_loop(
        size, lambda: decode(head, body, inferences.paths, inferences.max_body_bytes, inferences.raw())
    )
    decode_s = inferences.clock() - started
    try:
        timeout_s = incoming.timeout_s(ask.timeout_s)
        answer = await servable.answer(Question(ask.path, ask.arrays, timeout_s, incoming.client.gone))
    finally:
        incoming.client.forget()
    started = inferences.clock()
    size = sum(array.nbytes for array in answer.outputs.values())
    found = await _off_loop(size, lambda: encode(inferences.name, inferences.version, ask, answer.outputs))
    coding = coding_asked(incoming.header("Accept-Encoding"))
    response = await _response(found, answer, coding)
    encode_s = inferences.clock() - started
    return _Answered(
        response, None, Spent(decode_s + answer.codec_s, encode_s, answer.queue_s, answer.compute_s, answer.items)
    )


async def _response(found: Encoded, answer: Answer, coding: str | None) -> Response:
    # A client that finds an answer slow learns whether it waited or its batch took long (W3C Server Timing, ms).
    timing = f"queue;dur={answer.queue_s * 1e3:.2f}, compute;dur={answer.compute_s * 1e3:.2f}"
    headers, kind, body = {**NO_STORE, "Server-Timing": timing}, "application/json", found.body
    if found.json_bytes is not None:
        # The header counts the bytes before compression; its presence alone tells clients that raw tensors follow.
        headers[JSON_BYTES], kind = str(found.json_bytes), "application/octet-stream"
    if coding and len(body) >= LEAST_BYTES:
        headers["Content-Encoding"] = coding
        body = await asyncio.to_thread(deflate, body, coding)
    return Response(body, headers=headers, media_type=kind)


async def _off_loop(size: int, work: Callable[[], T]) -> T:
    return await asyncio.to_thread(work) if size > INLINE_BYTES else work()
