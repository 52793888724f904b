"""A process that misses an artifact: waits for its turn, and builds a cheap one where it is the one to build.

`python -m tests.unit.contender STORE EVENTS BUILD_S [OPTION=VALUE …]` writes a line an event to EVENTS.
"""

import os
import signal
import sys
import time
from pathlib import Path

from app.artifacts import Artifact, Layer, Missed
from app.artifacts.flight import flight
from app.artifacts.lease import TERMS, Terms
from app.artifacts.seal import seal
from app.artifacts.store import Store
from app.identity import ArtifactIdentity
from app.progress import Progress

IDENTITY = ArtifactIdentity({"torch": "2.13.0", "model": {"factory": "m:f", "kwargs": {}}, "tensors": "t"})
CONTENT = {"packages": [{"library": "code.so"}], "factory_files": {}}
FILES = {"code.so": b"compiled code" * 1000, "constants.safetensors": b"values", "deep/table.json": b"{}"}
NOWHERE = Path("/nowhere")
MISSED = Missed(IDENTITY, "nothing stored", (Layer("sealed-artifact", "miss"),))


def fill(payload: Path) -> None:
    payload.mkdir()
    for name, data in FILES.items():
        (payload / name).parent.mkdir(parents=True, exist_ok=True)
        (payload / name).write_bytes(data)


def build(path: Path, progress: Progress | None = None, wait_s: float = 60, terms: Terms = TERMS) -> Artifact:
    """Build, seal and publish as a start does, or take what another process has published."""
    store = Store(path)
    with flight(store, MISSED, NOWHERE, progress or Progress(), wait_s, terms) as turn:
        if turn.published:
            return turn.published.artifact
        with store.workspace() as workspace:
            fill(workspace / "payload")
            seal(workspace / "payload", IDENTITY, CONTENT)
            return turn.publish(workspace / "payload")


def main() -> None:
    store, events, build_s = Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])
    options = dict(option.split("=") for option in sys.argv[4:])
    terms = Terms(float(options.get("renew_s", 0.1)), float(options.get("expire_s", 30)))

    def tell(event: str) -> None:
        with events.open("a") as file:
            file.write(f"{event} {os.getpid()} {time.monotonic():.3f}\n")

    tell("started")
    while not events.with_name("go").exists():
        time.sleep(0.001)
    wait_s = float(options.get("wait_s", 60))
    with flight(Store(store), MISSED, NOWHERE, Progress(), wait_s, terms) as turn:
        if turn.published:
            tell("restored")
            return
        tell("building")
        if options.get("then") == "raise":
            time.sleep(build_s)
            raise RuntimeError("the compiler says no")
        if options.get("then") == "stop":
            signal.raise_signal(signal.SIGSTOP)
        with Store(store).workspace() as workspace:
            fill(workspace / "payload")
            time.sleep(build_s)
            seal(workspace / "payload", IDENTITY, CONTENT)
            turn.publish(workspace / "payload")
        tell("built")


if __name__ == "__main__":
    main()
