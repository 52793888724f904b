"""What is to be done with each stretch of each file, in an order that suits the disk."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from math import prod

from app.checkpoints import Piece
from app.weights.layout import Block, Conversion, Layout

# Long enough to be sequential for the disk and cheap to account for, short enough for progress and for stopping.
STEP = 16 << 20


@dataclass(frozen=True, slots=True)
class Stretch:
    """Bytes that are used where they are mapped."""

    file: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Box:
    """A box of a tensor that is converted; small enough for the scratch memory. `start` in elements of the tensor."""

    file: int
    offset: int
    nbytes: int
    conversion: Conversion
    start: tuple[int, ...]
    shape: tuple[int, ...]


Segment = Stretch | Block | Box


def segments(layout: Layout, scratch_bytes: int) -> list[Segment]:
    """Return everything that must come from the files, by file and offset, each of a bounded size."""
    found: list[Segment] = [
        *(piece for file, rows in layout.mapped.items() for row in rows for piece in _steps(Stretch(file, *row))),
        *(piece for block in layout.blocks for piece in _block_steps(block)),
        *(box for conversion in layout.conversions for box in _boxes(conversion, scratch_bytes)),
    ]
    return sorted(found, key=lambda one: (one.file, one.offset))


def batches(parts: list[Segment]) -> list[list[Segment]]:
    """Join small neighbours, so that ten thousand small tensors are not ten thousand pieces of work."""
    made: list[list[Segment]] = []
    for _, group in groupby(parts, key=lambda one: one.file):
        size = STEP
        for part in group:
            if size + part.nbytes > STEP:
                made.append([])
                size = 0
            made[-1].append(part)
            size += part.nbytes
    return made


def _steps(stretch: Stretch) -> Iterator[Stretch]:
    for offset, nbytes in _cuts(stretch.offset, stretch.nbytes):
        yield replace(stretch, offset=offset, nbytes=nbytes)


def _block_steps(block: Block) -> Iterator[Block]:
    for offset, nbytes in _cuts(block.offset, block.nbytes):
        yield replace(block, offset=offset, nbytes=nbytes, target=block.target + offset - block.offset)


def _cuts(offset: int, nbytes: int) -> Iterator[tuple[int, int]]:
    """Cut at multiples of the step: no two threads wait for one huge page, and direct reads are of whole pages."""
    end = offset + nbytes
    while offset < end:
        cut = min(end, offset // STEP * STEP + STEP)
        yield offset, cut - offset
        offset = cut


def _boxes(conversion: Conversion, scratch_bytes: int) -> Iterator[Box]:
    item = conversion.entry.nbytes // max(1, prod(conversion.entry.shape))
    for piece in conversion.pieces:
        yield from _split(conversion, piece, item, scratch_bytes)


def _split(conversion: Conversion, piece: Piece, item: int, limit: int) -> Iterator[Box]:
    """Cut a box along its outermost axes until each part fits: the parts stay contiguous in the file."""
    nbytes = item * prod(piece.shape)
    if nbytes == 0:
        return
    if nbytes <= limit:
        yield Box(piece.file, piece.offset, nbytes, conversion, piece.start, piece.shape)
        return
    axis = next(number for number, size in enumerate(piece.shape) if size > 1)
    inner = nbytes // piece.shape[axis]
    rows = max(1, limit // inner)
    for first in range(0, piece.shape[axis], rows):
        count = min(rows, piece.shape[axis] - first)
        start = (*piece.start[:axis], piece.start[axis] + first, *piece.start[axis + 1 :])
        shape = (*piece.shape[:axis], count, *piece.shape[axis + 1 :])
        yield from _split(conversion, Piece(piece.file, piece.offset + first * inner, start, shape), item, limit)
