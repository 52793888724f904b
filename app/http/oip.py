"""The Open Inference Protocol v2 over REST: its routes; tensors as JSON are in `oip_json`."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response
from starlette.requests import ClientDisconnect

from app import __version__
from app.http.answers import as_error, as_json
from app.http.gate import Gate
from app.http.oip_json import Ask, decode, encode
from app.paths import ModelPath
from app.servable import Rejected, Servable, TensorSpec

# Decoding more than this takes longer than a probe may wait for the event loop.
INLINE_BYTES = 256 * 1024

# A servable in the request's scope, put there by this program and by nobody outside: the gate is not open yet.
REHEARSED = "warmgate.rehearsed"

T = TypeVar("T")
Reason = Callable[[], str | None]


@dataclass(frozen=True, slots=True)
class Protocol:
    """What the protocol's routes answer from; `observe` is told status, reason and seconds of every inference."""

    name: str
    version: str
    paths: tuple[ModelPath, ...]
    gate: Gate
    not_ready: Reason
    authorize: Callable[[Request], None]
    max_body_bytes: int
    observe: "Observer"
    clock: Callable[[], float]


@dataclass(frozen=True, slots=True)
class Observer:
    """Where inferences are counted."""

    received: Callable[[], None]
    answered: Callable[[int, str | None, float, float], None]


def routes(protocol: Protocol) -> APIRouter:
    """Return the protocol's routes."""
    router = APIRouter(prefix="/v2", tags=["open inference protocol"])
    guarded = [Depends(protocol.authorize)]
    reads: dict[str, Any] = {"methods": ["GET", "HEAD"], "dependencies": guarded}

    @router.api_route("", **reads)
    async def server() -> Response:
        """Server metadata."""
        return as_json({"name": "warmgate", "version": __version__, "extensions": []})

    @router.api_route("/models", **reads)
    async def models() -> Response:
        """The one model of this server."""
        return as_json({"models": [protocol.name]})

    @router.api_route("/models/{model}", **reads)
    @router.api_route("/models/{model}/versions/{version}", **reads)
    async def metadata(model: str, version: str | None = None) -> Response:
        """Names, datatypes and shapes of inputs and outputs."""
        _known(protocol, model, version)
        return as_json(_metadata(protocol))

    @router.api_route("/models/{model}/ready", **reads)
    @router.api_route("/models/{model}/versions/{version}/ready", **reads)
    async def model_ready(model: str, version: str | None = None) -> Response:
        """The model may be asked."""
        _known(protocol, model, version)
        return _ready(protocol.not_ready, {"name": protocol.name, "ready": True})

    @router.post("/models/{model}/infer")
    @router.post("/models/{model}/versions/{version}/infer")
    async def infer(request: Request, model: str, version: str | None = None) -> Response:
        """Run one inference."""
        return await _infer(protocol, request, model, version)

    return router


def health_routes(not_alive: Reason, not_ready: Reason) -> APIRouter:
    """Return the protocol's probes, which need no key."""
    router = APIRouter(prefix="/v2/health", tags=["open inference protocol"])
    reads: dict[str, Any] = {"methods": ["GET", "HEAD"]}

    @router.api_route("/live", **reads)
    async def live() -> Response:
        """The process can still get there: `/healthz` in the protocol's words."""
        reason = not_alive()
        return as_error(Rejected(503, reason, "not_ready")) if reason else as_json({"live": True})

    @router.api_route("/ready", **reads)
    async def ready() -> Response:
        """The model may be asked; `live` stands beside it because one client reads that key."""
        return _ready(not_ready, {"ready": True, "live": True})

    return router


def _ready(not_ready: Reason, body: dict[str, Any]) -> Response:
    reason = not_ready()
    return as_error(Rejected(503, reason, "not_ready")) if reason else as_json(body)


def _known(protocol: Protocol, model: str, version: str | None) -> None:
    if model != protocol.name:
        raise Rejected(404, f"unknown model {model}; this server has {protocol.name}")
    if version not in (None, protocol.version):
        raise Rejected(404, f"unknown version {version} of {model}; this server has {protocol.version}")


def _metadata(protocol: Protocol) -> dict[str, Any]:
    def describe(specs: tuple[TensorSpec, ...]) -> list[dict[str, Any]]:
        return [
            {"name": s.name, "datatype": s.datatype, "shape": [-1 if isinstance(n, str) else n for n in s.shape]}
            for s in specs
        ]

    first, *_ = protocol.paths
    paths = {one.name: {"inputs": describe(one.inputs), "outputs": describe(one.outputs)} for one in protocol.paths}
    return {
        "name": protocol.name,
        "versions": [protocol.version],
        "platform": "pytorch_safetensors",
        "inputs": describe(first.inputs),
        "outputs": describe(first.outputs),
        **({"paths": paths} if len(paths) > 1 else {}),
    }


async def _infer(protocol: Protocol, request: Request, model: str, version: str | None) -> Response:
    began, codec_s, reason = protocol.clock(), 0.0, None
    rehearsed: Servable | None = request.scope.get(REHEARSED)
    if rehearsed is None:
        protocol.observe.received()
    status = 500
    try:
        if rehearsed is None:
            protocol.authorize(request)
        _known(protocol, model, version)
        servable = rehearsed or protocol.gate.enter()
        body = await _body(request, protocol.max_body_bytes)
        started = protocol.clock()
        ask = await _off_loop(len(body), lambda: decode(body, protocol.paths))
        codec_s = protocol.clock() - started
        answer = await servable.answer(ask.path, ask.arrays)
        started = protocol.clock()
        size = sum(array.nbytes for array in answer.outputs.values())
        response = await _off_loop(size, lambda: _encoded(protocol, ask, answer.outputs))
        codec_s += protocol.clock() - started
        status = response.status_code
    except Rejected as rejected:
        status, reason = rejected.status, rejected.reason
        return as_error(rejected)
    else:
        return response
    finally:
        if rehearsed is None:
            protocol.observe.answered(status, reason, protocol.clock() - began, codec_s)


def _encoded(protocol: Protocol, ask: Ask, outputs: Any) -> Response:
    return as_json(encode(protocol.name, protocol.version, ask, outputs))


async def _off_loop(size: int, work: Callable[[], T]) -> T:
    return await asyncio.to_thread(work) if size > INLINE_BYTES else work()


async def _body(request: Request, limit: int) -> bytes:
    """Read the raw body within the limit, from its declared length and while it streams."""
    declared = request.headers.get("content-length", "")
    too_large = Rejected(413, f"the body is larger than serving.max_body_bytes = {limit}", "too_large")
    if declared.isdigit() and int(declared) > limit:
        raise too_large
    parts, size = [], 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > limit:
                raise too_large
            parts.append(part)
    except ClientDisconnect as error:
        raise Rejected(400, "the client left before its request was complete", "disconnected") from error
    return b"".join(parts)
