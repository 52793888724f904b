"""Samples of every tensor tell one set of weights from another, and what looks broken, without reading it all."""

import os
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.checkpoints import Checkpoint, CheckpointFile, Piece, TensorEntry, file_stamp
from app.dtypes import size_bytes
from app.errors import CheckpointError
from app.progress import Progress, Stopped
from app.weights.layout import Mode, plan_layout
from app.weights.memory import Memory
from app.weights.reading import read_resident
from app.weights.samples import EVERY, LARGE, WHOLE, Sampled, sample
from tests.unit.written import Tensors, filled, noise, written

MODES: tuple[Mode, ...] = ("map", "read")

SMALL: Tensors = {"a": filled("F32", 10), "n": filled("I64", 3, 2), "s": filled("BF16"), "e": filled("F32", 0, 4)}


def fingerprint(directory: Path, *shards: Tensors) -> str:
    return sampled(directory, *shards).fingerprint


def sampled(directory: Path, *shards: Tensors) -> Sampled:
    """Sample what is mapped in files, and what is not aligned there in memory of our own."""
    checkpoint = written(directory, *shards)
    found = sample(checkpoint, resident(checkpoint, "map"), Progress())
    checkpoint.close()
    return found


def mapped(checkpoint: Checkpoint) -> Memory:
    """Map the files and read none: of tensors at whole multiples of their elements nothing lies elsewhere."""
    memory = Memory.reserve(checkpoint, plan_layout(checkpoint, "map", "", None))
    assert memory.slab is None
    return memory


def resident(checkpoint: Checkpoint, mode: Mode, cast: str | None = None) -> Memory:
    return read_resident(checkpoint, plan_layout(checkpoint, mode, "", cast), Progress(), 1 << 20, {}).memory


def raw(directory: Path, entry: TensorEntry, *contents: bytes) -> Sampled:
    """Sample one tensor in files without a format, from memory where it is put together there."""
    directory.mkdir(exist_ok=True)
    files = []
    for number, data in enumerate(contents):
        path = directory / f"{number}.bin"
        path.write_bytes(data)
        fd = os.open(path, os.O_RDONLY)
        files.append(CheckpointFile(path, fd, len(data), file_stamp(os.fstat(fd))))
    checkpoint = Checkpoint(directory, "raw", tuple(files), {entry.name: entry})
    found = sample(checkpoint, resident(checkpoint, "map"), Progress())
    checkpoint.close()
    return found


def test_equal_tensors_have_the_same_fingerprint_however_they_are_spread_over_files(tmp_path: Path) -> None:
    names = list(SMALL)
    one = fingerprint(tmp_path / "one", SMALL)

    assert one == fingerprint(tmp_path / "again", SMALL)
    assert one == fingerprint(tmp_path / "order", {name: SMALL[name] for name in reversed(names)})
    assert one == fingerprint(tmp_path / "shards", {n: SMALL[n] for n in names[2:]}, {n: SMALL[n] for n in names[:2]})


def flipped(tensor: tuple[str, tuple[int, ...], bytes], byte: int) -> tuple[str, tuple[int, ...], bytes]:
    dtype, shape, data = tensor
    changed = bytearray(data)
    changed[byte] ^= 1
    return dtype, shape, bytes(changed)


OTHER: dict[str, Tensors] = {
    "another name": {("b" if name == "a" else name): tensor for name, tensor in SMALL.items()},
    "another dtype of the same size": {**SMALL, "a": ("I32", *SMALL["a"][1:])},
    "another shape of the same size": {**SMALL, "n": ("I64", (2, 3), SMALL["n"][2])},
    "another shape of an empty tensor": {**SMALL, "e": ("F32", (4, 0), b"")},
    "a tensor more": {**SMALL, "z": filled("U8", 0)},
    "a tensor less": {name: tensor for name, tensor in SMALL.items() if name != "e"},
    "two tensors that have changed places": {**SMALL, "a": filled("F32", 10, salt=1)},
    **{f"byte {byte} of a small tensor": {**SMALL, "a": flipped(SMALL["a"], byte)} for byte in (0, 17, 39)},
    "the sign of a scalar": {**SMALL, "s": flipped(SMALL["s"], 1)},
}


@pytest.mark.parametrize("other", OTHER.values(), ids=OTHER)
def test_other_weights_have_another_fingerprint(tmp_path: Path, other: Tensors) -> None:
    assert fingerprint(tmp_path / "one", SMALL) != fingerprint(tmp_path / "two", other)


def test_equal_bytes_under_swapped_names_are_other_weights(tmp_path: Path) -> None:
    a, b = filled("F32", 10, salt=1), filled("F32", 10, salt=2)

    assert fingerprint(tmp_path / "one", {"a": a, "b": b}) != fingerprint(tmp_path / "two", {"a": b, "b": a})


@pytest.mark.parametrize("byte", [*range(0, WHOLE, 273), WHOLE - 1])
def test_a_tensor_up_to_a_page_is_sampled_as_a_whole(tmp_path: Path, byte: int) -> None:
    tensor = filled("U8", WHOLE)

    assert fingerprint(tmp_path / "one", {"a": tensor}) != fingerprint(tmp_path / "two", {"a": flipped(tensor, byte)})


@pytest.mark.parametrize("size", [WHOLE + 4, 10_000, LARGE - 4, LARGE, LARGE + 4, LARGE + 1020])
@pytest.mark.parametrize("where", ["first", "in the first sample", "middle", "in the last sample", "last"])
def test_first_middle_and_last_bytes_of_a_long_tensor_are_sampled(tmp_path: Path, size: int, where: str) -> None:
    tensor = filled("F32", size // 4)
    byte = {"first": 0, "in the first sample": 255, "middle": size // 2, "in the last sample": size - 200, "last": -1}

    assert fingerprint(tmp_path / "one", {"a": tensor}) != fingerprint(
        tmp_path / "two", {"a": flipped(tensor, byte[where])}
    )


@pytest.mark.parametrize("change", [{"stride": (1, 4)}, {"shape": (8, 2)}, {"dtype": "I32"}, {"name": "b"}])
def test_the_same_stretch_understood_in_another_way_is_other_weights(tmp_path: Path, change: dict[str, Any]) -> None:
    entry, data = TensorEntry("a", "F32", (4, 4), 0, 0, 64), noise(64)

    one, two = raw(tmp_path / "one", entry, data), raw(tmp_path / "two", replace(entry, **change), data)

    assert one.fingerprint != two.fingerprint


def in_pieces(shape: tuple[int, ...], *pieces: Piece) -> TensorEntry:
    return TensorEntry("a", "F32", shape, 0, 0, size_bytes("F32", shape), pieces=pieces)


@pytest.mark.parametrize("place", [(0, 16), (0, 16 + WHOLE - 1), (1, 0), (1, 39)])
def test_every_piece_of_a_tensor_is_sampled(tmp_path: Path, place: tuple[int, int]) -> None:
    entry = in_pieces((2010,), Piece(0, 16, (0,), (2000,)), Piece(1, 0, (2000,), (10,)))
    contents = [noise(8016), noise(40)]
    changed = [bytearray(data) for data in contents]
    changed[place[0]][place[1]] ^= 1

    one, two = raw(tmp_path / "one", entry, *contents), raw(tmp_path / "two", entry, *map(bytes, changed))

    assert one.fingerprint != two.fingerprint


def test_an_empty_tensor_in_pieces_is_sampled_as_nothing(tmp_path: Path) -> None:
    assert raw(tmp_path, in_pieces((0, 4), Piece(0, 0, (0, 0), (0, 4))), b"x").warnings == ()


def test_a_long_tensor_of_zeros_is_told(tmp_path: Path) -> None:
    zeros = ("F32", (LARGE // 4,), bytes(LARGE))

    assert sampled(tmp_path, {"a": zeros, "b": filled("I64", 3)}).warnings == (
        "a is all zeros where it was sampled; was the file written completely?",
    )


@pytest.mark.parametrize("byte", [0, WHOLE - 1, LARGE - 1, LARGE - WHOLE])
def test_a_long_tensor_with_anything_in_its_first_or_last_sample_is_not_told(tmp_path: Path, byte: int) -> None:
    assert sampled(tmp_path, {"a": flipped(("I32", (LARGE // 4,), bytes(LARGE)), byte)}).warnings == ()


def test_a_short_tensor_of_zeros_is_an_ordinary_bias(tmp_path: Path) -> None:
    assert sampled(tmp_path, {"a": ("F32", (LARGE // 4 - 1,), bytes(LARGE - 4))}).warnings == ()


def bits(dtype: str, *values: float) -> bytes:
    if dtype == "BF16":
        return b"".join(struct.pack("<f", value)[2:] for value in values)
    return np.array(values, {"F16": "<f2", "F32": "<f4", "F64": "<f8"}[dtype]).tobytes()


NAN, INFINITE = float("nan"), float("inf")
NUMBERS = ("F16", "BF16", "F32", "F64")
MANY: Tensors = {
    "a": filled("F32", 10),
    "n": filled("I64", 3, 2),
    "e": filled("F32", 0, 4),
    "long": filled("I32", 5000),
    "nan": ("F16", (3,), bits("F16", 1.0, NAN, 2.0)),
    "larger": filled("U8", LARGE + 3),
}


@pytest.mark.parametrize("dtype", NUMBERS)
@pytest.mark.parametrize("value", [NAN, -NAN])
@pytest.mark.parametrize("position", [0, 1, 2])
def test_values_that_are_no_numbers_are_told(tmp_path: Path, dtype: str, value: float, position: int) -> None:
    values = [1.0, -2.0, 0.5]
    values[position] = value

    assert sampled(tmp_path, {"a": (dtype, (3,), bits(dtype, *values))}).warnings == (
        "a holds values that are no numbers (NaN)",
    )


@pytest.mark.parametrize("dtype", NUMBERS)
def test_infinities_and_the_smallest_numbers_are_numbers(tmp_path: Path, dtype: str) -> None:
    data = bits(dtype, INFINITE, -INFINITE, 0.0, -0.0, 6e-8)

    assert sampled(tmp_path, {"a": (dtype, (5,), data)}).warnings == ()


@pytest.mark.parametrize(
    ("dtype", "data"),
    [("F32", "01008 07f"), ("F16", "017c"), ("BF16", "817f"), ("F64", "010000000000f0ff"), ("F32", "ffff bf7f")],
)
def test_any_bit_below_a_full_exponent_means_no_number(tmp_path: Path, dtype: str, data: str) -> None:
    content = bytes.fromhex(data.replace(" ", ""))

    assert len(sampled(tmp_path, {"a": (dtype, (1,), content)}).warnings) == 1


@pytest.mark.parametrize("dtype", ["I16", "I32", "U64", "F8_E4M3", "F8_E5M2", "C64", "BOOL", "F4"])
def test_other_types_are_not_looked_at_for_numbers(tmp_path: Path, dtype: str) -> None:
    data = b"\1" * size_bytes(dtype, (8,)) if dtype == "BOOL" else b"\xff" * size_bytes(dtype, (8,))

    assert sampled(tmp_path, {"a": (dtype, (8,), data)}).warnings == ()


def test_the_last_value_of_a_long_tensor_is_looked_at(tmp_path: Path) -> None:
    dtype, shape, data = ("F16", (5001,), bytes(10_002))

    assert len(sampled(tmp_path, {"a": (dtype, shape, data[:-2] + b"\xff\xff")}).warnings) == 1


@pytest.mark.parametrize("left", [0, 100, 5000])
def test_a_file_that_was_truncated_is_an_error_with_its_name_and_where_it_ends(tmp_path: Path, left: int) -> None:
    checkpoint = written(tmp_path, {"a": filled("F32", 2000)})
    file = checkpoint.files[0]
    memory = mapped(checkpoint)
    os.truncate(file.path, left)

    with pytest.raises(CheckpointError, match=rf"{file.path} ends at byte \d+; it was truncated"):
        sample(checkpoint, memory, Progress())
    checkpoint.close()


@pytest.mark.parametrize("left", [0, 100, 5000])
def test_tensors_in_memory_of_our_own_are_sampled_there_and_not_in_their_files(tmp_path: Path, left: int) -> None:
    checkpoint = written(tmp_path / "model", MANY)
    memory = resident(checkpoint, "read")
    before = sample(checkpoint, memory, Progress())
    os.truncate(checkpoint.files[0].path, left)

    assert sample(checkpoint, memory, Progress()) == before
    checkpoint.close()


def test_both_ways_of_reading_give_what_the_files_give(tmp_path: Path) -> None:
    checkpoint = written(tmp_path, MANY, {"zeros": ("F32", (LARGE // 4,), bytes(LARGE))})

    found = {mode: sample(checkpoint, resident(checkpoint, mode), Progress()) for mode in MODES}
    from_files = sample(checkpoint, mapped(checkpoint), Progress())
    checkpoint.close()

    assert found["map"] == found["read"] == from_files
    assert from_files.warnings == (
        "nan holds values that are no numbers (NaN)",
        "zeros is all zeros where it was sampled; was the file written completely?",
    )


def test_slabs_that_were_not_filled_have_another_fingerprint(tmp_path: Path) -> None:
    checkpoint = written(tmp_path, MANY)
    empty = Memory.reserve(checkpoint, plan_layout(checkpoint, "read", "", None))

    assert sample(checkpoint, empty, Progress()) != sample(checkpoint, resident(checkpoint, "read"), Progress())
    checkpoint.close()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("dtype", "cast", "value", "warnings"),
    [
        ("F32", "F16", NAN, ("a holds values that are no numbers (NaN)",)),
        ("F32", "BF16", NAN, ("a holds values that are no numbers (NaN)",)),
        ("F16", "F64", NAN, ("a holds values that are no numbers (NaN)",)),
        ("F64", "F32", 1e300, ()),
        ("F32", "F16", 1.5, ()),
    ],
)
def test_what_is_cast_is_looked_at_as_it_is_after_the_cast(
    tmp_path: Path, mode: Mode, dtype: str, cast: str, value: float, warnings: tuple[str, ...]
) -> None:
    checkpoint = written(tmp_path, {"a": (dtype, (3,), bits(dtype, 1.0, 2.0, value))})

    assert sample(checkpoint, resident(checkpoint, mode, cast), Progress()).warnings == warnings
    checkpoint.close()


@pytest.mark.parametrize("position", [0, 2500, 4999])
def test_every_sample_of_a_cast_tensor_counts_and_both_ways_of_reading_agree(tmp_path: Path, position: int) -> None:
    dtype, shape, data = "F32", (5000,), bits("F32", *range(5000))
    changed = bytearray(data)
    changed[4 * position : 4 * position + 4] = struct.pack("<f", -7.0)
    found = []
    for name, content in (("one", data), ("two", bytes(changed))):
        checkpoint = written(tmp_path / name, {"a": (dtype, shape, content)})
        found.append({sample(checkpoint, resident(checkpoint, mode, "F16"), Progress()) for mode in MODES})
        checkpoint.close()

    assert [len(one) for one in found] == [1, 1]
    assert found[0] != found[1]


def test_a_view_with_strides_is_sampled_in_memory_over_the_whole_stretch_that_it_looks_at(tmp_path: Path) -> None:
    # Every second of 5000 elements: its last lies at byte 19 992, twice as far as its own bytes would reach.
    entry = TensorEntry("a", "F32", (2500,), 0, 0, 19_996, stride=(2,))
    found = []
    for name, last in (("one", 1.0), ("two", float("nan"))):
        (tmp_path / name).write_bytes(bits("F32", *range(4998), last, 0.0))
        fd = os.open(tmp_path / name, os.O_RDONLY)
        file = CheckpointFile(tmp_path / name, fd, 20_000, file_stamp(os.fstat(fd)))
        checkpoint = Checkpoint(tmp_path, "raw", (file,), {"a": entry})
        found.append({sample(checkpoint, resident(checkpoint, mode), Progress()) for mode in MODES})
        checkpoint.close()

    assert [len(one) for one in found] == [1, 1]
    assert [one.warnings for (one,) in found] == [(), ("a holds values that are no numbers (NaN)",)]
    assert found[0] != found[1]


class Watched(Progress):
    """Remembers what was said, and is stopped after so many sentences."""

    def __init__(self, stop_after: int = -1) -> None:
        super().__init__()
        self.said: list[str] = []
        self._stop_after = stop_after

    def say(self, detail: str) -> None:
        super().say(detail)
        self.said.append(detail)
        if len(self.said) == self._stop_after:
            self.stop()


@pytest.mark.parametrize(("count", "told"), [(0, []), (1, [0]), (EVERY, [0]), (EVERY + 1, [0, EVERY])])
def test_progress_says_how_many_tensors_were_sampled(tmp_path: Path, count: int, told: list[int]) -> None:
    checkpoint = written(tmp_path, {f"t{number}": filled("U8", 1) for number in range(count)})
    progress = Watched()

    sample(checkpoint, mapped(checkpoint), progress)
    checkpoint.close()

    assert progress.said == [f"sampling, {done} of {count} tensors" for done in told]


def test_a_start_up_that_is_stopped_while_it_samples_ends_soon(tmp_path: Path) -> None:
    checkpoint = written(tmp_path, {f"t{number}": filled("U8", 1) for number in range(2 * EVERY + 1)})
    progress = Watched(stop_after=2)

    with pytest.raises(Stopped):
        sample(checkpoint, mapped(checkpoint), progress)
    checkpoint.close()

    assert len(progress.said) == 2
