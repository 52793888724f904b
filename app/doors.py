"""The sockets that the server listens on: TCP, a socket file, and a port for probes and metrics alone."""

import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from app.errors import ResourceError, SettingsError
from app.settings import Http

# What a server that listens everywhere is reached by.
_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - read, not listened on


@dataclass(frozen=True, slots=True)
class Door:
    """One listening socket; `encrypted`: by TLS; `admin`: only probes, metrics and status answer."""

    socket: socket.socket
    encrypted: bool = False
    admin: bool = False

    @property
    def address(self) -> str:
        """Where clients of this machine find it."""
        found = reachable(self.socket)
        if isinstance(found, str):
            return f"unix:{found}"
        host, port, *_ = found
        scheme = "https" if self.encrypted else "http"
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def open_doors(http: Http) -> list[Door]:
    """Return what the configuration asks for, the one that clients of other machines use first.

    Raises ResourceError naming address and remedy. TLS is for the network: a socket file has the file system's rights,
    and the port for probes is for those who cannot have certificates.
    """
    doors = []
    if http.port is not None:
        doors.append(Door(_bind_port(http.host, http.port, "http.port"), encrypted=http.ssl_certfile is not None))
    if http.uds is not None:
        file = http.uds
        doors.append(Door(_named(str(file), "http.uds", lambda: _bind_file(file))))
    if http.admin_port is not None:
        doors.append(Door(_bind_port(http.host, http.admin_port, "http.admin_port"), admin=True))
    return doors


def check_certificate(http: Http) -> None:
    """Raise SettingsError where certificate and private key cannot be used together."""
    if http.ssl_certfile is None or http.ssl_keyfile is None:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(http.ssl_certfile, http.ssl_keyfile)
    except OSError as error:  # ssl.SSLError among them
        told = f"http.ssl_certfile = {http.ssl_certfile} and http.ssl_keyfile = {http.ssl_keyfile} cannot be used"
        raise SettingsError(f"{told}: {error.strerror or error}") from error


def to_itself(http: Http) -> ssl.SSLContext | None:
    """Return how the server itself is a client of its first door: it trusts its own certificate and no other."""
    if http.ssl_certfile is None or http.port is None:
        return None
    made = ssl.create_default_context(cafile=str(http.ssl_certfile))
    made.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # the file need not hold the root
    made.check_hostname = False  # it is asked for by an address, whatever names it has
    return made


def reachable(listening: socket.socket) -> tuple[str, int] | str:
    """Return the address by which this machine reaches a listening socket."""
    name = listening.getsockname()
    return name if isinstance(name, str) else (_LOOPBACK.get(name[0], name[0]), *name[1:])


def _named(where: str, field: str, bind: Callable[[], socket.socket]) -> socket.socket:
    try:
        return bind()
    except OSError as error:
        raise ResourceError(f"{where} cannot be listened on: {error.strerror}; is {field} in use already?") from error


def _bind_port(host: str, port: int, field: str) -> socket.socket:
    def bind() -> socket.socket:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        # With the protocol named: asyncio turns Nagle's algorithm off only for sockets that say they are TCP, and with
        # it on every answer on a kept connection waits 40 ms for the client's delayed acknowledgement.
        made = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        return made

    return _named(f"{host}:{port}", field, bind)


def _bind_file(path: Path) -> socket.socket:
    """Bind a socket file, in place of one that nobody listens on any more; every user of the volume may connect."""
    made = socket.socket(socket.AF_UNIX)
    if path.is_socket() and made.connect_ex(str(path)) != 0:
        path.unlink()
        made.close()
        made = socket.socket(socket.AF_UNIX)
    made.bind(str(path))
    path.chmod(0o666)
    return made
