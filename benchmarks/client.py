"""A light client for what wrk cannot do: bodies that differ, each answer checked, and a rate that does not wait.

`python -m benchmarks.client PLAN` carries out a plan in a process of its own and prints its samples as JSON.
"""

import asyncio
import itertools
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from benchmarks.process import ROOT, environment
from benchmarks.wrk import Body

# A request's answer must not depend on its company: rounding alone may differ.
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Plan:
    """What to send: bodies drawn at random; `rate` requests a second, or None: each client as it is answered.

    With a rate a request never waits for another's answer, and `clients` is not used. `bodies`: file, content type, and
    the length of the JSON in front of raw tensors.
    """

    port: int
    path: str
    bodies: Sequence[tuple[str, str, int | None]]
    seconds: float
    clients: int = 32
    rate: float | None = None
    seed: int = 19


@dataclass(frozen=True)
class Sample:
    """One request: which body, when it was sent, its status (0: no answer), how long it took.

    `compute_s`: what the server says its batch took; `wrong`: what is not right with an answer of 200.
    """

    body: int
    at_s: float
    status: int
    seconds: float
    compute_s: float | None
    wrong: str | None


def send(plan: Plan, file: Path) -> list[Sample]:
    """Carry out a plan in a process of its own; `file` is where the plan is handed over."""
    return finish(begin(plan, file))


def begin(plan: Plan, file: Path) -> subprocess.Popen[bytes]:
    """Start to carry out a plan."""
    file.write_text(json.dumps(asdict(plan)))
    command = [sys.executable, "-m", "benchmarks.client", file]
    return subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE)


def finish(process: subprocess.Popen[bytes]) -> list[Sample]:
    """Wait for the end of a plan; return its samples."""
    out, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"the client ended with {process.returncode}")
    return [Sample(*row) for row in json.loads(out)]


class Client:
    """Carries out one plan on kept connections."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._requests = [self._request(*body) for body in plan.bodies]
        self._draw = random.Random(plan.seed)
        self._first: dict[int, Any] = {}
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        self._began = time.perf_counter()
        self.samples: list[Sample] = []

    def _request(self, file: str, content_type: str, header_bytes: int | None) -> bytes:
        body = Path(file).read_bytes()
        lines = [f"POST {self._plan.path} HTTP/1.1", "Host: bench", f"Content-Type: {content_type}"]
        lines += [] if header_bytes is None else [f"Inference-Header-Content-Length: {header_bytes}"]
        return "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode() + body

    async def run(self) -> None:
        if self._plan.rate is None:
            await asyncio.gather(*(self._closed() for _ in range(self._plan.clients)))
        else:
            await self._open(self._plan.rate)
        for _, writer in self._idle:
            writer.close()

    async def _closed(self) -> None:
        while self._elapsed() < self._plan.seconds:
            await self._one()

    async def _open(self, rate: float) -> None:
        running = []
        for number in itertools.count():
            due = number / rate
            if due > self._plan.seconds:
                break
            await asyncio.sleep(max(0.0, due - self._elapsed()))
            running.append(asyncio.create_task(self._one()))
        await asyncio.gather(*running)

    def _elapsed(self) -> float:
        return time.perf_counter() - self._began

    async def _one(self) -> None:
        body = self._draw.randrange(len(self._requests))
        connection = self._idle.pop() if self._idle else await asyncio.open_connection("127.0.0.1", self._plan.port)
        at_s = self._elapsed()
        try:
            status, headers, answer = await _exchange(*connection, self._requests[body])
        except (OSError, asyncio.IncompleteReadError):
            self.samples.append(Sample(body, at_s, 0, self._elapsed() - at_s, None, None))
            return
        seconds = self._elapsed() - at_s
        if headers.get("connection") == "close":
            connection[1].close()
        else:
            self._idle.append(connection)
        wrong = self._check(body, answer) if status == 200 else None
        self.samples.append(Sample(body, at_s, status, seconds, _compute_s(headers), wrong))

    def _check(self, body: int, answer: bytes) -> str | None:
        output = orjson.loads(answer)["outputs"][0]
        values = np.array(output["data"]).reshape(output["shape"])
        first = self._first.setdefault(body, values)
        if values.shape != first.shape:
            return f"shape {values.shape}, before {first.shape}"
        worst = float(np.abs(values - first).max())
        return f"differs by {worst:.2g} from the first answer" if not worst <= TOLERANCE else None


async def _exchange(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes
) -> tuple[int, dict[str, str], bytes]:
    writer.write(request)
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:] if line)}
    return int(head[0].split(" ")[1]), headers, await reader.readexactly(int(headers["content-length"]))


def _compute_s(headers: dict[str, str]) -> float | None:
    """Return the time of the batch from `Server-Timing: …, compute;dur=MILLISECONDS`."""
    for part in headers.get("server-timing", "").split(","):
        name, _, duration = part.strip().partition(";dur=")
        if name == "compute":
            return float(duration) / 1e3
    return None


def quantile(seconds: Sequence[float], share: float) -> float:
    """Return the smallest that no more than the rest of them exceeds."""
    ordered = sorted(seconds)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def bodies(directory: Path, contents: Iterator[Body]) -> list[tuple[str, str, int | None]]:
    """Write bodies to files; return what a plan says of them."""
    rows = []
    for number, body in enumerate(contents):
        file = directory / f"body-{number}"
        file.write_bytes(body.content)
        rows.append((str(file), body.content_type, body.header_bytes))
    return rows


if __name__ == "__main__":
    made = Client(Plan(**json.loads(Path(sys.argv[1]).read_text())))
    asyncio.run(made.run())
    print(json.dumps([[*asdict(sample).values()] for sample in made.samples]))
