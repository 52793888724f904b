"""The child process: reads one request, fills a directory, tells its steps on standard output."""

import ctypes
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def main() -> int:
    """Build what standard input asks for; the outcome is written beside the directory."""
    parent = int(sys.argv[1])
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return 1  # the server died before the line above: nobody waits for this build
    os.nice(10)  # requests and probes come first
    tell = _teller()
    request = json.loads(sys.stdin.buffer.read())
    directory = Path(request["directory"])
    cache = directory.with_suffix(".cache")
    outcome = directory.with_suffix(".outcome")
    try:
        from app.settings import Settings

        tell()
        began = time.monotonic()
        from app.builder.export import build_payload

        content = build_payload(Settings(**request["settings"]), directory, cache, tell)
        content["timings"] = {"build_s": time.monotonic() - began}
        outcome.write_text(json.dumps({"content": content}))
    except Exception as error:
        outcome.write_text(json.dumps({"error": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}))
        raise
    finally:
        shutil.rmtree(cache, ignore_errors=True)
    return 0


def _teller() -> Callable[[], None]:
    """Keep standard output for steps alone; whatever libraries print goes to the log."""
    steps = os.dup(1)
    os.dup2(2, 1)
    return lambda: (os.write(steps, b"\n"), None)[1]


if __name__ == "__main__":
    sys.exit(main())
