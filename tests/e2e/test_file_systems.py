"""A file system that is slow, fails, or goes away while weights are read: mounted for real, in user space.

Needs the right to mount, /dev/fuse and libfuse3 (Debian: fuse3); part of the whole proof, `make test-all`.
"""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.e2e.conftest import JSON, Start, configuration
from tests.e2e.harness import ROOT, Server, environment

pytestmark = pytest.mark.slow

Mount = Callable[[str], Path]
ROWS = 1 << 18  # 32 MiB


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    """Show a checkpoint through a file system that misbehaves in the given way."""
    point, source = tmp_path / "mount", tmp_path / "source"
    point.mkdir()
    source.mkdir()
    state = {"table.weight": torch.rand(ROWS, 32), "last.weight": torch.rand(4, 32), "last.bias": torch.rand(4)}
    save_file(state, source / "model.safetensors")
    running: list[subprocess.Popen[bytes]] = []

    def begin(mode: str) -> Path:
        script = ROOT / "tests/e2e/faulty_files.py"
        running.append(subprocess.Popen([sys.executable, script, point, source, mode], env=environment()))
        until = time.monotonic() + 20
        while not point.is_mount():
            assert running[-1].poll() is None, "the file system was not mounted"
            assert time.monotonic() < until
            time.sleep(0.02)
        return point

    yield begin
    subprocess.run(["umount", "--lazy", point], check=False, capture_output=True)
    for process in running:
        process.kill()
        process.wait()


def table(checkpoint: Path, tmp_path: Path, reading: str) -> JSON:
    config = configuration(
        "table",
        checkpoint,
        tmp_path / "store",
        inputs=[{"name": "ids", "datatype": "INT64", "shape": ["batch", 3], "low": 0, "high": 8}],
        compile={"engine": "eager"},
    )
    config["model"] |= {"kwargs": {"rows": ROWS}, "reading": reading}
    return config


def fatal(server: Server) -> JSON:
    return next(event for event in server.events() if event["event"] == "fatal")


def test_a_mapping_that_is_slow_is_measured_and_given_up(start: Start, mount: Mount, tmp_path: Path) -> None:
    server = start(table(mount("slow"), tmp_path, "auto"))
    server.wait()
    weights = server.status()["weights"]
    assert weights["mode"] == "read"
    assert "is fuse, not known to be local; measured:" in weights["why"]


def test_a_mapping_that_is_fast_is_kept_on_an_unknown_file_system(start: Start, mount: Mount, tmp_path: Path) -> None:
    server = start(table(mount("plain"), tmp_path, "auto"))
    server.wait()
    assert server.status()["weights"]["mode"] == "map"


@pytest.mark.parametrize("reading", ["auto", "map", "read"])
@pytest.mark.parametrize(
    ("mode", "why"), [("error", "Input/output error"), ("gone", "Transport endpoint is not connected")]
)
def test_a_failing_file_system_is_a_named_error_and_never_a_signal(
    start: Start, mount: Mount, tmp_path: Path, mode: str, why: str, reading: str
) -> None:
    server = start(table(mount(mode), tmp_path, reading))
    assert server.exit_code() == 3
    message = fatal(server)["message"]
    assert "model.safetensors cannot be read at byte" in message
    assert why in message


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
def test_a_file_system_that_is_lost_after_ready_ends_readiness_and_nothing_else(
    start: Start, mount: Mount, tmp_path: Path, end: signal.Signals
) -> None:
    point = mount("plain")
    server = start(table(point, tmp_path, "map"))
    server.wait()
    subprocess.run(["pkill", f"-{end.value}", "-f", f"faulty_files.py {point}"], check=True)
    server.wait("/readyz", 503, timeout=30)
    body = server.get("/readyz")[1]
    assert b"[-]read-weights failed" in body
    assert (b"is gone" if end is signal.SIGKILL else b"has not answered for") in body
    for path in ("/healthz", "/status", "/metrics"):
        assert server.get(path)[0] == 200
    status, _ = server.infer("table", {"ids": np.zeros((2, 3), np.int64)})
    assert status == 200, "its pages are in memory"
    subprocess.run(["pkill", "-KILL", "-f", f"faulty_files.py {point}"], check=False)
