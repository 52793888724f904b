"""Read a directory that may be anything: through one descriptor, following no link, within limits."""

import contextlib
import hashlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Self

from app.artifacts.writers import Writers

# More than any build makes; what exceeds them is there to keep the reader busy.
LARGEST_TOTAL = 256 << 30
MOST_ENTRIES = 100_000
DEEPEST = 16
_CHUNK = 1 << 20
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Without O_NONBLOCK opening a pipe waits for a writer.
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a directory",
}


class SealedFiles:
    """The files of one directory. `writers`: who may write to them, None where that is not asked."""

    def __init__(self, fd: int, writers: Writers | None) -> None:
        self._fd = fd
        self._writers = writers

    @classmethod
    @contextlib.contextmanager
    def open(cls, directory: Path, writers: Writers | None) -> Iterator[Self]:
        """Hold the directory open, so that what is examined and what is read is the same; raises OSError."""
        fd = os.open(directory, _DIRECTORY)
        try:
            yield cls(fd, writers)
        finally:
            os.close(fd)

    def read(self, name: str, limit: int) -> bytes:
        """Return a small file; raises OSError, or ValueError where it is not a file of at most `limit` bytes."""
        with self._opened(name) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_size > limit:
                raise ValueError(f"{name} is not a file of at most {limit} bytes")
            if problem := self._unsafe(name, status):
                raise ValueError(problem)
            return file.read(limit)

    def why_not_directory(self) -> str | None:
        """Return who else could write to the directory itself, or None."""
        return self._unsafe("the artifact's directory", os.fstat(self._fd), directory=True)

    def names(self) -> Iterator[str]:
        """Yield the path of everything below that is no directory; raises OSError, or ValueError beyond the limits."""
        todo, seen = [""], 0
        while todo:
            place = todo.pop()
            if place.count("/") > DEEPEST:
                raise ValueError(f"directories lie more than {DEEPEST} deep")
            with self._directory(place) as fd, os.scandir(fd) as entries:
                if place and (problem := self._unsafe(place.rstrip("/"), os.fstat(fd), directory=True)):
                    raise ValueError(problem)
                for entry in entries:
                    seen += 1
                    if seen > MOST_ENTRIES:
                        raise ValueError(f"it holds more than {MOST_ENTRIES} entries")
                    if entry.is_dir(follow_symlinks=False):
                        todo.append(f"{place}{entry.name}/")
                    else:
                        yield f"{place}{entry.name}"

    def why_not(self, name: str, size: int, digest: str) -> str | None:
        """Return why a file is not the one of this size and sha256, or None; reads it when the rest holds."""
        place, _, last = name.rpartition("/")
        with self._directory(place) as fd:
            status = os.stat(last, dir_fd=fd, follow_symlinks=False)
        if not stat.S_ISREG(status.st_mode):
            kind = _KINDS.get(stat.S_IFMT(status.st_mode), "something else")
            return f"{name} is {kind}, not a regular file"
        with self._opened(name) as file:
            status = os.fstat(file.fileno())
            if status.st_nlink != 1:
                return f"{name} has {status.st_nlink} hard links: it can be changed by another name"
            if problem := self._unsafe(name, status):
                return problem
            if status.st_size != size:
                return f"{name} has {status.st_size} bytes, sealed were {size}"
            if _sha256(file, size) != digest:
                return f"{name} is not what was sealed: its sha256 differs"
        return None

    def _unsafe(self, name: str, status: os.stat_result, directory: bool = False) -> str | None:
        if stat.S_ISDIR(status.st_mode) != directory:
            return f"{name} is not a {'directory' if directory else 'regular file'}"
        return self._writers.why_not(name, status) if self._writers else None

    @contextlib.contextmanager
    def _directory(self, place: str) -> Iterator[int]:
        """Open a directory below, one step at a time: O_NOFOLLOW holds for the last part of a path alone."""
        fd = os.dup(self._fd)
        try:
            for part in filter(None, place.split("/")):
                below = os.open(part, _DIRECTORY, dir_fd=fd)
                os.close(fd)
                fd = below
            yield fd
        finally:
            os.close(fd)

    @contextlib.contextmanager
    def _opened(self, name: str) -> Iterator[IO[bytes]]:
        place, _, last = name.rpartition("/")
        with self._directory(place) as fd:
            file = os.fdopen(os.open(last, _FILE, dir_fd=fd), "rb", buffering=0)
        with file:
            yield file


def _sha256(file: IO[bytes], size: int) -> str:
    """Digest so many bytes: a file that grows meanwhile is not followed."""
    digest, left = hashlib.sha256(), size
    while left and (chunk := file.read(min(left, _CHUNK))):
        digest.update(chunk)
        left -= len(chunk)
    return digest.hexdigest()
