"""Reading a file past the page cache: it takes no memory for a second copy, and none that others' files lie in."""

import ctypes
import os
from collections.abc import Callable, Sequence
from dataclasses import replace

from app.checkpoints import CheckpointFile
from app.weights.layout import Block
from app.weights.memory import SelfClosing, address_of

# What every common device is content with for offset, address and length.
UNIT = 4096
# Of smaller files the cache is no burden.
SMALLEST = 8 << 20
# One call: a huge page, which stays in the processor's cache until it is copied from.
SCRATCH = 2 << 20


def reopen(file: CheckpointFile) -> SelfClosing | None:
    """Open the same file again for reading past the cache; None where its file system does not offer that."""
    try:
        return SelfClosing(os.open(f"/proc/self/fd/{file.fd}", os.O_RDONLY | os.O_DIRECT))
    except OSError:
        return None


def read_blocks(
    opened: SelfClosing, blocks: Sequence[Block], address: int, scratch: memoryview, advance: Callable[[int], None]
) -> list[Block]:
    """Bring blocks of a file, sorted by offset, to `address` + their targets; returns what is left of them.

    `scratch`: whole units, on a page. Something is left where the file ends early or the kernel refuses: whoever reads
    that the ordinary way learns why.
    """
    end = blocks[-1].offset + blocks[-1].nbytes
    source = address_of(scratch)
    begin = size = 0  # the window: what of the file is in the scratch memory
    for number, block in enumerate(blocks):
        done = 0
        while done < block.nbytes:
            at = block.offset + done
            if not begin <= at < begin + size:
                begin = at // UNIT * UNIT
                size = _read(opened, scratch[: -(-(end - begin) // UNIT) * UNIT], begin)
                if begin + size <= at:
                    rest = replace(block, offset=at, nbytes=block.nbytes - done, target=block.target + done)
                    return [rest, *blocks[number + 1 :]]
            count = min(block.nbytes - done, begin + size - at)
            # By ctypes: it leaves the interpreter lock to others meanwhile, an assignment of slices does not.
            ctypes.memmove(address + block.target + done, source + at - begin, count)
            done += count
            advance(count)
    return []


def _read(opened: SelfClosing, target: memoryview, offset: int) -> int:
    try:
        return os.preadv(opened.fileno(), [target], offset)
    except OSError:
        return 0
