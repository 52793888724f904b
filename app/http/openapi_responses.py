"""Answers as OpenAPI describes them: state is never cached, a 503 says when to come back."""

from collections.abc import Mapping

from app.http.openapi_schemas import TEXT, Schema, ref

Responses = Mapping[str, Schema]

NO_STORE = {"Cache-Control": {"required": True, "schema": {"const": "no-store"}}}
RETRY_AFTER = {
    "Retry-After": {"required": True, "schema": {"type": "integer", "minimum": 1}, "description": "Seconds."}
}
CHALLENGE = {"WWW-Authenticate": {"required": True, "schema": {"const": "Bearer"}}}

ERRORS: Mapping[int, str] = {
    400: "The request is malformed, or does not fit the model.",
    401: "The API key is missing or wrong.",
    404: "No such model, version or check.",
    413: "The body is larger than `serving.max_body_bytes`.",
    415: "Content-Encoding is neither gzip nor deflate.",
    500: "The model failed, or its answer cannot be told as it was asked for.",
    501: "A part of the protocol that this server does not have.",
    503: "Not ready, overloaded or shutting down: `reason` says which, come back later.",
    504: "Not started within its time; it never ran.",
}
HEADERS: Mapping[int, Schema] = {401: CHALLENGE, 503: RETRY_AFTER}


def json_body(schema: str) -> Schema:
    """Return a 200 of this schema."""
    return {"description": "So it is.", "headers": NO_STORE, "content": {"application/json": {"schema": ref(schema)}}}


def text_body(*kinds: str) -> Schema:
    """Return a 200 of text."""
    return {"description": "So it is.", "headers": NO_STORE, "content": {kind: {"schema": TEXT} for kind in kinds}}


def error(status: int) -> Schema:
    """Return the error of this status."""
    return {
        "description": ERRORS[status],
        "headers": {**NO_STORE, **HEADERS.get(status, {})},
        "content": {"application/json": {"schema": ref("Refusal" if status == 503 else "Error")}},
    }


def probe(json: str | None = None) -> Responses:
    """Return what a probe answers: text, and JSON of this schema where it has one."""
    content = {"text/plain": {"schema": TEXT}, **({"application/json": {"schema": ref(json)}} if json else {})}
    return {
        "200": {"description": "It holds.", "headers": NO_STORE, "content": content},
        "503": {"description": "It does not, and why.", "headers": {**NO_STORE, **RETRY_AFTER}, "content": content},
    }
