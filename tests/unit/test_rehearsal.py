"""Before ready the server asks itself through its own socket; nobody else gets in by the same door."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from app.errors import WarmupError
from app.http.infer import REHEARSED
from app.http.rehearsal import HEADER, Rehearsing
from app.servable import Answer


class Model:
    """A servable that is only ever looked at."""

    async def answer(self, arrays: Any) -> Answer:
        raise NotImplementedError


@contextlib.contextmanager
def served(listening: socket.socket, scopes: list[Any]) -> Iterator[Rehearsing]:
    """Serve an application that answers 200 to what reaches a servable and 503 to everything else."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        scopes.append(scope)
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 200 if REHEARSED in scope else 503, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    rehearsing = Rehearsing(app)
    server = uvicorn.Server(uvicorn.Config(rehearsing, lifespan="off", log_config=None))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listening])))
    thread.start()
    while not server.started:
        pass
    try:
        yield rehearsing
    finally:
        server.should_exit = True
        thread.join()


def listen(kind: str, directory: Path) -> socket.socket:
    if kind == "uds":
        made = socket.socket(socket.AF_UNIX)
        made.bind(str(directory / "socket"))
        return made
    made = socket.socket(socket.AF_INET6 if ":" in kind else socket.AF_INET)
    made.bind((kind, 0))
    return made


@pytest.mark.parametrize("kind", ["127.0.0.1", "0.0.0.0", "uds"])  # noqa: S104
def test_a_request_goes_through_the_socket_to_the_servable(tmp_path: Path, kind: str) -> None:
    scopes: list[Any] = []
    model = Model()
    listening = listen(kind, tmp_path)
    with served(listening, scopes) as rehearsing:
        assert rehearsing.post(listening, "/v2/models/a%20b/infer", 10, model, b"{}") == 200
        (scope,) = scopes
        assert scope[REHEARSED] is model
        assert (scope["method"], scope["path"]) == ("POST", "/v2/models/a b/infer")
        assert scope["server"][0] in {kind, "127.0.0.1", str(tmp_path / "socket")}, "it came over a connection"

        # The same request again, once nothing is rehearsed any more: the secret opens nothing.
        again = {name: value for name, value in scope.items() if name != REHEARSED}
        assert HEADER.encode() in dict(again["headers"])
        asyncio.run(rehearsing(again, received, sent))
    assert len(scopes) == 2
    assert REHEARSED not in scopes[1]


async def received() -> Any:
    return {"type": "http.request", "body": b"", "more_body": False}


async def sent(message: Any) -> None:
    del message


def test_another_secret_opens_nothing_while_a_rehearsal_runs() -> None:
    scopes: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        scopes.append(scope)

    rehearsing = Rehearsing(app)
    rehearsing._servable = Model()
    for value in (b"", b"0" * 64, "é".encode()):
        asyncio.run(rehearsing({"type": "http", "headers": [(HEADER.encode(), value)]}, None, sent))
    asyncio.run(rehearsing({"type": "http", "headers": []}, None, sent))
    assert len(scopes) == 4
    assert not any(REHEARSED in scope for scope in scopes)


def test_a_server_that_does_not_reach_itself_is_told(tmp_path: Path) -> None:
    closed = listen("127.0.0.1", tmp_path)
    with pytest.raises(WarmupError, match="cannot reach its own socket: ConnectionRefusedError"):
        Rehearsing(served).post(closed, "/", 1, Model(), b"{}")
    closed.close()
