"""How much of a file is in the page cache already, found without bringing in more of it."""

import ctypes
import os
from collections.abc import Sequence

from app.checkpoints import Checkpoint, CheckpointFile

# Linux 6.5 and later; the same number on every architecture. The kernel tells whoever owns or may write the file.
CACHESTAT = 451
# Where the kernel does not tell: samples of a whole checkpoint. Each one that finds nothing starts reading ahead there.
SAMPLES = 16
# The reading of headers brings in a little of each file, and the kernel may have dropped a little.
WARM, COLD = 0.95, 0.25

_libc = ctypes.CDLL(None, use_errno=True)


def cached_shares(checkpoint: Checkpoint) -> list[float | None]:
    """Return for each file which share of it is cached, 0 to 1; None where its file system cannot say."""
    total = sum(file.size for file in checkpoint.files)
    return [cached_share(file, -(-SAMPLES * file.size // max(1, total))) for file in checkpoint.files]


def cached_share(file: CheckpointFile, samples: int) -> float | None:
    """Return which share of a file is cached; by samples where the kernel does not count."""
    if file.size == 0:
        return 1.0
    pages = _counted(file)
    if pages is not None:
        return min(1.0, pages * os.sysconf("SC_PAGE_SIZE") / file.size)
    found = [_is_cached(file, file.size * number // samples) for number in range(samples)]
    return None if None in found else found.count(True) / samples


def cached_ratio(checkpoint: Checkpoint, shares: Sequence[float | None]) -> float | None:
    """Return which share of the bytes of all files is cached, 0 to 1; None where one of them cannot say."""
    total = sum(file.size for file in checkpoint.files)
    known = [share * file.size for share, file in zip(shares, checkpoint.files, strict=True) if share is not None]
    if len(known) < len(shares):
        return None
    return sum(known) / total if total else 1.0


def summary(ratio: float | None) -> str:
    """Say it in a word: warm, cold or mixed."""
    if ratio is None:
        return "mixed"
    return "warm" if ratio >= WARM else "cold" if ratio <= COLD else "mixed"


def _counted(file: CheckpointFile) -> int | None:
    """Return the number of cached pages by cachestat(2); None on another system or where it may not be asked."""
    everything = (ctypes.c_uint64 * 2)(0, 0)
    counts = (ctypes.c_uint64 * 5)()  # cached, dirty, under writeback, evicted, recently evicted
    if _libc.syscall(CACHESTAT, file.fd, everything, counts, 0) != 0:
        return None
    return int(counts[0])


def _is_cached(file: CheckpointFile, offset: int) -> bool | None:
    try:
        return os.preadv(file.fd, [bytearray(1)], offset, os.RWF_NOWAIT) == 1
    except BlockingIOError:
        return False
    except OSError:
        return None
