"""The memory ledger: what start-up planned to take and what it took, from the kernel's own books."""

from dataclasses import dataclass
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
# cgroup v1 says "no limit" by a number near the largest page-aligned 63-bit one (kernel, memcontrol).
_NO_LIMIT = 1 << 60


@dataclass(frozen=True, slots=True)
class Row:
    """One memory object; None where it was not planned or cannot be measured."""

    name: str
    planned_bytes: int | None = None
    measured_bytes: int | None = None
    peak_bytes: int | None = None


def host_limit_bytes() -> int:
    """Return the smaller of the cgroup's limit and the machine's memory."""
    limits = [_meminfo_total()]
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        text = _read(_CGROUP / name)
        if text.isdigit() and int(text) < _NO_LIMIT:
            limits.append(int(text))
    return min(limits)


def host_used_bytes() -> int:
    """Return what cannot be reclaimed: anonymous and shared memory of the cgroup, else of the machine."""
    for name in ("memory.stat", "memory/memory.stat"):
        rows = dict(line.split() for line in _read(_CGROUP / name).splitlines() if len(line.split()) == 2)
        if "anon" in rows:
            return int(rows["anon"]) + int(rows.get("shmem", 0))
        if "total_rss" in rows:
            return int(rows["total_rss"])
    fields = _fields(Path("/proc/meminfo"))
    return fields.get("MemTotal", 0) - fields.get("MemAvailable", 0)


def process_rows() -> tuple[Row, ...]:
    """Return the process's anonymous and file-backed resident memory, and its largest resident size ever."""
    status = _fields(Path("/proc/self/status"))
    return (
        Row("host_anonymous", measured_bytes=status.get("RssAnon", 0)),
        Row("host_file_backed", measured_bytes=status.get("RssFile", 0)),
        Row("host_resident", measured_bytes=status.get("VmRSS", 0), peak_bytes=status.get("VmHWM", 0)),
    )


def _meminfo_total() -> int:
    return _fields(Path("/proc/meminfo")).get("MemTotal", _NO_LIMIT)


def _fields(path: Path) -> dict[str, int]:
    """Parse lines of `Name:  123 kB` into bytes."""
    rows = (line.split() for line in _read(path).splitlines())
    return {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows if len(row) == 3 and row[2] == "kB"}


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
