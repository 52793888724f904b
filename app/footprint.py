"""What a run takes of memory and what it keeps, from the kernel's own books of this process."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc/self")
# Written to clear_refs: the peak begins anew at what is resident now (Linux, proc(5)).
_RESET_PEAK = "5"


@dataclass(slots=True)
class Footprint:
    """Bytes beyond what was resident before: the most at any moment, and what is left; None where it is not told."""

    peak_bytes: int | None = None
    kept_bytes: int | None = None


@contextmanager
def measured() -> Iterator[Footprint]:
    """Measure the block; what other threads take meanwhile is in it."""
    found = Footprint()
    try:
        (_PROC / "clear_refs").write_text(_RESET_PEAK)
        before = _resident("VmRSS")
    except (OSError, StopIteration):  # a sandbox without this file
        yield found
        return
    yield found
    found.peak_bytes = max(0, _resident("VmHWM") - before)
    found.kept_bytes = max(0, _resident("VmRSS") - before)


def _resident(field: str) -> int:
    rows = (_PROC / "status").read_text().splitlines()
    return next(int(row.split()[1]) * 1024 for row in rows if row.startswith(f"{field}:"))
