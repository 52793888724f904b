"""One served model: its start-up, its readiness, its gate, and the answers that probes give from them."""

import asyncio
import contextlib
import gc
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry

from app import metrics, status
from app.artifacts import Compiled, Uncompiled
from app.codecs import NO_CODEC, LoadedCodec, chosen
from app.console import Console
from app.devices import AcquiredDevice
from app.errors import WarmgateError, WarmupError
from app.graph import Lane
from app.http.gate import Gate
from app.http.statistics import Statistics
from app.http.wire import request_body
from app.lanes import Crew, DeviceLane, run_on_thread
from app.logs import log
from app.paths import ModelPath
from app.process_clock import ProcessClock
from app.progress import Stopped
from app.readiness import Check, Drain, Readiness
from app.sentinel import LateCompiles
from app.servable import Array
from app.serving.coding import Coding
from app.serving.executor import Executor
from app.serving.requests import RequestMetrics
from app.settings import Settings
from app.stages import STARTUP
from app.stages.bind_engine import BoundEngine
from app.stages.prove_answers import ProvenModel
from app.stages.rehearse_requests import Rehearsal
from app.startup import Startup
from app.swap import Swap, Swapped
from app.weights import LoadedModel, ResidentWeights
from app.weights.watch import FileWatch

# While libraries are imported on another thread, the event loop waits this long for the interpreter lock at most.
STARTUP_SWITCH_INTERVAL_S = 0.001
AFTER_READY_S = 1.0


@dataclass
class Sidecar:
    """One served model and everything that tells its state."""

    settings: Settings
    clock: ProcessClock
    console: Console
    fatal: Callable[["Sidecar", WarmgateError], None]
    after_ready: Callable[["Sidecar", ProvenModel], None]
    servable: Executor | Coding | None = None
    send: Callable[[Executor | Coding, bytes], int] | None = None
    start_report: dict[str, Any] | None = None
    lag_s: float = 0.0
    closed: bool = False
    late: LateCompiles = field(default_factory=LateCompiles)
    files: FileWatch = field(default_factory=lambda: FileWatch(()))

    def __post_init__(self) -> None:
        """Make the parts; nothing runs yet but the device thread, which waits."""
        self._finished = threading.Event()
        self._codec_crew = Crew(self.settings.serving.codec_threads if self.settings.model.codec else 0, "codec")
        self.device_lane = DeviceLane(self.clock)
        self.swap = Swap(self.settings, self.device_lane)
        lanes = {Lane.DISK: run_on_thread, Lane.PROCESS: run_on_thread, Lane.DEVICE: self.device_lane.run}
        self.startup = Startup(STARTUP, lanes, self.clock, self.console.changed)
        self.drain = Drain(self.clock)
        self.readiness = Readiness(*self._checks())
        self.registry = metrics.registry()
        self.requests = RequestMetrics(self.registry, (bucket.name for bucket in self.settings.buckets))
        self.statistics = Statistics(self.requests.runs)
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
            Check("engine", self._engine_not_ready),
            Check("device", lambda: None if AcquiredDevice in self.startup.values else "not acquired yet"),
            Check("late-compile", lambda: self.late.why_not(policy)),
            Check("shutdown", self.drain.why_not),
        )

    def _stage_check(self, name: str) -> Check:
        if name == "read-weights":
            why_not = lambda: self.startup.view(name).reason or self.files.why_not()  # noqa: E731
            return Check(name, why_not, lambda: self.startup.view(name).ratio)
        return Check(name, lambda: self.startup.view(name).reason, lambda: self.startup.view(name).ratio)

    def eta_s(self) -> float | None:
        """Return the longest rest that a running stage's own progress tells, or None where none tells any."""
        now = self.clock()
        rests = [
            (now - view.start_s) * (1 - view.ratio) / view.ratio
            for view in self.startup.snapshot()
            if view.state == "running" and view.ratio and view.start_s is not None
        ]
        return round(max(rests), 1) if rests else None

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
        """Return why the engine cannot run requests, or None; stages that use the device have checks of their own."""
        return self.device_lane.why_not(self._call_limit_s())

    def _call_limit_s(self) -> float:
        return self.settings.startup.stall_timeout_s if self.startup.finished else float("inf")

    def _engine_not_ready(self) -> str | None:
        return self.engine_down() if BoundEngine in self.startup.values else "not bound yet"

    def not_alive(self) -> str | None:
        """Return why a restart would help, or None."""
        if self.startup.error:
            return f"start-up {self.not_started()}"
        return self.device_lane.why_dead(self._call_limit_s(), self.settings.http.drain_delay_s)

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
            await self.startup.run(self.settings, self._rehearsal())
        except Stopped:
            return
        except WarmgateError as error:
            self._fail(error)
            return
        finally:
            sys.setswitchinterval(0.005)
            gc.freeze()
            gc.enable()
        proven: ProvenModel = self.startup.values[ProvenModel]
        self.late.arm()
        self.files = FileWatch(self.startup.values[ResidentWeights].mapped_files)
        self.files.start()
        self.servable = self._servable(proven, self.requests)
        self.start_report = self.report()
        with contextlib.suppress(OSError):
            self.console.ended(self.startup.finished_s)
        # What only the next start needs can wait for the first requests to be over.
        await asyncio.sleep(AFTER_READY_S)
        await run_on_thread(self.finish, "after-ready")
        if self.swap.wanted(self.startup.values):
            await self._swap()

    async def _swap(self) -> None:
        """Build the code that the module serves in the place of, and exchange them between two requests."""
        with contextlib.suppress(Stopped):
            found = await run_on_thread(lambda: self.swap.run(self.startup.values), "swap")
            if isinstance(found, Swapped):
                await self.device_lane.run(lambda: self._take(found), "swap")
                await run_on_thread(lambda: self.after_ready(self, found.proven), "after-swap")
                log.info("swapped", engine=found.code.engine)
            else:
                self.startup.values[Compiled | Uncompiled] = found
                log.error("the code could not be swapped in: %s", found.why)

    def _take(self, found: Swapped) -> None:
        """Serve by another engine from now on; on the device thread, where no request is half run."""
        self.startup.values[Compiled | Uncompiled] = found.code
        self.startup.values |= {LoadedModel: found.loaded, BoundEngine: found.engine, ProvenModel: found.proven}
        self.startup.show("prove-answers", found.proven.rows)
        if self.servable is not None:
            self.servable.use(found.proven.forward)
        self.late.arm()

    def _servable(self, proven: ProvenModel, metrics: RequestMetrics) -> Executor | Coding:
        limits, codec = self.settings.serving, self.startup.values[LoadedCodec]
        inner = Executor(proven.forward, self.device_lane, limits, metrics, self.clock, self.late.note)
        return inner if codec.raw is None else Coding(inner, codec, codec.raw, self._codec_crew, limits, self.clock)

    def raw_form(self) -> ModelPath | None:
        """Return the form of requests for the codec, once it is loaded and where there is one."""
        loaded: LoadedCodec = self.startup.values.get(LoadedCodec, NO_CODEC)
        return loaded.raw

    def _rehearsal(self) -> Rehearsal:
        """Return a way to send requests to the server before clients can reach its model; they are not counted."""
        uncounted = RequestMetrics(CollectorRegistry(), ())

        def send(proven: ProvenModel, path: ModelPath, arrays: Mapping[str, Array]) -> int:
            if self.send is None:
                raise WarmupError("there is no application to rehearse with")
            raw = self.raw_form()
            body = request_body(chosen(path, raw, arrays), arrays)
            if len(body) > self.settings.serving.max_body_bytes:
                return 413  # the server would close the connection while the body is still being sent
            try:
                return self.send(self._servable(proven, uncounted), body)
            except WarmupError:
                if self.drain.begun:  # the sockets are closed because the process leaves
                    raise Stopped from None
                raise

        return Rehearsal(send)

    def _fail(self, error: WarmgateError) -> None:
        if error.__cause__ and not isinstance(error.__cause__, WarmgateError):
            with contextlib.suppress(OSError):
                log.error("start-up failed", exc_info=error.__cause__)
        self.fatal(self, error)

    def finish(self) -> None:
        """Keep what a later start can use, once; also called when the process leaves before it came to it."""
        if self.servable is None or self._finished.is_set():
            return
        self._finished.set()
        try:
            self.after_ready(self, self.startup.values[ProvenModel])
        except Exception:  # noqa: BLE001 - nothing after ready may end the serving
            log.exception("work after ready failed; serving goes on")

    async def watch_loop(self) -> None:
        """Measure how late the event loop is, twice a second."""
        loop = asyncio.get_running_loop()
        while True:
            planned = loop.time() + 0.5
            await asyncio.sleep(0.5)
            self.lag_s = max(0.0, loop.time() - planned)
