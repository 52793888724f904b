"""The Open Inference Protocol v2 over REST: all of its routes; what inference does is in `infer`."""

from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response

from app import __version__
from app.http.answers import as_error, as_json
from app.http.infer import Inferences, infer
from app.servable import Rejected, TensorSpec

Reason = Callable[[], str | None]


def routes(inferences: Inferences, not_ready: Reason) -> APIRouter:
    """Return the protocol's routes."""

    def authorize(request: Request) -> None:
        inferences.authorize(request.headers)

    router = APIRouter(prefix="/v2", tags=["open inference protocol"])
    guarded = [Depends(authorize)]
    reads: dict[str, Any] = {"methods": ["GET", "HEAD"], "dependencies": guarded}

    @router.api_route("", **reads)
    async def server() -> Response:
        """Server metadata."""
        return as_json({"name": "warmgate", "version": __version__, "extensions": []})

    @router.api_route("/models", **reads)
    async def models() -> Response:
        """The one model of this server."""
        return as_json({"models": [inferences.name]})

    @router.api_route("/models/{model}", **reads)
    @router.api_route("/models/{model}/versions/{version}", **reads)
    async def metadata(model: str, version: str | None = None) -> Response:
        """Names, datatypes and shapes of inputs and outputs."""
        inferences.known(model, version)
        return as_json(_metadata(inferences))

    @router.api_route("/models/{model}/ready", **reads)
    @router.api_route("/models/{model}/versions/{version}/ready", **reads)
    async def model_ready(model: str, version: str | None = None) -> Response:
        """The model may be asked."""
        inferences.known(model, version)
        return _ready(not_ready, {"name": inferences.name, "ready": True})

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


def _ready(not_ready: Reason, body: dict[str, Any]) -> Response:
    reason = not_ready()
    return as_error(Rejected(503, reason, "not_ready")) if reason else as_json(body)


def _metadata(inferences: Inferences) -> dict[str, Any]:
    def describe(specs: tuple[TensorSpec, ...]) -> list[dict[str, Any]]:
        return [
            {"name": s.name, "datatype": s.datatype, "shape": [-1 if isinstance(n, str) else n for n in s.shape]}
            for s in specs
        ]

    first, *_ = inferences.paths
    paths = {one.name: {"inputs": describe(one.inputs), "outputs": describe(one.outputs)} for one in inferences.paths}
    return {
        "name": inferences.name,
        "versions": [inferences.version],
        "platform": "pytorch_safetensors",
        "inputs": describe(first.inputs),
        "outputs": describe(first.outputs),
        **({"paths": paths} if len(paths) > 1 else {}),
    }
