"""Kill a process at every step of build, seal and publish, and tell what each leaves.

`python -m tests.unit.killed DIRECTORY` writes one JSON line a step.
A step is a line of app/artifacts or of the build, or something that Python tells its audit hooks (a file opened, a
rename …); the process kills itself with SIGKILL when it comes to its n-th.
"""

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from app.artifacts import Restored
from app.artifacts.prune import Rules, prune
from app.artifacts.store import Store
from tests.unit.contender import IDENTITY, NOWHERE, build

TRACED = (str(Path(__file__).resolve().parents[2] / "app/artifacts"), str(Path(__file__).with_name("contender.py")))
AUDITED = ("open", "os.", "shutil.", "tempfile.")


def on_every_step(step: Callable[[], None]) -> None:
    """Call before each step of this thread, from now on."""

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        del argument
        if not frame.f_code.co_filename.startswith(TRACED):
            return None
        if event in {"line", "return"}:
            step()
        return trace

    sys.addaudithook(lambda event, _: step() if event.startswith(AUDITED) else None)
    sys.settrace(trace)


def killed_at(number: int, store: Path) -> bool:
    """Build in a process that is killed at a step; False where it had ended before."""
    pid = os.fork()
    if pid == 0:
        own, left = os.getpid(), number

        def step() -> None:
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(own, signal.SIGKILL)

        on_every_step(step)
        build(store)
        sys.settrace(None)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in {0, -signal.SIGKILL}, f"exit code {code} at step {number}"
    return code != 0


def main() -> None:
    directory, number = Path(sys.argv[1]), 1
    while killed_at(number, directory / str(number)):
        store = Store(directory / str(number))
        names = sorted(path.name for path in store.path.iterdir()) if store.path.exists() else []
        found = store.find(IDENTITY, NOWHERE)
        row: dict[str, Any] = {
            "step": number,
            "left": sorted({name.partition("-")[0] for name in names if name != IDENTITY.key()}),
            "found": True if isinstance(found, Restored) else found.why,
        }
        # The next process: it finds what is whole, or builds it without waiting for the dead.
        build(store.path)
        row["next"] = isinstance(store.find(IDENTITY, NOWHERE), Restored)
        for path in store.path.glob(".*"):
            os.utime(path, (0, 0))
        prune(store, IDENTITY, Rules())
        row["after"] = sorted(path.name for path in store.path.iterdir())
        sys.stdout.write(f"{json.dumps(row)}\n")
        sys.stdout.flush()
        number += 1


if __name__ == "__main__":
    main()
