"""Put the parts together: the application, the lifespan that starts the graph, the server that drains before it ends.

The only module that knows all others. Nothing here imports torch: importing it is a stage.
"""

import asyncio
import contextlib
import faulthandler
import gc
import json
import os
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from fastapi import Depends, FastAPI
from starlette.types import ASGIApp

from app import __version__, metrics, status
from app.artifacts import Compiled, Uncompiled, golden
from app.console import Console, curl_line
from app.devices import AcquiredDevice
from app.errors import ResourceError, StallError, WarmgateError
from app.http import oip, probes
from app.http import status as status_routes
from app.http.edge import Edge, install_errors, key_check
from app.http.gate import Gate
from app.lanes import DeviceLane, run_on_thread
from app.logs import log
from app.readiness import Check, Drain, Readiness
from app.sentinel import LateCompiles
from app.serving.executor import Executor
from app.serving.requests import RequestMetrics
from app.settings import Http, Settings
from app.stages import STARTUP
from app.stages.prove_answers import ProvenModel
from app.startup import Lane, Startup
from app.weights import ResidentWeights

# While libraries are imported on another thread, the event loop waits this long for the interpreter lock at most.
STARTUP_SWITCH_INTERVAL_S = 0.001
# How long the leaving process waits for the builder to be stopped and its directory to be removed.
SETTLE_S = 5.0


class ProcessClock:
    """Seconds since this process was started by the kernel, so that imports before the first line count too."""

    def __init__(self) -> None:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        self._zero = time.monotonic() - (time.clock_gettime(time.CLOCK_BOOTTIME) - started)

    def __call__(self) -> float:
        """Return the age of the process in seconds."""
        return time.monotonic() - self._zero

    @property
    def started_at(self) -> datetime:
        """The moment the process started."""
        return datetime.now(UTC) - timedelta(seconds=self())


@dataclass
class Sidecar:
    """One served model and everything that tells its state."""

    settings: Settings
    clock: ProcessClock
    console: Console
    fatal: Callable[["Sidecar", WarmgateError], None]
    servable: Executor | None = None
    lag_s: float = 0.0
    closed: bool = False
    late: LateCompiles = field(default_factory=LateCompiles)

    def __post_init__(self) -> None:
        """Make the parts; nothing runs yet but the device thread, which waits."""
        self.device_lane = DeviceLane(self.clock)
        lanes = {Lane.DISK: run_on_thread, Lane.PROCESS: run_on_thread, Lane.DEVICE: self.device_lane.run}
        self.startup = Startup(STARTUP, lanes, self.clock, self.console.changed)
        self.drain = Drain(self.clock)
        self.readiness = Readiness(*self._checks())
        self.registry = metrics.registry()
        self.requests = RequestMetrics(self.registry, (bucket.name for bucket in self.settings.buckets))
        self.facts = status.Facts(
            self.settings,
            self.startup,
            self.readiness,
            self.drain,
            self.clock.started_at,
            self.clock,
            lambda: self.late.count,
            lambda: self.requests.first,
        )
        wall = self.clock.started_at.timestamp()
        self.registry.register(
            metrics.StateCollector(
                self.report, self.readiness, lambda: self.lag_s, lambda: wall + self.device_lane.heartbeat
            )
        )

    def report(self) -> dict[str, Any]:
        """Return the start report as it stands."""
        return status.document(self.facts)

    def _checks(self) -> tuple[Check, ...]:
        policy = self.settings.readiness.late_compile
        return (
            Check("startup", self.not_started),
            *(self._stage_check(one.name) for one in STARTUP.stages),
            Check("engine", self.engine_down),
            Check("device", lambda: None if AcquiredDevice in self.startup.values else "not acquired yet"),
            Check("late-compile", lambda: self.late.why_not(policy)),
            Check("shutdown", self.drain.why_not),
        )

    def _stage_check(self, name: str) -> Check:
        return Check(name, lambda: self.startup.view(name).reason, lambda: self.startup.view(name).ratio)

    def not_started(self) -> str | None:
        """Return why start-up has not finished, or None."""
        if self.startup.error:
            return f"failed: {str(self.startup.error).splitlines()[0]}"
        missing = self.startup.missing()
        if missing or self.servable is None:
            running = ", ".join(view.name for view in missing if view.state == "running") or "none"
            return f"{len(STARTUP.stages) - len(missing)} of {len(STARTUP.stages)} stages done, running: {running}"
        return None

    def engine_down(self) -> str | None:
        """Return why the engine cannot run requests, or None; while stages use the device they have their own checks."""
        limit = self.settings.startup.stall_timeout_s if self.startup.finished else float("inf")
        return self.device_lane.why_not(limit)

    def not_alive(self) -> str | None:
        """Return why a restart would help, or None."""
        if self.startup.error:
            return f"start-up {self.not_started()}"
        return self.engine_down()

    def not_ready(self) -> str | None:
        """Return the first reason against readiness, or None: the protocol's answer is that of /readyz."""
        return next((f"{name}: {reason}" for name, reason in self.readiness.verdict().reasons.items()), None)

    def gate(self) -> Gate:
        """Return the gate in front of inference."""
        closed = lambda: "the server is shutting down" if self.closed else None  # noqa: E731
        return Gate(lambda: self.servable, self.startup.missing, self.engine_down, closed)

    async def start(self) -> None:
        """Run the graph to the end, then open the gate; a failure goes to `fatal`."""
        sys.setswitchinterval(STARTUP_SWITCH_INTERVAL_S)
        # Imports make hundreds of thousands of objects that live for ever. A full collection among them stops every
        # thread for a third of a second and finds nothing.
        gc.disable()
        try:
            await self.startup.run(self.settings)
        except WarmgateError as error:
            if error.__cause__ and not isinstance(error.__cause__, WarmgateError):
                log.error("start-up failed", exc_info=error.__cause__)
            self.fatal(self, error)
            return
        finally:
            sys.setswitchinterval(0.005)
            gc.freeze()
            gc.enable()
        proven: ProvenModel = self.startup.values[ProvenModel]
        self.late.arm()
        self.servable = Executor(
            proven.forward, self.device_lane, self.settings.serving, self.requests, self.clock
        )
        self.console.ended(self.startup.finished_s)
        await run_on_thread(lambda: self._after_ready(proven), "after-ready")

    def _after_ready(self, proven: ProvenModel) -> None:
        """Keep what a later start can use; none of it is needed for serving."""
        code: Compiled | Uncompiled = self.startup.values[Compiled | Uncompiled]
        if isinstance(code, Compiled) and proven.to_keep:
            try:
                golden.keep(code.artifact, self.startup.values[ResidentWeights].digest, proven.to_keep)
            except OSError as error:
                log.warning("the proven answers could not be kept; the next start proves again", error=error.strerror)
        write_report(self)

    async def watch_loop(self) -> None:
        """Measure how late the event loop is, twice a second."""
        loop = asyncio.get_running_loop()
        while True:
            planned = loop.time() + 0.5
            await asyncio.sleep(0.5)
            self.lag_s = max(0.0, loop.time() - planned)

    def settle(self) -> None:
        """Stop the start-up and wait until no child process is left."""
        self.startup.stop()
        until = time.monotonic() + SETTLE_S
        while any(thread.name in {"build-artifact", "compute-reference"} for thread in threading.enumerate()) and time.monotonic() < until:
            time.sleep(0.02)


def create_app(sidecar: Sidecar) -> FastAPI:
    """Return the application; its lifespan starts the graph and yields at once."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        del app
        tasks = [asyncio.create_task(sidecar.start()), asyncio.create_task(sidecar.watch_loop())]
        yield
        for task in tasks:
            task.cancel()
        await asyncio.to_thread(sidecar.settle)

    app = FastAPI(
        title="Warmgate", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None, redirect_slashes=False
    )
    install_errors(app)
    app.include_router(probes.routes(_probes(sidecar)))
    app.include_router(status_routes.routes(sidecar.report, sidecar.registry))
    checked = Depends(key_check(sidecar.settings.http.api_key_file))
    app.include_router(oip.health_routes(sidecar.not_ready))
    app.include_router(oip.routes(_protocol(sidecar)), dependencies=[checked])
    return app


def _probes(sidecar: Sidecar) -> probes.Probes:
    return probes.Probes(
        sidecar.readiness,
        sidecar.not_alive,
        lambda: None if sidecar.startup.finished else sidecar.not_started(),
        lambda: status.phase(sidecar.facts),
        sidecar.clock,
        lambda: None,
    )


def _protocol(sidecar: Sidecar) -> oip.Protocol:
    requests, settings = sidecar.requests, sidecar.settings

    def answered(code: int, reason: str | None, total_s: float, codec_s: float) -> None:
        requests.inflight.dec()
        requests.requests.labels(str(code)).inc()
        requests.duration.labels("total").observe(total_s)
        requests.duration.labels("codec").observe(codec_s)
        if reason:
            requests.rejected.labels(reason).inc()

    return oip.Protocol(
        settings.model.name,
        settings.model.version,
        settings.input_specs,
        settings.output_specs,
        sidecar.gate(),
        sidecar.not_ready,
        settings.serving.max_body_bytes,
        oip.Observer(requests.inflight.inc, answered),
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
        self._sidecar.closed = True
        self.should_exit = True


def write_report(sidecar: Sidecar) -> None:
    """Write the start report where the configuration asks for it; a full disk is logged, not fatal."""
    file = sidecar.settings.report.file
    if file is None:
        return
    try:
        temporary = file.with_name(f".{file.name}.{os.getpid()}")
        temporary.write_text(json.dumps(sidecar.report(), indent=1, default=str))
        temporary.replace(file)
    except OSError as error:
        log.warning("the report could not be written", file=str(file), error=error.strerror)


def end_process(sidecar: Sidecar, error: WarmgateError) -> None:
    """Tell the fatal error where people look for it, then leave with its code (or stay, when that is configured).

    `os._exit`, because a thread that hangs in a driver or an import can be neither stopped nor waited for.
    """
    failed = next((view.name for view in sidecar.startup.snapshot() if view.state == "failed"), None)
    facts = status.failure(error, failed)
    sidecar.console.ended(None)
    log.error("fatal", **facts)
    if sidecar.settings.startup.on_failure == "stay":
        return
    with contextlib.suppress(OSError):
        if sidecar.settings.startup.termination_log.exists():
            sidecar.settings.startup.termination_log.write_text(json.dumps(facts)[:4096])
    write_report(sidecar)
    sidecar.settle()
    leave(error.exit_code)


def leave(code: int) -> None:
    """End the process now; threads that are still busy are not waited for."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def watch_for_stalls(sidecar: Sidecar) -> None:
    """Look for stages without a sign of life, on a thread of its own: the event loop may be what hangs."""
    limit = sidecar.settings.startup.stall_timeout_s

    def look() -> None:
        while not sidecar.startup.finished and not sidecar.startup.error:
            time.sleep(min(1.0, limit / 4))
            if error := sidecar.startup.find_stall(limit):
                _end_stalled(sidecar, error)
                return

    threading.Thread(target=look, name="stall-watch", daemon=True).start()


def _end_stalled(sidecar: Sidecar, error: StallError) -> None:
    faulthandler.dump_traceback(sys.stderr, all_threads=True)
    sidecar.startup.fail(error)
    end_process(sidecar, error)


def bind(http: Http) -> socket.socket:
    """Return the listening socket; raises ResourceError naming address and remedy."""
    try:
        if http.uds is not None:
            made = socket.socket(socket.AF_UNIX)
            http.uds.unlink(missing_ok=True)
            made.bind(str(http.uds))
            return made
        family, _, _, _, address = socket.getaddrinfo(http.host, http.port, type=socket.SOCK_STREAM)[0]
        made = socket.socket(family)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
    except OSError as error:
        where = http.uds or f"{http.host}:{http.port}"
        raise ResourceError(f"{where} cannot be listened on: {error.strerror}; is http.port in use already?") from error
    return made


def serve(settings: Settings, console: Console) -> int:
    """Run the sidecar until it is told to leave; returns the exit code after a drain (0)."""
    sidecar = Sidecar(settings, ProcessClock(), console, end_process)
    listening = bind(settings.http)
    app: ASGIApp = Edge(create_app(sidecar), lambda: sidecar.drain.begun)
    config = uvicorn.Config(
        app,
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=75,
        # At least a second: uvicorn takes 0 for "do not wait" and None for "wait for ever".
        timeout_graceful_shutdown=max(1, round(settings.http.drain_timeout_s)),
    )
    watch_for_stalls(sidecar)
    address = _address(listening)
    console.opened(address, curl_line(settings, address), sidecar.startup.snapshot)
    asyncio.run(DrainingServer(config, sidecar).serve(sockets=[listening]))
    if sidecar.startup.error and not sidecar.drain.begun:
        return sidecar.startup.error.exit_code
    log.info("drained")
    return 0


def _address(listening: socket.socket) -> str:
    name = listening.getsockname()
    if isinstance(name, str):
        return f"unix:{name}"
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(name[0], name[0])  # noqa: S104 - for the line people paste
    return f"http://{host}:{name[1]}"
