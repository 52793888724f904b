"""Whether files lie on a local file system: there a mapping is read as fast as a file, elsewhere it seldom is."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

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
    """Return the file system that holds a file; `mounts` is the text of /proc/self/mountinfo (proc(5))."""
    text = _mount_table() if mounts is None else mounts
    real = path.resolve()
    found = FileSystem("unknown", "/")
    for row in text.splitlines():
        before, separator, after = row.partition(" - ")
        fields = before.split()
        if not separator or len(fields) < 5:
            continue
        point = _unescaped(fields[4])
        # A later mount hides what lay below its mount point before.
        if real.is_relative_to(point):
            found = FileSystem(after.split()[0], point)
    return found


def farthest(paths: Iterable[Path]) -> FileSystem:
    """Return the file system that decides for a set of files: a network one before an unknown before a local one."""
    order = (Reach.LOCAL, Reach.UNKNOWN, Reach.NETWORK)
    table = _mount_table()
    return max((file_system(path, table) for path in paths), key=lambda one: order.index(one.reach))


def _mount_table() -> str:
    try:
        return Path("/proc/self/mountinfo").read_text()
    except OSError:
        return ""


def _unescaped(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
