"""Checkpoint formats: one file each, found out from the path, opened and validated before the model is touched."""

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from app import plugins
from app.checkpoints._file import (
    PUBLISH,
    TOO_MANY_FILES,
    CheckpointFile,
    FileStamp,
    file_stamp,
    fill,
    read_at,
    read_exactly,
)
from app.errors import CheckpointError

__all__ = [
    "PUBLISH",
    "TOO_MANY_FILES",
    "Checkpoint",
    "CheckpointFile",
    "CheckpointFormat",
    "FileStamp",
    "Opaque",
    "Piece",
    "Scan",
    "TensorEntry",
    "file_stamp",
    "fill",
    "open_checkpoint",
    "read_at",
    "read_exactly",
    "scan_checkpoint",
]


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a tensor (`start` and `shape` in elements) that lies in one stretch of a file, in C order."""

    file: int
    offset: int
    start: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where a tensor lies.

    `dtype` is named as in safetensors (F32, BF16, I64 …), `shape` is torch's, `offset` counts from the file's start,
    `nbytes` is the length of the stretch. `stride`: in elements; None is C order. `pieces`: the boxes of a tensor that
    is kept in several; `file` and `offset` then mean nothing.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: int
    offset: int
    nbytes: int
    stride: tuple[int, ...] | None = None
    pieces: tuple[Piece, ...] = ()

    @property
    def place(self) -> object:
        """Equal for two names that are one tensor in the files."""
        return self.pieces or (self.file, self.offset, self.nbytes, self.shape, self.stride)


@dataclass(frozen=True, slots=True)
class Opaque:
    """Stands for a value of a checkpoint that is not read; `what` names its kind."""

    what: str


@dataclass(slots=True)
class Scan:
    """What was found at a path so far; formats fill it, problems and all.

    `objects`: entries that are no tensors (extra state). `versions`: module → version of its state's format, where the
    file says it. `notes`: what was left aside or guessed, in words. `headers_only`: the files have no data.
    """

    path: Path
    format: str
    files: list[CheckpointFile] = field(default_factory=list)
    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    headers_only: bool = False

    def open_file(self, path: Path) -> int | None:
        """Open a file for reading and return its number; None, and a problem, where that fails."""
        try:
            # Not blocking: a pipe of that name would keep the start for ever. Regular files do not care.
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except (OSError, ValueError) as error:
            told = getattr(error, "strerror", None) or error
            if getattr(error, "errno", None) in TOO_MANY_FILES:
                told = f"{told}; raise the limit of open files (ulimit -n)"
            gone = f" (a link to {path.readlink()}; was the download complete?)" if path.is_symlink() else ""
            self.problems.append(f"{path} cannot be opened: {told}{gone}")
            return None
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            os.close(fd)
            self.problems.append(f"{path} is no regular file; put the checkpoint's file there")
            return None
        self.files.append(CheckpointFile(path, fd, status.st_size, file_stamp(status)))
        return len(self.files) - 1

    def add(self, entry: TensorEntry) -> None:
        """Add a tensor; a name that another file holds already is a problem."""
        if entry.name in self.tensors:
            names = [self.files[one.file].path.name for one in (entry, self.tensors[entry.name])]
            self.problems.append(f"{names[0]}: tensor {entry.name} is also in {names[1]}; a name belongs to one shard")
        self.tensors[entry.name] = entry

    def close(self) -> None:
        """Close every file."""
        for file in self.files:
            os.close(file.fd)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An opened checkpoint whose headers are valid and consistent with the sizes of its files."""

    path: Path
    format: str
    files: tuple[CheckpointFile, ...]
    tensors: Mapping[str, TensorEntry]
    objects: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    headers_only: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of all files together."""
        return sum(file.size for file in self.files)

    @property
    def tensor_bytes(self) -> int:
        """Bytes of all tensors together; what several names share counts once."""
        return sum({entry.place: entry.nbytes for entry in self.tensors.values()}.values())

    def table(self) -> list[list[object]]:
        """Return names, dtypes and shapes, sorted by name: what compiled code may depend on, without any value."""
        return [[e.name, e.dtype, list(e.shape)] for e in sorted(self.tensors.values(), key=lambda e: e.name)]

    def close(self) -> None:
        """Close the files; mappings of them stay valid."""
        for file in self.files:
            os.close(file.fd)


class CheckpointFormat(Protocol):
    """A way of storing tensors in files."""

    plugin: bool
    name: str

    @classmethod
    def files(cls, path: Path) -> tuple[str, ...]:
        """Return the names at `path` (a directory or a file) that belong to this format; empty when none does."""

    @classmethod
    def fill(cls, scan: Scan, trust_pickle: bool) -> None:
        """Open and validate everything at the scan's path; what is wrong becomes its problems.

        `trust_pickle`: the operator has said that pickles at this path may be opened.
        """


def open_checkpoint(path: Path, trust_pickle: bool = False) -> Checkpoint:
    """Find the format of what lies at `path`, validate its headers; raises CheckpointError with all problems."""
    scan = scan_checkpoint(path, trust_pickle)
    if scan.problems:
        scan.close()
        raise CheckpointError(f"{path} is not a complete checkpoint: {len(scan.problems)} problem(s)", scan.problems)
    files, notes = tuple(scan.files), tuple(scan.notes)
    return Checkpoint(path, scan.format, files, scan.tensors, scan.objects, scan.versions, notes, scan.headers_only)


def scan_checkpoint(path: Path, trust_pickle: bool = False) -> Scan:
    """Find the format of what lies at `path` and look at everything in it; raises CheckpointError where none is."""
    try:
        form = _format_of(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}; check model.checkpoint and its permissions") from error
    scan = Scan(path, form.name)
    try:
        form.fill(scan, trust_pickle)
    except OSError as error:
        scan.problems.append(f"{error.filename or path} cannot be read: {error.strerror or error}; check the disk")
    return scan


def _format_of(path: Path) -> type[CheckpointFormat]:
    try:
        path.stat()
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist; model.checkpoint names a directory or a file") from None
    formats = [plugins.load(__name__, name, CheckpointFormat) for name in plugins.names(__name__)]
    found = {one: names for one in formats if (names := one.files(path))}
    if not found:
        listing = ", ".join(sorted(p.name for p in path.iterdir())[:20]) if path.is_dir() else path.name
        known = ", ".join(one.name for one in formats)
        raise CheckpointError(f"{path} holds no checkpoint of a known format ({known}); found: {listing or 'nothing'}")
    if len(found) > 1:
        listing = "; ".join(f"{one.name}: {', '.join(names[:5])}" for one, names in found.items())
        raise CheckpointError(
            f"{path} holds checkpoints of {len(found)} formats ({listing}); leave only one, or let model.checkpoint "
            f"name the file or the index that is meant"
        )
    return next(iter(found))
