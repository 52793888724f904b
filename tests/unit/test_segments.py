"""What is to be read is cut into bounded parts: together exactly what was planned, each contiguous in its file."""

import random
from collections.abc import Iterator
from math import prod
from pathlib import Path

import numpy as np
import pytest

from app.checkpoints import Checkpoint, CheckpointFile, Piece, TensorEntry
from app.weights import segments as module
from app.weights.layout import Block, Conversion, Layout, Place, plan_layout
from app.weights.segments import Box, Segment, Stretch, batches, segments

STEP = 1 << 10


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STEP", STEP)


def layout(
    mapped: dict[int, tuple[tuple[int, int], ...]] | None = None,
    blocks: tuple[Block, ...] = (),
    conversions: tuple[Conversion, ...] = (),
) -> Layout:
    return Layout("map", "", mapped or {}, blocks, conversions, {}, 0)


def whole(shape: tuple[int, ...], item: int = 4, offset: int = 0) -> Conversion:
    dtype = {1: "U8", 2: "F16", 4: "F32", 8: "F64"}[item]
    return Conversion(TensorEntry("t", dtype, shape, 0, offset, item * prod(shape)), Place(0, "BF16"))


@pytest.mark.parametrize("length", [1, STEP - 1, STEP, STEP + 1, 5 * STEP + 77])
@pytest.mark.parametrize("offset", [0, 8, 4095, 12345])
def test_mapped_stretches_are_cut_into_steps_without_a_gap(offset: int, length: int) -> None:
    parts = segments(layout({3: ((offset, length),)}), 0)

    assert all(isinstance(part, Stretch) and part.file == 3 and 0 < part.nbytes <= STEP for part in parts)
    assert covered(parts) == [(offset, offset + length)]


@pytest.mark.parametrize("length", [1, STEP - 1, STEP, STEP + 1, 5 * STEP + 77])
def test_blocks_are_cut_into_steps_that_keep_their_distance_from_the_target(length: int) -> None:
    parts = segments(layout(blocks=(Block(1, 100, length, 6400),)), 0)

    assert all(isinstance(part, Block) and part.nbytes <= STEP for part in parts)
    assert {part.target - part.offset for part in parts if isinstance(part, Block)} == {6300}
    assert covered(parts) == [(100, 100 + length)]


def test_everything_is_sorted_by_file_and_offset() -> None:
    parts = segments(
        layout({1: ((50, 10), (900, 5)), 0: ((8, 10),)}, (Block(1, 70, 20, 0), Block(0, 0, 8, 64)), (whole((3,)),)),
        1 << 10,
    )

    assert [(part.file, part.offset) for part in parts] == [(0, 0), (0, 0), (0, 8), (1, 50), (1, 70), (1, 900)]


def test_nothing_planned_is_nothing_to_do() -> None:
    assert segments(layout(), 0) == []
    assert batches([]) == []
    assert segments(layout(conversions=(whole((3, 0, 2)),)), 8) == []


def covered(parts: list[Segment]) -> list[tuple[int, int]]:
    """Join adjacent parts in their order; a gap or an overlap leaves more than one."""
    found: list[tuple[int, int]] = []
    for part in parts:
        if found and found[-1][1] == part.offset:
            found[-1] = (found[-1][0], part.offset + part.nbytes)
        else:
            found.append((part.offset, part.offset + part.nbytes))
    return found


def cases(count: int) -> Iterator[tuple[tuple[int, ...], int, int]]:
    """Yield shapes, sizes of an element and limits of the scratch memory, the same ones every time."""
    generator = random.Random(20)
    for _ in range(count):
        shape = tuple(generator.choice([1, 1, 2, 3, 4, 5, 7, 16]) for _ in range(generator.randint(0, 5)))
        item = generator.choice([1, 2, 4, 8])
        yield shape, item, generator.choice([item, item * generator.randint(1, 40), 4096])


@pytest.mark.parametrize(("shape", "item", "limit"), list(cases(150)))
def test_a_tensor_is_cut_into_boxes_that_are_contiguous_and_together_the_tensor(
    shape: tuple[int, ...], item: int, limit: int
) -> None:
    conversion = whole(shape, item, offset=1000)
    stored = np.arange(prod(shape), dtype=np.int64).reshape(shape)
    made = np.full(shape, -1)

    parts = segments(layout(conversions=(conversion,)), limit)

    for part in parts:
        assert isinstance(part, Box)
        assert part.conversion is conversion
        assert 0 < part.nbytes <= limit
        assert part.nbytes == item * prod(part.shape)
        first = (part.offset - 1000) // item
        box = tuple(slice(begin, begin + size) for begin, size in zip(part.start, part.shape, strict=True))
        assert (made[box] == -1).all()
        made[box] = stored.reshape(-1)[first : first + prod(part.shape)].reshape(part.shape)
    assert (made == stored).all()
    assert covered(parts) == [(1000, 1000 + item * prod(shape))]


@pytest.mark.parametrize(("shape", "item", "limit"), [c for c in cases(120) if len(c[0]) > 1 and c[0][0] > 1][:40])
def test_a_tensor_in_pieces_is_cut_within_each_piece(shape: tuple[int, ...], item: int, limit: int) -> None:
    """Two shards, cut along the last axis: neither lies in the tensor as a contiguous stretch."""
    left = (shape[-1] + 1) // 2
    boxes = [((0,) * len(shape), (*shape[:-1], left))]
    if shape[-1] > left:
        boxes.append(((*(0,) * (len(shape) - 1), left), (*shape[:-1], shape[-1] - left)))
    tensor = np.arange(prod(shape), dtype=np.int64).reshape(shape)
    files = [tensor[tuple(slice(b, b + s) for b, s in zip(start, size, strict=True))].ravel() for start, size in boxes]
    pieces = tuple(Piece(number, 640, start, size) for number, (start, size) in enumerate(boxes))
    entry = TensorEntry(
        "t", {1: "U8", 2: "F16", 4: "F32", 8: "F64"}[item], shape, 0, 0, item * prod(shape), None, pieces
    )
    made = np.full(shape, -1)

    for part in segments(layout(conversions=(Conversion(entry, Place(0, entry.dtype)),)), limit):
        assert isinstance(part, Box)
        assert part.nbytes <= limit
        first = (part.offset - 640) // item
        box = tuple(slice(begin, begin + size) for begin, size in zip(part.start, part.shape, strict=True))
        assert (made[box] == -1).all()
        made[box] = files[part.file][first : first + prod(part.shape)].reshape(part.shape)

    assert (made == tensor).all()


def test_small_neighbours_are_joined_up_to_the_size_of_a_step() -> None:
    parts: list[Segment] = [Block(0, 100 * number, 100, 128 * number) for number in range(25)]

    made = batches(parts)

    assert [len(batch) for batch in made] == [10, 10, 5]
    assert [part for batch in made for part in batch] == parts


def test_files_are_never_joined() -> None:
    parts: list[Segment] = [Block(number // 3, 8, 8, 64 * number) for number in range(9)]

    assert [[part.file for part in batch] for batch in batches(parts)] == [[0] * 3, [1] * 3, [2] * 3]


def test_a_part_longer_than_a_step_is_a_batch_of_its_own() -> None:
    small, large = Stretch(0, 0, 8), Stretch(0, 8, STEP)
    last = Stretch(0, 8 + STEP, 8)

    assert batches([small, large, last]) == [[small], [large], [last]]


def test_a_planned_checkpoint_is_covered_from_its_first_tensor_to_its_last() -> None:
    entries, offset = {}, 808
    for number in range(300):
        size = (number * 37) % 900 * 2 + 2
        entries[f"t{number}"] = TensorEntry(f"t{number}", "F16" if number % 3 else "F32", (size // 2,), 0, offset, size)
        if number % 3 == 0:
            entries[f"t{number}"] = TensorEntry(f"t{number}", "U8", (size,), 0, offset, size)
        offset += size
    files = (CheckpointFile(Path("/x"), -1, offset, (0, 0, 0, 0)),)
    for mode in ("map", "read"):
        for cast in (None, "F32"):
            planned = plan_layout(Checkpoint(Path("/x"), "safetensors", files, entries), mode, "", cast)
            parts = segments(planned, 512)
            assert sum(part.nbytes for part in parts) == planned.read_bytes
            assert min(part.offset for part in parts) == 808
            assert max(part.offset + part.nbytes for part in parts) == offset
            assert sum(map(len, batches(parts))) == len(parts)
