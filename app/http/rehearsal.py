"""The first requests are the server's own: through its socket, before the gate opens for anybody else."""

import hmac
import secrets
import socket
import ssl
import threading
from http.client import HTTPConnection, HTTPException

from starlette.types import ASGIApp, Receive, Scope, Send

from app.doors import reachable
from app.errors import WarmupError
from app.http.infer import REHEARSED
from app.servable import Servable

HEADER = "x-warmgate-rehearsal"


class Rehearsing:
    """Leads requests that carry a secret of this process to a servable that clients cannot reach yet."""

    def __init__(self, app: ASGIApp, tls: ssl.SSLContext | None = None) -> None:
        """Make it; `tls`: how the server's own socket is encrypted, seen from a client."""
        self._app, self._tls = app, tls
        self._secret = secrets.token_hex(32).encode()
        self._servable: Servable | None = None
        self._one = threading.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on; outside a rehearsal the secret opens nothing."""
        if self._servable is not None and scope["type"] == "http":
            given = dict(scope["headers"]).get(HEADER.encode(), b"")
            if hmac.compare_digest(given, self._secret):
                scope = {**scope, REHEARSED: self._servable}
        await self._app(scope, receive, send)

    def post(self, listening: socket.socket, path: str, timeout_s: float, servable: Servable, body: bytes) -> int:
        """Post a body to the server's own socket and return the status; blocks, so never on the event loop.

        Raises WarmupError where the server does not reach itself.
        """
        headers = {HEADER: self._secret.decode(), "Content-Type": "application/json", "Connection": "close"}
        with self._one, socket.socket(listening.family, socket.SOCK_STREAM) as client:
            self._servable = servable
            try:
                client.settimeout(timeout_s)
                client.connect(reachable(listening))
                connection = HTTPConnection("localhost", timeout=timeout_s)
                connection.sock = self._tls.wrap_socket(client) if self._tls else client
                connection.request("POST", path, body, headers)
                answer = connection.getresponse()
                answer.read()
            except (OSError, HTTPException) as error:
                raise WarmupError(
                    f"the server cannot reach its own socket: {type(error).__name__}: {error}; is a firewall or a "
                    f"limit of file descriptors in the way?"
                ) from error
            finally:
                self._servable = None
        return answer.status
