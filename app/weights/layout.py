"""Where every tensor of a checkpoint will lie in memory, decided from its headers alone.

Mapped: in a read-only mapping of its file. Placed: in one block of memory of our own, the slab, at a multiple of 64
bytes. A file that keeps a tensor as the model wants it is mapped or read as a whole; what must be cast or put together
from pieces is placed in its final form.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from app.checkpoints import Checkpoint, Piece, TensorEntry
from app.dtypes import FLOATING, item_bytes, size_bytes

Mode = Literal["map", "read"]

# The widest vector registers and a cache line.
ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor in the slab: `offset` in bytes, `dtype` as it is there, `stride` in elements (None: C order)."""

    offset: int
    dtype: str
    stride: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Block:
    """A stretch of a file that is read into the slab as it is."""

    file: int
    offset: int
    nbytes: int
    target: int


@dataclass(frozen=True, slots=True)
class Conversion:
    """A tensor that is put together from pieces, or cast, on its way into the slab."""

    entry: TensorEntry
    place: Place

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """The boxes of the tensor; one that is whole is a single box."""
        entry = self.entry
        return entry.pieces or (Piece(entry.file, entry.offset, (0,) * len(entry.shape), entry.shape),)


@dataclass(frozen=True, slots=True)
class Layout:
    """The plan of memory. `mapped`: file → stretches (offset, length) that are used where they are mapped."""

    mode: Mode
    why: str
    mapped: Mapping[int, tuple[tuple[int, int], ...]]
    blocks: tuple[Block, ...]
    conversions: tuple[Conversion, ...]
    places: Mapping[str, Place]
    slab_bytes: int

    @property
    def mapped_bytes(self) -> int:
        """Bytes that become resident in mappings."""
        return sum(length for stretches in self.mapped.values() for _, length in stretches)

    @property
    def read_bytes(self) -> int:
        """Bytes that come from the files."""
        converted = sum(conversion.entry.nbytes for conversion in self.conversions)
        return self.mapped_bytes + sum(block.nbytes for block in self.blocks) + converted

    @property
    def cast(self) -> tuple[str, ...]:
        """Names whose stored dtype is not the one in memory."""
        casts = {c.entry.place for c in self.conversions if c.entry.dtype != c.place.dtype}
        return tuple(c.entry.name for c in self.conversions if c.entry.place in casts)


def plan_layout(checkpoint: Checkpoint, mode: Mode, why: str, cast: str | None) -> Layout:
    """Decide for every tensor; `cast` is the dtype that floating-point tensors get, None leaves them as stored."""
    entries = sorted(checkpoint.tensors.values(), key=lambda e: (e.file, e.offset, e.nbytes))
    filled = [entry for entry in entries if entry.nbytes]
    converted = [entry for entry in filled if entry.pieces or _is_cast(entry, cast)]
    plain = [entry for entry in filled if not (entry.pieces or _is_cast(entry, cast))]
    taken = [entry for entry in plain if mode == "read" or _must_move(entry)]
    places: dict[str, Place] = {}
    blocks, end = _blocks(taken, places)
    conversions, end = _conversions(converted, cast, places, end)
    stay = [entry for entry in plain if entry.name not in places]
    mapped = {number: tuple(_stretches(stay, number)) for number in sorted({entry.file for entry in stay})}
    return Layout(mode, why, mapped, tuple(blocks), tuple(conversions), places, end)


def _is_cast(entry: TensorEntry, cast: str | None) -> bool:
    # What is stored with strides is cast when it is installed: those of the file are not kept anyway.
    return cast is not None and entry.dtype in FLOATING and entry.dtype != cast and entry.stride is None


def _must_move(entry: TensorEntry) -> bool:
    """A tensor at an address that is no multiple of its element's size cannot be used where it is mapped.

    Aligning further buys nothing on a CPU: MiniLM compiled with weights at 0, 8, 16 and 24 modulo 64 runs equally fast
    within 1 %.
    """
    return bool(entry.offset % item_bytes(entry.dtype))


def _blocks(entries: list[TensorEntry], places: dict[str, Place]) -> tuple[list[Block], int]:
    """Give each stretch a block; stretches that overlap (views of one storage) share theirs."""
    blocks: list[Block] = []
    end = 0
    for entry in entries:
        last = blocks[-1] if blocks else None
        if last is None or last.file != entry.file or entry.offset >= last.offset + last.nbytes:
            end = _aligned(end)
            last = Block(entry.file, entry.offset, entry.nbytes, end)
            blocks.append(last)
        elif entry.offset + entry.nbytes > last.offset + last.nbytes:
            last = Block(last.file, last.offset, entry.offset + entry.nbytes - last.offset, last.target)
            blocks[-1] = last
        end = last.target + last.nbytes
        places[entry.name] = Place(last.target + entry.offset - last.offset, entry.dtype, entry.stride)
    return blocks, end


def _conversions(
    entries: list[TensorEntry], cast: str | None, places: dict[str, Place], end: int
) -> tuple[list[Conversion], int]:
    made: dict[object, Conversion] = {}
    for entry in entries:
        if entry.place not in made:
            dtype = cast if cast is not None and _is_cast(entry, cast) else entry.dtype
            end = _aligned(end)
            made[entry.place] = Conversion(entry, Place(end, dtype))
            end += size_bytes(dtype, entry.shape)
        places[entry.name] = made[entry.place].place
    return list(made.values()), end


def _stretches(entries: list[TensorEntry], file: int) -> Iterator[tuple[int, int]]:
    """Join what lies close together: whole pages are mapped anyway, and long stretches are read fast."""
    near = 1 << 20
    begin = end = -1
    for entry in (one for one in entries if one.file == file):
        if begin >= 0 and entry.offset > end + near:
            yield begin, end - begin
            begin = -1
        begin = entry.offset if begin < 0 else begin
        end = max(end, entry.offset + entry.nbytes)
    if begin >= 0:
        yield begin, end - begin


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT
