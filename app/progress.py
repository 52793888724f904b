"""How far a stage has come: written by the stage, read by probes, watched for signs of life."""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


class Stopped(Exception):  # noqa: N818 - nobody's error: the start-up was told to end
    """Raised inside a running stage once the start-up has been stopped."""


class Progress:
    """How far one stage has come; written by the stage on its lane, read by probes at any time."""

    def __init__(self) -> None:
        self.total = 0
        self.unit = ""
        self.detail = ""
        self.rows: tuple[Any, ...] = ()
        self._done = 0
        self._observe: Callable[[], int] | None = None
        self._stop = threading.Event()
        self._lock = threading.Lock()

    @property
    def done(self) -> int:
        """Units finished so far."""
        return self._observe() if self._observe else self._done

    @property
    def ratio(self) -> float | None:
        """Share finished, or None while the total is unknown."""
        return min(1.0, self.done / self.total) if self.total else None

    @property
    def stopped(self) -> bool:
        """The start-up has been told to end."""
        return self._stop.is_set()

    def expect(self, total: int, unit: str) -> None:
        """Declare what is to be done."""
        self.total, self.unit = total, unit

    def advance(self, count: int = 1) -> None:
        """Count finished units; raises Stopped when the start-up has been stopped."""
        with self._lock:
            self._done += count
        self.check()

    def check(self) -> None:
        """Raise Stopped when the start-up has been stopped."""
        if self.stopped:
            raise Stopped

    def observe(self, count: Callable[[], int]) -> None:
        """Take progress from outside a call that cannot report it, for example modules imported so far."""
        self._observe = count

    def say(self, detail: str) -> None:
        """Set the sentence that probes show beside the stage."""
        self.detail = detail

    def show(self, rows: Sequence[Any]) -> None:
        """Publish records that belong to the stage, for example its buckets."""
        self.rows = tuple(rows)

    def stop(self) -> None:
        """Ask the stage to end at its next step."""
        self._stop.set()

    def sign_of_life(self) -> tuple[int, str, int]:
        """Return a value that changes whenever the stage gets anywhere."""
        return self.done, self.detail, hash(self.rows)


def reads_of_this_thread() -> Callable[[], int]:
    """Return a count of the calling thread's reads, for others to ask: the sign of life of many small ones."""
    counters = Path(f"/proc/self/task/{threading.get_native_id()}/io")

    def count() -> int:
        try:
            rows = dict(line.split(": ") for line in counters.read_text().splitlines())
        except OSError:  # the thread has ended, or the kernel does not count
            return 0
        return int(rows.get("syscr", 0))

    return count
