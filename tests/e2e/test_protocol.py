"""Probes, metrics and the inference protocol of a ready server, as clients and scrapers meet them."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as plain

from tests.e2e.conftest import JSON
from tests.e2e.harness import Server, outputs

CHECKS = [
    "startup",
    "open-checkpoint",
    "import-runtime",
    "preflight",
    "acquire-device",
    "read-weights",
    "find-artifact",
    "build-artifact",
    "compute-reference",
    "build-skeleton",
    "install-weights",
    "bind-engine",
    "warm-buckets",
    "prove-answers",
    "load-codec",
    "prove-codec",
    "rehearse-requests",
    "engine",
    "device",
    "late-compile",
    "shutdown",
]

# Every name of the contract (without `_total`, as the parsers give them).
METRICS = {
    "warmgate_info",
    "warmgate_phase",
    "warmgate_ready",
    "warmgate_time_to_ready_seconds",
    "warmgate_stage_state",
    "warmgate_stage_duration_seconds",
    "warmgate_stage_progress_ratio",
    "warmgate_check_ok",
    "warmgate_weights_bytes",
    "warmgate_weights_read_bytes",
    "warmgate_memory_bytes",
    "warmgate_artifact_lookups",
    "warmgate_bucket_warm",
    "warmgate_bucket_seconds",
    "warmgate_late_compiles",
    "warmgate_uncovered_requests",
    "warmgate_requests",
    "warmgate_request_duration_seconds",
    "warmgate_batch_size",
    "warmgate_padding_ratio",
    "warmgate_queue_items",
    "warmgate_queue_bytes",
    "warmgate_inflight_requests",
    "warmgate_rejected",
    "warmgate_first_request_seconds",
    "warmgate_event_loop_lag_seconds",
    "warmgate_engine_heartbeat_timestamp_seconds",
    "warmgate_device_memory_bytes",
    "process_resident_memory_bytes",
}

X = np.linspace(-1, 1, 32, dtype=np.float32).reshape(2, 16)


@pytest.fixture(scope="module")
def server(tiny: JSON, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("server"), {**tiny, "serving": {"max_body_bytes": 4096}}) as running:
        running.wait("/healthz")
        running.first_scrape = running.get("/metrics")[1].decode()  # type: ignore[attr-defined]
        running.wait()
        yield running


@pytest.mark.parametrize("path", ["/healthz", "/livez", "/startupz", "/readyz", "/readyz/engine", "/readyz/"])
def test_a_ready_server_says_ok(server: Server, path: str) -> None:
    status, body, headers = server.get(path)
    assert (status, body) == (200, b"ok")
    assert headers["Cache-Control"] == "no-store"


def test_verbose_readiness_names_every_check(server: Server) -> None:
    lines = server.get("/readyz?verbose")[1].decode().splitlines()
    assert sorted(lines[:-1]) == sorted(f"[+]{name} ok" for name in CHECKS)
    assert lines[-1] == "readyz check passed"


def test_readiness_as_json(server: Server) -> None:
    document = json.loads(server.get("/readyz", {"Accept": "application/json"})[1])
    assert (document["ready"], document["phase"]) == (True, "ready")
    assert {check["name"] for check in document["checks"]} == set(CHECKS)
    assert all(check["ok"] and check["reason"] is None for check in document["checks"])


def test_the_first_scrape_has_every_series_but_the_one_that_is_not_known_yet(server: Server) -> None:
    names = {family.name for family in plain(server.first_scrape)}  # type: ignore[attr-defined]
    assert METRICS - names <= {"warmgate_time_to_ready_seconds"}
    assert {family.name for family in plain(server.get("/metrics")[1].decode())} >= METRICS


def test_openmetrics_is_given_to_who_accepts_it(server: Server) -> None:
    accept = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"
    status, body, headers = server.get("/metrics", {"Accept": accept})
    assert status == 200
    assert headers["Content-Type"].startswith("application/openmetrics-text")
    assert {family.name for family in openmetrics(body.decode())} >= METRICS


def test_promtool_finds_nothing_to_say(server: Server) -> None:
    promtool = shutil.which("promtool")
    assert promtool, "promtool (Debian package prometheus) is needed for this test"
    done = subprocess.run(
        [promtool, "check", "metrics"], input=server.get("/metrics")[1], capture_output=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_one_phase_and_one_state_a_stage_are_one(server: Server) -> None:
    families = {family.name: family for family in plain(server.get("/metrics")[1].decode())}
    phases = {s.labels["phase"]: s.value for s in families["warmgate_phase"].samples}
    assert phases == {"starting": 0, "ready": 1, "degraded": 0, "draining": 0, "failed": 0}
    per_stage: dict[str, float] = {}
    for sample in families["warmgate_stage_state"].samples:
        per_stage[sample.labels["stage"]] = per_stage.get(sample.labels["stage"], 0) + sample.value
    assert set(per_stage.values()) == {1}


GETS: list[tuple[str, int, Any]] = [
    ("/v2/health/live", 200, {"live": True}),
    ("/v2/health/ready", 200, {"ready": True, "live": True}),
    ("/v2/models", 200, {"models": ["tiny"]}),
    ("/v2/models/tiny/ready", 200, {"name": "tiny", "ready": True}),
    ("/v2/models/tiny/versions/1/ready", 200, {"name": "tiny", "ready": True}),
    ("/v2/models/other", 404, {"error": "unknown model other; this server has tiny"}),
    ("/v2/models/tiny/versions/7", 404, {"error": "unknown version 7 of tiny; this server has 1"}),
    ("/nowhere", 404, {"error": "Not Found: GET /nowhere"}),
    ("/v2/models/tiny/infer", 405, {"error": "Method Not Allowed: GET /v2/models/tiny/infer"}),
]


@pytest.mark.parametrize(("path", "status", "body"), GETS, ids=[row[0] for row in GETS])
def test_protocol_reads(server: Server, path: str, status: int, body: Any) -> None:
    code, found, headers = server.get(path)
    assert (code, json.loads(found)) == (status, body)
    assert headers["Content-Type"] == "application/json"


@pytest.mark.parametrize("path", ["/v2", "/v2/"])
def test_server_metadata_with_and_without_slash(server: Server, path: str) -> None:
    status, body, _ = server.get(path)
    assert status == 200
    assert set(json.loads(body)) == {"name", "version", "extensions"}


def test_model_metadata(server: Server) -> None:
    assert json.loads(server.get("/v2/models/tiny")[1]) == {
        "name": "tiny",
        "versions": ["1"],
        "platform": "pytorch_safetensors",
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 16]}],
        "outputs": [{"name": "y", "datatype": "FP32", "shape": [-1, 4]}],
    }


def request(**changes: Any) -> bytes:
    row = {"name": "x", "shape": [2, 16], "datatype": "FP32", "data": X.ravel().tolist(), **changes}
    return json.dumps({"inputs": [row]}).encode()


@pytest.mark.parametrize("content_type", [None, "application/json", "application/octet-stream", "text/plain"])
def test_the_body_is_read_whatever_its_content_type(server: Server, content_type: str | None) -> None:
    headers = {"Content-Type": content_type} if content_type else {}
    assert server.post("/v2/models/tiny/infer", request(), headers)[0] == 200


def test_nested_and_flat_data_answer_the_same(server: Server) -> None:
    flat = json.loads(server.post("/v2/models/tiny/infer", request())[1])
    nested = json.loads(server.post("/v2/models/tiny/infer", request(data=X.tolist()))[1])
    assert flat["outputs"] == nested["outputs"]
    assert (flat["model_name"], flat["model_version"]) == ("tiny", "1")
    assert "id" not in flat


def test_an_id_is_echoed_and_outputs_are_selected(server: Server) -> None:
    status, body = server.infer("tiny", {"x": X}, id="a-1", outputs=[{"name": "y"}], model_name="ignored")
    assert (status, body["id"]) == (200, "a-1")
    assert [row["name"] for row in body["outputs"]] == ["y"]


BAD: list[tuple[bytes, int, str]] = [
    (b"{", 400, "the body is not JSON: "),
    (b"[]", 400, 'the body must be an object with "inputs"'),
    (request(name="z"), 400, "input x is missing; the model takes x"),
    (request(datatype="FP64"), 400, "input x is float64, expected FP32"),
    (request(shape=[32]), 400, "input x has shape [32], expected ['batch', 16]"),
    (request(shape=[2, 15]), 400, "input x: 32 values for shape [2, 15], expected 30"),
    (request(shape=[17, 16], data=[0.0] * 272), 400, "batch is 17, allowed are 1 to 16"),
    (request(shape=[0, 16], data=[]), 400, "batch is 0, allowed are 1 to 16"),
    (request(data=["a"] * 32), 400, "input x: data is not float32"),
    (b" " * 4097, 413, "the body is larger than serving.max_body_bytes = 4096"),
]


@pytest.mark.parametrize(("body", "status", "error"), BAD, ids=[row[2][:40] for row in BAD])
def test_a_bad_request_is_told_what_is_wrong(server: Server, body: bytes, status: int, error: str) -> None:
    code, answer = server.post("/v2/models/tiny/infer", body)
    assert code == status
    assert json.loads(answer)["error"].startswith(error)


def test_a_shape_beyond_the_buckets_runs_by_dynamic_code_and_is_counted(server: Server) -> None:
    x = np.linspace(-1, 1, 12 * 16, dtype=np.float32).reshape(12, 16).round(2)
    status, body = server.infer("tiny", {"x": x})
    assert status == 200
    assert outputs(body).shape == (12, 4)
    assert 'warmgate_uncovered_requests_total{policy="pad"} 1.0' in server.get("/metrics")[1].decode()


def test_requests_are_counted_and_first_requests_kept(server: Server) -> None:
    server.infer("tiny", {"x": X})
    families = {family.name: family for family in plain(server.get("/metrics")[1].decode())}
    codes = {s.labels["code"]: s.value for s in families["warmgate_requests"].samples}
    assert codes["200"] >= 1
    first = {b["name"]: b["first_request_s"] for b in server.status()["buckets"]}
    assert first["batch=2"] > 0
    assert first["batch=8"] is None
