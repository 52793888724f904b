"""What the serving table compares with: a bare Starlette route that parses JSON and answers the same, and no model."""

import contextlib
import importlib.util
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import orjson
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from benchmarks.process import ROOT, environment

PATH = "/echo"


async def echo(request: Request) -> Response:
    return Response(orjson.dumps(orjson.loads(await request.body())), media_type="application/json")


app = Starlette(routes=[Route(PATH, echo, methods=["POST"])])


@contextlib.contextmanager
def echoing() -> Iterator[int]:
    """Serve it while the block runs, by uvicorn with the fastest loop and parser there are; yields the port."""
    if missing := [name for name in ("uvloop", "httptools") if importlib.util.find_spec(name) is None]:
        names = " ".join(missing)
        raise SystemExit(f"not installed: {names}; pip install --constraint constraints.txt {names} does it")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = ["--loop", "uvloop", "--http", "httptools", "--no-access-log", "--log-level", "error"]
    process = subprocess.Popen(
        [sys.executable, "-m", "uvicorn", "benchmarks.echo:app", "--port", str(port), *options],
        cwd=ROOT,
        env=environment(),
    )
    try:
        _wait(port, process)
        yield port
    finally:
        process.terminate()
        process.wait()


def _wait(port: int, process: subprocess.Popen[bytes]) -> None:
    while True:
        if process.poll() is not None:
            raise SystemExit(f"the bare server ended with {process.returncode}")
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.05)
