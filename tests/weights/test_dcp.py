"""Distributed checkpoints open piece by piece, only with trust, and every fault is told with both sides."""

import collections
import io
import os
import pickle
import random
import socket
import warnings
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import multiprocessing
from torch.distributed.checkpoint import metadata as described
from torch.distributed.checkpoint.filesystem import SerializationFormat, _StorageInfo
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

from app.checkpoints import Checkpoint, Opaque, open_checkpoint, scan_checkpoint
from app.checkpoints.dcp import Dcp, _tiles
from app.dtypes import item_bytes
from app.errors import CheckpointError
from tests.weights.test_torch_zip import TORCH, bits

FULL = torch.arange(35, dtype=torch.float32).reshape(5, 7)
CUBE = torch.arange(60, dtype=torch.int64).reshape(3, 4, 5)
STREAM = Opaque("bytes of torch.save")


def saved(path: Path, value: dict[str, Any], **writer: Any) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(value, storage_writer=dcp.FileSystemWriter(path, sync_files=False, **writer), no_dist=True)
    return path


def opened(path: Path) -> Checkpoint:
    checkpoint = open_checkpoint(path, trust_pickle=True)
    checkpoint.close()
    return checkpoint


def problems(path: Path, trust: bool = True) -> tuple[str, ...]:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path, trust).close()
    return caught.value.problems


def tensor_of(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    """Put a tensor together from the bytes at the places that were found."""
    entry = checkpoint.tensors[name]
    dtype, item = TORCH[entry.dtype], item_bytes(entry.dtype)
    places = [(p.file, p.offset, p.start, p.shape) for p in entry.pieces]
    whole = torch.zeros(*entry.shape, item, dtype=torch.uint8)
    for file, offset, start, shape in places or [(entry.file, entry.offset, (0,) * len(entry.shape), entry.shape)]:
        count = item * torch.Size(shape).numel()
        content = os.pread(checkpoint.files[file].fd, count, offset)
        box = tuple(slice(s, s + n) for s, n in zip(start, shape, strict=True))
        if count:
            whole[box] = torch.frombuffer(bytearray(content), dtype=torch.uint8).reshape(*shape, item)
    return whole.view(dtype).reshape(entry.shape)


def same(found: torch.Tensor, tensor: torch.Tensor) -> bool:
    raw = [one.contiguous().flatten().view(torch.uint8) for one in (found, tensor)]
    return found.shape == tensor.shape and found.dtype == tensor.dtype and torch.equal(*raw)


def held(path: Path) -> dict[str, torch.Tensor]:
    checkpoint = open_checkpoint(path, trust_pickle=True)
    found = {name: tensor_of(checkpoint, name) for name in checkpoint.tensors}
    checkpoint.close()
    return found


def test_without_trust_nothing_is_opened_and_the_setting_is_named(tmp_path: Path) -> None:
    saved(tmp_path / "x", {"w": FULL})

    assert scan_checkpoint(tmp_path / "x").files == []
    assert problems(tmp_path / "x", trust=False) == (
        f"{tmp_path}/x is described by a pickle (.metadata), which every other tool that opens it will run; "
        "set model.trust_pickle: true when you trust where it came from",
    )


def test_every_dtype_lies_where_it_was_written(tmp_path: Path) -> None:
    tensors = {dtype: bits(dtype, 2, 3) for dtype in TORCH}

    found = held(saved(tmp_path / "x", tensors))

    assert [name for name, tensor in tensors.items() if not same(found[name], tensor)] == []


def test_a_directory_that_one_process_wrote_is_known_and_opened(tmp_path: Path) -> None:
    value = {"w": FULL, "n": torch.tensor(7), "e": torch.zeros(0, 4), "t": CUBE.permute(2, 0, 1), "step": 5}
    checkpoint = open_checkpoint(saved(tmp_path / "x", value), trust_pickle=True)

    assert (Dcp.files(tmp_path / "x"), checkpoint.format) == ((".metadata", "__0_0.distcp"), "dcp")
    assert [file.path.name for file in checkpoint.files] == [".metadata", "__0_0.distcp"]
    assert (checkpoint.objects, checkpoint.notes) == ({"step": STREAM}, ())
    assert all(same(tensor_of(checkpoint, name), value[name]) for name in ("w", "n", "e"))
    entry = checkpoint.tensors["t"]
    assert (entry.shape, entry.stride, entry.pieces) == ((5, 3, 4), (1, 20, 5), ())
    checkpoint.close()


@pytest.mark.parametrize("writer", [{"thread_count": 2}, {"single_file_per_rank": False}], ids=str)
def test_a_directory_of_several_files_is_opened(tmp_path: Path, writer: dict[str, Any]) -> None:
    path = saved(tmp_path / "x", {"w": FULL, "v": CUBE}, **writer)

    found = held(path)

    assert (same(found["w"], FULL), same(found["v"], CUBE)) == (True, True)
    assert sorted(file.path.name for file in opened(path).files) == [".metadata", "__0_0.distcp", "__0_1.distcp"]


def one_of_two(rank: int, path: Path, port: int) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    model = {
        "rows": distribute_tensor(FULL, mesh, [Shard(0)]),
        "columns": distribute_tensor(FULL, mesh, [Shard(1)]),
        "depth": distribute_tensor(CUBE, mesh, [Shard(2)]),
        "one row": distribute_tensor(FULL[:1], mesh, [Shard(0)]),
        "whole": distribute_tensor(FULL, mesh, [Replicate()]),
    }
    dcp.save({"model": model, "step": 5}, checkpoint_id=path)
    dist.destroy_process_group()


def test_what_two_processes_wrote_is_put_together(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        multiprocessing.start_processes(one_of_two, (tmp_path / "x", port), nprocs=2, start_method="fork")

    found, checkpoint = held(tmp_path / "x"), opened(tmp_path / "x")

    wanted = {"rows": FULL, "columns": FULL, "depth": CUBE, "one row": FULL[:1], "whole": FULL}
    assert sorted(found) == sorted(wanted)
    assert [name for name, tensor in wanted.items() if not same(found[name], tensor)] == []
    assert {name: [(p.start, p.shape) for p in e.pieces] for name, e in checkpoint.tensors.items()} == {
        "rows": [((0, 0), (3, 7)), ((3, 0), (2, 7))],
        "columns": [((0, 0), (5, 4)), ((0, 4), (5, 3))],
        "depth": [((0, 0, 0), (3, 4, 3)), ((0, 0, 3), (3, 4, 2))],
        "one row": [],
        "whole": [],
    }
    assert (checkpoint.tensors["rows"].nbytes, checkpoint.tensors["depth"].nbytes) == (140, 480)
    assert checkpoint.notes == (".metadata: the weights are what it holds as model; left aside: step",)


EXTRA = {"a": FULL, "n": 1}
# what is saved → names of the tensors, the objects, the notes
LAYOUTS: dict[str, tuple[dict[str, Any], list[str], Mapping[str, object], tuple[str, ...]]] = {
    "flat": ({"a.w": FULL, "b": CUBE, "s": "text"}, ["a.w", "b"], {"s": STREAM}, ()),
    "flat with an extra state": (
        {"w": FULL, "x._extra_state": EXTRA, "y._extra_state": b"z"},
        ["w"],
        {"x._extra_state": Opaque("dict"), "y._extra_state": STREAM},
        (),
    ),
    "a model": (
        {"model": {"a.w": FULL, "b": CUBE}},
        ["a.w", "b"],
        {},
        (".metadata: the weights are what it holds as model; left aside: nothing",),
    ),
    "a model with an extra state": (
        {"model": {"w": FULL, "x._extra_state": EXTRA, "y._extra_state": 3}, "epoch": 3},
        ["w"],
        {"x._extra_state": Opaque("dict"), "y._extra_state": STREAM},
        (".metadata: the weights are what it holds as model; left aside: epoch",),
    ),
    "a model, an optimizer and a number": (
        {"model": {"w": FULL}, "optim": {"state": {"w": {"exp_avg": FULL}}, "lr": 1}, "step": torch.tensor(5)},
        ["w"],
        {},
        (".metadata: the weights are what it holds as model; left aside: optim, step",),
    ),
}


@pytest.mark.parametrize(("value", "names", "objects", "notes"), LAYOUTS.values(), ids=LAYOUTS)
def test_the_weights_are_the_top_or_the_one_mapping_of_tensors(
    tmp_path: Path, value: dict[str, Any], names: list[str], objects: Mapping[str, object], notes: tuple[str, ...]
) -> None:
    checkpoint = opened(saved(tmp_path / "x", value))

    assert (sorted(checkpoint.tensors), checkpoint.objects, checkpoint.notes) == (names, objects, notes)


UNKNOWN = "which are the weights is unknown, save only them"


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ({"model": {"w": FULL}, "ema": {"w": FULL}}, f".metadata: tensors are under ema, model; {UNKNOWN}"),
        ({"a": {"b": {"w": FULL}}, "c": FULL}, f".metadata: tensors are under a, c; {UNKNOWN}"),
        ({"step": 3}, f".metadata: tensors are under nothing; {UNKNOWN}"),
    ],
)
def test_when_no_mapping_or_several_hold_tensors_the_keys_are_told(
    tmp_path: Path, value: dict[str, Any], told: str
) -> None:
    assert problems(saved(tmp_path / "x", value)) == (told,)


Boxes = list[tuple[tuple[int, ...], torch.Tensor]]
BLOBS = "__0_0.distcp"


class Directory:
    """Writes a checkpoint by hand, so that any part of it can be wrong."""

    def __init__(self, path: Path, **tensors: Boxes) -> None:
        self.path = path
        self.metadata = described.Metadata({}, storage_data={})
        self.content = io.BytesIO()
        for name, boxes in tensors.items():
            self.add(name, boxes)

    def add(self, name: str, boxes: Boxes) -> None:
        chunks = []
        for begin, tensor in boxes:
            offset = self.content.tell()
            torch.save(tensor, self.content)
            length = self.content.tell() - offset
            self.metadata.storage_data[described.MetadataIndex(name, begin)] = _StorageInfo(BLOBS, offset, length)
            chunks.append(described.ChunkStorageMetadata(torch.Size(begin), tensor.size()))
        properties = described.TensorProperties.create_from_tensor(boxes[0][1])
        ends = [[b + n for b, n in zip(begin, tensor.shape, strict=True)] for begin, tensor in boxes]
        size = torch.Size(map(max, *ends) if len(ends) > 1 else ends[0])
        self.metadata.state_dict_metadata[name] = described.TensorStorageMetadata(properties, size, chunks)

    def kept(self, name: str = "w") -> Any:
        return self.metadata.state_dict_metadata[name]

    def info(self, name: str = "w") -> Any:
        """Return where the first piece of a tensor is said to lie."""
        return next(one for index, one in self.metadata.storage_data.items() if index.fqn == name)

    def write(self) -> Path:
        self.path.mkdir()
        (self.path / BLOBS).write_bytes(self.content.getvalue())
        (self.path / ".metadata").write_bytes(pickle.dumps(self.metadata))
        return self.path


def halves() -> Boxes:
    return [((0, 0), FULL[:3].clone()), ((3, 0), FULL[3:].clone())]


def quarters() -> Boxes:
    return [((r, c), FULL[r : r + 3, c : c + 4].clone()) for r in (0, 3) for c in (0, 4)]


@pytest.mark.parametrize("boxes", [halves, quarters], ids=["halves", "quarters"])
def test_a_directory_made_by_hand_opens(tmp_path: Path, boxes: Callable[[], Boxes]) -> None:
    found = held(Directory(tmp_path / "x", w=boxes(), v=[((0, 0, 0), CUBE)]).write())

    assert (same(found["w"], FULL), same(found["v"], CUBE)) == (True, True)


def cut(directory: Directory) -> None:
    directory.content.truncate(directory.content.seek(0, io.SEEK_END) - 10)


def compressed(directory: Directory) -> None:
    directory.info().transform_descriptors = ["zstd"]


def moved(directory: Directory, place: int, *begin: int) -> None:
    """Let a piece begin elsewhere, in both tables."""
    stored = directory.metadata.storage_data
    index = [index for index in stored if index.fqn == "w"][place]
    stored[described.MetadataIndex("w", begin)] = stored.pop(index)
    directory.kept().chunks[place].offsets = torch.Size(begin)


def resized(directory: Directory, *size: int) -> None:
    directory.kept().size = torch.Size(size)


def elsewhere(directory: Directory, **changed: Any) -> None:
    for name, value in changed.items():
        setattr(directory.info(), name, value)


def transposed_piece(directory: Directory) -> None:
    directory.add("w", [((0, 0), FULL[:3].clone()), ((3, 0), FULL[3:].t().contiguous().t())])


def typed(directory: Directory, dtype: torch.dtype) -> None:
    directory.kept().properties.dtype = dtype


def forgotten(directory: Directory) -> None:
    del directory.metadata.storage_data[described.MetadataIndex("w", (3, 0))]


def blob_of(value: object) -> Callable[[Directory], None]:
    def put(directory: Directory) -> None:
        offset = directory.content.seek(0, io.SEEK_END)
        torch.save(value, directory.content)
        elsewhere(directory, offset=offset, length=directory.content.tell() - offset)

    return put


HOLE = "is F32{}, its {} pieces are {}: a hole or an overlap"
# what is wrong with two halves of w → how it is done, the problem
FAULTS: dict[str, tuple[Callable[[Directory], object], str]] = {
    "a hole": (
        lambda d: moved(d, 1, 4, 0),
        f"w {HOLE.format([5, 7], 2, '[3, 7] at [0, 0], [2, 7] at [4, 0]')}",
    ),
    "an overlap": (
        lambda d: moved(d, 1, 2, 0),
        f"w {HOLE.format([5, 7], 2, '[3, 7] at [0, 0], [2, 7] at [2, 0]')}",
    ),
    "a larger tensor": (
        lambda d: resized(d, 6, 7),
        f"w {HOLE.format([6, 7], 2, '[3, 7] at [0, 0], [2, 7] at [3, 0]')}",
    ),
    "a smaller tensor": (
        lambda d: resized(d, 5, 6),
        f"w {HOLE.format([5, 6], 2, '[3, 7] at [0, 0], [2, 7] at [3, 0]')}",
    ),
    "no pieces": (lambda d: d.kept().chunks.clear(), f"w {HOLE.format([5, 7], 0, '')}"),
    "a piece twice": (
        lambda d: d.kept().chunks.append(d.kept().chunks[0]),
        f"w {HOLE.format([5, 7], 3, '[3, 7] at [0, 0], [2, 7] at [3, 0], [3, 7] at [0, 0]')}",
    ),
    "a piece in no file": (forgotten, "w has a piece at [3, 0] that is in no file"),
    "another dtype": (
        lambda d: typed(d, torch.int32),
        f"w has a piece at byte 0 of {BLOBS}: F32[3, 7] there, I32[3, 7] in .metadata",
    ),
    "a dtype that is not known": (
        lambda d: typed(d, torch.complex32),
        "w is complex32, which cannot be read here; known are bool, uint8, int8, int16, uint16, int32, uint32, int64, "
        "uint64, float16, bfloat16, float32, float64, complex64, complex128, float4_e2m1fn_x2, float8_e4m3fn, "
        "float8_e5m2, float8_e8m0fnu, float8_e4m3fnuz, float8_e5m2fnuz",
    ),
    "another tensor in its place": (
        blob_of(torch.ones(3, 6)),
        f"w has a piece at byte {{end}} of {BLOBS}: F32[3, 6] there, F32[3, 7] in .metadata",
    ),
    "no tensor in its place": (
        blob_of({"w": FULL}),
        f"w has a piece at byte {{end}} of {BLOBS}: is no tensor; convert it to a plain tensor and save it again",
    ),
    "a sparse piece": (
        blob_of(torch.eye(3).to_sparse()),
        f"w has a piece at byte {{end}} of {BLOBS}: is a sparse tensor; convert it to a plain tensor and save it again",
    ),
    "pieces in another order": (
        transposed_piece,
        "w is in 2 pieces that are not all in C order; save it contiguous",
    ),
    "a compressed piece": (
        compressed,
        f"w has a piece at byte 0 of {BLOBS} that was compressed or changed in writing; save it without extensions",
    ),
    "a cut file": (
        cut,
        f"w has a piece at byte {{first}} of {BLOBS} of {{second}} bytes, the file has {{size}}; truncated?",
    ),
    "a piece beyond the end": (
        lambda d: elsewhere(d, offset=2**62),
        f"w has a piece at byte {2**62} of {BLOBS} of {{first}} bytes, the file has {{end}}; truncated?",
    ),
    "a piece that is cut short": (
        lambda d: elsewhere(d, length=1000),
        f"w has a piece at byte 0 of {BLOBS}: 1000 bytes that are no whole zip archive (File is not a zip file); "
        "truncated? copy it anew",
    ),
    "a piece that begins late": (
        lambda d: elsewhere(d, offset=1),
        f"w has a piece at byte 1 of {BLOBS}: {{first}} bytes that begin with b'K\\x03\\x04\\x00\\x00\\x08\\x08\\x00"
        "\\x00\\x00\\x00\\x00\\x00\\x00\\x00\\x00', not a file of torch.save; copy it anew",
    ),
}


@pytest.mark.parametrize(("damage", "told"), FAULTS.values(), ids=FAULTS)
def test_a_tensor_that_is_not_whole_is_refused_with_both_sides(
    tmp_path: Path, damage: Callable[[Directory], object], told: str
) -> None:
    directory = Directory(tmp_path / "x", w=halves())
    first, second = directory.metadata.storage_data.values()
    places = {"first": first.length, "second": second.length, "end": second.offset + second.length}
    places["size"] = places["end"] - 10
    damage(directory)

    assert problems(directory.write()) == (f".metadata: tensor {told.format(**places)}",)


def test_everything_that_is_wrong_is_told_together(tmp_path: Path) -> None:
    directory = Directory(tmp_path / "x", w=halves(), v=[((0, 0, 0), CUBE)], u=[((0,), torch.ones(1))], t=halves())
    moved(directory, 1, 4, 0)
    elsewhere(directory)
    directory.info("v").relative_path = directory.info("u").relative_path = "__1_0.distcp"
    directory.info("t").length = 10

    assert problems(directory.write()) == (
        f".metadata: tensor w {HOLE.format([5, 7], 2, '[3, 7] at [0, 0], [2, 7] at [4, 0]')}",
        f"{tmp_path}/x/__1_0.distcp cannot be opened: No such file or directory",
        f".metadata: tensor t has a piece at byte {directory.info('t').offset} of {BLOBS}: 10 bytes that are no whole "
        "zip archive (File is not a zip file); truncated? copy it anew",
    )


def test_a_directory_without_metadata_is_an_unfinished_one(tmp_path: Path) -> None:
    path = saved(tmp_path / "x", {"w": FULL})
    (path / ".metadata").unlink()

    assert problems(path) == (f"{path} has no .metadata, which is written last: the save did not finish",)


def test_pieces_in_the_safetensors_format_are_refused_by_name(tmp_path: Path) -> None:
    path = saved(tmp_path / "x", {"w": FULL}, serialization_format=SerializationFormat.SAFETENSORS)

    assert problems(path) == (
        f".metadata: tensor w has a piece at byte 0 of {BLOBS}: safetensors; "
        "save it with SerializationFormat.TORCH_SAVE",
    )


NOT_THIS = ".metadata is not what torch.distributed.checkpoint writes:"


class Evil:
    """Runs a command in whoever loads it."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


def named(**changed: Any) -> Callable[[Directory], object]:
    return lambda directory: elsewhere(directory, **changed)


def replaced(part: str, value: object) -> Callable[[Directory], object]:
    return lambda directory: setattr(directory.metadata, part, value)


# what is wrong with the description → how it is done, the problem
DESCRIPTIONS: dict[str, tuple[Callable[[Directory], object], str]] = {
    "a path upward": (named(relative_path="../x"), "it names '../x', which is not a file name beside it"),
    "a path from the root": (
        named(relative_path="/etc/passwd"),
        "it names '/etc/passwd', which is not a file name beside it",
    ),
    "a path below": (named(relative_path="a/b"), "it names 'a/b', which is not a file name beside it"),
    "the directory above": (named(relative_path=".."), "it names '..', which is not a file name beside it"),
    "no name": (named(relative_path=""), "it names '', which is not a file name beside it"),
    "half a name": (named(relative_path="a\0b"), "it names 'a\\x00b', which is not a file name beside it"),
    "a number for a name": (named(relative_path=3), "a _StorageInfo has no file, offset and length"),
    "a negative offset": (named(offset=-1), "a _StorageInfo has no file, offset and length"),
    "a length of text": (named(length="1"), "a _StorageInfo has no file, offset and length"),
    "places of something else": (replaced("storage_data", {1: 2}), "no MetadataIndex where one belongs"),
    "a size of fractions": (
        lambda d: setattr(d.kept(), "size", (1.5,)),
        "a TensorStorageMetadata has no size and chunks",
    ),
    "no chunks": (lambda d: setattr(d.kept(), "chunks", None), "a TensorStorageMetadata has no size and chunks"),
    "chunks of something else": (
        lambda d: setattr(d.kept(), "chunks", [1]),
        "no ChunkStorageMetadata where one belongs",
    ),
    "a chunk of other dimensions": (
        lambda d: setattr(d.kept().chunks[0], "sizes", torch.Size([3])),
        "a ChunkStorageMetadata has no offsets and sizes",
    ),
    "no properties": (lambda d: setattr(d.kept(), "properties", None), "a TensorProperties has no dtype"),
    "another object": (replaced("__class__", described.StorageMeta), "no Metadata where one belongs"),
}


@pytest.mark.parametrize(("damage", "told"), DESCRIPTIONS.values(), ids=DESCRIPTIONS)
def test_a_description_that_is_none_is_refused(
    tmp_path: Path, damage: Callable[[Directory], object], told: str
) -> None:
    directory = Directory(tmp_path / "x", w=halves())
    damage(directory)

    assert problems(directory.write()) == (f"{NOT_THIS} {told}",)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "pickle exhausted before seeing STOP (at byte 0)"),
        (pickle.dumps([1]), "no Metadata where one belongs"),
        (pickle.dumps({"a": [1]})[:-1], "pickle exhausted before seeing STOP (at byte 23)"),
    ],
    ids=["empty", "something else", "cut"],
)
def test_a_file_that_is_no_description_is_refused(tmp_path: Path, content: bytes, told: str) -> None:
    path = saved(tmp_path / "x", {"w": FULL})
    (path / ".metadata").write_bytes(content)

    assert problems(path) == (f"{NOT_THIS} {told}",)


def test_a_command_in_the_description_is_not_run_even_with_trust(tmp_path: Path) -> None:
    directory = Directory(tmp_path / "x", w=halves())
    directory.metadata.planner_data = Evil(f"touch {tmp_path}/run")

    assert list(opened(directory.write()).tensors) == ["w"]
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_a_description_with_any_damage_is_opened_within_its_files_or_refused(tmp_path: Path) -> None:
    path = Directory(tmp_path / "x", w=quarters(), v=[((0, 0, 0), CUBE)]).write()
    content = (path / ".metadata").read_bytes()
    generator, outcomes = random.Random(0), collections.Counter[str]()
    for _ in range(700):
        damaged = bytearray(content)
        for _ in range(generator.choice([1, 2, 8])):
            damaged[generator.randrange(len(damaged))] = generator.randrange(256)
        (path / ".metadata").write_bytes(damaged)
        try:
            found = opened(path)
        except CheckpointError:
            outcomes["refused"] += 1
            continue
        outcomes["opened"] += 1
        for entry in found.tensors.values():
            assert all(0 <= p.offset < found.files[p.file].size for p in entry.pieces or (entry,))

    assert min(outcomes["opened"], outcomes["refused"]) > 10


def boxes_of(shape: tuple[int, ...], generator: random.Random) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cut a shape along random planes, and sometimes move, drop or repeat a box."""
    cuts = [sorted({0, n, *generator.sample(range(n), generator.randrange(min(3, n)))}) for n in shape]
    for edges in product(*(pairwise(c) for c in cuts)):
        begin, size = tuple(a for a, _ in edges), tuple(b - a for a, b in edges)
        if generator.random() < 0.1:
            begin = tuple(max(0, b + generator.choice([-1, 0, 1])) for b in begin)
        if generator.random() > 0.05:
            yield begin, size


def test_boxes_tile_a_shape_exactly_when_every_element_is_in_one_of_them() -> None:
    generator, seen = random.Random(0), collections.Counter[bool]()
    for _ in range(2000):
        shape = tuple(generator.randrange(1, 6) for _ in range(generator.randrange(4)))
        boxes = list(boxes_of(shape, generator))
        counts = collections.Counter(
            point
            for begin, size in boxes
            for point in product(*map(range, begin, map(sum, zip(begin, size, strict=True))))
        )
        exact = set(counts) == set(product(*map(range, shape))) and set(counts.values()) == {1}
        assert _tiles(shape, boxes) is exact, (shape, boxes)
        seen[exact] += 1

    assert min(seen.values()) > 300


def test_boxes_along_many_dimensions_are_refused_and_take_no_time() -> None:
    assert _tiles((2,) * 60, [((0,) * 60, (1,) * 60)] * 3) is False
