"""What is told of a child process that failed, and where its output is kept."""

import logging
import os
import shutil
import signal
import time
from pathlib import Path
from typing import IO, Any

from app import errors
from app.private import private_directory
from app.units import bytes_text

logger = logging.getLogger("warmgate.child")

# Less free space than this, and a failure may well be the disk's.
ROOM = 64_000_000
KEPT_LOGS = 3


def full_disk(*directories: Path) -> str:
    """Say which disk is nearly full: compilers that hit its end report anything but that."""
    free = {directory: shutil.disk_usage(directory).free for directory in directories if directory.exists()}
    full = [
        f"only {bytes_text(count)} are free at {directory.parent}" for directory, count in free.items() if count < ROOM
    ]
    return "".join(f"; {text}" for text in full)


def memory_limit(limit: int | None) -> str:
    """Say what each process of the child may allocate, where that is limited."""
    return "" if limit is None else f"; compile.build_memory_bytes allows each process {bytes_text(limit)}"


def failure(
    otherwise: type[errors.WarmgateError], task: str, found: dict[str, Any], code: int, log: IO[bytes], limits: str
) -> errors.WarmgateError:
    """Return the child's own error where it is one of ours, else `otherwise`; its output goes to the log alone."""
    kind = getattr(errors, str(found.get("kind")), None)
    if isinstance(kind, type) and issubclass(kind, errors.WarmgateError):
        message, *problems = found["error"].split("\n  - ")
        return kind(message, problems)
    # The end of the log goes to the log alone: status and probes are public, and a library may print anything.
    logger.warning("the %s process failed: %s | its whole output: %s", task, _tail(log), _kept(task, log))
    told = found.get("error") or f"the {task} process ended with {_ending(code)}"
    return otherwise(f"{told}{limits}; the log has the end of its output")


def _ending(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _kept(task: str, log: IO[bytes]) -> str:
    """Keep the output of a process that failed, for its user alone, and the newest few of them; say where."""
    try:
        directory = private_directory()
        target = directory / f"{task}-{time.time_ns()}.log"
        log.seek(0)
        with target.open("xb") as file:
            shutil.copyfileobj(log, file)
        for old in sorted(directory.glob(f"{task}-*.log"))[:-KEPT_LOGS]:
            old.unlink(missing_ok=True)
    except (OSError, errors.ArtifactError) as error:
        return f"could not be kept ({error})"
    return str(target)


def _tail(log: IO[bytes], limit: int = 2000) -> str:
    size = log.seek(0, os.SEEK_END)
    log.seek(max(0, size - limit))
    return " | ".join(log.read().decode(errors="replace").splitlines()[-12:])
