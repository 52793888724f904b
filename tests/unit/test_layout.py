"""Where every tensor will lie is decided from headers alone: mapped where it can be used, else placed at 64 bytes."""

from pathlib import Path

import pytest

from app.checkpoints import Checkpoint, CheckpointFile, Piece, TensorEntry
from app.dtypes import BITS, FLOATING, item_bytes, size_bytes
from app.weights.layout import ALIGNMENT, Block, Conversion, Layout, Mode, Place, plan_layout

MODES: tuple[Mode, ...] = ("map", "read")
NEAR = 1 << 20


def entry(
    name: str,
    offset: int,
    *shape: int,
    dtype: str = "F32",
    file: int = 0,
    stride: tuple[int, ...] | None = None,
    nbytes: int | None = None,
) -> TensorEntry:
    size = size_bytes(dtype, shape) if nbytes is None else nbytes
    return TensorEntry(name, dtype, shape, file, offset, size, stride)


def pieces(name: str, *given: Piece, shape: tuple[int, ...], dtype: str = "F32") -> TensorEntry:
    return TensorEntry(name, dtype, shape, 0, 0, size_bytes(dtype, shape), pieces=given)


def layout(*entries: TensorEntry, mode: Mode, cast: str | None = None) -> Layout:
    files = tuple(CheckpointFile(Path(f"/models/{n}"), -1, 1 << 30, (0, n, 0, 0)) for n in range(3))
    checkpoint = Checkpoint(Path("/models"), "safetensors", files, {one.name: one for one in entries})
    return plan_layout(checkpoint, mode, "because", cast)


def test_mapping_leaves_tensors_where_they_lie_in_their_files() -> None:
    planned = layout(entry("a", 100, 2), entry("b", 108, 6), entry("c", 8, 4, file=2), mode="map")

    assert planned == Layout("map", "because", {0: ((100, 32),), 2: ((8, 16),)}, (), (), {}, 0)
    assert (planned.mapped_bytes, planned.read_bytes) == (48, 48)


def test_reading_gives_every_tensor_its_place_in_one_block_of_memory() -> None:
    planned = layout(entry("a", 100, 2), entry("b", 108, 6), entry("c", 8, 4, file=2), mode="read")

    blocks = (Block(0, 100, 8, 0), Block(0, 108, 24, 64), Block(2, 8, 16, 128))
    places = {"a": Place(0, "F32"), "b": Place(64, "F32"), "c": Place(128, "F32")}
    assert planned == Layout("read", "because", {}, blocks, (), places, 144)
    assert (planned.mapped_bytes, planned.read_bytes) == (0, 48)


@pytest.mark.parametrize("mode", MODES)
def test_tensors_without_bytes_and_checkpoints_without_tensors_need_no_memory(mode: Mode) -> None:
    for planned in (layout(mode=mode), layout(entry("a", 8, 0, 3), entry("b", 8, 3, 0, dtype="BF16"), mode=mode)):
        assert planned == Layout(mode, "because", {}, (), (), {}, 0)
        assert planned.read_bytes == 0


@pytest.mark.parametrize("dtype", sorted(BITS))
def test_a_tensor_that_is_not_aligned_to_its_element_is_placed_and_its_neighbours_stay_mapped(dtype: str) -> None:
    item = item_bytes(dtype)
    for offset in range(1600, 1600 + 2 * item):
        planned = layout(entry("a", 0, 4), entry("x", offset, 3, dtype=dtype), mode="map")
        whole = offset % item == 0
        assert ("x" in planned.places) is not whole
        assert planned.mapped_bytes == (offset + 3 * item if whole else 16)
        assert planned.slab_bytes == (0 if whole else 3 * item)


def test_a_complex_number_of_four_byte_alignment_is_placed() -> None:
    assert layout(entry("x", 4, 1, dtype="C64"), mode="map").places == {"x": Place(0, "C64")}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cast", [None, "BF16", "F64"])
def test_every_place_is_a_multiple_of_64_bytes_and_none_overlaps_another(mode: Mode, cast: str | None) -> None:
    names = sorted(BITS)
    entries, offset = [], 3
    for number, dtype in enumerate(names):
        entries.append(entry(dtype, offset, number % 5 + 1, dtype=dtype))
        offset += entries[-1].nbytes + number % 2
    planned = layout(*entries, mode=mode, cast=cast)

    ends = 0
    for name, place in sorted(planned.places.items(), key=lambda one: one[1].offset):
        assert place.offset % ALIGNMENT == 0
        assert place.offset >= ends
        ends = place.offset + size_bytes(place.dtype, planned_shape(entries, name))
    assert ends == planned.slab_bytes
    assert planned.read_bytes >= sum(one.nbytes for one in entries)


def planned_shape(entries: list[TensorEntry], name: str) -> tuple[int, ...]:
    return next(one.shape for one in entries if one.name == name)


@pytest.mark.parametrize("cast", sorted(FLOATING))
def test_a_cast_converts_what_is_floating_point_and_has_another_dtype(cast: str) -> None:
    entries = [entry(dtype, 64 * number, 2, dtype=dtype) for number, dtype in enumerate(sorted(BITS))]
    planned = layout(*entries, mode="map", cast=cast)

    assert {one.entry.name: one.place.dtype for one in planned.conversions} == dict.fromkeys(FLOATING - {cast}, cast)
    assert set(planned.places) == FLOATING - {cast}
    assert planned.slab_bytes == ALIGNMENT * (len(FLOATING) - 2) + 2 * item_bytes(cast)


def test_four_bit_floats_are_no_floating_point_numbers_that_a_cast_may_change() -> None:
    assert "F4" not in FLOATING
    assert layout(entry("a", 0, 2, dtype="F4"), mode="map", cast="BF16").conversions == ()


def test_the_names_of_a_tie_share_one_place() -> None:
    one, two = entry("a", 100, 2), entry("b", 100, 2)

    assert layout(one, two, mode="map").mapped_bytes == 8
    read = layout(one, two, mode="read")
    assert (read.places, read.blocks) == ({"a": Place(0, "F32"), "b": Place(0, "F32")}, (Block(0, 100, 8, 0),))
    cast = layout(one, two, mode="map", cast="F16")
    assert cast.places == {"a": Place(0, "F16"), "b": Place(0, "F16")}
    assert [(c.entry.name, c.place) for c in cast.conversions] == [("a", Place(0, "F16"))]
    assert (cast.slab_bytes, cast.read_bytes) == (4, 8)


def test_views_of_one_storage_are_read_once_and_keep_their_distance() -> None:
    planned = layout(
        entry("whole", 64, 10), entry("row", 72, 2), entry("beyond", 96, 4), entry("apart", 200, 1), mode="read"
    )

    assert planned.blocks == (Block(0, 64, 48, 0), Block(0, 200, 4, 64))
    assert planned.places == {
        "whole": Place(0, "F32"),
        "row": Place(8, "F32"),
        "beyond": Place(32, "F32"),
        "apart": Place(64, "F32"),
    }
    assert (planned.slab_bytes, planned.read_bytes) == (68, 52)


def test_equal_offsets_in_different_files_have_nothing_in_common() -> None:
    planned = layout(entry("a", 0, 10), entry("b", 4, 2, file=1), mode="read")

    assert planned.blocks == (Block(0, 0, 40, 0), Block(1, 4, 8, 64))


@pytest.mark.parametrize("mode", MODES)
def test_strides_of_the_file_are_kept_in_memory(mode: Mode) -> None:
    planned = layout(entry("t", 64, 2, 3, stride=(1, 2)), mode=mode)

    assert planned.places == ({} if mode == "map" else {"t": Place(0, "F32", (1, 2))})
    assert planned.conversions == ()


@pytest.mark.parametrize("mode", MODES)
def test_what_has_strides_is_not_cast_on_its_way(mode: Mode) -> None:
    planned = layout(entry("t", 64, 2, 3, stride=(1, 2)), mode=mode, cast="BF16")

    assert planned.conversions == ()
    assert planned.read_bytes == 24


@pytest.mark.parametrize("mode", MODES)
def test_a_tensor_in_pieces_is_put_together_in_its_place(mode: Mode) -> None:
    parts = (Piece(1, 800, (0, 0), (2, 3)), Piece(2, 96, (2, 0), (2, 3)))
    one = pieces("a", *parts, shape=(4, 3))
    planned = layout(one, mode=mode)

    assert planned.places == {"a": Place(0, "F32")}
    assert planned.conversions == (Conversion(one, Place(0, "F32")),)
    assert planned.conversions[0].pieces == parts
    assert (planned.mapped, planned.blocks, planned.slab_bytes, planned.read_bytes) == ({}, (), 48, 48)


def test_a_tensor_that_is_cast_and_whole_is_a_single_piece_of_it() -> None:
    planned = layout(entry("a", 100, 2, 3, file=1), mode="map", cast="BF16")

    assert planned.conversions[0].pieces == (Piece(1, 100, (0, 0), (2, 3)),)
    assert (planned.slab_bytes, planned.read_bytes) == (12, 24)


def test_the_names_of_a_tie_in_pieces_share_one_place() -> None:
    parts = (Piece(1, 800, (0,), (2,)), Piece(2, 96, (2,), (2,)))
    planned = layout(pieces("a", *parts, shape=(4,)), pieces("b", *parts, shape=(4,)), mode="map")

    assert planned.places == {"a": Place(0, "F32"), "b": Place(0, "F32")}
    assert len(planned.conversions) == 1


@pytest.mark.parametrize(
    ("distance", "stretches"),
    [
        (0, ((8, 16),)),
        (4, ((8, 20),)),
        (NEAR, ((8, 16 + NEAR),)),
        (NEAR + 4, ((8, 8), (8 + 8 + NEAR + 4, 8))),
    ],
)
def test_stretches_that_lie_close_together_are_mapped_as_one(
    distance: int, stretches: tuple[tuple[int, int], ...]
) -> None:
    planned = layout(entry("a", 8, 2), entry("b", 16 + distance, 2), mode="map")

    assert planned.mapped == {0: stretches}


def test_a_long_tensor_that_holds_a_short_one_ends_where_it_ends() -> None:
    planned = layout(entry("long", 0, 100), entry("short", 4, 1), entry("next", 400, 1), mode="map")

    assert planned.mapped == {0: ((0, 404),)}


@pytest.mark.parametrize("mode", MODES)
def test_views_of_one_storage_with_different_elements_are_each_aligned_to_their_own(mode: Mode) -> None:
    planned = layout(entry("bytes", 65, 8, dtype="U8"), entry("numbers", 68, 2), mode=mode)

    assert "numbers" not in planned.places or planned.places["numbers"].offset % 4 == 0


def test_what_lies_within_a_conversion_is_read_for_itself() -> None:
    planned = layout(entry("cast", 64, 4), entry("kept", 72, 2, dtype="I32"), mode="read", cast="BF16")

    assert planned.places == {"kept": Place(0, "I32"), "cast": Place(64, "BF16")}
    assert (planned.blocks, planned.read_bytes) == ((Block(0, 72, 8, 0),), 24)
