"""The memory that holds weights: read-only mappings of their files, and one slab of our own."""

import contextlib
import ctypes
import io
import mmap
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from app.checkpoints import TOO_MANY_FILES, Checkpoint, CheckpointFile, TensorEntry
from app.errors import CheckpointError, ResourceError
from app.weights.layout import Layout, Place

# Since Linux 5.14: fault in pages; a truncated file or an I/O error is an error code there, not SIGBUS.
POPULATE_READ, POPULATE_WRITE = 22, 23

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = _libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class SelfClosing(io.FileIO):
    """Closes itself with the last that holds it, without a warning."""

    def __del__(self) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class Memory:
    """Where the bytes of every tensor are.

    The slab is a file in memory and not anonymous, so that the process that computes the reference can map it instead
    of taking a second copy.
    """

    layout: Layout
    maps: Mapping[int, mmap.mmap]
    slab: mmap.mmap | None
    slab_file: io.FileIO | None

    @classmethod
    def reserve(cls, checkpoint: Checkpoint, layout: Layout, slab_fd: int | None = None) -> Self:
        """Map the files for reading only and make room for the slab; raises CheckpointError or ResourceError.

        `slab_fd`: the slab of the process that filled it; it is mapped for reading only. Nothing is resident yet.
        """
        maps = {number: _map(checkpoint.files[number]) for number in layout.mapped}
        if not layout.slab_bytes:
            return cls(layout, maps, None, None)
        try:
            file = SelfClosing(os.memfd_create("warmgate-weights") if slab_fd is None else slab_fd, "rb+")
            if slab_fd is None:
                file.truncate(layout.slab_bytes)
            access = mmap.ACCESS_WRITE if slab_fd is None else mmap.ACCESS_READ
            slab = prefer_huge_pages(mmap.mmap(file.fileno(), layout.slab_bytes, access=access))
            return cls(layout, maps, slab, file)
        except (OSError, ValueError) as error:
            raise ResourceError(
                f"{layout.slab_bytes} bytes of memory for weights are not to be had: {error}; raise the memory limit"
            ) from error

    def populate(self, checkpoint: Checkpoint) -> None:
        """Map the pages of files that another process has made resident; raises CheckpointError where they are not."""
        for number, stretches in self.layout.mapped.items():
            for offset, length in stretches:
                if code := populate(address_of(self.maps[number]) + offset, length, POPULATE_READ):
                    path = checkpoint.files[number].path
                    raise CheckpointError(f"{path} cannot be mapped at byte {offset}: {os.strerror(code)}")

    def find(self, entry: TensorEntry) -> tuple[mmap.mmap, Place]:
        """Return the memory a tensor with bytes lies in, and its place there."""
        if (place := self.layout.places.get(entry.name)) is not None:
            if self.slab is None:
                raise CheckpointError(f"{entry.name} was planned for memory that was never reserved")
            return self.slab, place
        return self.maps[entry.file], Place(entry.offset, entry.dtype, entry.stride)


def _map(file: CheckpointFile) -> mmap.mmap:
    # For reading only: no commit charge, no private copy, and a write would not pass unseen.
    try:
        return prefer_huge_pages(mmap.mmap(file.fd, file.size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ))
    except (ValueError, OSError) as error:
        few = getattr(error, "errno", None) in TOO_MANY_FILES
        remedy = "raise the limit of open files (ulimit -n)" if few else "was it truncated?"
        raise CheckpointError(f"{file.path} cannot be mapped: {error}; {remedy}") from error


def prefer_huge_pages(memory: mmap.mmap) -> mmap.mmap:
    """Ask for huge pages where the kernel has them, and return the same memory.

    Of a mapped file the page cache then keeps huge pages too, past this process: reading 3 GiB took 0.7 of the time,
    and mapping them again after a restart 4 ms instead of 90.
    """
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def address_of(memory: mmap.mmap | memoryview) -> int:
    """Return the address of memory, read-only or not."""
    # A read-only map cannot be the target of from_buffer; numpy takes the address of a read-only buffer.
    import numpy as np

    return int(np.frombuffer(memory, np.uint8, 1).ctypes.data)


def populate(address: int, length: int, advice: int) -> int:
    """Fault in the pages of a stretch of memory; returns 0 or the error number.

    By ctypes and not mmap.madvise: that one keeps the interpreter lock, and probes would wait for the disk.
    """
    begin = address // mmap.PAGESIZE * mmap.PAGESIZE
    return 0 if _libc.madvise(begin, address + length - begin, advice) == 0 else ctypes.get_errno()


def can_populate() -> bool:
    """Say whether this kernel has MADV_POPULATE_READ (Linux 5.14)."""
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        return populate(address_of(page), 1, POPULATE_READ) == 0


def protect(memory: mmap.mmap) -> None:
    """Make memory read-only for this process: weights are not written, and a write must not pass unseen."""
    if _libc.mprotect(address_of(memory), len(memory), mmap.PROT_READ) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def resident_bytes(memories: Iterable[mmap.mmap]) -> int | None:
    """Return how many bytes of mappings this process has in memory, from its own page tables; None where it has none.

    From /proc/self/pagemap in short reads: mincore would say "all" to whoever neither owns nor may write a file (Linux
    5.2 and later), and smaps keeps the address space locked for as long as it looks at a whole mapping, during which
    no thread gets memory (3 GiB: 30 ms). Format: pagemap.rst of the kernel; the highest bit says present.
    """
    import numpy as np

    try:
        opened = Path("/proc/self/pagemap").open("rb", buffering=0)  # noqa: SIM115 - closed below
    except OSError:
        return None
    pages = 0
    with opened as table:
        for memory in memories:
            first = address_of(memory) // mmap.PAGESIZE
            last = first + -(-len(memory) // mmap.PAGESIZE)
            for page in range(first, last, 4096):
                rows = os.pread(table.fileno(), 8 * min(4096, last - page), 8 * page)
                pages += int(np.count_nonzero(np.frombuffer(rows, np.uint64) >> 63))
    return pages * mmap.PAGESIZE
