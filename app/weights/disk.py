"""How fast the disk was at best while the weights were read: no read of its own, and no figure where none was seen."""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

EVERY_S = 0.025
# Long enough that what is in flight at its ends does not count; shorter readings tell nothing.
WINDOW_S = 0.25
SHORTEST_S = 2 * WINDOW_S
# Readers that wait less for the disk than this share of their time are held up by something else.
WAITING = 0.5
MEGABYTE = 1_000_000


@dataclass(frozen=True, slots=True)
class DiskSpeed:
    """What the disk delivered while it was what the readers waited for.

    `bytes_per_s`: the most in a quarter of a second, so the disk can do no less; `ratio`: share of it that the whole
    reading came to. Both None where nothing was seen, and `why`.
    """

    bytes_per_s: int | None = None
    ratio: float | None = None
    why: str = ""


@dataclass(frozen=True, slots=True)
class Sample:
    """A moment of a reading: bytes that the storage was asked for, bytes that arrived, share of readers that wait."""

    at_s: float
    stored: int
    arrived: int
    waiting: float


class DiskWatch(AbstractContextManager["DiskWatch"]):
    """Looks at a reading from the side, forty times a second, as long as it is entered."""

    def __init__(self, arrived: Callable[[], int]) -> None:
        self.samples: list[Sample] = []
        self._arrived = arrived
        self._readers: set[int] = set()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="disk-watch", daemon=True)

    def watched(self, work: Callable[[], None]) -> Callable[[], None]:
        """Return the work such that whoever does it counts as a reader."""

        def run() -> None:
            self._readers.add(threading.get_native_id())
            work()

        return run

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while True:
            over = self._over.wait(EVERY_S)
            stored = bytes_from_storage()
            if stored is not None:
                readers = [waits_for_disk(reader) for reader in tuple(self._readers)]
                waiting = sum(readers) / len(readers) if readers else 0.0
                self.samples.append(Sample(time.monotonic(), stored, self._arrived(), waiting))
            if over:
                return


def bytes_from_storage() -> int | None:
    """Return how many bytes this process has had fetched from storage; None where the kernel does not count them."""
    try:
        rows = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        return int(rows["read_bytes"])
    except (OSError, ValueError, KeyError):
        return None


def waits_for_disk(thread: int) -> bool:
    """Say whether a thread of this process sleeps in the kernel until data comes (state D)."""
    try:
        return Path(f"/proc/self/task/{thread}/stat").read_bytes().rpartition(b") ")[2][:1] == b"D"
    except OSError:
        return False


def disk_speed(samples: Sequence[Sample], warm: bool) -> DiskSpeed:
    """Return what samples of a reading, in the order of time, say of the disk; `warm`: its files were cached before."""
    if why := "the files were in the page cache already" if warm else _why_unknown(samples):
        return DiskSpeed(why=why)
    best = max((_rate(one, two) for one, two in _windows(samples)), default=0.0)
    if best < 1:
        return DiskSpeed(why="what was asked for and what arrived never met in one window")
    return DiskSpeed(round(best), round(min(1.0, _rate(samples[0], samples[-1]) / best), 4))


def _why_unknown(samples: Sequence[Sample]) -> str:
    if len(samples) < 2:
        return "the kernel does not count what comes from storage, or the reading was over at once"
    seconds = samples[-1].at_s - samples[0].at_s
    if seconds < SHORTEST_S:
        return f"the reading took {seconds:.2f} s, too short to tell"
    if samples[-1].stored - samples[0].stored < MEGABYTE:
        return "the kernel counts nothing that came from storage for this process"
    waiting = sum(sample.waiting for sample in samples) / len(samples)
    if waiting < WAITING:
        return f"the readers waited for the disk {waiting:.0%} of their time, so something else held them up"
    return ""


def _windows(samples: Sequence[Sample]) -> list[tuple[Sample, Sample]]:
    """Return each sample with the first one that is a window later."""
    windows, last = [], 0
    for one in samples:
        # The end moves on with the beginning: a reading of an hour has a hundred thousand samples.
        while last < len(samples) and samples[last].at_s - one.at_s < WINDOW_S:
            last += 1
        if last < len(samples):
            windows.append((one, samples[last]))
    return windows


def _rate(one: Sample, two: Sample) -> float:
    """Return bytes a second; asked for ahead and taken from the cache are both no speed of the disk, so the less."""
    return min(two.stored - one.stored, two.arrived - one.arrived) / (two.at_s - one.at_s)
