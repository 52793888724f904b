"""Where every tensor of a checkpoint will lie in memory, decided from its headers alone.

Mapped: in a read-only mapping of its file. Placed: in one block of memory of our own, the slab, at a multiple of 64
bytes. A file that keeps a tensor as the model wants it is mapped or read as a whole; what must be cast or put together
from pieces is placed in its final form.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from app.checkpoints import Checkpoint, Piece, TensorEntry
from app.dtypes import FLOATING, item_bytes, size_bytes

Mode = Literal["map", "read"]

# What torch calls the state that a module keeps beside its tensors.
EXTRA_STATE = "_extra_state"
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
    mapped = {number: tuple(_stretches(group)) for number, group in groupby(stay, key=lambda entry: entry.file)}
    return Layout(mode, why, mapped, tuple(blocks), tuple(conversions), places, end)


def loaded_dtype(entry: TensorEntry, cast: str | None) -> str:
    """Return the dtype that a stored tensor has in the model; the state of a module beside its tensors is not cast."""
    state = entry.name.endswith(EXTRA_STATE)
    return cast if cast is not None and entry.dtype in FLOATING and not state else entry.dtype


def _is_cast(entry: TensorEntry, cast: str | None) -> bool:
    # What is stored with strides is cast when it is installed: those of the file are not kept anyway.
    return entry.stride is None and loaded_dtype(entry, cast) != entry.dtype


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
    for group in _overlapping(entries):
        begin, last = group[0].offset, max(entry.offset + entry.nbytes for entry in group)
        # Several views keep the alignment that they have to each other in the file.
        target = _aligned(end) + (begin % ALIGNMENT if group[-1].offset != begin else 0)
        blocks.append(Block(group[0].file, begin, last - begin, target))
        end = target + last - begin
        for entry in group:
            places[entry.name] = Place(target + entry.offset - begin, entry.dtype, entry.stride)
    return blocks, end


def _overlapping(entries: list[TensorEntry]) -> Iterator[list[TensorEntry]]:
    """Group tensors, sorted by file and offset, that have bytes in common."""
    group: list[TensorEntry] = []
    end = 0
    for entry in entries:
        if group and (entry.file != group[0].file or entry.offset >= end):
            yield group
            group = []
        end = max(end if group else 0, entry.offset + entry.nbytes)
        group.append(entry)
    if group:
        yield group


def _conversions(
    entries: list[TensorEntry], cast: str | None, places: dict[str, Place], end: int
) -> tuple[list[Conversion], int]:
    made: dict[object, Conversion] = {}
    for entry in entries:
        if entry.place not in made:
            dtype = loaded_dtype(entry, cast)
            end = _aligned(end)
            made[entry.place] = Conversion(entry, Place(end, dtype))
            end += size_bytes(dtype, entry.shape)
        places[entry.name] = made[entry.place].place
    return list(made.values()), end


def _stretches(entries: Iterable[TensorEntry]) -> Iterator[tuple[int, int]]:
    """Join what lies close together: whole pages are mapped anyway, and long stretches are read fast."""
    near = 1 << 20
    begin = end = -1
    for entry in entries:
        if begin >= 0 and entry.offset > end + near:
            yield begin, end - begin
            begin = -1
        begin = entry.offset if begin < 0 else begin
        end = max(end, entry.offset + entry.nbytes)
    if begin >= 0:
        yield begin, end - begin


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT
