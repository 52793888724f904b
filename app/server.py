"""Put the parts together: the application, the lifespan that starts the graph, the server that drains before it ends.

Nothing here imports torch: importing it is a stage.
"""

import asyncio
import contextlib
import faulthandler
import resource
import urllib.parse
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import uvicorn
import uvloop
from fastapi import FastAPI
from starlette.types import ASGIApp

from app import endings, status
from app.console import Console, curl_line
from app.doors import Door, check_certificate, open_doors, to_itself
from app.draining import DrainingServer
from app.http import oip, openapi, probes
from app.http import status as status_routes
from app.http.api_keys import key_check
from app.http.connections import Connection, Patience
from app.http.edge import Edge, install_errors
from app.http.infer import InferenceRoute, Inferences, Observer, Spent
from app.http.rehearsal import Rehearsing
from app.logs import log
from app.process_clock import ProcessClock
from app.settings import Settings
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

    app = _app_with_probes(sidecar, lifespan=lifespan)
    app.include_router(openapi.routes(guarded=sidecar.settings.http.api_key_file is not None))
    app.include_router(oip.health_routes(sidecar.not_alive, sidecar.not_ready))
    app.include_router(oip.routes(_model_state(sidecar, inferences)))
    app.include_router(oip.inference_routes(inferences))
    return app


def create_admin_app(sidecar: Sidecar) -> FastAPI:
    """Return what answers on the port for probes, metrics and status alone."""
    return _app_with_probes(sidecar)


def _app_with_probes(sidecar: Sidecar, **options: Any) -> FastAPI:
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False, **options)
    install_errors(app)
    app.include_router(probes.routes(_probes(sidecar)))
    app.include_router(status_routes.routes(sidecar.report, sidecar.registry))
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
        sidecar.raw_form,
        sidecar.gate(),
        key_check(settings.http.api_key_file, sidecar.clock),
        settings.serving.max_body_bytes,
        settings.http.receive_timeout_s,
        Observer(requests.inflight.inc, ended),
        sidecar.clock,
    )


def serve(settings: Settings, console: Console) -> int:
    """Run the sidecar until it is told to leave; returns the exit code after a drain (0)."""
    # What ends a process without a word (a file truncated under its mapping, a fault in native code) is told.
    faulthandler.enable()
    _raise_file_limit()
    sidecar = Sidecar(settings, ProcessClock(), console, endings.end_process, endings.after_ready)
    check_certificate(settings.http)
    inferences = inferences_of(sidecar)
    doors = open_doors(settings.http)
    first, *_ = doors
    draining = lambda: sidecar.drain.begun  # noqa: E731
    answering = InferenceRoute(create_app(sidecar, inferences), inferences)
    rehearsing = Rehearsing(Edge(answering, draining), to_itself(settings.http))
    path = f"/v2/models/{urllib.parse.quote(settings.model.name)}/infer"
    sidecar.send = partial(rehearsing.post, first.socket, path, settings.startup.stall_timeout_s)
    admin = Edge(create_admin_app(sidecar), draining)
    sockets = [(door.socket, _config(admin if door.admin else rehearsing, settings, door)) for door in doors]
    endings.watch_for_stalls(sidecar)
    console.opened(first.address, curl_line(settings, first.address), sidecar.startup.snapshot)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(DrainingServer(sockets, sidecar).run_until_drained())
    if sidecar.startup.error and not sidecar.drain.begun:
        return sidecar.startup.error.exit_code
    log.info("drained")
    return 0


def _config(app: ASGIApp, settings: Settings, door: Door) -> uvicorn.Config:
    http = settings.http
    patience = Patience(http.receive_timeout_s, settings.serving.max_body_bytes)
    return uvicorn.Config(
        app,
        lifespan="on",
        http=partial(Connection, patience=patience),  # type: ignore[arg-type]  # called, and nothing else
        ws="none",
        ssl_certfile=http.ssl_certfile if door.encrypted else None,
        ssl_keyfile=http.ssl_keyfile if door.encrypted else None,
        # Behind a proxy nothing here depends on who the client is, so nobody's header needs to be believed.
        proxy_headers=False,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=75,
        # At least a second: uvicorn takes 0 for "do not wait" and None for "wait for ever".
        timeout_graceful_shutdown=max(1, round(http.drain_timeout_s)),
    )


def _raise_file_limit() -> None:
    """Shards take two descriptors each, connections one; the soft limit is for programs that use select."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, hard) if hard != resource.RLIM_INFINITY else soft, hard))
