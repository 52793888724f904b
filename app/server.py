"""Put the parts together: the application, the lifespan that starts the graph, the server that drains before it ends.

Nothing here imports torch: importing it is a stage.
"""

import asyncio
import contextlib
import faulthandler
import resource
import socket
import urllib.parse
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from types import FrameType

import uvicorn
import uvloop
from fastapi import FastAPI

from app import endings, status
from app.console import Console, curl_line
from app.errors import ResourceError
from app.http import oip, openapi, probes
from app.http import status as status_routes
from app.http.edge import Edge, install_errors, key_check
from app.http.infer import InferenceRoute, Inferences, Observer, Spent
from app.http.rehearsal import Rehearsing
from app.logs import log
from app.process_clock import ProcessClock
from app.settings import Http, Settings
from app.sidecar import Sidecar
from app.startup import settle


def create_app(sidecar: Sidecar, inferences: Inferences) -> FastAPI:
    """Return the application; its lifespan starts the graph and yields at once."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        del app
        tasks = [asyncio.create_task(sidecar.start()), asyncio.create_task(sidecar.watch_loop())]
        yield
        for task in tasks:
            task.cancel()
        await asyncio.to_thread(sidecar.swap.stop)
        await asyncio.to_thread(settle, sidecar.startup)
        await asyncio.to_thread(sidecar.finish)

    app = FastAPI(lifespan=lifespan, openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    install_errors(app)
    app.include_router(probes.routes(_probes(sidecar)))
    app.include_router(status_routes.routes(sidecar.report, sidecar.registry))
    app.include_router(openapi.routes(guarded=sidecar.settings.http.api_key_file is not None))
    app.include_router(oip.health_routes(sidecar.not_alive, sidecar.not_ready))
    app.include_router(oip.routes(_model_state(sidecar, inferences)))
    app.include_router(oip.inference_routes(inferences))
    return app


def _probes(sidecar: Sidecar) -> probes.Probes:
    return probes.Probes(
        sidecar.readiness,
        sidecar.not_alive,
        lambda: None if sidecar.startup.finished else sidecar.not_started(),
        lambda: status.phase(sidecar.facts),
        sidecar.clock,
        sidecar.eta_s,
    )


def _model_state(sidecar: Sidecar, inferences: Inferences) -> oip.ModelState:
    return oip.ModelState(
        inferences,
        sidecar.statistics,
        sidecar.not_ready,
        lambda: sidecar.servable is None and sidecar.startup.error is None,
        sidecar.settings.serving.max_batch_delay_ms,
    )


def inferences_of(sidecar: Sidecar) -> Inferences:
    """Return what inference requests of this sidecar are answered from; raises SettingsError for a key that is none."""
    requests, settings = sidecar.requests, sidecar.settings

    def ended(status: int, reason: str | None, total_s: float, spent: Spent | None) -> None:
        requests.inflight.dec()
        requests.requests.labels(str(status)).inc()
        requests.duration.labels("total").observe(total_s)
        if spent:
            requests.duration.labels("codec").observe(spent.codec_s)
        if reason:
            requests.rejected.labels(reason).inc()
        sidecar.statistics.note(status, total_s, spent)

    return Inferences(
        settings.model.name,
        settings.model.version,
        settings.model_paths,
        sidecar.gate(),
        key_check(settings.http.api_key_file),
        settings.serving.max_body_bytes,
        Observer(requests.inflight.inc, ended),
        sidecar.clock,
    )


class DrainingServer(uvicorn.Server):
    """uvicorn, but a signal first turns readiness off while requests are still served, and only then closes sockets.

    uvicorn closes its sockets the moment it sees the signal, while the load balancer still sends for some seconds.
    """

    def __init__(self, config: uvicorn.Config, sidecar: Sidecar) -> None:
        super().__init__(config)
        self._sidecar = sidecar
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Open the sockets; from here on a signal finds the loop."""
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)

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


def bind(http: Http) -> socket.socket:
    """Return the listening socket; raises ResourceError naming address and remedy."""
    try:
        if http.uds is not None:
            return _bind_file(http.uds)
        family, _, _, _, address = socket.getaddrinfo(http.host, http.port, type=socket.SOCK_STREAM)[0]
        # With the protocol named: asyncio turns Nagle's algorithm off only for sockets that say they are TCP, and with
        # it on every answer on a kept connection waits 40 ms for the client's delayed acknowledgement.
        made = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
    except OSError as error:
        where = http.uds or f"{http.host}:{http.port}"
        raise ResourceError(f"{where} cannot be listened on: {error.strerror}; is http.port in use already?") from error
    return made


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


def serve(settings: Settings, console: Console) -> int:
    """Run the sidecar until it is told to leave; returns the exit code after a drain (0)."""
    # What ends a process without a word (a file truncated under its mapping, a fault in native code) is told.
    faulthandler.enable()
    _raise_file_limit()
    sidecar = Sidecar(settings, ProcessClock(), console, endings.end_process, endings.after_ready)
    listening = bind(settings.http)
    inferences = inferences_of(sidecar)
    answering = InferenceRoute(create_app(sidecar, inferences), inferences)
    rehearsing = Rehearsing(Edge(answering, lambda: sidecar.drain.begun))
    path = f"/v2/models/{urllib.parse.quote(settings.model.name)}/infer"
    sidecar.send = partial(rehearsing.post, listening, path, settings.startup.stall_timeout_s)
    config = uvicorn.Config(
        rehearsing,
        lifespan="on",
        http="httptools",
        # Behind a proxy nothing here depends on who the client is, so nobody's header needs to be believed.
        proxy_headers=False,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=75,
        # At least a second: uvicorn takes 0 for "do not wait" and None for "wait for ever".
        timeout_graceful_shutdown=max(1, round(settings.http.drain_timeout_s)),
    )
    endings.watch_for_stalls(sidecar)
    address = _address(listening)
    console.opened(address, curl_line(settings, address), sidecar.startup.snapshot)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(DrainingServer(config, sidecar).serve(sockets=[listening]))
    if sidecar.startup.error and not sidecar.drain.begun:
        return sidecar.startup.error.exit_code
    log.info("drained")
    return 0


def _raise_file_limit() -> None:
    """Shards take two descriptors each, connections one; the soft limit is for programs that use select."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, hard) if hard != resource.RLIM_INFINITY else soft, hard))


def _address(listening: socket.socket) -> str:
    name = listening.getsockname()
    if isinstance(name, str):
        return f"unix:{name}"
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(name[0], name[0])  # noqa: S104 - for the line people paste
    return f"http://[{host}]:{name[1]}" if ":" in host else f"http://{host}:{name[1]}"
