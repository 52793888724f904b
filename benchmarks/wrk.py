"""Load by wrk (Debian package wrk): one body on kept connections, as fast as the answers come."""

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).with_name("wrk.lua")
# One thread: a second one would take from the server what it is measured with, on two processors.
THREADS = 1


@dataclass(frozen=True)
class Body:
    """What is posted; `header_bytes`: length of the JSON in front of raw tensors."""

    content: bytes
    content_type: str = "application/json"
    header_bytes: int | None = None


def raw_body(tensors: Mapping[str, Any], datatype: str, **parameters: bool) -> Body:
    """Return a request whose tensors stand raw behind the JSON."""
    inputs = [
        {
            "name": name,
            "shape": list(array.shape),
            "datatype": datatype,
            "parameters": {"binary_data_size": array.nbytes},
        }
        for name, array in tensors.items()
    ]
    head = json.dumps({"inputs": inputs, "parameters": parameters}).encode()
    raw = b"".join(array.tobytes() for array in tensors.values())
    return Body(head + raw, "application/octet-stream", len(head))


@dataclass(frozen=True)
class Load:
    """What wrk has seen; seconds of requests from the first byte sent to the last received."""

    requests: int
    seconds: float
    p50_s: float
    p99_s: float
    max_s: float
    bad: int

    @property
    def per_second(self) -> float:
        return self.requests / self.seconds


def hammer(port: int, path: str, body: Body, connections: int, seconds: int) -> Load:
    """Send for some seconds; raises SystemExit where an answer is not 200 or wrk is not there."""
    wrk = shutil.which("wrk")
    if wrk is None:
        raise SystemExit("wrk is not installed; apt-get install wrk does it")
    with tempfile.NamedTemporaryFile() as file:
        file.write(body.content)
        file.flush()
        length = {} if body.header_bytes is None else {"WRK_HEADER_LENGTH": str(body.header_bytes)}
        done = subprocess.run(
            [
                *(wrk, f"-t{THREADS}", f"-c{connections}", f"-d{seconds}s", "--timeout", "60s"),
                *("-s", SCRIPT, f"http://127.0.0.1:{port}{path}"),
            ],
            env={**os.environ, "WRK_BODY": file.name, "WRK_TYPE": body.content_type, **length},
            capture_output=True,
            text=True,
            check=True,
        )
    load = Load(**json.loads(done.stdout.splitlines()[-1]))
    if load.bad:
        raise SystemExit(f"{load.bad} of {load.requests} requests to {path} went wrong")
    return load
