"""The child process: reads one request, fills a directory, tells its steps on standard output."""

import ctypes
import importlib
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from app.child import cache_path, outcome_path
from app.errors import WarmgateError
from app.settings import Settings

_PR_SET_PDEATHSIG = 1


def main() -> int:
    """Do the task of the command line on the request in standard input; the outcome is written beside the directory."""
    task, parent = sys.argv[1], int(sys.argv[2])
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return 1  # the server died before the line above: nobody waits for this work
    os.nice(19)  # requests and probes come first
    tell = _teller()
    request = json.loads(sys.stdin.buffer.read())
    directory = Path(request["directory"])
    try:
        settings = Settings(**request["settings"])
        tell()
        work = importlib.import_module(f"app.child.{task}").work
        tell()
        outcome = {"content": work(settings, directory, tell)}
    except Exception as error:
        told = str(error) if isinstance(error, WarmgateError) else f"{type(error).__name__}: {_first_line(error)}"
        outcome_path(directory).write_text(json.dumps({"kind": type(error).__name__, "error": told}))
        raise
    finally:
        shutil.rmtree(cache_path(directory), ignore_errors=True)
    outcome_path(directory).write_text(json.dumps(outcome))
    return 0


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "")


def _teller() -> Callable[[], None]:
    """Keep standard output for steps alone; whatever libraries print goes to the log."""
    steps = os.dup(1)
    os.dup2(2, 1)
    return lambda: (os.write(steps, b"\n"), None)[1]


if __name__ == "__main__":
    sys.exit(main())
