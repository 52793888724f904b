"""Responses that every route shares: state is never cached, every error is `{"error": …}`."""

from collections.abc import Mapping
from typing import Any

import orjson
from fastapi.responses import Response

from app.servable import Rejected

# What a client sent comes back in its error, but not without a limit.
ERROR_LIMIT = 1000

NO_STORE = {"Cache-Control": "no-store"}


def retry_after(eta_s: float | None) -> dict[str, str]:
    """Return the header that a 503 carries: the expected wait, at least one second."""
    return {"Retry-After": str(max(1, min(60, round(eta_s))) if eta_s else 1)}


def as_json(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return JSON that no cache keeps."""
    body = orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)
    return Response(body, status, {**NO_STORE, **(headers or {})}, media_type="application/json")


def as_text(content: str, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return plain text that no cache keeps and no browser takes for anything else."""
    extra = {**NO_STORE, "X-Content-Type-Options": "nosniff", **(headers or {})}
    return Response(content, status, extra, media_type="text/plain; charset=utf-8")


def as_error(rejected: Rejected) -> Response:
    """Return the protocol's error body; a 503 says when to come back and why in one word."""
    headers = retry_after(None) if rejected.status == 503 else {}
    reason = {"reason": rejected.reason} if rejected.reason else {}
    if rejected.status == 401:
        headers = {"WWW-Authenticate": "Bearer"}
    return as_json({"error": str(rejected)[:ERROR_LIMIT], **reason}, rejected.status, headers)
