"""Bring the bytes of a checkpoint into memory, with every fault as an error and without the interpreter lock."""

import errno
import hashlib
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING

from app.checkpoints import PUBLISH, Checkpoint, CheckpointFile, fill
from app.errors import CheckpointError
from app.lanes import run_in_parallel
from app.progress import Progress
from app.weights import ResidentWeights, direct, page_cache, samples
from app.weights.disk import DiskWatch, disk_speed
from app.weights.layout import Block, Layout, Mode
from app.weights.memory import (
    POPULATE_READ,
    POPULATE_WRITE,
    Memory,
    SelfClosing,
    address_of,
    populate,
    prefer_huge_pages,
    protect,
    resident_bytes,
)
from app.weights.segments import Segment, Stretch, batches, segments

if TYPE_CHECKING:
    from hashlib import _Hash

    from app.weights.converting import Convert

# Threads that read. Mapping: no more than processors, because a thread that waits for one keeps the address space
# locked and others wait for memory: on two processors 5 ms beside two threads and 25 ms beside four, which were
# no faster. Those that take new memory and copy leave the disk alone meanwhile: of 3 GiB twelve read a tenth more a
# second than eight.
THREADS: Mapping[Mode, int] = {"map": max(2, min(4, len(os.sched_getaffinity(0)))), "read": 12}
# Scratch for hashing: small enough for the processor's cache, so the hash reads what was just copied.
SCRATCH = 1 << 20
# Scratch for converting, a thread, where the configuration allows as much.
CONVERSION_SCRATCH = 4 << 20
# One call into the kernel: short enough to show life on a slow network.
CALL = 8 << 20


def read_resident(
    checkpoint: Checkpoint,
    layout: Layout,
    progress: Progress,
    staging_bytes: int,
    digests: Mapping[str, str],
    cached: Sequence[float | None] | None = None,
) -> ResidentWeights:
    """Bring every tensor into memory and say what was read; raises CheckpointError naming file and byte.

    `staging_bytes` bounds the scratch memory of all threads together. `digests`: sha256 by file name; what is named
    there is verified on the way, one file a thread, because a sha256 has an order. `cached`: which share of each file
    the page cache held before anything of it was brought in; by default it is looked up here.
    """
    began = time.monotonic()
    cached = page_cache.cached_shares(checkpoint) if cached is None else cached
    ratio = page_cache.cached_ratio(checkpoint, cached)
    file_cache = page_cache.summary(ratio)
    memory = Memory.reserve(checkpoint, layout)
    reader = _Reader(checkpoint, memory, progress, staging_bytes, bool(digests))
    if layout.mode == "read" and not digests:
        reader.pass_cache(number for number, share in enumerate(cached) if share is not None and share < 0.5)
    progress.expect(layout.read_bytes, "bytes")
    parts = segments(layout, reader.scratch_bytes)
    with DiskWatch(lambda: progress.done) as watch:
        work = [watch.watched(one) for one in _work(checkpoint, reader, parts, digests)]
        run_in_parallel(work, reader.threads, "read")
    if changed := next((text for file in checkpoint.files if (text := file.changed())), None):
        raise CheckpointError(f"{changed}; {PUBLISH}")
    if memory.slab is not None:
        protect(memory.slab)
    sampled = samples.sample(checkpoint, memory, progress)
    return ResidentWeights(
        checkpoint=checkpoint,
        memory=memory,
        fingerprint=sampled.fingerprint,
        warnings=sampled.warnings,
        verified=dict(digests),
        bytes_read=layout.read_bytes,
        seconds=time.monotonic() - began,
        file_cache=file_cache,
        cached_ratio=ratio,
        disk=disk_speed(watch.samples, warm=file_cache == "warm"),
        direct_bytes=reader.direct_bytes,
        staging_bytes=reader.staging_bytes,
        resident_bytes=resident_bytes(memory.maps.values()),
        copied_bytes=resident_bytes([memory.slab] if memory.slab is not None else []),
    )


def _work(
    checkpoint: Checkpoint, reader: "_Reader", parts: list[Segment], digests: Mapping[str, str]
) -> Iterator[Callable[[], None]]:
    if not digests:
        yield from (partial(reader.take_all, batch) for batch in batches(parts))
        return
    by_file = {number: list(group) for number, group in groupby(parts, key=lambda part: part.file)}
    for number, file in enumerate(checkpoint.files):
        yield partial(reader.verify, number, by_file.get(number, []), digests[file.path.name])


def planned_staging(layout: Layout, staging_bytes: int, verifying: bool) -> int:
    """Return the scratch memory that reading will take."""
    threads, each = _scratch(layout, staging_bytes, verifying)
    return threads * each


def _scratch(layout: Layout, staging_bytes: int, verifying: bool) -> tuple[int, int]:
    """Return how many threads read, and the scratch memory of each."""
    plain = direct.SCRATCH if layout.mode == "read" else 0
    wanted = CONVERSION_SCRATCH if layout.conversions else SCRATCH if verifying else plain
    threads = max(1, min(THREADS[layout.mode], staging_bytes // SCRATCH))
    return threads, min(wanted, staging_bytes // threads)


class _Reader:
    """One reading of one checkpoint; its methods run on several threads."""

    def __init__(
        self, checkpoint: Checkpoint, memory: Memory, progress: Progress, staging_bytes: int, verifying: bool
    ) -> None:
        self._checkpoint, self._memory, self._progress = checkpoint, memory, progress
        self.threads, self.scratch_bytes = _scratch(memory.layout, staging_bytes, verifying)
        self._addresses = {number: address_of(one) for number, one in memory.maps.items()}
        self._slab = memoryview(memory.slab) if memory.slab is not None else memoryview(b"")
        self._slab_address = address_of(memory.slab) if memory.slab is not None else 0
        self._local = threading.local()
        self._lock = threading.Lock()
        self._convert: Convert | None = None
        self._direct: dict[int, SelfClosing] = {}
        self.staging_bytes = self.direct_bytes = 0

    def pass_cache(self, numbers: Iterable[int]) -> None:
        """Read these files past the page cache, where their file system offers that."""
        for number in numbers:
            file = self._checkpoint.files[number]
            if file.size >= direct.SMALLEST and (opened := direct.reopen(file)):
                self._direct[number] = opened

    def _scratch(self) -> memoryview:
        if not hasattr(self._local, "scratch"):
            # Whole pages of its own, given back when the thread ends.
            pages = mmap.mmap(-1, max(1, self.scratch_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self._local.scratch = memoryview(prefer_huge_pages(pages))
            with self._lock:
                self.staging_bytes += self.scratch_bytes
        scratch: memoryview = self._local.scratch
        return scratch

    def take_all(self, parts: Sequence[Segment]) -> None:
        """Take a batch of neighbours in one file."""
        blocks = [part for part in parts if isinstance(part, Block)]
        if blocks:
            self._prepare(blocks)
            opened = self._direct.get(blocks[0].file)
            for block in self._take_direct(opened, blocks) if opened else blocks:
                self._take(block)
        for part in parts:
            if not isinstance(part, Block):
                self._take(part)

    def _take_direct(self, opened: SelfClosing, blocks: Sequence[Block]) -> Sequence[Block]:
        """Take blocks past the page cache; returns what is left of them."""
        self._progress.check()
        rest = direct.read_blocks(opened, blocks, self._slab_address, self._scratch(), self._progress.advance)
        with self._lock:
            self.direct_bytes += sum(block.nbytes for block in blocks) - sum(block.nbytes for block in rest)
        return rest

    def verify(self, number: int, parts: Sequence[Segment], wanted: str) -> None:
        """Take a file from its first byte to its last and compare its sha256."""
        file, digest, position = self._checkpoint.files[number], hashlib.sha256(), 0
        for part in parts:
            self._hash(file, position, part.offset, digest)
            data = self._take(part)
            # Views of one storage overlap: what was hashed once is not hashed again.
            position, end = max(position, part.offset), part.offset + part.nbytes
            if data is None:
                self._hash(file, position, end, digest)
            elif end > position:
                digest.update(data[position - part.offset :])
            position = max(position, end)
        self._hash(file, position, file.size, digest)
        if digest.hexdigest() != wanted:
            raise CheckpointError(
                f"{file.path} has sha256 {digest.hexdigest()}, model.sha256 says {wanted}; it is damaged or another "
                f"file: download it again, or correct the list"
            )

    def _prepare(self, blocks: Sequence[Block]) -> None:
        """Fault in the slab's pages at once: one by one they would cost more than the copying."""
        begin, end = blocks[0].target, max(block.target + block.nbytes for block in blocks)
        code = populate(self._slab_address + begin, end - begin, POPULATE_WRITE)
        if code not in (0, errno.EINVAL):  # a kernel before 5.14 faults them in while they are written
            raise CheckpointError(
                f"no memory for {end - begin} bytes of weights: {os.strerror(code)}; raise the memory limit"
            )

    def _take(self, part: Segment) -> memoryview | None:
        """Bring one segment where it belongs; returns its bytes as they are in the file where they were copied."""
        self._progress.check()
        file = self._checkpoint.files[part.file]
        if isinstance(part, Stretch):
            self._populate(file, part)
            self._progress.advance(part.nbytes)
            return None
        if isinstance(part, Block):
            data = self._slab[part.target : part.target + part.nbytes]
            self._read(file, data, part.offset)
            return data
        data = self._scratch()[: part.nbytes]
        self._read(file, data, part.offset)
        self._converter()(data, part)
        return data

    def _hash(self, file: CheckpointFile, begin: int, end: int, digest: "_Hash") -> None:
        scratch = self._scratch()
        for offset in range(begin, end, len(scratch)):
            data = scratch[: min(len(scratch), end - offset)]
            fill(file, data, offset)
            digest.update(data)

    def _read(self, file: CheckpointFile, target: memoryview, offset: int) -> None:
        for done in range(0, len(target), CALL):
            part = target[done : done + CALL]
            fill(file, part, offset + done)
            self._progress.advance(len(part))

    def _populate(self, file: CheckpointFile, part: Stretch) -> None:
        code = populate(self._addresses[part.file] + part.offset, part.nbytes, POPULATE_READ)
        if code:
            _read_through(file, part)
            raise CheckpointError(
                f"{file.path} cannot be mapped at byte {part.offset}: {os.strerror(code)}; set model.reading: read"
            )

    def _converter(self) -> "Convert":
        # torch is needed for this alone, and reading begins before it is imported.
        with self._lock:
            if self._convert is None:
                from app.weights.converting import converter

                self._convert = converter(self._memory)
            return self._convert


def _read_through(file: CheckpointFile, part: Stretch) -> None:
    """Read a stretch for its errors alone: those of a mapping say neither where nor why."""
    scratch = memoryview(bytearray(SCRATCH))
    for offset in range(part.offset, part.offset + part.nbytes, SCRATCH):
        fill(file, scratch[: min(SCRATCH, part.offset + part.nbytes - offset)], offset)
