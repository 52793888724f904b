"""The server that leaves in good order: readiness first, then the sockets, then what is still being answered."""

import asyncio
import socket
from collections.abc import Sequence
from functools import partial
from types import FrameType
from typing import Any

import uvicorn

from app.http.connections import tend
from app.logs import frames, log
from app.sidecar import Sidecar

# uvicorn's main loop turns ten times a second.
TURNS_A_SECOND = 10

Listening = tuple[socket.socket, uvicorn.Config]


class DrainingServer(uvicorn.Server):
    """uvicorn, but a signal first turns readiness off while requests are still served, and only then closes sockets.

    uvicorn closes its sockets the moment it sees the signal, while the load balancer still sends for some seconds.
    """

    def __init__(self, sockets: Sequence[Listening], sidecar: Sidecar) -> None:
        """Make it; each socket is served as its own configuration says, by the application that stands there."""
        (self._first, config), *self._others = sockets
        super().__init__(config)
        self._sidecar = sidecar
        self._loop: asyncio.AbstractEventLoop | None = None

    async def run_until_drained(self) -> None:
        """Serve until a signal has come and everything is answered."""
        await self.serve(sockets=[self._first])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Open the sockets; from here on a signal finds the loop."""
        self._loop = loop = asyncio.get_running_loop()
        loop.set_exception_handler(_tell)
        await super().startup(sockets)
        for listening, config in self._others:
            config.load()
            state: dict[str, Any] = {"server_state": self.server_state, "app_state": self.lifespan.state}
            make = partial(config.http_protocol_class, config=config, **state)  # type: ignore[call-arg]
            self.servers.append(await loop.create_server(make, sock=listening, ssl=config.ssl, backlog=config.backlog))

    async def on_tick(self, counter: int) -> bool:
        """Look after connections once a second."""
        if counter % TURNS_A_SECOND == 0:
            tend(self.server_state.connections, asyncio.get_running_loop().time())
        return await super().on_tick(counter)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Take a signal; unlike uvicorn's own, it is not raised again at the end, so the exit code is ours."""
        del sig, frame
        if self._loop is None:
            self.should_exit = True
        else:
            self._loop.call_soon_threadsafe(self._leave)

    def _leave(self) -> None:
        """First signal: drain. Second: close at once. Third: do not wait for requests either."""
        first = self._sidecar.drain.begin()
        if first and self._sidecar.servable is not None:
            delay = self._sidecar.settings.http.drain_delay_s
            log.info("draining", seconds=delay)
            asyncio.get_running_loop().call_later(delay, self._close)
        else:
            self.force_exit = self.should_exit
            self._close()

    def _close(self) -> None:
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the gate in the moment in which the sockets close: until then every request is served."""
        self._sidecar.closed = True
        await super().shutdown(sockets)


def _tell(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log what nobody has caught, by kind and place; asyncio itself writes messages, and what was asked in them."""
    del loop
    error = context.get("exception")
    told = {"error": type(error).__name__, "frames": frames(error)} if isinstance(error, BaseException) else {}
    log.error("unhandled in the event loop", what=context["message"], **told)
