"""The inference operation: its body is JSON, or JSON with raw tensors behind it."""

from app.http.openapi_responses import NO_STORE, error
from app.http.openapi_schemas import TEXT, Schema, ref

TIMING = {
    "Server-Timing": {
        "required": True,
        "schema": {**TEXT, "pattern": r"^queue;dur=[\d.]+, compute;dur=[\d.]+$"},
        "description": "Milliseconds that the request waited, and that the batch it was in took.",
    }
}
STATUSES = (400, 404, 413, 500, 501, 503, 504)
ABOUT = """\
The body is read raw, whatever its content type. A model that is not ready refuses at once with 503 and names the
stage; requests are never parked. What a model takes is in its metadata: a well-formed request that does not fit it is
answered with 400."""


def inference(parameters: list[Schema]) -> Schema:
    """Return the operation."""
    answer = {
        "description": "The outputs asked for.",
        "headers": {**NO_STORE, **TIMING},
        "content": _json("InferenceResponse"),
    }
    return {
        "summary": "Run one inference.",
        "description": ABOUT,
        "parameters": parameters,
        "requestBody": {"required": True, "content": _json("InferenceRequest")},
        "responses": {"200": answer, **{str(status): error(status) for status in STATUSES}},
    }


def _json(schema: str) -> Schema:
    return {"application/json": {"schema": ref(schema)}}
