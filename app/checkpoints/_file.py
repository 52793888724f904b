"""One file of a checkpoint, and reading it with every fault as an error that names file and byte."""

import errno
import os
from dataclasses import dataclass
from pathlib import Path

from app.errors import CheckpointError

FileStamp = tuple[int, int, int, int]
# The remedy against files that change while they are used.
PUBLISH = "publish checkpoints by renaming a complete directory, then restart"
TOO_MANY_FILES = frozenset({errno.EMFILE, errno.ENFILE})


def read_at(fd: int, count: int, offset: int) -> bytes:
    """Return bytes of a file, fewer only at its end: file systems on the network may give less than was asked for."""
    found = os.pread(fd, count, offset)
    while 0 < len(found) < count and (more := os.pread(fd, count - len(found), offset + len(found))):
        found += more
    return found


def file_stamp(status: os.stat_result) -> FileStamp:
    """Return what identifies the content of a file without reading it: device, inode, size, modification time."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


@dataclass(frozen=True, slots=True)
class CheckpointFile:
    """One open file of a checkpoint; the stamp tells later whether it is still the same file."""

    path: Path
    fd: int
    size: int
    stamp: FileStamp

    def changed_in_place(self) -> str | None:
        """Say that the content is not what it was when the file was opened, or None."""
        changed = file_stamp(os.fstat(self.fd)) != self.stamp
        return f"{self.path} was changed in place after it was opened" if changed else None

    def changed(self) -> str | None:
        """Say how the file, or the file that its path names by now, differs from what was opened, or None.

        Where a path names another file, a set of shards may be half old and half new.
        """
        if told := self.changed_in_place():
            return told
        try:
            replaced = file_stamp(self.path.stat()) != self.stamp
        except OSError as error:
            return f"{self.path} went away after it was opened ({error.strerror})"
        return f"{self.path} was replaced after it was opened" if replaced else None


def read_exactly(file: CheckpointFile, count: int, offset: int) -> bytes:
    """Return bytes of a file; raises CheckpointError naming file and byte where they are not to be had."""
    try:
        found = read_at(file.fd, count, offset)
    except OSError as error:
        raise CheckpointError(
            f"{file.path} cannot be read at byte {offset}: {error.strerror}; check the disk or its server"
        ) from error
    if len(found) != count:
        raise CheckpointError(f"{file.path} ends at byte {offset + len(found)}; it was truncated after it was opened")
    return found


def fill(file: CheckpointFile, target: memoryview, offset: int) -> None:
    """Read exactly as many bytes as `target` has; raises CheckpointError naming file and byte."""
    count = 0
    try:
        # File systems in user space and on the network may give less than was asked for; nothing at all is the end.
        while count < len(target) and (got := os.preadv(file.fd, [target[count:]], offset + count)):
            count += got
    except OSError as error:
        raise CheckpointError(
            f"{file.path} cannot be read at byte {offset + count}: {error.strerror}; check the disk or its server"
        ) from error
    if count != len(target):
        raise CheckpointError(
            f"{file.path} ends at byte {offset + count}, it had {file.size} bytes when it was opened; "
            f"it was truncated while it was being loaded: publish checkpoints by renaming a complete directory"
        )
