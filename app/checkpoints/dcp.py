"""Directories of torch.distributed.checkpoint: `.metadata`, a pickle, places the pieces of every tensor in files.

It is read as data, not run. Trust is asked for all the same: every other tool that the directory meets will run it.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from math import prod
from pathlib import Path
from typing import NamedTuple

from app.checkpoints import Opaque, Piece, Scan, TensorEntry
from app.checkpoints._pickle import BYTES_LIMIT, DICT, Call, Global, read_pickle
from app.checkpoints._torch_archive import DTYPES, Archive, ArchiveError, numbers_of, pairs_of, read_or_fail
from app.dtypes import size_bytes

METADATA = ".metadata"
SUFFIX = ".distcp"
# What a module's get_extra_state returned; a dict of tensors there is flattened like one of weights, and is none.
EXTRA_STATE = "_extra_state"
# Tensors are split along a few dimensions; the exact check takes two to the power of their number.
SPLIT_LIMIT = 8

Numbers = tuple[int, ...]


class Dcp:
    """The format's entry for the loader."""

    plugin = True
    name = "dcp"

    @classmethod
    def files(cls, path: Path) -> tuple[str, ...]:
        """Return the names in a directory that are of this format; `.metadata` is written last and may be missing."""
        if not path.is_dir():
            return ()
        return tuple(sorted(p.name for p in path.iterdir() if p.name == METADATA or p.name.endswith(SUFFIX)))

    @classmethod
    def fill(cls, scan: Scan, trust_pickle: bool) -> None:
        """Look at every piece of what is taken; without trust nothing is opened and the problem says so."""
        path = scan.path
        if METADATA not in cls.files(path):
            scan.problems.append(f"{path} has no {METADATA}, which is written last: the save did not finish")
        elif not trust_pickle:
            scan.problems.append(
                f"{path} is described by a pickle ({METADATA}), which every other tool that opens it will run; "
                f"set model.trust_pickle: true when you trust where it came from"
            )
        elif (number := scan.open_file(path / METADATA)) is not None:
            try:
                _Reader(scan, read_pickle(read_or_fail(scan.files[number].fd, BYTES_LIMIT + 1, 0))).read()
            except ValueError as error:
                scan.problems.append(f"{METADATA} is not what torch.distributed.checkpoint writes: {error}")


class _Stretch(NamedTuple):
    file: str
    offset: int
    length: int
    transformed: bool


class _Tensor(NamedTuple):
    dtype: str
    shape: Numbers
    boxes: tuple[tuple[Numbers, Numbers], ...]  # begin and size of each piece


class _Reader:
    """Goes through a `.metadata`; a ValueError says that it is none, everything else becomes a problem."""

    def __init__(self, scan: Scan, metadata: object) -> None:
        fields = _fields(metadata, "Metadata")
        self._scan = scan
        self._kept = _by_text(fields.get("state_dict_metadata"))
        self._stretches = dict(_stretches(fields.get("storage_data")))
        planned = _by_text(fields.get("planner_data") or Call(DICT))
        self._paths = {name: _path(planned.get(name), name) for name in self._kept}
        self._numbers: dict[str, int | None] = {}

    def read(self) -> None:
        """Add tensors, objects, notes and problems to the scan."""
        tensors = {name for name, value in self._kept.items() if _is_a(value, "TensorStorageMetadata")}
        prefix = self._prefix([self._paths[name] for name in tensors])
        for key, path in self._paths.items():
            if prefix is None or path[: len(prefix)] != prefix or len(path) == len(prefix):
                continue
            name, inside = ".".join(path[len(prefix) :]), _extra_state(path[len(prefix) :])
            if inside or key not in tensors:
                self._scan.objects[inside or name] = Opaque("dict" if inside else "bytes of torch.save")
                continue
            try:
                if entry := self._entry(name, key):
                    self._scan.add(entry)
            except ArchiveError as error:
                self._scan.problems.append(f"{METADATA}: tensor {name} {error}")

    def _prefix(self, paths: Sequence[tuple[str, ...]]) -> tuple[str, ...] | None:
        """Return what the paths of the weights begin with: nothing, or the one key that holds tensors by name."""
        lengths: dict[str, set[int]] = {}
        for path in paths:
            if not _extra_state(path):
                lengths.setdefault(path[0], set()).add(len(path))
        if lengths and all(found == {1} for found in lengths.values()):
            return ()
        wrapped = [key for key, found in lengths.items() if found == {2}]
        if len(wrapped) != 1:
            found = ", ".join(sorted(lengths)) or "nothing"
            self._scan.problems.append(
                f"{METADATA}: tensors are under {found}; which are the weights is unknown, save only them"
            )
            return None
        others = sorted({path[0] for path in self._paths.values()} - set(wrapped))
        self._scan.notes.append(
            f"{METADATA}: the weights are what it holds as {wrapped[0]}; left aside: {', '.join(others) or 'nothing'}"
        )
        return (wrapped[0],)

    def _entry(self, name: str, key: str) -> TensorEntry | None:
        """Return where a tensor lies, None where a file of it could not be opened; raises ArchiveError."""
        tensor = _tensor(self._kept[key])
        if not _tiles(tensor.shape, tensor.boxes):
            shown = ", ".join(f"{list(size)} at {list(begin)}" for begin, size in tensor.boxes[:5])
            both = f"{tensor.dtype}{list(tensor.shape)}, its {len(tensor.boxes)} pieces are {shown}"
            raise ArchiveError(f"is {both}: a hole or an overlap")
        if not prod(tensor.shape):
            if (key, origin := (0,) * len(tensor.shape)) in self._stretches:
                self._piece(name, key, tensor, origin, tensor.shape)  # where it is in a file, that one must be whole
            return TensorEntry(name, tensor.dtype, tensor.shape, 0, 0, 0)
        found = [self._piece(name, key, tensor, *box) for box in tensor.boxes]
        entries = [entry for entry in found if entry]
        if len(entries) < len(found):
            return None
        if len(entries) == 1:
            return entries[0]
        if any(entry.stride for entry in entries):
            raise ArchiveError(f"is in {len(entries)} pieces that are not all in C order; save it contiguous")
        pieces = tuple(Piece(e.file, e.offset, *box) for e, box in zip(entries, tensor.boxes, strict=True))
        nbytes = size_bytes(tensor.dtype, tensor.shape)
        return replace(entries[0], shape=tensor.shape, nbytes=nbytes, pieces=pieces)

    def _piece(self, name: str, key: str, tensor: _Tensor, begin: Numbers, size: Numbers) -> TensorEntry | None:
        stretch = self._stretches.get((key, begin))
        if stretch is None:
            raise ArchiveError(f"has a piece at {list(begin)} that is in no file")
        place = f"has a piece at byte {stretch.offset} of {stretch.file}"
        if stretch.transformed:
            raise ArchiveError(f"{place} that was compressed or changed in writing; save it without extensions")
        if stretch.file not in self._numbers:
            self._numbers[stretch.file] = self._scan.open_file(self._scan.path / stretch.file)
        if (number := self._numbers[stretch.file]) is None:
            return None
        file = self._scan.files[number]
        if stretch.offset + stretch.length > file.size:
            raise ArchiveError(f"{place} of {stretch.length} bytes, the file has {file.size}; truncated?")
        try:
            archive = Archive(file.fd, stretch.offset, stretch.length)
            entry = archive.entry(name, archive.root, number)
        except ArchiveError as error:
            other = "safetensors; save it with SerializationFormat.TORCH_SAVE"
            raise ArchiveError(f"{place}: {other if read_or_fail(file.fd, 9, 0)[8:] == b'{' else error}") from error
        if (entry.dtype, entry.shape) != (tensor.dtype, size):
            both = f"{entry.dtype}{list(entry.shape)} there, {tensor.dtype}{list(size)} in {METADATA}"
            raise ArchiveError(f"{place}: {both}")
        return entry


def _is_a(value: object, name: str) -> bool:
    match value:
        case Call(function=Global(module, found)):
            return found == name and module.startswith("torch.distributed.")
    return False


def _fields(value: object, name: str) -> dict[str, object]:
    if not isinstance(value, Call) or not _is_a(value, name):
        raise ValueError(f"no {name} where one belongs")
    return _by_text(value.state)


def _by_text(value: object) -> dict[str, object]:
    return {key: one for key, one in pairs_of(value) or () if isinstance(key, str)}


def _path(value: object, name: str) -> tuple[str, ...]:
    """Return where a flattened name came from: itself, where the writer kept no path."""
    parts = value if isinstance(value, tuple) else ()
    return tuple(str(part) for part in parts if isinstance(part, str | int)) or (name,)


def _extra_state(path: Sequence[str]) -> str:
    """Return the name of the extra state that something is a part of; empty when it is of none."""
    ends = (number for number, part in enumerate(path[:-1], 1) if part.endswith(EXTRA_STATE))
    return ".".join(path[: next(ends, 0)])


def _stretches(value: object) -> Iterator[tuple[tuple[str, Numbers | None], _Stretch]]:
    for key, one in pairs_of(value) or ():
        index, info = _fields(key, "MetadataIndex"), _fields(one, "_StorageInfo")
        file, place = info.get("relative_path"), numbers_of((info.get("offset"), info.get("length")))
        fqn, begin = index.get("fqn"), numbers_of(index.get("offset"))
        if not isinstance(fqn, str) or not isinstance(file, str) or place is None:
            raise ValueError("a _StorageInfo has no file, offset and length")
        if Path(file).name != file or file in {"", ".", ".."} or "\0" in file:
            raise ValueError(f"it names {file!r}, which is not a file name beside it")
        yield (fqn, begin), _Stretch(file, place[0], place[1], bool(info.get("transform_descriptors")))


def _tensor(value: object) -> _Tensor:
    fields = _fields(value, "TensorStorageMetadata")
    shape, chunks = numbers_of(fields.get("size")), fields.get("chunks")
    if shape is None or not isinstance(chunks, list):
        raise ValueError("a TensorStorageMetadata has no size and chunks")
    match fields.get("properties"):
        case Call(state=(Global("torch", kind), *_)) if kind in DTYPES:
            dtype = DTYPES[kind]
        case Call(state=(Global(_, kind), *_)):
            raise ArchiveError(f"is {kind}, which cannot be read here; known are {', '.join(DTYPES)}")
        case _:
            raise ValueError("a TensorProperties has no dtype")
    boxes = []
    for chunk in chunks:
        parts = _fields(chunk, "ChunkStorageMetadata")
        begin, size = numbers_of(parts.get("offsets")), numbers_of(parts.get("sizes"))
        if begin is None or size is None or not len(begin) == len(size) == len(shape):
            raise ValueError("a ChunkStorageMetadata has no offsets and sizes")
        if prod(size):
            boxes.append((begin, size))
    return _Tensor(dtype, shape, tuple(boxes))


def _tiles(shape: Numbers, boxes: Sequence[tuple[Numbers, Numbers]]) -> bool:
    """Say whether boxes fill a shape without hole or overlap.

    Exact and without comparing pairs: a box is the sum of its corners with alternating signs (what differentiating it
    along every dimension leaves), so the boxes are the whole if and only if all corners cancel.
    """
    split = [d for d in range(len(shape)) if any(begin[d] or size[d] != shape[d] for begin, size in boxes)]
    if not boxes or len(split) > SPLIT_LIMIT:
        return not boxes and not prod(shape)
    corners: Counter[Numbers] = Counter()
    for sign, (begin, size) in [(-1, (tuple(0 for _ in shape), shape)), *((1, box) for box in boxes)]:
        for ends in product((0, 1), repeat=len(split)):
            point = tuple(begin[d] + size[d] * end for d, end in zip(split, ends, strict=True))
            corners[point] += sign * (-1) ** sum(ends)
    return not any(corners.values())
