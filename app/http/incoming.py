"""An inference request as it comes in: its id, its body under bounds, how long its client waits and whether it does."""

import asyncio
import itertools
import re
import secrets
from typing import Any

from starlette.types import Receive, Scope

from app.http.wire import JSON_BYTES, Head
from app.servable import Rejected

# What is echoed and logged as a request's id: visible characters, so that a line of the log stays one.
REQUEST_ID = "X-Request-Id"
_VISIBLE = re.compile(r"[!-~]{1,128}")
_own_ids = map(f"{secrets.token_hex(4)}-{{:x}}".format, itertools.count(1))

# Milliseconds until a request must have started; the second is what the proxy of many service meshes sends by itself.
TIMEOUT_HEADERS = ("X-Request-Timeout-Ms", "X-Envoy-Expected-Rq-Timeout-Ms")
_MOST_DIGITS = 15


class Incoming:
    """One request; its headers stand in a table, since a small forward takes no longer than looking through a list."""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self.scope, self._receive = scope, receive
        self._headers: dict[bytes, bytes] = dict(scope["headers"])
        given = self.header(REQUEST_ID)
        self.id = given if _VISIBLE.fullmatch(given) else next(_own_ids)
        self.client = Client(receive)

    def header(self, name: str) -> str:
        """Return a header, empty where there is none."""
        return self._headers.get(name.lower().encode(), b"").decode("latin-1")

    @property
    def head(self) -> Head:
        """How the body is encoded."""
        told = self._headers.get(JSON_BYTES.lower().encode())
        return Head(self.header("Content-Encoding"), None if told is None else told.decode("latin-1"))

    async def body(self, limit: int, timeout_s: float) -> bytes:
        """Read the raw body; raises Rejected as `read_body` does."""
        return await read_body(self._receive, self.header("Content-Length"), limit, timeout_s)

    def timeout_s(self, asked: float | None) -> float | None:
        """Return the shortest time that anybody on the way gives the request: its body, its headers, a proxy."""
        told = [asked, *(_milliseconds(name, self.header(name)) for name in TIMEOUT_HEADERS)]
        return min((seconds for seconds in told if seconds), default=None)


class Client:
    """Whether the client is still there; asked of requests that wait alone, since a watch costs a task."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._watch: asyncio.Future[Any] | None = None

    def gone(self) -> bool:
        """The connection is closed; the first call starts to watch it. Called on the event loop."""
        if self._watch is None:
            self._watch = asyncio.ensure_future(self._receive())
        return self._watch.done()

    def forget(self) -> None:
        """End the watch."""
        if self._watch is not None:
            self._watch.cancel()


async def read_body(receive: Receive, declared: str, limit: int, timeout_s: float) -> bytes:
    """Read a raw body; `declared`: what Content-Length says.

    Raises Rejected: 413 over the limit, from its declared length and while it streams; 400 when it is late.
    """
    if declared.isdecimal() and int(declared) > limit:
        raise _too_large(limit)
    try:
        async with asyncio.timeout(timeout_s):
            return await _read(receive, limit)
    except TimeoutError as error:
        raise Rejected(400, f"the body has not arrived within http.receive_timeout_s = {timeout_s:g}") from error


async def _read(receive: Receive, limit: int) -> bytes:
    parts, size, more = [], 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Rejected(400, "the client left before its request was complete", "disconnected")
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > limit:
            raise _too_large(limit)
        more = message.get("more_body", False)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _too_large(limit: int) -> Rejected:
    return Rejected(413, f"the body is larger than serving.max_body_bytes = {limit}", "too_large")


def _milliseconds(name: str, value: str) -> float | None:
    if not value:
        return None
    if not (value.isascii() and value.isdecimal()):
        raise Rejected(400, f"the header {name} must be whole milliseconds, got {value[:100]!r}")
    return int(value[:_MOST_DIGITS]) / 1e3
