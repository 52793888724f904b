"""A safetensors checkpoint is opened only when headers, index and file sizes agree; all faults are told together."""

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save, save_file

from app.checkpoints import Checkpoint, open_checkpoint
from app.errors import CheckpointError

INDEX = "model.safetensors.index.json"
KNOWN = (
    "F4, BOOL, U8, I8, F8_E4M3, F8_E5M2, F8_E8M0, F8_E4M3FNUZ, F8_E5M2FNUZ, I16, U16, F16, BF16, I32, U32, F32, "
    "I64, U64, F64, C64"
)
REMEDY = "remove it, make the index anew, or let model.checkpoint name the index"


def framed(header: bytes, data: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header + data


def by_hand(header: Any, data: bytes = b"") -> bytes:
    return framed(json.dumps(header).encode(), data)


def tensor(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


# Two tensors without hole: a at 0 to 8, b at 8 to 12.
HEADER: dict[str, Any] = {"a": tensor("F32", [2], 0, 8), "b": tensor("I16", [2], 8, 12)}
TWICE = {"a": HEADER["a"], "c": HEADER["a"]}
GOOD = by_hand(HEADER, bytes(range(12)))


def base(header: Any) -> int:
    return len(by_hand(header))


BASE = base(HEADER)


def fault(file: Path) -> tuple[str, tuple[str, ...]]:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(file).close()
    return str(caught.value).split("\n")[0], caught.value.problems


def described(checkpoint: Checkpoint) -> dict[str, tuple[str, tuple[int, ...], str, bytes]]:
    """Return dtype, shape, file and bytes of every tensor, read at the offsets that were found."""
    found = {}
    for name, entry in checkpoint.tensors.items():
        file = checkpoint.files[entry.file]
        found[name] = (entry.dtype, entry.shape, file.path.name, os.pread(file.fd, entry.nbytes, entry.offset))
    checkpoint.close()
    return found


def shards(directory: Path, placed: dict[str, str] | None = None) -> Path:
    """Write a checkpoint of two shards with its index; `placed` replaces the index's map."""
    save_file({"a": np.arange(2, dtype=np.float32)}, directory / "one.safetensors")
    save_file({"b": np.arange(3, dtype=np.int64)}, directory / "two.safetensors")
    found = {"a": "one.safetensors", "b": "two.safetensors"} if placed is None else placed
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": found}))
    return directory


A, B = np.arange(2, dtype=np.float32).tobytes(), np.arange(3, dtype=np.int64).tobytes()


@pytest.mark.parametrize("given", ["", "model.safetensors"], ids=["directory", "file"])
def test_a_single_file_opens_with_every_tensor_where_it_lies(tmp_path: Path, given: str) -> None:
    arrays = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "n": np.array(7, np.int64), "e": np.zeros((0, 4))}
    save_file(arrays, tmp_path / "model.safetensors", metadata={"format": "pt"})

    checkpoint = open_checkpoint(tmp_path / given)

    assert (checkpoint.path, checkpoint.format) == (tmp_path / given, "safetensors")
    assert (checkpoint.objects, checkpoint.notes) == ({}, ())
    assert (checkpoint.nbytes, checkpoint.tensor_bytes) == ((tmp_path / "model.safetensors").stat().st_size, 32)
    assert described(checkpoint) == {
        "w": ("F32", (2, 3), "model.safetensors", arrays["w"].tobytes()),
        "n": ("I64", (), "model.safetensors", arrays["n"].tobytes()),
        "e": ("F64", (0, 4), "model.safetensors", b""),
    }


@pytest.mark.parametrize("given", ["", INDEX], ids=["directory", "index"])
def test_shards_open_as_one_checkpoint_by_their_index(tmp_path: Path, given: str) -> None:
    assert described(open_checkpoint(shards(tmp_path) / given)) == {
        "a": ("F32", (2,), "one.safetensors", A),
        "b": ("I64", (3,), "two.safetensors", B),
    }


def test_a_shard_opens_alone_when_it_is_the_file_that_is_given(tmp_path: Path) -> None:
    assert described(open_checkpoint(shards(tmp_path) / "two.safetensors")) == {
        "b": ("I64", (3,), "two.safetensors", B)
    }


def test_a_file_made_by_hand_opens(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(GOOD)

    assert described(open_checkpoint(tmp_path)) == {
        "a": ("F32", (2,), "x.safetensors", bytes(range(8))),
        "b": ("I16", (2,), "x.safetensors", bytes(range(8, 12))),
    }


def test_a_link_to_a_file_opens_like_the_file(tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(GOOD)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "x.safetensors").symlink_to("../blob")

    assert sorted(described(open_checkpoint(tmp_path / "model"))) == ["a", "b"]


def test_the_table_lists_names_dtypes_and_shapes_by_name(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(by_hand({"b": HEADER["a"], "a": tensor("BF16", [1, 2], 8, 12)}, bytes(12)))

    checkpoint = open_checkpoint(tmp_path)
    checkpoint.close()

    assert checkpoint.table() == [["a", "BF16", [1, 2]], ["b", "F32", [2]]]


def changed(name: str, **fields: Any) -> bytes:
    return by_hand({**HEADER, name: {**HEADER[name], **fields}}, bytes(12))


def lacking(field: str) -> bytes:
    rest = {key: value for key, value in HEADER["a"].items() if key != field}
    return by_hand({**HEADER, "a": rest}, bytes(12))


SIZE = len(GOOD)
NOT_THIS = "truncated, or not safetensors"
NO_ROW = "x.safetensors: tensor a has no dtype, shape and data_offsets"

# what is wrong → bytes of the file, the problem that is told
CORRUPTIONS: dict[str, tuple[bytes, str]] = {
    "last byte gone": (
        GOOD[:-1],
        f"x.safetensors: {SIZE - 1} bytes, its header describes {SIZE}: truncated",
    ),
    "all data gone": (GOOD[:BASE], f"x.safetensors: {BASE} bytes, its header describes {SIZE}: truncated"),
    "cut in the header": (
        GOOD[:20],
        f"x.safetensors: 20 bytes with a header of {BASE - 8} bytes; {NOT_THIS}",
    ),
    "one byte of the header gone": (
        GOOD[: BASE - 1],
        f"x.safetensors: {BASE - 1} bytes with a header of {BASE - 8} bytes; {NOT_THIS}",
    ),
    "cut in the length": (GOOD[:5], f"x.safetensors: 5 bytes with a header of 0 bytes; {NOT_THIS}"),
    "empty file": (b"", f"x.safetensors: 0 bytes with a header of 0 bytes; {NOT_THIS}"),
    "one byte too many": (
        GOOD + b"\0",
        f"x.safetensors: {SIZE + 1} bytes, its header describes {SIZE}: with bytes that no tensor owns",
    ),
    "hole between tensors": (
        by_hand({"a": HEADER["a"], "b": tensor("I16", [2], 9, 13)}, bytes(13)),
        f"x.safetensors: tensor b begins at {BASE + 9}, expected {BASE + 8} (hole or overlap)",
    ),
    "hole before the first": (
        by_hand({"b": HEADER["b"]}, bytes(12)),
        f"x.safetensors: tensor b begins at {base({'b': HEADER['b']}) + 8}, expected {base({'b': HEADER['b']})} "
        "(hole or overlap)",
    ),
    "overlap": (
        by_hand({"a": HEADER["a"], "b": tensor("I16", [2], 6, 10)}, bytes(10)),
        f"x.safetensors: tensor b begins at {BASE + 6}, expected {BASE + 8} (hole or overlap)",
    ),
    "the same bytes twice": (
        by_hand(TWICE, bytes(8)),
        f"x.safetensors: tensor c begins at {base(TWICE)}, expected {base(TWICE) + 8} (hole or overlap)",
    ),
    "header length of zero": (
        struct.pack("<Q", 0) + GOOD[8:],
        f"x.safetensors: {SIZE} bytes with a header of 0 bytes; {NOT_THIS}",
    ),
    "header length past the end": (
        struct.pack("<Q", SIZE - 7) + GOOD[8:],
        f"x.safetensors: {SIZE} bytes with a header of {SIZE - 7} bytes; {NOT_THIS}",
    ),
    "huge header length": (
        struct.pack("<Q", 2**64 - 1) + GOOD[8:],
        f"x.safetensors: {SIZE} bytes with a header of {2**64 - 1} bytes; {NOT_THIS}",
    ),
    "header one byte short": (
        struct.pack("<Q", BASE - 9) + GOOD[8:],
        "x.safetensors: the header is not JSON of this format "
        f"(Expecting ',' delimiter: line 1 column {BASE - 8} (char {BASE - 9}))",
    ),
    "header of noise": (
        framed(b"\x93\xfa\x01\x02", b""),
        "x.safetensors: the header is not JSON of this format ('utf-8' codec can't decode byte 0x93 in position 0: "
        "invalid start byte)",
    ),
    "unknown dtype": (
        changed("a", dtype="F33"),
        f"x.safetensors: tensor a is F33, which cannot be read here; known are {KNOWN}",
    ),
    "shape smaller than the offsets": (
        changed("a", shape=[1]),
        "x.safetensors: tensor a F32[1] needs 4 bytes, its offsets give 8",
    ),
    "shape larger than the offsets": (
        changed("b", shape=[2, 2**40]),
        f"x.safetensors: tensor b I16[2, {2**40}] needs {2**42} bytes, its offsets give 4",
    ),
    "offsets the wrong way round": (
        changed("a", data_offsets=[8, 0]),
        "x.safetensors: tensor a F32[2] needs 8 bytes, its offsets give -8",
    ),
    "negative shape": (
        changed("a", shape=[-1, -2]),
        "x.safetensors: tensor a has shape [-1, -2] at [0, 8], expected whole numbers from 0 and at most 64 dimensions",
    ),
    "negative offset": (
        changed("a", data_offsets=[-8, 0]),
        "x.safetensors: tensor a has shape [2] at [-8, 0], expected whole numbers from 0 and at most 64 dimensions",
    ),
    "broken size in the shape": (
        changed("a", shape=[2.5]),
        "x.safetensors: tensor a has shape [2.5] at [0, 8], expected whole numbers from 0 and at most 64 dimensions",
    ),
    "true in the shape": (
        changed("a", shape=[True, 2]),
        "x.safetensors: tensor a has shape [True, 2] at [0, 8], expected whole numbers from 0 and at most 64 "
        "dimensions",
    ),
    "three offsets": (changed("a", data_offsets=[0, 4, 8]), NO_ROW),
    "no dtype": (lacking("dtype"), NO_ROW),
    "no shape": (lacking("shape"), NO_ROW),
    "no offsets": (lacking("data_offsets"), NO_ROW),
    "a number for a tensor": (by_hand({**HEADER, "a": 5}, bytes(12)), NO_ROW),
}


@pytest.mark.parametrize(("content", "problem"), CORRUPTIONS.values(), ids=CORRUPTIONS)
def test_a_corrupt_file_is_refused_with_what_is_wrong_in_it(tmp_path: Path, content: bytes, problem: str) -> None:
    (tmp_path / "x.safetensors").write_bytes(content)

    assert fault(tmp_path) == (f"{tmp_path} is not a complete checkpoint: 1 problem(s)", (problem,))


# Where our reader must refuse too, whatever it says.
STRANGE: dict[str, bytes] = {
    "a list for a header": framed(b"[1]", b""),
    "a list for a dtype": changed("a", dtype=["F32"]),
    "a header nested without end": framed(b"[" * 100_000, b""),
}


@pytest.mark.parametrize("content", STRANGE.values(), ids=STRANGE)
def test_a_strange_header_is_a_fault_of_the_checkpoint_and_not_of_this_program(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.safetensors").write_bytes(content)

    assert fault(tmp_path)[0] == f"{tmp_path} is not a complete checkpoint: 1 problem(s)"


@pytest.mark.parametrize(
    "content",
    [*(content for content, _ in CORRUPTIONS.values()), *STRANGE.values()],
    ids=[*CORRUPTIONS, *STRANGE],
)
def test_the_reader_of_the_safetensors_package_refuses_the_same_files(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "x.safetensors"
    file.write_bytes(content)

    with pytest.raises(SafetensorError), safe_open(file, framework="numpy"):
        pass


def index_of(text: str) -> Callable[[Path], object]:
    return lambda directory: (directory / INDEX).write_text(text)


def placed(**weight_map: str) -> Callable[[Path], object]:
    return lambda directory: shards(directory, weight_map)


def also(name: str, **arrays: np.ndarray[Any, Any]) -> Callable[[Path], object]:
    return lambda directory: (directory / name).write_bytes(save(arrays))


def without(name: str) -> Callable[[Path], object]:
    return lambda directory: (directory / name).unlink()


ONE, TWO = "one.safetensors", "two.safetensors"

# what is wrong with two shards and their index → how it is done, the problems that are told
MISFITS: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "missing shard": (without(TWO), ("{path}/two.safetensors cannot be opened: No such file or directory",)),
    "dangling link": (
        lambda directory: ((directory / TWO).unlink(), (directory / TWO).symlink_to("nowhere")),
        (
            "{path}/two.safetensors cannot be opened: No such file or directory "
            "(a link to nowhere; was the download complete?)",
        ),
    ),
    "extra shard": (
        also("three.safetensors", c=np.zeros(1)),
        (f"three.safetensors is not named by {INDEX}; {REMEDY}",),
    ),
    "key that the index does not place there": (
        also(TWO, b=np.zeros(1), c=np.zeros(1)),
        ("two.safetensors: holds c, which the index does not place there",),
    ),
    "key that the file does not hold": (
        placed(a=ONE, b=TWO, c=TWO),
        ("two.safetensors: the index promises c, the file does not hold it",),
    ),
    "keys swapped": (
        placed(a=TWO, b=ONE),
        (
            "one.safetensors: the index promises b, the file does not hold it",
            "one.safetensors: holds a, which the index does not place there",
            "two.safetensors: the index promises a, the file does not hold it",
            "two.safetensors: holds b, which the index does not place there",
        ),
    ),
    "key in two shards": (
        also(TWO, a=np.zeros(1), b=np.zeros(1)),
        (
            "two.safetensors: tensor a is also in one.safetensors; a name belongs to one shard",
            "two.safetensors: holds a, which the index does not place there",
        ),
    ),
    "empty shard": (also(TWO), ("two.safetensors: the index promises b, the file does not hold it",)),
    "path upwards": (
        placed(a=ONE, b="../two.safetensors"),
        (
            f"{INDEX} names '../two.safetensors', which is not a file name beside it",
            f"two.safetensors is not named by {INDEX}; {REMEDY}",
        ),
    ),
    "absolute path": (
        placed(a=ONE, b="/two.safetensors"),
        (
            f"{INDEX} names '/two.safetensors', which is not a file name beside it",
            f"two.safetensors is not named by {INDEX}; {REMEDY}",
        ),
    ),
    "two points": (
        placed(a=ONE, b=".."),
        (
            f"{INDEX} names '..', which is not a file name beside it",
            f"two.safetensors is not named by {INDEX}; {REMEDY}",
        ),
    ),
    "index not JSON": (
        index_of("{"),
        (
            f"{INDEX} is no index: JSONDecodeError: Expecting property name enclosed in double quotes: "
            "line 1 column 2 (char 1)",
        ),
    ),
    "index without map": (index_of("{}"), (f"{INDEX} is no index: KeyError: 'weight_map'",)),
    "index is a list": (
        index_of("[]"),
        (f"{INDEX} is no index: TypeError: list indices must be integers or slices, not str",),
    ),
    "map is a list": (
        index_of('{"weight_map": []}'),
        (f"{INDEX} is no index: AttributeError: 'list' object has no attribute 'values'",),
    ),
    "no index": (
        without(INDEX),
        (
            "2 safetensors files without an index (one.safetensors, two.safetensors): which belong together is "
            "unknown; let model.checkpoint name one of them",
        ),
    ),
}


@pytest.mark.parametrize(("spoil", "problems"), MISFITS.values(), ids=MISFITS)
def test_shards_that_do_not_fit_their_index_are_refused(
    tmp_path: Path, spoil: Callable[[Path], object], problems: tuple[str, ...]
) -> None:
    spoil(shards(tmp_path))

    assert fault(tmp_path) == (
        f"{tmp_path} is not a complete checkpoint: {len(problems)} problem(s)",
        tuple(problem.format(path=tmp_path) for problem in problems),
    )


def test_an_index_with_a_name_that_no_file_can_have_is_refused(tmp_path: Path) -> None:
    placed(a=ONE, b="two\0.safetensors")(tmp_path)

    assert fault(tmp_path)[0].startswith(f"{tmp_path} is not a complete checkpoint: ")


def test_a_directory_named_like_a_shard_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").mkdir()

    assert str(tmp_path) in fault(tmp_path)[0]


def test_the_faults_of_all_shards_are_told_together(tmp_path: Path) -> None:
    shards(tmp_path, {"a": ONE, "b": TWO, "c": "three.safetensors"})
    (tmp_path / ONE).write_bytes(GOOD[:-1])
    (tmp_path / TWO).write_bytes(b"")
    (tmp_path / "four.safetensors").write_bytes(GOOD)

    assert fault(tmp_path)[1] == (
        f"four.safetensors is not named by {INDEX}; {REMEDY}",
        f"one.safetensors: {SIZE - 1} bytes, its header describes {SIZE}: truncated",
        "one.safetensors: holds b, which the index does not place there",
        f"{tmp_path}/three.safetensors cannot be opened: No such file or directory",
        f"two.safetensors: 0 bytes with a header of 0 bytes; {NOT_THIS}",
    )


def test_all_faulty_tensors_of_a_file_are_told_together(tmp_path: Path) -> None:
    header = {"a": tensor("F33", [2], 0, 8), "b": tensor("I16", [3], 8, 12)}
    (tmp_path / "x.safetensors").write_bytes(by_hand(header, bytes(12)))

    assert fault(tmp_path)[1] == (
        f"x.safetensors: tensor a is F33, which cannot be read here; known are {KNOWN}",
        "x.safetensors: tensor b I16[3] needs 6 bytes, its offsets give 4",
    )


def test_a_path_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    missing = tmp_path / "nowhere"

    assert fault(missing) == (f"{missing} does not exist; model.checkpoint names a directory or a file", ())


@pytest.mark.parametrize(("names", "listing"), [((), "nothing"), (("b.md", "a.txt"), "a.txt, b.md")])
def test_a_directory_without_a_checkpoint_is_refused_with_what_lies_there(
    tmp_path: Path, names: tuple[str, ...], listing: str
) -> None:
    for name in names:
        (tmp_path / name).touch()

    assert fault(tmp_path) == (
        f"{tmp_path} holds no checkpoint of a known format (dcp, safetensors, torch); found: {listing}",
        (),
    )


def test_a_file_of_another_kind_is_refused_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").touch()

    assert fault(tmp_path / "model.onnx")[0] == (
        f"{tmp_path}/model.onnx holds no checkpoint of a known format (dcp, safetensors, torch); found: model.onnx"
    )


def open_files() -> list[str]:
    return sorted(path.name for path in Path("/proc/self/fd").iterdir())


def test_a_refused_checkpoint_leaves_no_file_open(tmp_path: Path) -> None:
    shards(tmp_path)
    (tmp_path / TWO).write_bytes(GOOD[:-1])
    before = open_files()

    fault(tmp_path)

    assert open_files() == before
