"""The Open Inference Protocol v2 over REST: all of its routes; what inference does is in `infer`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import orjson
from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response

from app import __version__
from app.http.answers import as_error, as_json
from app.http.incoming import read_body
from app.http.infer import Inferences, infer
from app.http.model_config import configuration, metadata
from app.http.statistics import Statistics
from app.servable import Rejected

EXTENSIONS = ("binary_tensor_data", "model_configuration", "model_repository", "statistics")
# A request for the index is a few words.
INDEX_BYTES = 64 * 1024

Reason = Callable[[], str | None]


@dataclass(frozen=True, slots=True)
class ModelState:
    """What is told about the one model beside its answers; `loading`: it has not been ready yet and still may be."""

    inferences: Inferences
    statistics: Statistics
    not_ready: Reason
    loading: Callable[[], bool]
    batch_delay_ms: float

    def index(self, only_ready: bool) -> list[dict[str, str]]:
        """Return the repository's rows: the one model, its state, and why it is not ready."""
        reason = self.not_ready()
        if reason and only_ready:
            return []
        state = "READY" if reason is None else "LOADING" if self.loading() else "UNAVAILABLE"
        one = self.inferences
        return [{"name": one.name, "version": one.version, "state": state, "reason": reason or ""}]


def routes(model_state: ModelState) -> APIRouter:
    """Return the protocol's routes."""
    inferences = model_state.inferences

    def authorize(request: Request) -> None:
        inferences.authorize(request.headers)

    router = APIRouter(prefix="/v2", tags=["open inference protocol"], dependencies=[Depends(authorize)])
    reads: dict[str, Any] = {"methods": ["GET", "HEAD"]}

    @router.api_route("", **reads)
    async def server() -> Response:
        """Server metadata."""
        return as_json({"name": "warmgate", "version": __version__, "extensions": EXTENSIONS})

    @router.api_route("/models", **reads)
    async def models() -> Response:
        """The one model of this server."""
        return as_json({"models": [inferences.name]})

    @router.api_route("/models/stats", **reads)
    async def all_statistics() -> Response:
        """What the model has been asked since the start."""
        return as_json(model_state.statistics.document(inferences.name, inferences.version))

    @router.post("/repository/index")
    async def index(request: Request) -> Response:
        """Every model with its state, and why it is not ready."""
        declared = request.headers.get("content-length", "")
        body = await read_body(request.receive, declared, INDEX_BYTES, inferences.receive_timeout_s)
        return as_json(model_state.index(_only_ready(body)))

    def model_routes(path: str, told: Callable[[], Response]) -> None:
        """Serve it with and without the version."""

        @router.api_route(f"/models/{{model}}{path}", **reads)
        @router.api_route(f"/models/{{model}}/versions/{{version}}{path}", **reads)
        async def about(model: str, version: str | None = None) -> Response:
            inferences.known(model, version)
            return told()

    name, version, paths = inferences.name, inferences.version, inferences.paths
    model_routes("", lambda: as_json(metadata(name, version, paths, inferences.raw())))
    model_routes("/ready", lambda: _ready(model_state.not_ready, {"name": name, "ready": True}))
    model_routes("/config", lambda: as_json(configuration(name, paths, model_state.batch_delay_ms)))
    model_routes("/stats", lambda: as_json(model_state.statistics.document(name, version)))
    return router


def inference_routes(inferences: Inferences) -> APIRouter:
    """Return the routes of inference, which count what they refuse and so ask for the key themselves."""
    router = APIRouter(prefix="/v2", tags=["open inference protocol"])

    @router.post("/models/{model}/infer")
    @router.post("/models/{model}/versions/{version}/infer")
    async def run(request: Request, model: str, version: str | None = None) -> Response:
        """Run one inference: requests for other models come here, the others only without `InferenceRoute` in front."""
        return await infer(inferences, request.scope, request.receive, (model, version))

    return router


def health_routes(not_alive: Reason, not_ready: Reason) -> APIRouter:
    """Return the protocol's probes, which need no key."""
    router = APIRouter(prefix="/v2/health", tags=["open inference protocol"])
    reads: dict[str, Any] = {"methods": ["GET", "HEAD"]}

    @router.api_route("/live", **reads)
    async def live() -> Response:
        """The process can still get there: `/healthz` in the protocol's words."""
        reason = not_alive()
        return as_error(Rejected(503, reason, "not_ready")) if reason else as_json({"live": True})

    @router.api_route("/ready", **reads)
    async def ready() -> Response:
        """The model may be asked; `live` stands beside it because one client reads that key."""
        return _ready(not_ready, {"ready": True, "live": True})

    return router


def _ready(not_ready: Reason, body: Mapping[str, Any]) -> Response:
    reason = not_ready()
    return as_error(Rejected(503, reason, "not_ready")) if reason else as_json(body)


def _only_ready(body: bytes) -> bool:
    """Read the index's request: `{"ready": true}` leaves out what is not ready; an empty body asks for all."""
    try:
        asked = orjson.loads(body) if body.strip() else {}
    except orjson.JSONDecodeError as error:
        raise Rejected(400, f"the body is not JSON: {error}") from error
    ready = asked.get("ready") if isinstance(asked, dict) else ...
    if not (ready is None or isinstance(ready, bool)):
        raise Rejected(400, 'the body must be an object in which "ready" is true or false, or be empty')
    return ready is True
