"""`/status` and `/metrics`: the same facts for people and for Prometheus."""

from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from app.http.answers import NO_STORE, as_json


def routes(status: Callable[[], dict[str, Any]], registry: CollectorRegistry) -> APIRouter:
    """Return the routes that tell the whole state."""
    router = APIRouter(tags=["state"])
    reads: dict[str, Any] = {"methods": ["GET", "HEAD"]}

    @router.api_route("/status", **reads)
    async def report() -> Response:
        """The live start report."""
        return as_json(status())

    @router.api_route("/metrics", **reads)
    async def metrics(request: Request) -> Response:
        """Prometheus text, or OpenMetrics where the scraper accepts it."""
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(registry), headers={**NO_STORE, "Content-Type": content_type})

    return router
