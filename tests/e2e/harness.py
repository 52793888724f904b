"""Drives a real Warmgate process through its public interface."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
JSON = dict[str, Any]


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("TORCHINDUCTOR", "WARMGATE_"))}
    return {**kept, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", **(extra or {})}


def command(*arguments: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "app", *arguments],
        cwd=ROOT,
        env=environment(env),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


class Server:
    """One `serve` process on a free port."""

    def __init__(
        self, directory: Path, config: JSON, env: Mapping[str, str] | None = None, **http_options: Any
    ) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.log = directory / "log"
        self.config = directory / "config.yaml"
        merged = {**config, "http": {"host": "127.0.0.1", **config.get("http", {}), "port": self.port, **http_options}}
        self.config.write_text(json.dumps(merged))
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "app", "serve", "--config", str(self.config)],
                cwd=ROOT,
                env=environment(env),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def get(self, path: str, headers: Mapping[str, str] | None = None) -> tuple[int, bytes, Mapping[str, str]]:
        return self.send(urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", headers=dict(headers or {})))

    def post(self, path: str, body: bytes, headers: Mapping[str, str] | None = None) -> tuple[int, bytes]:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", data=body, headers=dict(headers or {}), method="POST"
        )
        return self.send(request)[:2]

    @staticmethod
    def send(request: urllib.request.Request, timeout: float = 60) -> tuple[int, bytes, Mapping[str, str]]:
        try:
            with urllib.request.urlopen(request, timeout=timeout) as answer:
                return answer.status, answer.read(), answer.headers
        except urllib.error.HTTPError as error:
            return error.code, error.read(), error.headers

    def infer(self, model: str, inputs: Mapping[str, Any], **extra: Any) -> tuple[int, JSON]:
        names = {"int64": "INT64", "float32": "FP32"}
        rows = [
            {"name": n, "shape": list(a.shape), "datatype": names[str(a.dtype)], "data": a.ravel().tolist()}
            for n, a in inputs.items()
        ]
        status, body = self.post(f"/v2/models/{model}/infer", json.dumps({"inputs": rows, **extra}).encode())
        return status, json.loads(body)

    def status(self) -> JSON:
        found: JSON = json.loads(self.get("/status")[1])
        return found

    def wait(self, path: str = "/readyz", code: int = 200, timeout: float = 180) -> None:
        """Wait until a path answers with a status; a process that ends before is a failure with its log."""
        until = time.monotonic() + timeout
        while time.monotonic() < until:
            if self.process.poll() is not None:
                raise AssertionError(f"exit code {self.process.returncode} before {path}: {self.text()[-3000:]}")
            with contextlib.suppress(OSError):
                if self.get(path)[0] == code:
                    return
            time.sleep(0.02)
        raise AssertionError(f"{path} was not {code} within {timeout} s: {self.text()[-3000:]}")

    def wait_for_stage(self, name: str, state: str) -> None:
        until = time.monotonic() + 120
        while time.monotonic() < until:
            with contextlib.suppress(OSError):
                if any(s["name"] == name and s["state"] == state for s in self.status()["stages"]):
                    return
            time.sleep(0.01)
        raise AssertionError(f"{name} was never {state}: {self.text()[-3000:]}")

    def signal(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def exit_code(self, timeout: float = 120) -> int:
        return self.process.wait(timeout)

    def stop(self) -> int:
        self.signal()
        return self.exit_code()

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def events(self) -> list[JSON]:
        lines = (line for line in self.text().splitlines() if line.startswith("{"))
        return [json.loads(line) for line in lines]

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextlib.contextmanager
def load(server: Server, model: str, inputs: Mapping[str, Any], clients: int = 4) -> Iterator[list[Any]]:
    """Send requests from several clients until the block ends; yields every answer that was not 200, with its time."""
    failures: list[Any] = []
    over = threading.Event()

    def ask() -> None:
        while not over.is_set():
            try:
                status, body = server.infer(model, inputs)
                if status != 200:
                    failures.append((time.monotonic(), status, body))
            except OSError as error:
                failures.append((time.monotonic(), repr(error)))
                time.sleep(0.01)

    threads = [threading.Thread(target=ask, daemon=True) for _ in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield failures
    finally:
        over.set()
        for thread in threads:
            thread.join(30)


def outputs(body: JSON) -> Any:
    row = body["outputs"][0]
    return np.array(row["data"], dtype=np.float32).reshape(row["shape"])
