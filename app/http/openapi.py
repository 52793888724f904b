"""`/openapi.json`: the interface for programs; by hand, since bodies are read raw, and built when first asked for."""

import functools
from typing import Any

from fastapi import APIRouter
from fastapi.responses import Response

from app import __version__
from app.http.answers import as_json
from app.http.openapi_paths import paths
from app.http.openapi_schemas import SCHEMAS

ABOUT = """\
A model-serving sidecar: the Open Inference Protocol v2 over REST, probes of Kubernetes, metrics and the start report.
Every path is served with and without a trailing slash, never by a redirect. Every error is `{"error": …}`."""

SECURITY_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "The key of `http.api_key_file`."},
    "apiKey": {"type": "apiKey", "in": "header", "name": "X-API-Key", "description": "The same key."},
}


@functools.cache
def document(guarded: bool) -> dict[str, Any]:
    """Return the document; `guarded`: this server asks for an API key."""
    return {
        "openapi": "3.1.0",
        "info": {"title": "Warmgate", "version": __version__, "description": ABOUT, "license": {"name": "Apache-2.0"}},
        "tags": [{"name": name} for name in ("probes", "state", "open inference protocol")],
        "paths": paths(guarded),
        "components": {"schemas": SCHEMAS, **({"securitySchemes": SECURITY_SCHEMES} if guarded else {})},
    }


def routes(guarded: bool) -> APIRouter:
    """Return the route; it needs no key, as it tells nothing about the model."""
    router = APIRouter(tags=["state"])

    @router.api_route("/openapi.json", methods=["GET", "HEAD"])
    async def openapi() -> Response:
        """What this server answers, for programs."""
        return as_json(document(guarded))

    return router
