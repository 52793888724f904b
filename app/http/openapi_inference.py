"""The inference operation: its body is JSON, or JSON with raw tensors behind it."""

from app.http.incoming import TIMEOUT_HEADERS
from app.http.openapi_responses import NO_STORE, error
from app.http.openapi_schemas import COUNT, TEXT, Schema, one_of, ref

TIMING = {
    "Server-Timing": {
        "required": True,
        "schema": {**TEXT, "pattern": r"^queue;dur=[\d.]+, compute;dur=[\d.]+$"},
        "description": "Milliseconds that the request waited, and that the batch it was in took.",
    }
}
ID = {"X-Request-Id": {"required": True, "schema": TEXT, "description": "The request's own, or one made for it."}}
CODED = {
    "Content-Encoding": {
        "schema": one_of("gzip", "deflate"),
        "description": "Where `Accept-Encoding` names exactly one coding and the answer is at least 1 KiB.",
    }
}
JSON_BYTES = "Inference-Header-Content-Length"
RAW_HEADER = {
    JSON_BYTES: {"schema": COUNT, "description": "How many bytes of the uncompressed answer are JSON, if any are not."}
}
RAW = {"schema": {"type": "string", "format": "binary"}}
PARAMETERS: list[Schema] = [
    {
        "name": JSON_BYTES,
        "in": "header",
        "schema": COUNT,
        "description": (
            "How many bytes of the uncompressed body are JSON, where raw tensors follow; 0: the body is nothing but "
            "the bytes of the model's only input, and all outputs come back raw. Without it all of the body is JSON."
        ),
    },
    {"name": "X-Request-Id", "in": "header", "schema": TEXT, "description": "Comes back, and stands in the log."},
    *(
        {
            "name": name,
            "in": "header",
            "schema": COUNT,
            "description": "Milliseconds until it must have started, if less than the server's; 0: none.",
        }
        for name in TIMEOUT_HEADERS
    ),
    {
        "name": "Content-Encoding",
        "in": "header",
        "schema": one_of("gzip", "deflate", "identity"),
        "description": "How the body is compressed; deflate is the format of zlib.",
    },
]
STATUSES = (400, 404, 413, 415, 500, 501, 503, 504)
ABOUT = """\
The body is read raw, whatever its content type: JSON, and behind it, in their order, the little-endian bytes of the
inputs that say `binary_data_size`. An answer with an output that was asked for as `binary_data` is such a body too, of
type `application/octet-stream`. Each element of BYTES begins with its length in four bytes. A
model that is not ready refuses at once with 503 and names the stage; requests are never parked. What a model takes is
in its metadata: a well-formed request that does not fit it is answered with 400."""


def inference(parameters: list[Schema]) -> Schema:
    """Return the operation."""
    answer = {
        "description": "The outputs asked for.",
        "headers": {**NO_STORE, **ID, **TIMING, **CODED, **RAW_HEADER},
        "content": _bodies("InferenceResponse"),
    }
    return {
        "summary": "Run one inference.",
        "description": ABOUT,
        "parameters": [*parameters, *PARAMETERS],
        "requestBody": {"required": True, "content": _bodies("InferenceRequest")},
        "responses": {"200": answer, **{str(status): error(status) for status in STATUSES}},
    }


def _bodies(schema: str) -> Schema:
    return {"application/json": {"schema": ref(schema)}, "application/octet-stream": RAW}
