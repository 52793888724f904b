"""Work in a child process: what imports model libraries or compiles must neither slow a probe nor stay in memory.

Three tasks: `build` (export and compile, needs shapes only), `jit` (compile without export, the same) and `reference`
(the module itself on the weights).
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from app import errors
from app.checkpoints import FileStamp
from app.child.failures import failure, full_disk, memory_limit
from app.environment import child_environment
from app.progress import Progress
from app.settings import Settings

OUTCOME = "outcome.json"

# What a child tells once it is behind it; the last one says that the outcome is written.
STEPS = {
    "build": ("started", "runtime imported", "model built", "graph exported", "code compiled", "payload written"),
    "jit": ("started", "runtime imported", "model built", "buckets compiled", "payload written"),
    "reference": ("started", "runtime imported", "model built", "weights installed", "answers computed"),
}


class ChildFailed(errors.ArtifactError):
    """The build ended without an outcome, or could not be done."""


class ReferenceFailed(errors.WarmupError):
    """The module could not be run for comparison."""


FAILURES: Mapping[str, type[errors.WarmgateError]] = {
    "build": ChildFailed,
    "jit": ChildFailed,
    "reference": ReferenceFailed,
}


@dataclass(frozen=True, slots=True)
class Resident:
    """Weights that this process holds, for a child to map instead of reading them again; `stamps` are of the files."""

    mode: str
    slab_fd: int | None
    stamps: tuple[FileStamp, ...]


@dataclass(frozen=True, slots=True)
class Work:
    """What a task is given in the child: the directory to fill, one for scratch files, and a way to tell its steps.

    `key`: that of the artifact which is built.
    """

    settings: Settings
    directory: Path
    scratch: Path
    resident: Resident | None
    key: str
    tell: Callable[[], None]


def run(
    task: str,
    settings: Settings,
    directory: Path,
    threads: int,
    progress: Progress,
    resident: Resident | None = None,
    key: str = "",
) -> dict[str, Any]:
    """Run a task that fills `directory`; return what it tells about it.

    Raises the child's own error where it is one of ours (for example CheckpointError), else ChildFailed. The child
    and the compilers it started are stopped when the start-up is stopped. Progress is the child's steps and its
    processor time, so that one long compiler run is not taken for a stall.
    """
    progress.expect(len(STEPS[task]), "steps")
    try:
        # Local and private: a compiler's scratch files have no business on a volume that pods share.
        with tempfile.TemporaryDirectory(prefix="warmgate-") as scratch, tempfile.TemporaryFile() as log:
            request = _Request(task, settings, directory, Path(scratch), threads, resident, key)
            return _run(request, progress, log)
    except OSError as error:
        raise FAILURES[task](f"the {task} process needs a writable temporary directory: {error}") from error


@dataclass(frozen=True, slots=True)
class _Request:
    task: str
    settings: Settings
    directory: Path
    scratch: Path
    threads: int
    resident: Resident | None
    key: str

    def as_json(self) -> dict[str, Any]:
        return {
            "settings": self.settings.model_dump(mode="json"),
            "directory": str(self.directory),
            "scratch": str(self.scratch),
            "resident": asdict(self.resident) if self.resident else None,
            "key": self.key,
        }


def _run(request: _Request, progress: Progress, log: IO[bytes]) -> dict[str, Any]:
    with _child(request, log) as child:
        _feed(child, request.as_json())
        _follow(request.task, child, progress, time.monotonic() + request.settings.compile.build_timeout_s)
        code = child.wait()
        found = _outcome(request.scratch)
        if code == 0 and "content" in found:
            return dict(found["content"])
        raise failure(FAILURES[request.task], request.task, found, code, log, _limits(request))


def _outcome(scratch: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads((scratch / OUTCOME).read_bytes())
    except (OSError, ValueError):
        return {}
    return found


def _limits(request: _Request) -> str:
    """Say which limit the child may have met."""
    allowed = None if request.task == "reference" else request.settings.compile.build_memory_bytes
    return full_disk(request.directory, request.scratch) + memory_limit(allowed)


@contextlib.contextmanager
def _child(request: _Request, log: IO[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    environment = child_environment(
        {
            "TORCHINDUCTOR_CACHE_DIR": str(request.scratch / "cache"),
            "TORCHINDUCTOR_COMPILE_THREADS": str(request.threads),
            # Generated code holds the number of threads: those of the device, which the identity names, not whatever
            # this machine has.
            "OMP_NUM_THREADS": str(request.threads),
            "MKL_NUM_THREADS": str(request.threads),
            # The processor's flags tell its instruction set; compiling a program to ask again takes four seconds.
            "TORCHINDUCTOR_VEC_ISA_OK": "1",
            "PYTHONUNBUFFERED": "1",
        }
    )
    shared = request.resident.slab_fd if request.resident else None
    child = subprocess.Popen(
        [sys.executable, "-m", "app.child", request.task, str(os.getpid())],
        pass_fds=() if shared is None else (shared,),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        env=environment,
        # A group, not a session: with a session of its own the kernel would give it a share of its own, nice or not.
        process_group=0,
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


def _feed(child: subprocess.Popen[bytes], request: dict[str, Any]) -> None:
    """Send the request: the settings, the directory to fill, one for scratch files, and where the weights are."""
    if child.stdin:
        with contextlib.suppress(BrokenPipeError):  # it died at once; its exit code and log tell why
            child.stdin.write(json.dumps(request).encode())
            child.stdin.close()


def _follow(task: str, child: subprocess.Popen[bytes], progress: Progress, until: float) -> None:
    """Pass on the child's steps as it tells them, and its processor time twice a second, until it ends."""
    if child.stdout:
        os.set_blocking(child.stdout.fileno(), False)
    turn = 0
    while child.poll() is None:
        told = child.stdout.read() if child.stdout else None
        progress.advance(told.count(b"\n") if told else 0)
        if time.monotonic() > until:
            raise FAILURES[task](f"the {task} process ran longer than compile.build_timeout_s; raise it")
        if (told or turn % 10 == 0) and progress.done < progress.total:
            used = group_seconds(child.pid)
            progress.say(f"next: {STEPS[task][progress.done]}, {used:.0f} s of processor time used")
        turn += 1
        time.sleep(0.05)
    progress.say("")


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
