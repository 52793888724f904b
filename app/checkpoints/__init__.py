"""Checkpoint formats: one file each, found out from the path, opened and validated before the model is touched."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from app import plugins
from app.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class CheckpointFile:
    """One open file of a checkpoint; the stamp tells later whether it is still the same file."""

    path: Path
    fd: int
    size: int
    stamp: tuple[int, int, int, int]

    def changed(self) -> str | None:
        """Say how the open file differs from what it was when it was opened, or None."""
        now = file_stamp(os.fstat(self.fd))
        return None if now == self.stamp else f"{self.path} changed while it was being loaded"


def file_stamp(status: os.stat_result) -> tuple[int, int, int, int]:
    """Return what identifies the content of a file without reading it: device, inode, size, modification time."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where a tensor lies; `dtype` is named as in safetensors (F32, BF16, I64 …), `offset` counts from file start."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An opened checkpoint whose headers are valid and consistent with the sizes of its files."""

    path: Path
    format: str
    files: tuple[CheckpointFile, ...]
    tensors: Mapping[str, TensorEntry]
    config_digest: str | None

    @property
    def nbytes(self) -> int:
        """Bytes of all files together."""
        return sum(file.size for file in self.files)

    @property
    def tensor_bytes(self) -> int:
        """Bytes of all tensors together."""
        return sum(entry.nbytes for entry in self.tensors.values())

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
    def open(cls, path: Path) -> Checkpoint:
        """Open and validate; raises CheckpointError that lists everything that is wrong."""


def open_checkpoint(path: Path) -> Checkpoint:
    """Find the format of what lies at `path`, open it and validate its headers; raises CheckpointError."""
    try:
        return _open(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}; check model.checkpoint and its permissions") from error


def _open(path: Path) -> Checkpoint:
    if not path.exists():
        raise CheckpointError(f"{path} does not exist; model.checkpoint names a directory or a file")
    formats = [plugins.load(__name__, name, CheckpointFormat) for name in plugins.names(__name__)]
    found = {one.name: one for one in formats if one.files(path)}
    if not found:
        listing = ", ".join(sorted(p.name for p in path.iterdir())[:20]) if path.is_dir() else path.name
        known = ", ".join(one.name for one in formats)
        raise CheckpointError(f"{path} holds no checkpoint of a known format ({known}); found: {listing or 'nothing'}")
    if len(found) > 1:
        raise CheckpointError(f"{path} holds checkpoints of {len(found)} formats: {', '.join(found)}; leave only one")
    return next(iter(found.values())).open(path)
