"""Files that a model's factory reads: seen while it runs, digested, and compared before its code is restored.

The identity covers what is known beforehand: sources, arguments, the checkpoint's config.json. A factory may read more,
and import by name; only running it shows that.
"""

import contextlib
import hashlib
import os
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

# A factory must not read weights; what is larger than this is not configuration.
LARGEST = 64 << 20
BESIDE_CHECKPOINT = "checkpoint:"

Recorded = dict[str, str]


@contextlib.contextmanager
def recording(checkpoint: Path) -> Iterator[Recorded]:
    """Fill the yielded mapping, when the block ends, with file → sha256 of what was opened or imported inside it.

    Installed packages are left out: the identity has their versions. Files in the checkpoint's directory are named
    relative to it, so that another machine may mount it elsewhere.
    """
    opened: set[str] = set()
    watching = True

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if watching and event == "open" and isinstance(arguments[0], str | os.PathLike):
            opened.add(os.fspath(arguments[0]))

    sys.addaudithook(watch)  # stays for the life of the process; the flag makes it idle
    recorded: Recorded = {}
    try:
        yield recorded
    finally:
        watching = False
    modules = {str(m.__file__) for m in list(sys.modules.values()) if getattr(m, "__file__", None)}
    for name in sorted(opened | modules):
        path = Path(name).resolve()
        if _counts(path):
            recorded[_named(path, checkpoint)] = _digest(path)


def changed(recorded: Mapping[str, str], checkpoint: Path) -> Iterator[str]:
    """Yield the recorded files that are not here, or not the same, in words."""
    for name, digest in recorded.items():
        path = _directory(checkpoint) / name.removeprefix(BESIDE_CHECKPOINT)
        if not path.is_file():
            yield f"{name}, which the factory reads, is not here"
        elif _digest(path) != digest:
            yield f"{name}, which the factory reads, has changed"


def _counts(path: Path) -> bool:
    own = Path(__file__).resolve().parents[1]
    installed = {Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "purelib", "platlib")}
    outside = not any(
        path.is_relative_to(place) for place in (*installed, own, Path("/proc"), Path("/sys"), Path("/dev"))
    )
    return outside and path.suffix != ".pyc" and path.is_file() and path.stat().st_size <= LARGEST


def _named(path: Path, checkpoint: Path) -> str:
    directory = _directory(checkpoint).resolve()
    return f"{BESIDE_CHECKPOINT}{path.relative_to(directory)}" if path.is_relative_to(directory) else str(path)


def _directory(checkpoint: Path) -> Path:
    return checkpoint if checkpoint.is_dir() else checkpoint.parent


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
