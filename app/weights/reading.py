"""Map checkpoint files read-only and make every page resident, without holding the interpreter lock."""

import ctypes
import errno
import hashlib
import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from app.checkpoints import Checkpoint, CheckpointFile
from app.errors import CheckpointError
from app.lanes import spawn
from app.progress import Progress
from app.weights import ResidentWeights

# A step is long enough to be sequential for the disk and short enough for progress and for stopping.
CHUNK = 8 << 20
# One scratch buffer a thread: small enough for the processor's cache, so the hash reads what was just copied.
STEP = 1 << 20
# Since Linux 5.14: fault in pages for reading; a truncated file is an error code there, not SIGBUS.
MADV_POPULATE_READ = 22

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

Chunk = tuple[int, int, int]  # file number, offset, length


def read_resident(checkpoint: Checkpoint, progress: Progress, threads: int) -> ResidentWeights:
    """Read every byte once, hash it and leave its page mapped; raises CheckpointError naming file and offset."""
    began = time.monotonic()
    maps = map_files(checkpoint)
    file_cache = _file_cache(checkpoint)
    progress.expect(checkpoint.nbytes, "bytes")
    chunks = [
        (number, offset, min(CHUNK, file.size - offset))
        for number, file in enumerate(checkpoint.files)
        for offset in range(0, file.size, CHUNK)
    ]
    digests: dict[Chunk, bytes] = {}
    _in_parallel(chunks, threads, partial(_read_chunk, checkpoint, maps, digests, progress))
    if changed := next((text for file in checkpoint.files if (text := file.changed())), None):
        raise CheckpointError(f"{changed}; publish checkpoints by renaming a complete directory")
    digest = hashlib.sha256(b"".join(digests[chunk] for chunk in chunks)).hexdigest()
    return ResidentWeights(
        checkpoint,
        maps,
        digest,
        checkpoint.nbytes,
        time.monotonic() - began,
        "map",
        file_cache,
        _mapped_resident_bytes(checkpoint),
    )


def map_files(checkpoint: Checkpoint) -> tuple[mmap.mmap, ...]:
    """Map every file for reading only: no commit charge, no private copy, and a write would not pass unseen."""
    return tuple(_map(file) for file in checkpoint.files)


def _map(file: CheckpointFile) -> mmap.mmap:
    try:
        return mmap.mmap(file.fd, file.size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{file.path} cannot be mapped: {error}; was it truncated?") from error


def _mapped_resident_bytes(checkpoint: Checkpoint) -> int:
    """Return how many bytes of the files' mappings this process has in memory, from its own page tables.

    mincore would say "all" to whoever neither owns nor may write a file (Linux 5.2 and later).
    """
    paths = {str(file.path.resolve()) for file in checkpoint.files}
    total, inside = 0, False
    for row in Path("/proc/self/smaps").read_text().splitlines():
        fields = row.split(maxsplit=5)
        if "-" in fields[0]:
            inside = len(fields) == 6 and fields[5] in paths
        elif inside and fields[0] == "Rss:":
            total += int(fields[1]) * 1024
    return total


def _in_parallel(chunks: Sequence[Chunk], threads: int, work: Callable[[Chunk, memoryview], None]) -> None:
    todo = iter(chunks)
    lock = threading.Lock()

    def drain() -> None:
        scratch = memoryview(bytearray(STEP))
        while True:
            with lock:
                chunk = next(todo, None)
            if chunk is None:
                return
            work(chunk, scratch)

    for future in [spawn(drain, f"read-{number}") for number in range(threads)]:
        future.result()


def _read_chunk(
    checkpoint: Checkpoint,
    maps: Sequence[mmap.mmap],
    digests: dict[Chunk, bytes],
    progress: Progress,
    chunk: Chunk,
    scratch: memoryview,
) -> None:
    """Read by `preadv` (sequential for the disk, errors as errors), then map the pages that are now cached."""
    number, offset, length = chunk
    file = checkpoint.files[number]
    progress.check()
    digest = hashlib.sha256()
    for step in range(offset, offset + length, STEP):
        part = scratch[: min(STEP, offset + length - step)]
        _fill(part, file, step)
        digest.update(part)
    digests[chunk] = digest.digest()
    _populate(maps[number], offset, length, file)
    progress.advance(length)


def _fill(part: memoryview, file: CheckpointFile, offset: int) -> None:
    count = 0
    try:
        # File systems in user space and on the network may give less than was asked for; nothing at all is the end.
        while count < len(part) and (got := os.preadv(file.fd, [part[count:]], offset + count)):
            count += got
    except OSError as error:
        raise CheckpointError(
            f"{file.path} cannot be read at byte {offset}: {error.strerror}; check the disk"
        ) from error
    if count != len(part):
        raise CheckpointError(
            f"{file.path} ends at byte {offset + count}, it had {file.size} bytes when it was opened; "
            f"it was truncated while it was being loaded: publish checkpoints by renaming a complete directory"
        )


def _populate(mapping: mmap.mmap, offset: int, length: int, file: CheckpointFile) -> None:
    # ctypes and not mmap.madvise: that one keeps the interpreter lock, and probes would wait for the disk.
    if _libc.madvise(_address(mapping) + offset, length, MADV_POPULATE_READ) == 0:
        return
    code = ctypes.get_errno()
    if code == errno.EINVAL:  # a kernel before 5.14: touch one byte a page, the data is cached already
        view = memoryview(mapping)
        bytes(view[offset : offset + length : mmap.PAGESIZE])
        return
    raise CheckpointError(f"{file.path} cannot be mapped at byte {offset}: {os.strerror(code)}; was it truncated?")


def _address(mapping: mmap.mmap) -> int:
    # A read-only map cannot be the target of from_buffer; numpy takes the address of a read-only buffer.
    import numpy as np

    return int(np.frombuffer(mapping, np.uint8, 1).ctypes.data)


def _file_cache(checkpoint: Checkpoint) -> str:
    """Say whether the files were in the page cache before anything was read, by samples that wait for no disk."""
    samples = [(file, offset) for file in checkpoint.files for offset in range(0, file.size, max(1, file.size // 64))]
    cached = [_is_cached(file, offset) for file, offset in samples]
    return "warm" if all(cached) else "cold" if cached.count(False) == len(cached) else "mixed"


def _is_cached(file: CheckpointFile, offset: int) -> bool | None:
    """Return None where the file system cannot say."""
    try:
        return os.preadv(file.fd, [bytearray(1)], offset, os.RWF_NOWAIT) == 1
    except BlockingIOError:
        return False
    except OSError:
        return None
