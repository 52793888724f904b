"""Rolling restarts under load: three processes, clients that keep connections and go round those that are ready.

WARMGATE_ROLLING_ROUNDS: how many rounds instead of twenty; a round restarts each process once.
"""

import http.client
import itertools
import json
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from benchmarks.process import Sidecar
from benchmarks.small import WIDTH, as_json, configured, values
from benchmarks.table import Row

ROUNDS = int(os.environ.get("WARMGATE_ROLLING_ROUNDS", "20"))
PROCESSES = 3
CLIENTS = 8
# How often readiness is asked for, and how long a process that leaves still serves: a fifth of what is usual of both.
ASK_EVERY_S, DRAIN_DELAY_S = 0.2, 1.0
INFER = "/v2/models/tiny/infer"


class Fleet:
    """The processes, and which of them are sent requests: those whose readiness was last seen to hold."""

    def __init__(self, config: Path, store: Path, processes: int) -> None:
        self._config, self._store = config, store
        self.members = [self._start() for _ in range(processes)]
        self.ready: Sequence[int] = [member.port for member in self.members]
        self._over = threading.Event()
        self._watch = threading.Thread(target=self._keep_watching, daemon=True)
        self._watch.start()

    def _start(self) -> Sidecar:
        made = Sidecar(self._store, f"http.drain_delay_s={DRAIN_DELAY_S}", config=self._config)
        made.wait()
        return made

    def _keep_watching(self) -> None:
        while not self._over.wait(ASK_EVERY_S):
            self.ready = [member.port for member in [*self.members] if member.get("/readyz") == 200]

    def restart(self, place: int) -> None:
        """Let one process leave as Kubernetes does, and start another in its place."""
        leaving = self.members[place]
        leaving.end(signal.SIGTERM)
        if leaving.process.returncode != 0:
            raise SystemExit(f"a process left with {leaving.process.returncode}; see {leaving.log.name}")
        self.members[place] = self._start()

    def end(self) -> None:
        self._over.set()
        self._watch.join()
        for member in self.members:
            member.end(signal.SIGTERM)


class Client(threading.Thread):
    """Sends one request after another, each to the next process, on connections that it keeps as long as it may."""

    def __init__(self, fleet: Fleet) -> None:
        super().__init__(daemon=True)
        self._fleet, self._body = fleet, as_json(values(1, WIDTH)).content
        self._kept: dict[int, http.client.HTTPConnection] = {}
        self._expected: list[float] = []
        self.over = threading.Event()
        self.answered, self.reused = 0, 0
        self.failures: list[str] = []

    def run(self) -> None:
        for turn in itertools.count():
            if self.over.is_set():
                break
            ready = self._fleet.ready
            if not ready:
                self.failures.append("no process was ready")
                time.sleep(ASK_EVERY_S)
                continue
            self._ask(ready[turn % len(ready)])
        for kept in self._kept.values():
            kept.close()

    def _ask(self, port: int) -> None:
        kept = self._kept.setdefault(port, http.client.HTTPConnection("127.0.0.1", port, timeout=30))
        reused = kept.sock is not None
        try:
            kept.request("POST", INFER, self._body)
            answer = kept.getresponse()
            body = answer.read()
        except (OSError, http.client.HTTPException) as error:
            self.failures.append(f"{type(error).__name__}: {error}")
            self._kept.pop(port).close()
            return
        if answer.status != 200 or not self._right(body):
            self.failures.append(f"{answer.status} {body[:200]!r}")
            return
        self.answered += 1
        self.reused += reused

    def _right(self, body: bytes) -> bool:
        """The answer is the first one's; in company the last bits may be others."""
        (output,) = json.loads(body)["outputs"]
        self._expected = self._expected or output["data"]
        return bool(np.allclose(output["data"], self._expected, rtol=1e-4, atol=1e-6))


def roll(fleet: Fleet, rounds: int) -> list[Client]:
    """Restart every process `rounds` times under load; return the clients with what has become of their requests."""
    clients = [Client(fleet) for _ in range(CLIENTS)]
    try:
        for client in clients:
            client.start()
        for place in [*range(len(fleet.members))] * rounds:
            fleet.restart(place)
    finally:
        for client in clients:
            client.over.set()
        for client in clients:
            client.join()
        fleet.end()
    return clients


def measure_rolling(directory: Path) -> Iterator[Row]:
    """Yield the rows."""
    clients = roll(Fleet(configured(directory, "tiny", WIDTH, 32), directory / "store", PROCESSES), ROUNDS)
    failures = [failure for client in clients for failure in client.failures]
    answered, reused = (sum(getattr(client, name) for client in clients) for name in ("answered", "reused"))
    share = reused / answered if answered else 0.0
    what = f"{ROUNDS} rounds, {answered} requests ({share:.1%} on kept connections): failed"
    yield Row(what, len(failures), 0, "", f"none; the first: {failures[0]}" if failures else "none")
