"""The HTTP edge: probes as Kubernetes writes them, the protocol's errors, a gate that is closed until ready."""

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import structlog.testing
from fastapi import Depends, FastAPI, Request
from starlette.types import ASGIApp

from app import __version__
from app.buckets import FORWARD, Kind, Route
from app.errors import SettingsError
from app.graph import Lane
from app.http import oip, probes
from app.http.answers import as_error, retry_after
from app.http.api_keys import LOOK_S, key_check, open_to_all
from app.http.edge import Edge, install_errors
from app.http.gate import Gate
from app.http.incoming import read_body
from app.http.infer import Inferences, Observer
from app.http.statistics import Statistics
from app.paths import ModelPath
from app.readiness import Check, Readiness
from app.servable import Answer, Question, Rejected, TensorSpec
from app.startup import StageView, State


def app_with(*routers: Any, **extra: Any) -> FastAPI:
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    install_errors(app)
    for router in routers:
        app.include_router(router, **extra)
    return app


def ask(app: ASGIApp, path: str, method: str = "GET", draining: bool = False, **sent: Any) -> httpx.Response:
    async def one() -> httpx.Response:
        transport = httpx.ASGITransport(Edge(app, lambda: draining), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://sidecar") as client:
            return await client.request(method, path, **sent)

    return asyncio.run(one())


def probing(
    *reasons: str | None,
    not_alive: str | None = None,
    not_started: str | None = None,
    eta_s: float | None = None,
) -> FastAPI:
    """Return the probes over the checks `startup`, `engine`, `shutdown` with these reasons."""
    names = ("startup", "engine", "shutdown")
    given = (*reasons, None, None, None)[: len(names)]
    checks = [Check(name, lambda reason=reason: reason, lambda: 0.5) for name, reason in zip(names, given, strict=True)]
    return app_with(
        probes.routes(
            probes.Probes(
                Readiness(*checks),
                lambda: not_alive,
                lambda: not_started,
                lambda: "starting" if any(given) else "ready",
                lambda: 12.34567,
                lambda: eta_s,
            )
        )
    )


READY, COLD, BOTH = (None, None), (None, "it is cold"), ("2 of 5 stages done", "it is cold")
GOOD_LINES = "[+]startup ok\n[+]engine ok\n[+]shutdown ok\nreadyz check passed\n"
COLD_LINES = "[+]startup ok\n[-]engine failed: it is cold\n[+]shutdown ok\nreadyz check failed\n"
WARN = "warn: some health checks cannot be excluded: no matches for"


@pytest.mark.parametrize(
    ("reasons", "path", "status", "body"),
    [
        (READY, "/readyz", 200, "ok"),
        (READY, "/readyz?verbose", 200, GOOD_LINES),
        (READY, "/readyz?verbose=1", 200, GOOD_LINES),
        (READY, "/readyz?exclude=engine", 200, "ok"),
        (READY, "/readyz?exclude=nothing", 200, f'ok\n{WARN} "nothing"'),
        (READY, "/readyz?verbose&exclude=nothing", 200, f'{WARN} "nothing"\n{GOOD_LINES}'),
        (COLD, "/readyz", 503, COLD_LINES),
        (COLD, "/readyz?verbose", 503, COLD_LINES),
        (COLD, "/readyz?exclude=engine", 200, "ok"),
        (
            COLD,
            "/readyz?verbose&exclude=engine",
            200,
            "[+]startup ok\n[+]engine excluded: ok\n[+]shutdown ok\nreadyz check passed\n",
        ),
        (COLD, "/readyz?exclude=startup", 503, COLD_LINES.replace("startup ok", "startup excluded: ok")),
        (COLD, "/readyz?exclude=b&exclude=a", 503, f'{WARN} "a" "b"\n{COLD_LINES}'),
        (
            BOTH,
            "/readyz",
            503,
            COLD_LINES.replace("[+]startup ok", "[-]startup failed: 2 of 5 stages done"),
        ),
        (BOTH, "/readyz?exclude=engine&exclude=startup", 200, "ok"),
        (READY, "/readyz/engine", 200, "ok"),
        (COLD, "/readyz/startup", 200, "ok"),
        (COLD, "/readyz/engine", 503, "[-]engine failed: it is cold\nengine check failed\n"),
    ],
)
def test_readiness_is_told_check_by_check(reasons: tuple[str | None, ...], path: str, status: int, body: str) -> None:
    found = ask(probing(*reasons), path)

    assert (found.status_code, found.text) == (status, body)
    assert found.headers["content-type"] == "text/plain; charset=utf-8"


@pytest.mark.parametrize(
    ("path", "not_alive", "not_started", "status", "body"),
    [
        ("/livez", None, "still reading", 200, "ok"),
        ("/healthz", None, "still reading", 200, "ok"),
        ("/livez", "stalled", None, 503, "[-]livez failed: stalled\nlivez check failed\n"),
        ("/healthz", "stalled", None, 503, "[-]livez failed: stalled\nlivez check failed\n"),
        ("/startupz", "stalled", None, 200, "ok"),
        ("/startupz", None, "still reading", 503, "[-]startupz failed: still reading\nstartupz check failed\n"),
    ],
)
def test_liveness_and_start_up_answer_for_themselves_whatever_readiness_says(
    path: str, not_alive: str | None, not_started: str | None, status: int, body: str
) -> None:
    found = ask(probing("cold", not_alive=not_alive, not_started=not_started), path)

    assert (found.status_code, found.text) == (status, body)


@pytest.mark.parametrize(
    "path",
    ["/healthz", "/livez", "/startupz", "/readyz", "/readyz?verbose", "/readyz/engine", "/readyz/nothing", "/nowhere"],
)
@pytest.mark.parametrize("method", ["GET", "HEAD"])
@pytest.mark.parametrize("slash", ["", "/", "//"])
def test_every_path_answers_get_and_head_with_and_without_slash_the_same_and_is_never_cached(
    path: str, method: str, slash: str
) -> None:
    name, mark, query = path.partition("?")
    app = probing(*COLD)

    plain, found = ask(app, path), ask(app, f"{name}{slash}{mark}{query}", method)

    assert (found.status_code, found.headers["cache-control"]) == (plain.status_code, "no-store")
    assert method == "HEAD" or name == "/nowhere" or found.text == plain.text


@pytest.mark.parametrize(
    ("eta_s", "header"),
    [(None, "1"), (0.0, "1"), (0.2, "1"), (7.4, "7"), (59.6, "60"), (3600.0, "60")],
)
@pytest.mark.parametrize("path", ["/readyz", "/readyz?verbose", "/readyz/engine"])
def test_a_failing_check_says_when_to_come_back_between_one_second_and_a_minute(
    path: str, eta_s: float | None, header: str
) -> None:
    assert ask(probing(*COLD, eta_s=eta_s), path).headers["retry-after"] == header


@pytest.mark.parametrize("path", ["/readyz", "/readyz?verbose", "/readyz/engine", "/livez", "/startupz"])
def test_an_answer_of_200_does_not_say_when_to_come_back(path: str) -> None:
    assert "retry-after" not in ask(probing(), path).headers


@pytest.mark.parametrize("path", ["/livez", "/startupz"])
def test_a_failing_liveness_or_start_up_says_when_to_come_back(path: str) -> None:
    assert ask(probing(not_alive="x", not_started="x"), path).headers["retry-after"] == "1"


@pytest.mark.parametrize(
    ("reasons", "query", "status", "ready", "phase"),
    [
        (READY, "", 200, True, "ready"),
        (COLD, "", 503, False, "starting"),
        (COLD, "?exclude=engine", 200, True, "starting"),
    ],
)
def test_readiness_as_json_holds_every_check_with_its_progress(
    reasons: tuple[str | None, ...], query: str, status: int, ready: bool, phase: str
) -> None:
    found = ask(probing(*reasons, eta_s=4.0), f"/readyz{query}", headers={"Accept": "application/json"})

    assert (found.status_code, found.headers["cache-control"]) == (status, "no-store")
    assert found.headers.get("retry-after") == (None if ready else "4")
    assert found.json() == {
        "ready": ready,
        "phase": phase,
        "checks": [
            {"name": "startup", "ok": True, "reason": None, "progress": 0.5},
            {"name": "engine", "ok": reasons[1] is None, "reason": reasons[1], "progress": 0.5},
            {"name": "shutdown", "ok": True, "reason": None, "progress": 0.5},
        ],
        "elapsed_s": 12.346,
        "eta_s": 4.0,
    }


def test_an_unknown_check_is_404_with_the_known_ones() -> None:
    found = ask(probing(), "/readyz/gpu")

    assert (found.status_code, found.json()) == (404, {"error": "no check gpu; there are startup, engine, shutdown"})


@pytest.mark.parametrize("accept", ["text/plain", "application/json"])
def test_a_long_reason_is_cut_so_that_a_probe_can_read_the_whole_answer(accept: str) -> None:
    found = ask(probing("x" * 50_000, "y" * 50_000), "/readyz", headers={"Accept": accept})

    assert "x" * 200 in found.text
    assert "x" * 201 not in found.text


@pytest.mark.parametrize(
    "path",
    [f"/readyz?exclude={'z' * 30_000}", f"/readyz?verbose&exclude={'z' * 30_000}", f"/readyz/{'z' * 30_000}"],
    ids=["plain", "verbose", "one check"],
)
def test_an_answer_stays_under_ten_kibibytes_whatever_is_asked(path: str) -> None:
    assert len(ask(probing(*COLD), path).content) < 10 * 1024


def error_routes() -> FastAPI:
    app = app_with()

    @app.get("/secret")
    async def secret() -> None:
        raise RuntimeError("the password is hunter2")

    @app.get("/rejected/{status}")
    async def rejected(status: int) -> None:
        raise Rejected(status, "not now", "queue_full" if status == 503 else None)

    @app.get("/number")
    async def number(size: int) -> int:
        return size

    @app.post("/only-post")
    async def only_post() -> None: ...

    return app


@pytest.mark.parametrize(
    ("method", "path", "status", "body", "headers"),
    [
        ("GET", "/nowhere", 404, {"error": "Not Found: GET /nowhere"}, {}),
        ("POST", "/secret", 405, {"error": "Method Not Allowed: POST /secret"}, {"allow": "GET"}),
        ("GET", "/only-post", 405, {"error": "Method Not Allowed: GET /only-post"}, {"allow": "POST"}),
        ("GET", "/secret", 500, {"error": "the inference failed: RuntimeError; the log has the details"}, {}),
        ("GET", "/rejected/400", 400, {"error": "not now"}, {}),
        ("GET", "/rejected/503", 503, {"error": "not now", "reason": "queue_full"}, {"retry-after": "1"}),
        ("GET", "/number", 400, {"error": "Field required"}, {}),
    ],
)
def test_every_error_has_the_shape_of_the_protocol(
    method: str, path: str, status: int, body: dict[str, str], headers: dict[str, str]
) -> None:
    found = ask(error_routes(), path, method)

    assert (found.status_code, found.json(), found.headers["cache-control"]) == (status, body, "no-store")
    assert {name: found.headers.get(name) for name in ("allow", "retry-after")} == {
        "allow": None,
        "retry-after": None,
        **headers,
    }


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
def test_a_probe_tells_the_methods_that_it_answers(method: str) -> None:
    found = ask(probing(), "/readyz", method)

    assert (found.status_code, set(found.headers["allow"].split(", "))) == (405, {"GET", "HEAD"})
    assert found.json() == {"error": f"Method Not Allowed: {method} /readyz"}


@pytest.mark.parametrize(("draining", "connection"), [(False, None), (True, "close")])
@pytest.mark.parametrize("path", ["/livez", "/nowhere"])
def test_connections_are_closed_while_draining(path: str, draining: bool, connection: str | None) -> None:
    assert ask(probing(), path, draining=draining).headers.get("connection") == connection


@pytest.mark.parametrize(
    ("rejected", "status", "body", "header"),
    [
        (Rejected(503, "later", "not_ready"), 503, b'{"error":"later","reason":"not_ready"}', "1"),
        (Rejected(503, "later"), 503, b'{"error":"later"}', "1"),
        (Rejected(400, "no"), 400, b'{"error":"no"}', None),
        (Rejected(504, "late", "deadline"), 504, b'{"error":"late","reason":"deadline"}', None),
    ],
)
def test_only_a_503_says_when_to_come_back(rejected: Rejected, status: int, body: bytes, header: str | None) -> None:
    found = as_error(rejected)

    assert (found.status_code, found.body, found.headers.get("retry-after")) == (status, body, header)


def test_the_wait_is_a_whole_number_of_seconds() -> None:
    assert retry_after(2.5) == {"Retry-After": "2"}


def keyed(key_file: Path | None, now: Callable[[], float] = lambda: 0.0) -> FastAPI:
    app, check = app_with(), key_check(key_file, now)

    def authorize(request: Request) -> None:
        check(request.headers)

    @app.get("/v2", dependencies=[Depends(authorize)])
    async def inner() -> str:
        return "in"

    return app


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Authorization": "Bearer s3cret"}, 200),
        ({"X-API-Key": "s3cret"}, 200),
        ({"Authorization": "bearer  s3cret"}, 200),
        ({"Authorization": "BEARER n3xt"}, 200),
        ({"X-API-Key": b"\xff\xfe"}, 200),
        ({}, 401),
        ({"Authorization": "Bearer"}, 401),
        ({"Authorization": "s3cret"}, 401),
        ({"Authorization": "Bearer s3cre"}, 401),
        ({"Authorization": "Bearer s3cret2"}, 401),
        ({"Authorization": "Basic s3cret"}, 401),
        ({"X-API-Key": ""}, 401),
        ({"X-API-Key": "wrong", "Authorization": "Bearer s3cret"}, 401),
        ({"X-API-Key": "ÿ".encode("latin-1")}, 401),
    ],
)
def test_a_key_is_wanted_as_bearer_or_as_header(tmp_path: Path, headers: dict[str, Any], status: int) -> None:
    (tmp_path / "key").write_bytes(b"  s3cret\n\nn3xt \r\n\xff\xfe")

    found = ask(keyed(tmp_path / "key"), "/v2", headers=headers)

    assert found.status_code == status
    assert found.json() == (
        "in" if status == 200 else {"error": "this server wants an API key: Authorization: Bearer … or X-API-Key"}
    )


def test_without_a_key_file_everybody_may_ask() -> None:
    assert ask(keyed(None), "/v2").status_code == 200


def test_keys_that_change_are_read_again_a_second_later_and_what_cannot_be_read_changes_nothing(
    tmp_path: Path,
) -> None:
    file, now = tmp_path / "key", [0.0]
    file.write_text("first")
    app = keyed(file, lambda: now[0])

    def accepted(*keys: str) -> list[str]:
        return [key for key in keys if ask(app, "/v2", headers={"X-API-Key": key}).status_code == 200]

    file.write_text("second\nthird")
    assert accepted("first", "second", "third") == ["first"], "looked at before its time"
    now[0] += LOOK_S
    assert accepted("first", "second", "third") == ["second", "third"]
    for change in (lambda: file.write_text("\n"), file.unlink):
        change()
        now[0] += LOOK_S
        assert accepted("first", "second", "third") == ["second", "third"]
    file.write_text("first")
    now[0] += LOOK_S
    assert accepted("first", "second", "third") == ["first"]


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda path: None, "cannot be read: No such file or directory"),
        (lambda path: path.write_text(" \n"), "is empty"),
    ],
    ids=["absent", "empty"],
)
def test_a_key_file_without_a_key_is_refused_at_once(tmp_path: Path, make: Callable[[Path], object], why: str) -> None:
    make(tmp_path / "key")

    with pytest.raises(SettingsError) as caught:
        key_check(tmp_path / "key", lambda: 0.0)

    assert str(caught.value) == f"http.api_key_file = {tmp_path / 'key'} {why}"


INPUTS = (TensorSpec("x", "INT64", ("batch", 2)),)
OUTPUTS = (TensorSpec("y", "FP32", ("batch", 2)),)


class Doubling:
    """Answers twice its input; what it is told to raise, it raises."""

    inputs, outputs = INPUTS, OUTPUTS

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.asked: list[Question] = []

    async def answer(self, question: Question) -> Answer:
        self.asked.append(question)
        if self.error:
            raise self.error
        return Answer({"y": (question.arrays["x"] * 2).astype(np.float32)}, 1, Route(Kind.EXACT, None, ()), 0.0, 0.0)


def stage(name: str, state: State, detail: str = "") -> StageView:
    return StageView(name, state, (), Lane.DISK, None, None, 0, 0, "", None, detail, ())


WAITING, RUNNING = stage("bind-engine", State.WAITING), stage("read-weights", State.RUNNING, "3 of 9")
FAILED = stage("preflight", State.FAILED, "no memory")


def gate(
    servable: Doubling | None = None,
    missing: tuple[StageView, ...] = (),
    engine_down: str | None = None,
    closed: str | None = None,
) -> Gate:
    return Gate(lambda: servable, lambda: missing, lambda: engine_down, lambda: closed)


def protocol(
    opened: Gate,
    not_ready: str | None = None,
    limit: int = 1000,
    seen: list[tuple[int, str | None]] | None = None,
    loading: bool = False,
) -> FastAPI:
    observed = [] if seen is None else seen
    observer = Observer(lambda: None, lambda status, reason, *_: observed.append((status, reason)))
    made = Inferences(
        "tiny",
        "2",
        (ModelPath(FORWARD, INPUTS, OUTPUTS, (), ()),),
        lambda: None,
        opened,
        open_to_all,
        limit,
        5.0,
        observer,
        iter(range(1000)).__next__,
    )
    state = oip.ModelState(made, Statistics(lambda: 0), lambda: not_ready, lambda: loading, batch_delay_ms=2)
    health = oip.health_routes(lambda: None, lambda: not_ready)
    return app_with(health, oip.routes(state), oip.inference_routes(made))


BODY = {"inputs": [{"name": "x", "datatype": "INT64", "shape": [1, 2], "data": [1, 2]}]}


@pytest.mark.parametrize(
    ("closed_gate", "reason", "error"),
    [
        (gate(missing=(WAITING,)), "not_ready", "starting: bind-engine waiting"),
        (gate(missing=(WAITING, RUNNING)), "not_ready", "starting: read-weights running: 3 of 9"),
        (gate(missing=(WAITING, FAILED, RUNNING)), "not_ready", "starting: preflight failed: no memory"),
        (gate(Doubling(), missing=(RUNNING,)), "not_ready", "starting: read-weights running: 3 of 9"),
        (gate(Doubling(), engine_down="stuck for 9 s"), "not_ready", "engine: stuck for 9 s"),
        (gate(), "not_ready", "starting"),
        (gate(Doubling(), closed="the server is shutting down"), "draining", "the server is shutting down"),
        (gate(missing=(WAITING,), closed="the server is shutting down"), "draining", "the server is shutting down"),
    ],
)
def test_inference_before_ready_or_after_the_drain_is_503_with_the_reason_and_is_counted(
    closed_gate: Gate, reason: str, error: str
) -> None:
    seen: list[tuple[int, str | None]] = []

    found = ask(protocol(closed_gate, seen=seen), "/v2/models/tiny/infer", "POST", json=BODY)

    assert (found.status_code, found.json(), found.headers["retry-after"]) == (
        503,
        {"error": error, "reason": reason},
        "1",
    )
    assert seen == [(503, reason)]


@pytest.mark.parametrize("path", ["/v2/models/tiny/infer", "/v2/models/tiny/versions/2/infer"])
@pytest.mark.parametrize("content_type", ["application/json", "application/octet-stream", None])
def test_an_open_gate_lets_inference_through_whatever_the_content_type(path: str, content_type: str | None) -> None:
    seen: list[tuple[int, str | None]] = []
    headers = {"Content-Type": content_type} if content_type else {}
    body = httpx.Request("POST", "http://x", json={**BODY, "id": "a"}).content

    found = ask(protocol(gate(Doubling()), seen=seen), path, "POST", content=body, headers=headers)

    assert (found.status_code, seen) == (200, [(200, None)])
    assert found.json() == {
        "model_name": "tiny",
        "model_version": "2",
        "id": "a",
        "outputs": [{"name": "y", "datatype": "FP32", "shape": [1, 2], "data": [2.0, 4.0]}],
    }


@pytest.mark.parametrize(
    ("path", "error"),
    [
        ("/v2/models/big/infer", "unknown model big; this server has tiny"),
        ("/v2/models/tiny/versions/3/infer", "unknown version 3 of tiny; this server has 2"),
    ],
)
def test_another_model_or_version_is_404_even_before_ready(path: str, error: str) -> None:
    found = ask(protocol(gate()), path, "POST", json=BODY)

    assert (found.status_code, found.json()) == (404, {"error": error})


@pytest.mark.parametrize("declared", [True, False])
def test_a_body_beyond_the_limit_is_413_by_its_declared_length_and_while_it_streams(declared: bool) -> None:
    async def parts() -> Any:
        for _ in range(4):
            yield b" " * 4

    content = b" " * 16 if declared else parts()

    found = ask(protocol(gate(Doubling()), limit=15), "/v2/models/tiny/infer", "POST", content=content)

    assert (found.status_code, found.json()) == (
        413,
        {"error": "the body is larger than serving.max_body_bytes = 15", "reason": "too_large"},
    )


@pytest.mark.parametrize(
    ("error", "status", "body", "counted"),
    [
        (Rejected(400, "uncovered", "uncovered"), 400, {"error": "uncovered", "reason": "uncovered"}, "uncovered"),
        (
            ValueError("row 7 of the customer table"),
            500,
            {"error": "the inference failed: ValueError; the log has the details"},
            None,
        ),
    ],
)
def test_a_servable_that_refuses_or_breaks_is_answered_and_counted(
    error: Exception, status: int, body: dict[str, str], counted: str | None
) -> None:
    seen: list[tuple[int, str | None]] = []

    found = ask(protocol(gate(Doubling(error)), seen=seen), "/v2/models/tiny/infer", "POST", json=BODY)

    assert (found.status_code, found.json(), seen) == (status, body, [(status, counted)])


EXTENSIONS = ["binary_tensor_data", "model_configuration", "model_repository", "statistics"]
METADATA = {
    "name": "tiny",
    "versions": ["2"],
    "platform": "pytorch_safetensors",
    "inputs": [{"name": "x", "datatype": "INT64", "shape": [-1, 2]}],
    "outputs": [{"name": "y", "datatype": "FP32", "shape": [-1, 2]}],
}


@pytest.mark.parametrize(
    ("path", "not_ready", "status", "body"),
    [
        ("/v2", "cold", 200, {"name": "warmgate", "version": __version__, "extensions": EXTENSIONS}),
        ("/v2/models", "cold", 200, {"models": ["tiny"]}),
        ("/v2/models/tiny", "cold", 200, METADATA),
        ("/v2/models/tiny/versions/2", "cold", 200, METADATA),
        ("/v2/models/tiny/versions/1", None, 404, {"error": "unknown version 1 of tiny; this server has 2"}),
        ("/v2/models/big", None, 404, {"error": "unknown model big; this server has tiny"}),
        ("/v2/models/tiny/ready", None, 200, {"name": "tiny", "ready": True}),
        ("/v2/models/tiny/ready", "engine: cold", 503, {"error": "engine: cold", "reason": "not_ready"}),
        ("/v2/models/tiny/versions/2/ready", None, 200, {"name": "tiny", "ready": True}),
        ("/v2/models/big/ready", None, 404, {"error": "unknown model big; this server has tiny"}),
        ("/v2/health/live", "cold", 200, {"live": True}),
        ("/v2/health/ready", None, 200, {"ready": True, "live": True}),
        ("/v2/health/ready", "engine: cold", 503, {"error": "engine: cold", "reason": "not_ready"}),
    ],
)
def test_the_protocol_tells_what_is_served_and_whether_it_may_be_asked(
    path: str, not_ready: str | None, status: int, body: dict[str, Any]
) -> None:
    app = protocol(gate(Doubling()), not_ready)

    found, head = ask(app, path), ask(app, f"{path}/", "HEAD")

    assert (found.status_code, found.json(), found.headers["cache-control"]) == (status, body, "no-store")
    assert head.status_code == status


def index(body: bytes = b"", not_ready: str | None = None, loading: bool = False) -> tuple[int, Any]:
    found = ask(protocol(gate(), not_ready, loading=loading), "/v2/repository/index", "POST", content=body)
    return found.status_code, found.json()


@pytest.mark.parametrize(
    ("not_ready", "loading", "state"),
    [
        (None, False, "READY"),
        ("read-weights: running", True, "LOADING"),
        ("engine: device lost", False, "UNAVAILABLE"),
    ],
)
@pytest.mark.parametrize("body", [b"", b"{}", b'{"ready": false}', b'{"ready": null, "other": 1}'])
def test_the_repository_tells_the_models_state_and_why(
    body: bytes, not_ready: str | None, loading: bool, state: str
) -> None:
    row = {"name": "tiny", "version": "2", "state": state, "reason": not_ready or ""}

    assert index(body, not_ready, loading) == (200, [row])


@pytest.mark.parametrize(("not_ready", "rows"), [(None, 1), ("engine: device lost", 0)])
def test_the_repository_leaves_out_what_is_not_ready_where_it_is_asked_to(not_ready: str | None, rows: int) -> None:
    status, found = index(b'{"ready": true}', not_ready)

    assert (status, len(found)) == (200, rows)


@pytest.mark.parametrize("body", [b"{", b"[]", b"5", b'{"ready": 1}', b'{"ready": "yes"}'])
def test_a_request_for_the_index_that_is_none_is_refused(body: bytes) -> None:
    status, found = index(body)

    assert (status, list(found)) == (400, ["error"])


def test_a_request_for_the_index_has_its_own_limit() -> None:
    assert index(b" " * (oip.INDEX_BYTES + 1))[0] == 413


def infer(app: FastAPI, headers: dict[str, str] | None = None, body: Any = BODY) -> httpx.Response:
    return ask(app, "/v2/models/tiny/infer", "POST", json=body, headers=headers)


@pytest.mark.parametrize("status", [200, 400, 404, 503])
def test_an_answer_and_a_refusal_bear_the_id_that_the_request_came_with(status: int) -> None:
    app = protocol(gate(Doubling()) if status != 503 else gate())
    path = "/v2/models/other/infer" if status == 404 else "/v2/models/tiny/infer"

    found = ask(app, path, "POST", json={} if status == 400 else BODY, headers={"X-Request-Id": "trace-7!"})

    assert (found.status_code, found.headers["x-request-id"]) == (status, "trace-7!")


@pytest.mark.parametrize("given", ["", "two words", "tab\t", "x" * 129, "ÿ"])
def test_an_id_that_would_not_stay_one_word_of_a_line_is_replaced(given: str) -> None:
    app = protocol(gate(Doubling()))

    ids = [infer(app, {"X-Request-Id": given.encode("latin-1")}).headers["x-request-id"] for _ in range(2)]  # type: ignore[dict-item]

    assert len({*ids, given}) == 3
    assert all(re.fullmatch(r"[0-9a-f]+-[0-9a-f]+", one) for one in ids)


@pytest.mark.parametrize(
    ("headers", "parameter", "seconds"),
    [
        ({}, None, None),
        ({"X-Request-Timeout-Ms": "250"}, None, 0.25),
        ({"X-Envoy-Expected-Rq-Timeout-Ms": "1500"}, None, 1.5),
        ({"X-Request-Timeout-Ms": "250", "X-Envoy-Expected-Rq-Timeout-Ms": "100"}, None, 0.1),
        ({"X-Request-Timeout-Ms": "250"}, 50_000, 0.05),
        ({"X-Request-Timeout-Ms": "250"}, 500_000, 0.25),
        ({"X-Request-Timeout-Ms": "0"}, None, None),
        ({"X-Request-Timeout-Ms": "9" * 400}, None, 999999999999.999),
    ],
)
def test_the_shortest_time_that_anybody_gives_a_request_counts(
    headers: dict[str, str], parameter: int | None, seconds: float | None
) -> None:
    model = Doubling()
    body = BODY if parameter is None else {**BODY, "parameters": {"timeout": parameter}}

    assert infer(protocol(gate(model)), headers, body).status_code == 200
    assert [question.timeout_s for question in model.asked] == [seconds]


@pytest.mark.parametrize("value", ["-1", "1.5", "1s", "²"])
def test_a_time_in_a_header_that_is_none_is_refused(value: str) -> None:
    found = infer(protocol(gate(Doubling())), {"X-Request-Timeout-Ms": value.encode("latin-1")})  # type: ignore[dict-item]

    assert found.status_code == 400
    assert found.json()["error"].startswith("the header X-Request-Timeout-Ms must be whole milliseconds, got ")


def test_a_body_that_does_not_arrive_is_refused_by_name() -> None:
    async def never() -> Any:
        await asyncio.sleep(60)

    with pytest.raises(Rejected) as caught:
        asyncio.run(read_body(never, "", 100, 0.01))

    assert (caught.value.status, str(caught.value)) == (
        400,
        "the body has not arrived within http.receive_timeout_s = 0.01",
    )


def test_what_an_application_lets_out_is_answered_and_logged_by_kind_alone() -> None:
    app = app_with()

    @app.get("/broken")
    async def broken() -> None:
        raise ValueError("what was asked")

    with structlog.testing.capture_logs() as logged:
        found = ask(app, "/broken")

    (row,) = logged
    assert (found.status_code, found.json()["error"].partition(";")[0]) == (500, "the inference failed: ValueError")
    assert (row["event"], row["error"]) == ("a request failed", "ValueError")
    assert row["frames"][-1].endswith(" broken")
    assert "what was asked" not in f"{row}{found.text}"
