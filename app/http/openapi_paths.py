"""Every path with its parameters, and every status that it answers."""

from typing import Any

from app.http.openapi_inference import inference
from app.http.openapi_responses import Responses, error, json_body, probe, text_body
from app.http.openapi_schemas import TEXT, TEXTS, Schema, ref

STATISTICS = "How many inferences in how many runs since the start, and where their time went."
CONFIGURATION = "The largest batch, and inputs and outputs without their batch: what load tools read."
PROBES, STATE, PROTOCOL = "probes", "state", "open inference protocol"

MODEL = {"name": "model", "in": "path", "required": True, "schema": TEXT, "description": "As `/v2/models` names it."}
VERSION = {"name": "version", "in": "path", "required": True, "schema": TEXT}
CHECK = {
    "name": "check",
    "in": "path",
    "required": True,
    "schema": TEXT,
    "example": "engine",
    "description": "As `/readyz?verbose` names it.",
}
VERBOSE = {"name": "verbose", "in": "query", "schema": {}, "description": "Name every check; with any value, or none."}
EXCLUDE = {"name": "exclude", "in": "query", "schema": TEXTS, "description": "Checks that shall not count."}


def paths(guarded: bool) -> Schema:
    """Return every path; `guarded`: those of the protocol ask for an API key, its probes do not."""
    protocol = _protocol()
    for item in protocol.values():
        for operation in item.values() if guarded else ():
            operation["security"] = [{"bearer": []}, {"apiKey": []}]
            operation["responses"]["401"] = error(401)
    return {**_probes(), **_state(), **_health(), **protocol}


def _probes() -> Schema:
    made = {
        f"/{name}": _read(PROBES, name, "The process can still become or stay ready.", probe())
        for name in ("healthz", "livez")
    }
    made["/startupz"] = _read(PROBES, "startupz", "Start-up has finished; stays true.", probe())
    detailed = probe(json="Readiness")
    about = "Every check holds. Lines of the Kubernetes API server, or JSON where `Accept` asks for it."
    made["/readyz"] = _read(PROBES, "readyz", about, detailed, [VERBOSE, EXCLUDE])
    one = {**probe(), "404": error(404)}
    made["/readyz/{check}"] = _read(PROBES, "readyzCheck", "One check holds.", one, [CHECK])
    return made


def _state() -> Schema:
    kinds = ("text/plain", "application/openmetrics-text")
    return {
        "/metrics": _read(STATE, "metrics", "Prometheus text, or OpenMetrics by `Accept`.", {"200": text_body(*kinds)}),
        "/status": _read(STATE, "status", "The live start report.", {"200": json_body("Status")}),
        "/openapi.json": _read(STATE, "openapi", "This document.", {"200": json_body("Document")}),
    }


def _health() -> Schema:
    live, ready = "`/livez` in the protocol's words.", "`/readyz` in the protocol's words."
    return {
        "/v2/health/live": _read(PROTOCOL, "serverLive", live, {"200": json_body("Live"), "503": error(503)}),
        "/v2/health/ready": _read(PROTOCOL, "serverReady", ready, {"200": json_body("Ready"), "503": error(503)}),
    }


def _protocol() -> Schema:
    made = {
        "/v2": _read(
            PROTOCOL, "serverMetadata", "The server and its extensions.", {"200": json_body("ServerMetadata")}
        ),
        "/v2/models": _read(PROTOCOL, "models", "The one model of this server.", {"200": json_body("Models")}),
        "/v2/models/stats": _read(PROTOCOL, "statistics", STATISTICS, {"200": json_body("Statistics")}),
        "/v2/repository/index": {"post": _index()},
    }
    for path, name, parameters in (
        ("/v2/models/{model}", "model", [MODEL]),
        ("/v2/models/{model}/versions/{version}", "modelVersion", [MODEL, VERSION]),
    ):
        about = "Names, datatypes and shapes of inputs and outputs."
        found = {"200": json_body("ModelMetadata"), "404": error(404)}
        made[path] = _read(PROTOCOL, f"{name}Metadata", about, found, parameters)
        asked = {"200": json_body("ModelReady"), "404": error(404), "503": error(503)}
        made[f"{path}/ready"] = _read(PROTOCOL, f"{name}Ready", "The model may be asked.", asked, parameters)
        told = {"200": json_body("ModelConfiguration"), "404": error(404)}
        made[f"{path}/config"] = _read(PROTOCOL, f"{name}Configuration", CONFIGURATION, told, parameters)
        counted = {"200": json_body("Statistics"), "404": error(404)}
        made[f"{path}/stats"] = _read(PROTOCOL, f"{name}Statistics", STATISTICS, counted, parameters)
        made[f"{path}/infer"] = {"post": {"tags": [PROTOCOL], "operationId": f"{name}Infer", **inference(parameters)}}
    return made


def _index() -> Schema:
    return {
        "tags": [PROTOCOL],
        "operationId": "repositoryIndex",
        "summary": "The one model, its state, and why it is not ready.",
        "requestBody": {"content": {"application/json": {"schema": ref("RepositoryIndexRequest")}}},
        "responses": {"200": json_body("RepositoryIndex"), "400": error(400), "413": error(413)},
    }


def _read(tag: str, name: str, about: str, responses: Responses, parameters: list[Schema] | None = None) -> Schema:
    """Return GET, and HEAD with the same statuses and headers."""
    operation: dict[str, Any] = {"tags": [tag], "operationId": name, "summary": about}
    if parameters:
        operation["parameters"] = parameters
    bare = {code: {key: value for key, value in one.items() if key != "content"} for code, one in responses.items()}
    return {
        "get": {**operation, "responses": dict(responses)},
        "head": {**operation, "operationId": f"{name}Head", "responses": bare},
    }
