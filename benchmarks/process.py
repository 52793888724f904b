"""Start the sidecar on the example, probe it, ask it; everything through its socket, as the kubelet and a client do."""

import contextlib
import http.client
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
# How often a kubelet asks at most. Where only the server's own times count, faster probes would take from them.
KUBELET_S = 1.0
EXAMPLE = ROOT / "examples/minilm.yaml"


def environment() -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("TORCHINDUCTOR", "WARMGATE_"))}
    return {**kept, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}


def seconds_of(code: str, runs: int = 5) -> float:
    """Return the median wall time of a whole Python process that runs `code`."""
    times = []
    for _ in range(runs):
        began = time.monotonic()
        subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment(), check=True)
        times.append(time.monotonic() - began)
    return statistics.median(times)


def resident_bytes_of(code: str) -> int:
    """Return the resident size of a Python process after it has run `code`."""
    tell = "; print(next(l for l in open('/proc/self/status') if l.startswith('VmRSS')).split()[1])"
    done = subprocess.run(
        [sys.executable, "-c", code + tell], cwd=ROOT, env=environment(), check=True, capture_output=True, text=True
    )
    return int(done.stdout) * 1024


def figure(module: str, name: str, directory: Path) -> Any:
    """Return what `python -m MODULE NAME DIRECTORY` prints: a process of its own inherits nobody's memory."""
    done = subprocess.run(
        [sys.executable, "-m", module, name, directory],
        cwd=ROOT,
        env=environment(),
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def inference(rows: int, length: int) -> bytes:
    """Return the body of a request for texts of one shape; equal shapes have equal tokens."""
    inputs = [
        {"name": name, "shape": list(array.shape), "datatype": "INT64", "data": array.ravel().tolist()}
        for name, array in tokens(rows, length).items()
    ]
    return json.dumps({"inputs": inputs}).encode()


def tokens(rows: int, length: int) -> dict[str, Any]:
    """Return the tensors of such a request."""
    generator = np.random.Generator(np.random.PCG64(rows * 1000 + length))
    ids = generator.integers(1, 30000, (rows, length))
    return {"input_ids": ids, "attention_mask": np.ones_like(ids)}


class Sidecar:
    """One `serve` process; times count from its exec."""

    def __init__(self, store: Path, *assignments: str, config: Path = EXAMPLE) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        options = [f"http.port={self.port}", f"compile.artifacts={store}", f"report.file={store}.json", *assignments]
        arguments = [part for option in options for part in ("--set", option)]
        self.log = store.with_suffix(".log").open("ab")
        self.began = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "app", "serve", "--config", str(config), *arguments],
            cwd=ROOT,
            env=environment(),
            stdout=self.log,
            stderr=subprocess.STDOUT,
        )

    def get(self, path: str) -> int | None:
        """Ask as a probe does: a new connection; None when it is refused."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request("GET", path, headers={"Connection": "close"})
            answer = connection.getresponse()
            answer.read()
        except OSError:
            return None
        finally:
            connection.close()
        return answer.status

    def wait(self, path: str = "/readyz", every_s: float = 0.01) -> float:
        """Return the seconds from exec until `path` says 200."""
        while self.get(path) != 200:
            if self.process.poll() is not None:
                raise SystemExit(f"the sidecar ended with {self.process.returncode}; see {self.log.name}")
            time.sleep(every_s)
        return time.monotonic() - self.began

    def read(self, path: str) -> bytes:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        connection.request("GET", path, headers={"Connection": "close"})
        return connection.getresponse().read()

    def status(self) -> Any:
        return json.loads(self.read("/status"))

    def warm_status(self) -> Any:
        """Return the status; raises SystemExit where the start had to build its code."""
        report = self.status()
        if report["artifacts"]["outcome"] != "restored":
            raise SystemExit(f"not a warm start: {report['artifacts']}")
        return report

    def metric(self, sample: str) -> float:
        """Return one sample of /metrics, named with its labels as it stands there."""
        rows = (line.rpartition(" ") for line in self.read("/metrics").decode().splitlines())
        return next(float(value) for name, _, value in rows if name == sample)

    def resident_bytes(self) -> int:
        rows = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(int(row.split()[1]) * 1024 for row in rows if row.startswith("VmRSS"))

    def asker(self) -> Callable[[bytes], float]:
        """Return a function that sends one inference on a kept connection and returns its seconds."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.connect()
        connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def ask(body: bytes) -> float:
            began = time.perf_counter()
            connection.request("POST", "/v2/models/minilm/infer", body)
            answer = connection.getresponse()
            answer.read()
            taken = time.perf_counter() - began
            if answer.status != 200:
                raise SystemExit(f"an inference was answered with {answer.status}")
            return taken

        return ask

    def end(self, number: signal.Signals) -> None:
        """Send a signal, unless it has ended already, and wait for the end."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)
        self.process.wait()
        self.log.close()

    def __enter__(self) -> "Sidecar":
        return self

    def __exit__(self, *_: object) -> None:
        self.end(signal.SIGTERM)


def ready_times(fleet: Sequence[Sidecar], every_s: float) -> list[float]:
    """Return the seconds from the exec of the first process until each is ready, the shortest first."""
    waiting, times = set(fleet), []
    while waiting:
        for sidecar in [*waiting]:
            if sidecar.process.poll() is not None:
                raise SystemExit(f"a sidecar ended with {sidecar.process.returncode}; see {sidecar.log.name}")
            if sidecar.get("/readyz") == 200:
                times.append(time.monotonic() - fleet[0].began)
                waiting.remove(sidecar)
        time.sleep(every_s)
    return times


@contextlib.contextmanager
def confined(processors: Sequence[int]) -> Iterator[None]:
    """Confine the processes that the block starts to these processors: they inherit it from the thread."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, processors)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextlib.contextmanager
def probing(sidecar: Sidecar, path: str, every_s: float = 0.01) -> Iterator[list[tuple[int | None, float]]]:
    """Ask `path` again and again while the block runs; yields (status or None, seconds) of every probe."""
    rows: list[tuple[int | None, float]] = []
    over = threading.Event()

    def probe() -> None:
        while not over.is_set():
            began = time.perf_counter()
            code = sidecar.get(path)
            rows.append((code, time.perf_counter() - began))
            time.sleep(every_s)

    thread = threading.Thread(target=probe, daemon=True)
    thread.start()
    try:
        yield rows
    finally:
        over.set()
        thread.join()
