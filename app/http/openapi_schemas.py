"""What bodies look like, as JSON Schema: the protocol's objects, errors, readiness and the start report."""

from typing import Any

from app.servable import DATATYPES

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
BOOLEAN: Schema = {"type": "boolean"}
NUMBER: Schema = {"type": "number"}
COUNT: Schema = {"type": "integer", "minimum": 0}
MAYBE_NUMBER: Schema = {"type": ["number", "null"]}
MAYBE_COUNT: Schema = {"type": ["integer", "null"]}
OBJECT: Schema = {"type": "object"}
TEXTS: Schema = {"type": "array", "items": TEXT}
REASONS = ["not_ready", "queue_full", "deadline", "draining", "too_large", "disconnected", "uncovered"]


def ref(name: str) -> Schema:
    """Return a reference to a schema of this document."""
    return {"$ref": f"#/components/schemas/{name}"}


def record(required: Schema, optional: Schema | None = None, text: str = "") -> Schema:
    """Return an object with these members; others may stand beside them, and clients ignore them."""
    made: Schema = {"type": "object", "required": list(required), "properties": {**required, **(optional or {})}}
    return {**made, "description": text} if text else made


def array(items: Schema) -> Schema:
    """Return a list of these."""
    return {"type": "array", "items": items}


def one_of(*words: str) -> Schema:
    """Return one of these words."""
    return {"type": "string", "enum": list(words)}


DATATYPE = one_of(*DATATYPES)
SHAPE = {**array(COUNT), "description": "Sizes, row-major; an input's or output's variable sizes filled in."}
DECLARED_SHAPE = {**array({"type": "integer", "minimum": -1}), "description": "-1 where the size varies."}
DATA = {
    "type": "array",
    "items": {},
    "description": "Flat or nested, row-major; as many values as the shape's product. 64-bit integers are exact.",
}
MAYBE: Schema = {"type": ["boolean", "null"]}


def with_parameters(**known: Schema) -> Schema:
    """Return parameters; clients that write all members of their own records write null for those that are not set."""
    return {"type": ["object", "null"], "description": "Unknown parameters are ignored.", "properties": known}


DURATIONS = (
    "success",
    "fail",
    "queue",
    "compute_input",
    "compute_infer",
    "compute_output",
    "cache_hit",
    "cache_miss",
)

PROTOCOL: dict[str, Schema] = {
    "ServerMetadata": record({"name": TEXT, "version": TEXT, "extensions": TEXTS}),
    "Models": record({"models": TEXTS}),
    "TensorMetadata": record({"name": TEXT, "datatype": DATATYPE, "shape": DECLARED_SHAPE}),
    "PathMetadata": record({"inputs": array(ref("TensorMetadata")), "outputs": array(ref("TensorMetadata"))}),
    "ModelMetadata": record(
        {
            "name": TEXT,
            "versions": TEXTS,
            "platform": TEXT,
            "inputs": array(ref("TensorMetadata")),
            "outputs": array(ref("TensorMetadata")),
        },
        {"paths": {"type": "object", "additionalProperties": ref("PathMetadata")}, "codec": ref("PathMetadata")},
        "`paths` stands here where more than one of the model's methods is served; the first is asked by default. "
        "`codec`: raw inputs that may be given instead of tensors, and what comes back then.",
    ),
    "Live": record({"live": {"const": True}}),
    "Ready": record({"ready": {"const": True}, "live": {"const": True}}),
    "ModelReady": record({"name": TEXT, "ready": {"const": True}}),
    "RepositoryIndexRequest": record(
        {}, {"ready": {"type": ["boolean", "null"], "description": "Only what is ready."}}
    ),
    "RepositoryIndex": array(
        record({"name": TEXT, "version": TEXT, "state": one_of("READY", "LOADING", "UNAVAILABLE"), "reason": TEXT})
    ),
    "ConfiguredTensor": record({"name": TEXT, "data_type": TEXT, "dims": array({"type": "integer", "minimum": -1})}),
    "ModelConfiguration": record(
        {
            "name": TEXT,
            "platform": TEXT,
            "backend": TEXT,
            "max_batch_size": COUNT,
            "input": array(ref("ConfiguredTensor")),
            "output": array(ref("ConfiguredTensor")),
        },
        {"dynamic_batching": record({"max_queue_delay_microseconds": COUNT})},
    ),
    "Duration": record({"count": COUNT, "ns": COUNT}),
    "ModelStatistics": record(
        {
            "name": TEXT,
            "version": TEXT,
            "last_inference": COUNT,
            "inference_count": COUNT,
            "execution_count": COUNT,
            "inference_stats": record({part: ref("Duration") for part in DURATIONS}),
            "batch_stats": array(OBJECT),
        },
        text="`last_inference` in milliseconds since 1970; `inference_count` counts items, not requests.",
    ),
    "Statistics": record({"model_stats": array(ref("ModelStatistics"))}),
    "RequestInput": {
        **record(
            {"name": TEXT, "shape": SHAPE, "datatype": DATATYPE},
            {"data": DATA, "parameters": with_parameters(binary_data_size=MAYBE_COUNT)},
        ),
        "description": "One whole batch as the metadata tells it; values in `data`, or `binary_data_size` bytes.",
    },
    "RequestOutput": record({"name": TEXT}, {"parameters": with_parameters(binary_data=MAYBE)}),
    "InferenceRequest": record(
        {"inputs": array(ref("RequestInput"))},
        {
            "id": {"type": ["string", "null"], "description": "Comes back in the answer."},
            "outputs": {
                "type": ["array", "null"],
                "items": ref("RequestOutput"),
                "description": "What to answer, in this order; all by default.",
            },
            "parameters": with_parameters(
                path={**TEXT, "description": "Which of the model's methods; the first by default."},
                timeout={
                    "type": ["integer", "null"],
                    "minimum": 0,
                    "description": "Microseconds until it must have started, if less than the server's; 0: none.",
                },
                binary_data_output={**MAYBE, "description": "Outputs that do not say otherwise come back raw."},
            ),
        },
        "Unknown members are ignored.",
    ),
    "ResponseOutput": {
        **record({"name": TEXT, "shape": SHAPE, "datatype": DATATYPE}, {"data": DATA, "parameters": OBJECT}),
        "description": "Values in `data`, flat and row-major, or behind the JSON, `binary_data_size` bytes of them.",
    },
    "InferenceResponse": record(
        {"model_name": TEXT, "model_version": TEXT, "outputs": array(ref("ResponseOutput"))},
        {"id": TEXT, "parameters": OBJECT},
    ),
}

ERRORS: dict[str, Schema] = {
    "Error": record({"error": TEXT}, {"reason": one_of(*REASONS)}, "What is wrong, the fact, and what to do."),
    "Refusal": record(
        {"error": TEXT, "reason": one_of(*REASONS)}, text="`reason` is the label of `warmgate_rejected_total`."
    ),
}

STATE: dict[str, Schema] = {
    "Document": record({"openapi": TEXT, "info": OBJECT, "paths": OBJECT}),
    "Readiness": record(
        {
            "ready": BOOLEAN,
            "phase": ref("Phase"),
            "checks": array(
                record({"name": TEXT, "ok": BOOLEAN, "reason": {"type": ["string", "null"]}, "progress": MAYBE_NUMBER})
            ),
            "elapsed_s": NUMBER,
            "eta_s": MAYBE_NUMBER,
        }
    ),
    "Phase": one_of("starting", "ready", "degraded", "draining", "failed"),
    "Stage": record(
        {
            "name": TEXT,
            "state": one_of("waiting", "running", "done", "failed", "skipped", "stopped"),
            "needs": TEXTS,
            "start_s": MAYBE_NUMBER,
            "end_s": MAYBE_NUMBER,
            "done": COUNT,
            "total": COUNT,
            "unit": TEXT,
            "detail": TEXT,
        }
    ),
    "MemoryObject": record(
        {"name": TEXT, "planned_bytes": MAYBE_COUNT, "measured_bytes": MAYBE_COUNT, "peak_bytes": MAYBE_COUNT}
    ),
    "CacheLayer": record(
        {"name": TEXT, "result": one_of("hit", "miss", "rejected", "bypass"), "why": TEXT, "count": COUNT}
    ),
    "Bucket": record(
        {
            "name": TEXT,
            "required": BOOLEAN,
            "state": one_of("waiting", "warm", "failed", "skipped"),
            "first_s": MAYBE_NUMBER,
            "second_s": MAYBE_NUMBER,
            "steady_s": MAYBE_NUMBER,
            "proof": one_of("golden", "reference", "none"),
            "max_error": MAYBE_NUMBER,
            "graph": TEXT,
            "first_request_s": MAYBE_NUMBER,
        }
    ),
    "Status": record(
        {
            "model": record({"name": TEXT, "version": TEXT}),
            "phase": ref("Phase"),
            "ready": BOOLEAN,
            "started_at": {"type": "string", "format": "date-time"},
            "elapsed_s": NUMBER,
            "time_to_ready_s": MAYBE_NUMBER,
            "critical_path": TEXTS,
            "file_cache": one_of("", "cold", "warm", "mixed"),
            "compile_cache": one_of("none", "cold", "warm", "mixed"),
            "stages": array(ref("Stage")),
            "weights": record({"tensors": COUNT, "bytes": COUNT, "bytes_read": COUNT, "mode": TEXT}),
            "memory": array(ref("MemoryObject")),
            "artifacts": record(
                {
                    "engine": one_of("", "aot", "jit", "eager"),
                    "why": TEXT,
                    "identity": TEXT,
                    "outcome": one_of("restored", "rebuilt", "none"),
                    "layers": array(ref("CacheLayer")),
                    "differences": TEXTS,
                }
            ),
            "buckets": array(ref("Bucket")),
            "uncovered_policy": one_of("pad", "reject", "eager"),
            "late_compiles": COUNT,
            "device": record({"kind": TEXT, "name": TEXT, "fingerprint": TEXT}),
            "error": {
                "anyOf": [
                    {"type": "null"},
                    record({"kind": TEXT, "stage": {"type": ["string", "null"]}, "exit_code": COUNT, "message": TEXT}),
                ]
            },
        },
        text="The start report. More members than these stand in it; the README explains all.",
    ),
}

SCHEMAS = {**PROTOCOL, **ERRORS, **STATE}
