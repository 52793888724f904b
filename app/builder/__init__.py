"""Build compile artifacts in a child process: compiling needs shapes, not weights, and must not slow a probe."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from app.errors import ArtifactError
from app.settings import Settings, child_environment
from app.startup import Progress

STEPS = ("started", "runtime imported", "model built", "graph exported", "code compiled", "payload written")


@dataclass(frozen=True, slots=True)
class Built:
    """What the child left in the directory, in the terms of the manifest."""

    content: dict[str, Any]


class BuildFailed(ArtifactError):
    """The child could not build; `why` is one sentence."""


def build(settings: Settings, directory: Path, threads: int, progress: Progress) -> Built:
    """Run the child until it has filled `directory`; raises BuildFailed with the reason and the end of its log.

    Stops the child, its compilers included, when the start-up is stopped. Progress is the child's steps and its
    processor time, so that one long compiler run is not taken for a stall.
    """
    progress.expect(len(STEPS), "steps")
    with tempfile.TemporaryFile() as log, _child(directory, threads, log) as child:
        _feed(child, settings, directory)
        _follow(child, progress, time.monotonic() + settings.compile.build_timeout_s)
        code = child.wait()
        outcome = directory.with_suffix(".outcome")
        found = json.loads(outcome.read_bytes()) if outcome.exists() else {}
        outcome.unlink(missing_ok=True)
        if code == 0 and "content" in found:
            return Built(found["content"])
        raise BuildFailed(found.get("error") or f"the builder ended with {_ending(code)}", [_tail(log)])


@contextlib.contextmanager
def _child(directory: Path, threads: int, log: IO[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    environment = child_environment(
        {
            "TORCHINDUCTOR_CACHE_DIR": str(directory.with_suffix(".cache")),
            "TORCHINDUCTOR_COMPILE_THREADS": str(threads),
            "PYTHONUNBUFFERED": "1",
        }
    )
    child = subprocess.Popen(
        [sys.executable, "-m", "app.builder", str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        env=environment,
        start_new_session=True,
    )
    try:
        yield child
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        for pipe in (child.stdin, child.stdout):
            if pipe:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


def _feed(child: subprocess.Popen[bytes], settings: Settings, directory: Path) -> None:
    request = {"settings": settings.model_dump(mode="json"), "directory": str(directory)}
    if child.stdin:
        with contextlib.suppress(BrokenPipeError):  # it died at once; its exit code and log tell why
            child.stdin.write(json.dumps(request).encode())
            child.stdin.close()


def _follow(child: subprocess.Popen[bytes], progress: Progress, until: float) -> None:
    progress.observe(_Steps(child, progress))
    while child.poll() is None:
        progress.check()
        if time.monotonic() > until:
            raise BuildFailed("the build took longer than compile.build_timeout_s; raise it or give more processors")
        time.sleep(0.05)


class _Steps:
    """Counts the steps that the child has told so far; its processor time goes to the detail."""

    def __init__(self, child: subprocess.Popen[bytes], progress: Progress) -> None:
        self._child, self._progress, self._done = child, progress, 0
        if child.stdout:
            os.set_blocking(child.stdout.fileno(), False)

    def __call__(self) -> int:
        if self._child.stdout and not self._child.stdout.closed:
            told = self._child.stdout.read() or b""
            self._done += told.count(b"\n")
        step = STEPS[min(self._done, len(STEPS) - 1)]
        self._progress.say(f"next: {step}, {group_seconds(self._child.pid):.0f} s of processor time used")
        return self._done


def group_seconds(group: int) -> float:
    """Return the processor time of all living processes of a process group and of their ended children."""
    ticks = 0
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):
                # The name in field 2 may hold spaces; the fields after its closing bracket do not.
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(fields[2]) == group:
                    ticks += sum(int(value) for value in fields[11:15])
    return ticks / os.sysconf("SC_CLK_TCK")


def _ending(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _tail(log: IO[bytes], limit: int = 2000) -> str:
    size = log.seek(0, os.SEEK_END)
    log.seek(max(0, size - limit))
    return "end of the builder's log: " + " | ".join(log.read().decode(errors="replace").splitlines()[-12:])
