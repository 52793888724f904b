"""A lease on one piece of work: a file beside what is made, saying who makes it, rewritten while they do.

A lease ends exactly once. Whoever wants to end one that bears token T, to take it over or to give it back, creates the
file `<lease>.T`; of any number of contenders one succeeds, and that file is the lease from then on. So a lease is the
last of a chain of files, and giving it back removes the first one. Nothing depends on locks of the file system, on its
clock or on that of another host: a lease is dead when it has not changed for `expire_s` on the watcher's own clock, or
when its process is known to be gone. It saves work; that artifacts are whole rests on their being renamed into place.
"""

import contextlib
import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.artifacts.holder import Holder
from app.artifacts.seal import sync

LEASE = ".lease-"
_UNREADABLE = "unreadable"
_RECORD = 4096  # bytes of the record; the count of renewals follows at a fixed place
_LONGEST_CHAIN = 1000
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EINVAL}


@dataclass(frozen=True, slots=True)
class Terms:
    """How often a lease is renewed, and after how long without a change others take it over; in seconds."""

    renew_s: float = 3.0
    expire_s: float = 30.0


TERMS = Terms()


@dataclass(frozen=True, slots=True)
class Seen:
    """A lease as it was read; another content is a sign of life."""

    path: Path
    content: bytes

    @property
    def holder(self) -> Holder | None:
        """Whoever holds it; None where the file, which anything may have written, does not tell."""
        return Holder.parse(self.content[:_RECORD])


class Lease:
    """The lease of one name in a directory, as one contender sees it."""

    def __init__(
        self, directory: Path, name: str, terms: Terms = TERMS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.head = directory / f"{LEASE}{name}"
        self.terms, self._clock = terms, clock
        self._last: Seen | None = None
        self._changed = clock()

    def look(self) -> Seen | None:
        """Return the lease as it stands, or None where nobody holds it; notes when it changed last."""
        chain = list(self.chain())
        seen = chain[-1] if chain else None
        if seen != self._last:
            self._last, self._changed = seen, self._clock()
        return seen

    def chain(self) -> Iterator[Seen]:
        """Yield the files of the lease, the one that counts last."""
        path = self.head
        for _ in range(_LONGEST_CHAIN):
            content = _read(path)
            if content is None:
                return
            yield (seen := Seen(path, content))
            path = self.after(seen.holder)

    def after(self, holder: Holder | None) -> Path:
        """Return the file that ends a holder's lease."""
        return self.head.with_name(f"{self.head.name}.{holder.token if holder else _UNREADABLE}")

    def silent_s(self) -> float:
        """Return for how long what `look` found has not changed, in seconds of this process's clock."""
        return self._clock() - self._changed

    def acquire(self) -> "Held | None":
        """Take the lease where it is free or its holder dead; None where another has it. Raises OSError."""
        seen = self.look()
        if seen is None:
            return self.create(self.head)
        known_dead = seen.holder is not None and seen.holder.is_known_dead()
        if known_dead or self.silent_s() >= self.terms.expire_s:
            return self.create(self.after(seen.holder))
        return None

    def create(self, path: Path) -> "Held | None":
        """Create one file of the chain; None where another contender was faster. Raises OSError."""
        holder = Holder.this_process()
        if not _create(path, _content(holder, 0), holder.token):
            return None
        held = Held(self, holder, path)
        if not held.holds():  # the chain this file was to end has been given back meanwhile
            path.unlink(missing_ok=True)
            return None
        return held


class Held:
    """A lease that this process holds; `keep` renews it."""

    def __init__(self, lease: Lease, holder: Holder, path: Path) -> None:
        self.lease, self.holder, self.path = lease, holder, path
        self._renewals = 0

    def holds(self) -> bool:
        """The lease is still this process's."""
        end = list(self.lease.chain())[-1:]
        return bool(end) and end[0].path == self.path and end[0].holder == self.holder

    def renew(self) -> bool:
        """Write a sign of life; False where the lease is another's now. Raises OSError."""
        if not self.holds():
            return False
        try:
            fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return False
        try:
            # Through what was opened, not by name: this can never write into the lease of a successor.
            if os.pread(fd, _RECORD, 0) != _content(self.holder, 0)[:_RECORD]:
                return False
            self._renewals += 1
            os.pwrite(fd, _content(self.holder, self._renewals)[_RECORD:], _RECORD)
            os.fsync(fd)
        finally:
            os.close(fd)
        return True

    @contextlib.contextmanager
    def keep(self) -> Iterator[None]:
        """Renew the lease on a thread of its own while the block runs, and give it back at its end."""
        with every(self.lease.terms.renew_s, self.renew):
            try:
                yield
            finally:
                with contextlib.suppress(OSError):
                    self.release()

    def release(self) -> None:
        """Give the lease back; one that has been taken over stays its new holder's. Raises OSError."""
        if not self.holds() or (end := self.lease.create(self.lease.after(self.holder))) is None:
            return
        paths = [seen.path for seen in self.lease.chain()]
        # The first one first: from then on nobody can find the others, and a newcomer starts a chain of its own.
        for path in dict.fromkeys([*paths, end.path]):
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def every(seconds: float, work: Callable[[], Any]) -> Iterator[None]:
    """Call on a thread of its own while the block runs; an OSError is left to the next call."""
    over = threading.Event()

    def repeat() -> None:
        while not over.wait(seconds):
            with contextlib.suppress(OSError):
                work()

    thread = threading.Thread(target=repeat, name="renewal", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(seconds)


def _content(holder: Holder, renewals: int) -> bytes:
    return holder.as_json().ljust(_RECORD) + b"%20d\n" % renewals


def _create(path: Path, content: bytes, token: str) -> bool:
    """Create a file that is never seen without its content; False where it exists."""
    temporary = path.with_name(f"{path.name[:100]}.new-{token}")
    try:
        _write_new(temporary, content)
        try:
            os.link(temporary, path)
        except FileExistsError:
            # A server's answer may be lost and the request sent again: two names are the proof that it was done.
            return temporary.stat().st_nlink > 1
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            return _write_new(path, content)
        return True
    finally:
        temporary.unlink(missing_ok=True)


def _write_new(path: Path, content: bytes) -> bool:
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    except FileExistsError:
        return False
    with os.fdopen(fd, "wb") as file:
        file.write(content)
    sync(path)
    return True


def _read(path: Path) -> bytes | None:
    """Return the content, or None where there is no such file; opening it asks a file server anew."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    try:
        return os.read(fd, _RECORD + 64)
    finally:
        os.close(fd)
