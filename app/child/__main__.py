"""The child process: reads one request, fills a directory, tells its steps on standard output."""

import ctypes
import importlib
import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from app.child import OUTCOME, Resident, Work
from app.errors import WarmgateError
from app.settings import Settings

_PR_SET_PDEATHSIG = 1
# Of an error that is not ours; some libraries put all they know into one line, and the log has the whole.
_LONGEST_TOLD = 500


def main() -> int:
    """Do the command line's task on the request in standard input; the outcome is left in the scratch directory."""
    task, parent = sys.argv[1], int(sys.argv[2])
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return 1  # the server died before the line above: nobody waits for this work
    os.nice(19)  # requests and probes come first
    tell = _teller()
    request = json.loads(sys.stdin.buffer.read())
    directory, scratch = Path(request["directory"]), Path(request["scratch"])
    try:
        settings = Settings(**request["settings"])
        if task != "reference" and settings.compile.build_memory_bytes is not None:
            # Of what a process allocates itself, not of the files it maps; compilers that it starts inherit it.
            resource.setrlimit(resource.RLIMIT_DATA, (settings.compile.build_memory_bytes,) * 2)
        tell()
        work = importlib.import_module(f"app.child.{task}").work
        tell()
        resident = Resident(**request["resident"]) if request["resident"] else None
        outcome = {"content": work(Work(settings, directory, scratch, resident, request["key"], tell))}
    except Exception as error:
        told = str(error) if isinstance(error, WarmgateError) else f"{type(error).__name__}: {_first_line(error)}"
        (scratch / OUTCOME).write_text(json.dumps({"kind": type(error).__name__, "error": told}))
        raise
    (scratch / OUTCOME).write_text(json.dumps(outcome))
    return 0


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "")[:_LONGEST_TOLD]


def _teller() -> Callable[[], None]:
    """Keep standard output for steps alone; whatever libraries print goes to the log."""
    steps = os.dup(1)
    os.dup2(2, 1)
    return lambda: (os.write(steps, b"\n"), None)[1]


if __name__ == "__main__":
    sys.exit(main())
