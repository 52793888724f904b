"""The memory ledger: what start-up planned to take and what it took, from the kernel's own books.

Books: the memory controller of cgroup v2 or v1 where there is one, else /proc. Formats: cgroup-v2.rst,
cgroup-v1/memory.rst and proc(5).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

# cgroup v1 says "no limit" by a number near the largest page-aligned 63-bit one (kernel, memcontrol).
_NO_LIMIT = 1 << 60

# What start-up takes, and the process as a whole: the rows of /status and the labels of the metric.
OBJECTS = (
    "checkpoint_mapped",
    "checkpoint_resident",
    "anonymous_copies",
    "staging",
    "rebuilt_buffers",
    "engine_constants",
)
WHOLES = ("host_anonymous", "host_file_backed", "host_shared", "host_resident", "cgroup")


@dataclass(frozen=True, slots=True)
class Row:
    """One memory object; None where it was not planned or cannot be measured."""

    name: str
    planned_bytes: int | None = None
    measured_bytes: int | None = None
    peak_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Room:
    """A limit and what is in use of it and cannot be reclaimed: anonymous and shared memory, not the page cache."""

    where: str
    limit_bytes: int
    used_bytes: int

    @property
    def free_bytes(self) -> int:
        """What is left; below zero where the limit is exceeded."""
        return self.limit_bytes - self.used_bytes


@dataclass(frozen=True, slots=True)
class Books:
    """Where the kernel's numbers are read; another root than `/` is for tests."""

    root: Path = Path("/")

    def room(self) -> Room:
        """Return the tightest of what limits this process."""
        return min(self.rooms(), key=lambda room: room.free_bytes)

    def rooms(self) -> list[Room]:
        """Return all that limits this process: the machine, its cgroup, those above it."""
        machine = _fields(_read(self.root / "proc/meminfo"))
        total = machine.get("MemTotal", _NO_LIMIT)
        rooms = [Room("the machine", total, total - machine.get("MemAvailable", total))]
        for group in self._groups():
            text = _read(group / "memory.max") or _read(group / "memory.limit_in_bytes")
            if text.isdigit() and int(text) < _NO_LIMIT:
                rooms.append(Room(f"cgroup {group}", int(text), _unreclaimable(_pairs(_read(group / "memory.stat")))))
        return rooms

    def own_bytes(self) -> int:
        """Return the anonymous and shared memory of this process alone."""
        status = _fields(_read(self.root / "proc/self/status"))
        return status.get("RssAnon", 0) + status.get("RssShmem", 0)

    def cgroup_row(self) -> Row:
        """Return what is charged to the cgroup, page cache included, and its largest value ever."""
        for group in self._groups():
            for now, peak in (
                ("memory.current", "memory.peak"),
                ("memory.usage_in_bytes", "memory.max_usage_in_bytes"),
            ):
                if (text := _read(group / now)).isdigit():
                    most = _read(group / peak)
                    return Row("cgroup", None, int(text), int(most) if most.isdigit() else None)
        return Row("cgroup")

    def process_rows(self) -> tuple[Row, ...]:
        """Return the process's resident memory by kind, and its largest resident size ever."""
        status = _fields(_read(self.root / "proc/self/status"))
        return (
            Row("host_anonymous", measured_bytes=status.get("RssAnon", 0)),
            Row("host_file_backed", measured_bytes=status.get("RssFile", 0)),
            Row("host_shared", measured_bytes=status.get("RssShmem", 0)),
            Row("host_resident", measured_bytes=status.get("VmRSS", 0), peak_bytes=status.get("VmHWM", 0)),
        )

    def _groups(self) -> Iterator[Path]:
        """Yield the directories of this process's memory cgroup and of those above it, nearest first."""
        for row in _read(self.root / "proc/self/cgroup").splitlines():
            number, _, rest = row.partition(":")
            controllers, _, path = rest.partition(":")
            mounts: Sequence[str] = ()
            if number == "0" and not controllers:
                mounts = ("sys/fs/cgroup",)
            elif "memory" in controllers.split(","):
                mounts = ("sys/fs/cgroup/memory",)
            for mount in mounts:
                yield from _upwards(self.root / mount, path)


def _upwards(mount: Path, path: str) -> Iterator[Path]:
    """Yield the group and its parents; in a container the path may be the host's, and the mount is the group itself."""
    parts = [part for part in path.split("/") if part and part != ".."]
    for count in range(len(parts), -1, -1):
        group = mount.joinpath(*parts[:count])
        if (group / "memory.stat").exists():
            yield group


def _unreclaimable(rows: dict[str, int]) -> int:
    if "anon" in rows:  # cgroup v2
        return rows["anon"] + rows.get("shmem", 0)
    return rows.get("total_rss", rows.get("rss", 0)) + rows.get("total_shmem", rows.get("shmem", 0))


def _pairs(text: str) -> dict[str, int]:
    rows = (line.split() for line in text.splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) == 2 and row[1].isdigit()}


def _fields(text: str) -> dict[str, int]:
    """Parse lines of `Name:  123 kB` into bytes."""
    rows = (line.split() for line in text.splitlines())
    return {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows if len(row) == 3 and row[2] == "kB"}


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
