"""Connections of uvicorn's that do not wait for ever: for a request to arrive, for a refused body to end, to close."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

# The application answers a body that is late; what this closes is late by more than that.
GRACE_S = 2.0


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a head, and then a body, may take to arrive; how much of a body is read that nobody wants any more."""

    receive_s: float
    discard_bytes: int


class Connection(HttpToolsProtocol):
    """One connection; `tend` is called once a second, which costs a request nothing, unlike a timer of its own."""

    def __init__(self, *args: Any, patience: Patience, **named: Any) -> None:
        super().__init__(*args, **named)
        self._patience = patience
        self._since: float | None = self.loop.time()
        self._closing_since: float | None = None
        self._discarded = 0

    def on_message_begin(self) -> None:
        """A request has begun to arrive."""
        self._since, self._discarded = self.loop.time(), 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Its head is there, its body may follow."""
        self._since = self.loop.time()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Some of its body is there; what follows an answer is thrown away, for the client to read the answer.

        A connection that is closed while the client still sends takes the answer with it.
        """
        if self.cycle.response_complete:
            self._discarded += len(body)
            if self._discarded > self._patience.discard_bytes:
                self.transport.close()
        super().on_body(body)

    def on_message_complete(self) -> None:
        """All of it is there."""
        self._since = None
        super().on_message_complete()

    def tend(self, now: float) -> None:
        """Close what is late, and let go of what does not close because nobody reads its answer."""
        late = now - self._patience.receive_s - GRACE_S
        if self.transport.is_closing():
            self._closing_since = now if self._closing_since is None else self._closing_since
            if self._closing_since < late:
                self.transport.abort()
        elif self._since is not None and self._since < late:
            self.transport.close()


def tend(connections: Iterable[Any], now: float) -> None:
    """Look after all connections that there are."""
    for connection in [one for one in connections if isinstance(one, Connection)]:
        connection.tend(now)
