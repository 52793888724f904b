"""Who gets in and by which door, how long the server waits for them, and what of them stays in its log."""

import contextlib
import http.client
import json
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import models
from tests.e2e.conftest import JSON, Start, configuration, save
from tests.e2e.harness import Server, command
from tests.e2e.test_protocol import request

CANARY = "canary-5f2c"
INFER = "/v2/models/tiny/infer"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def until(holds: Any, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


class UnixConnection(http.client.HTTPConnection):
    """HTTP over a socket file."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=30)
        self.path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(str(self.path))


def ask(connection: http.client.HTTPConnection, method: str, target: str, body: bytes | None = None) -> int:
    with contextlib.closing(connection):
        try:
            connection.request(method, target, body)
            return connection.getresponse().status
        except OSError:
            return 0


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    directory = tmp_path_factory.mktemp("tls")
    made, key = directory / "tls.crt", directory / "tls.key"
    subject = ("-subj", "/CN=warmgate", "-addext", "subjectAltName=DNS:warmgate.example")
    options = ("-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2", *subject)
    subprocess.run(["openssl", "req", *options, "-keyout", key, "-out", made], check=True, capture_output=True)
    return made, key


def test_one_server_serves_tls_a_socket_file_and_a_port_for_probes(
    start: Start, tiny_config: JSON, tmp_path: Path, certificate: tuple[Path, Path]
) -> None:
    file, admin = tmp_path / "socket", free_port()
    made, key = certificate
    names = {"uds": str(file), "admin_port": admin, "ssl_certfile": str(made), "ssl_keyfile": str(key)}
    tiny_config["http"] |= names
    server = start(tiny_config)

    def probe(path: str) -> int:
        return ask(http.client.HTTPConnection("127.0.0.1", admin, timeout=30), "GET", path)

    until(lambda: probe("/readyz") == 200)  # so it has rehearsed requests through TLS
    assert ask(UnixConnection(file), "POST", INFER, request()) == 200
    assert [probe(path) for path in ("/healthz", "/startupz", "/metrics", "/status", "/readyz/engine")] == [200] * 5
    assert [probe(path) for path in ("/v2", "/v2/health/ready", "/openapi.json")] == [404] * 3
    assert ask(http.client.HTTPConnection("127.0.0.1", admin, timeout=30), "POST", INFER, request()) == 404

    trusting = ssl.create_default_context(cafile=str(made))
    with (
        socket.create_connection(("127.0.0.1", server.port)) as plain,
        trusting.wrap_socket(plain, server_hostname="warmgate.example") as encrypted,
    ):
        secure = http.client.HTTPConnection("warmgate.example")
        secure.sock = encrypted
        assert ask(secure, "POST", INFER, request()) == 200
    assert ask(http.client.HTTPConnection("127.0.0.1", server.port, timeout=5), "GET", "/healthz") == 0

    assert server.stop() == 0
    assert not [event for event in server.events() if event.get("level") == "error"]


def test_a_server_may_have_no_port_at_all(start: Start, tiny_config: JSON, tmp_path: Path) -> None:
    file = tmp_path / "socket"
    tiny_config["http"] |= {"uds": str(file)}
    server = start(tiny_config, port=None)

    until(lambda: ask(UnixConnection(file), "GET", "/readyz") == 200)

    assert ask(UnixConnection(file), "POST", INFER, request()) == 200
    assert server.stop() == 0


@pytest.mark.parametrize("change", ["missing", "other key", "no certificate"])
def test_a_certificate_that_cannot_be_used_is_a_wrong_configuration(
    tiny_config: JSON, tmp_path: Path, certificate: tuple[Path, Path], change: str
) -> None:
    made, key = certificate
    if change == "other key":
        key = tmp_path / "other.key"
        subprocess.run(["openssl", "genrsa", "-out", key, "2048"], check=True, capture_output=True)
    if change == "no certificate":
        made = tmp_path / "tls.crt"
        made.write_text("none")
    if change == "missing":
        made = tmp_path / "missing"
    tiny_config["http"] |= {"port": free_port(), "ssl_certfile": str(made), "ssl_keyfile": str(key)}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(tiny_config))

    done = command("serve", "--config", str(file))

    assert done.returncode == 2
    assert f"http.ssl_certfile = {made} and http.ssl_keyfile = {key} cannot be used" in done.stdout + done.stderr


@pytest.fixture(scope="module")
def guarded(tiny: JSON, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with a key, that waits two seconds for a request and takes 20 kB."""
    directory = tmp_path_factory.mktemp("guarded")
    (directory / "key").write_text("secret\n")
    limits = {"max_body_bytes": 20_000}
    own = {**tiny["http"], "api_key_file": str(directory / "key"), "receive_timeout_s": 1}
    with Server(directory, {**tiny, "serving": limits, "http": own}) as server:
        server.wait()
        yield server


def test_an_api_key_is_asked_for_by_the_protocol_alone_and_may_change(guarded: Server) -> None:
    def status(key: str) -> int:
        return guarded.post(INFER, request(), {"Authorization": f"Bearer {key}"})[0]

    for path in ("/healthz", "/metrics", "/status", "/v2/health/ready"):
        assert guarded.get(path)[0] == 200
    code, body = guarded.post(INFER, request())
    assert (code, set(json.loads(body))) == (401, {"error"})
    assert (status("secret"), guarded.post(INFER, request(), {"X-API-Key": "secret"})[0]) == (200, 200)

    (guarded.config.parent / "key").write_text("secret\nnew\n")
    until(lambda: status("new") == 200)
    assert status("secret") == 200
    (guarded.config.parent / "key").unlink()
    time.sleep(1.1)
    assert status("new") == 200
    told = [event for event in guarded.events() if event["event"] == "the API keys stay as they were"]
    assert [event["why"] for event in told] == ["cannot be read: No such file or directory"]
    assert "secret" not in guarded.text()


HEAD = f"POST {INFER} HTTP/1.1\r\nHost: x\r\nX-API-Key: secret\r\n"


def closed_within(connection: socket.socket, seconds: float) -> bytes:
    """Return all that comes until the server closes the connection."""
    connection.settimeout(seconds)
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(65536):
            found += part
    return found


# What a client sends, and how the answer begins that it gets before the connection is closed.
UNFINISHED = (
    ("", b""),
    ("POST /v2/mod", b""),
    (HEAD, b""),
    (HEAD + "Content-Length: 100\r\n\r\n", b"HTTP/1.1 400"),
    (HEAD + "Content-Length: 100\r\n\r\n{", b"HTTP/1.1 400"),
    (HEAD + "Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n", b"HTTP/1.1 400"),
)


def test_whoever_does_not_send_a_request_is_sent_away(guarded: Server) -> None:
    with contextlib.ExitStack() as stack:
        connections = []
        for sent, _ in UNFINISHED:
            connections.append(stack.enter_context(socket.create_connection(("127.0.0.1", guarded.port))))
            connections[-1].sendall(sent.encode())
        found = [closed_within(connection, 10) for connection in connections]

    assert [answer[:12] for answer in found] == [begins for _, begins in UNFINISHED]
    assert all((b"http.receive_timeout_s = 1" in answer) == bool(answer) for answer in found)


def test_slow_senders_hold_no_place_of_others(guarded: Server) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(300):
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", guarded.port)))
            connection.sendall((HEAD + "Content-Length: 100\r\n\r\n{").encode())
        assert guarded.post(INFER, request(), {"X-API-Key": "secret"})[0] == 200
        assert guarded.get("/readyz")[0] == 200


def test_a_refused_body_is_read_to_a_bound_and_its_refusal_arrives(guarded: Server) -> None:
    with socket.create_connection(("127.0.0.1", guarded.port)) as connection:
        connection.sendall((HEAD + "Content-Length: 10000000000\r\n\r\n").encode())
        connection.settimeout(10)
        assert connection.recv(12) == b"HTTP/1.1 413"
        sent = 0
        with pytest.raises(ConnectionError):  # noqa: PT012 - any of many sends is the one that fails
            while sent < 100_000_000:
                connection.sendall(bytes(100_000))
                sent += 100_000


def test_nothing_of_a_request_is_logged_whatever_becomes_of_it(start: Start, tmp_path: Path) -> None:
    save(models.Tiny(), tmp_path / "model.safetensors")
    config = configuration("telling", tmp_path / "model.safetensors", tmp_path / "store", compile={"engine": "eager"})
    config["model"]["factory"] = "tests.e2e.models:Telling"
    server = start(config)
    server.wait()
    path = "/v2/models/telling/infer"
    row = {"name": "x", "datatype": "FP32", "shape": [1, 16], "data": [12345.0] * 16}

    bodies: list[bytes] = [
        json.dumps({"inputs": [row], "id": CANARY, "parameters": {"key": CANARY}}).encode(),
        json.dumps({"inputs": [{**row, "name": CANARY}]}).encode(),
        json.dumps({"inputs": [{**row, "datatype": CANARY}]}).encode(),
        json.dumps({"inputs": [{**row, "data": [CANARY] * 16}]}).encode(),
        json.dumps({"inputs": [row], "outputs": [{"name": CANARY}]}).encode(),
        json.dumps({"inputs": [row], "parameters": {"path": CANARY}}).encode(),
        CANARY.encode(),
    ]
    statuses = [server.post(path, body, {"X-Request-Id": "trace-7", "X-Note": CANARY})[0] for body in bodies]
    statuses.append(server.post(f"/v2/models/{CANARY}/infer", bodies[0])[0])
    statuses.append(server.post(path, bodies[0], {"Inference-Header-Content-Length": CANARY})[0])
    statuses.append(server.post(path, bodies[0], {"Content-Encoding": CANARY})[0])
    statuses.append(server.get(f"/{CANARY}?{CANARY}")[0])
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(f"{CANARY} {CANARY}\r\n\r\n".encode())
        statuses.append(int(connection.recv(100).split()[1]))

    assert statuses == [500, 400, 400, 400, 400, 400, 400, 404, 400, 415, 404, 400]
    failed = [event for event in server.events() if event["event"] == "inference failed"]
    assert [event["request_id"] for event in failed] == ["trace-7"]
    assert server.stop() == 0
    assert CANARY not in server.text()
    assert "12345" not in server.text()
