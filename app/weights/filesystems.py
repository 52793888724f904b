"""Whether files lie on a local file system: there a mapping is read as fast as a file, elsewhere it seldom is."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

# Allowed, not forbidden, is what is listed: network file systems have too many names (vllm#52931, vllm#51339).
LOCAL = frozenset(
    (
        "bcachefs", "btrfs", "erofs", "exfat", "ext2", "ext3", "ext4", "f2fs", "iso9660", "jfs", "ntfs3", "overlay",
        "ramfs", "squashfs", "tmpfs", "udf", "vfat", "xfs", "zfs",
    )
)  # fmt: skip
# Known to be slow page by page, and to turn a lost server into SIGBUS: never mapped, not even to try.
NETWORK = frozenset(
    (
        "9p", "afs", "beegfs", "ceph", "cifs", "coda", "fuse.ceph", "fuse.gcsfuse", "fuse.glusterfs", "fuse.juicefs",
        "fuse.s3fs", "fuse.sshfs", "gfs2", "gpfs", "lustre", "ncpfs", "nfs", "nfs4", "ocfs2", "orangefs", "smb3",
        "smbfs", "virtiofs", "wekafs",
    )
)  # fmt: skip


class Reach(StrEnum):
    """How far away a file system is."""

    LOCAL = "local"
    NETWORK = "network"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class FileSystem:
    """A mounted file system."""

    type: str
    mount_point: str

    @property
    def reach(self) -> Reach:
        """Local and network types are listed; any other is unknown."""
        return Reach.LOCAL if self.type in LOCAL else Reach.NETWORK if self.type in NETWORK else Reach.UNKNOWN


def file_system(path: Path, mounts: str | None = None) -> FileSystem:
    """Return the file system that holds a file; `mounts` is the text of /proc/self/mountinfo (proc(5)).

    From the root down through the tree of mounts: of those that lie on one mount and hold the path, the shortest mount
    point counts, since a mount hides all that was mounted below its mount point before.
    """
    real = path.resolve()
    rows = list(_rows(_mount_table() if mounts is None else mounts))
    known = {row.number for row in rows}
    above = [row for row in rows if row.parent not in known]
    found = FileSystem("unknown", "/")
    while above:
        holding = [row for row in above if real.is_relative_to(row.system.mount_point)]
        if not holding:
            break
        lowest = min(reversed(holding), key=lambda row: len(row.system.mount_point))
        found = lowest.system
        above = [row for row in rows if row.parent == lowest.number != row.number]
    return found


class _Row(NamedTuple):
    number: str
    parent: str
    system: FileSystem


def _rows(text: str) -> Iterator[_Row]:
    for line in text.splitlines():
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) >= 5 and kind:
            yield _Row(fields[0], fields[1], FileSystem(kind[0], _unescaped(fields[4])))


def file_systems(paths: Iterable[Path]) -> frozenset[FileSystem]:
    """Return the file systems that hold a set of files."""
    table = _mount_table()
    # The files of a checkpoint mostly lie in one directory, whatever they are links to.
    return frozenset(file_system(parent, table) for parent in {path.resolve().parent for path in paths})


def farthest(systems: Iterable[FileSystem]) -> FileSystem:
    """Return the one that decides for all: a network file system before an unknown before a local one."""
    order = (Reach.LOCAL, Reach.UNKNOWN, Reach.NETWORK)
    return max(systems, key=lambda one: (order.index(one.reach), one.mount_point))


def _mount_table() -> str:
    try:
        return Path("/proc/self/mountinfo").read_text()
    except OSError:
        return ""


def _unescaped(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
