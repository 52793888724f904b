"""Rewrite a safetensors checkpoint as one file in which every tensor is aligned, for readers of any make.

The format allows no holes, so alignment comes from the order: tensors of whole multiples of 64 bytes first, then the
others, and between those small tensors of padding, named in the file's metadata. The header is filled with blanks up to
a whole page, so that one read of whole pages has all of it and the data begins on a page.
"""

import json
import os
import struct
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.artifacts.seal import sync
from app.checkpoints import Checkpoint, CheckpointFile, TensorEntry, read_exactly
from app.checkpoints.safetensors import HEADER_LIMIT, PADDING_KEY, SUFFIX, metadata_of
from app.errors import CheckpointError, ResourceError, SettingsError

ALIGNMENT = 64
PAGE = 4096
STEP = 8 << 20


@dataclass(frozen=True, slots=True)
class _Row:
    """A tensor of the new file; without `source` it is padding. Offsets count from the start of the data."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int
    source: TensorEntry | None


def repack(checkpoint: Checkpoint, out: Path) -> dict[str, Any]:
    """Write the new file and return what it holds.

    `out`: a file, or a directory that gets a model.safetensors. Raises SettingsError where there is one already,
    CheckpointError where the source cannot be read or is of another format, ResourceError where the disk is full.
    """
    if checkpoint.format != "safetensors":
        raise CheckpointError(f"{checkpoint.path} is of the format {checkpoint.format}; only safetensors is repacked")
    target = _target(checkpoint, out)
    rows = list(_arrange(checkpoint))
    header = _header(checkpoint, rows)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _write(checkpoint, header, rows, target)
    except OSError as error:
        raise ResourceError(f"{target} cannot be written: {error.strerror}; is the disk full?") from error
    padding = [row for row in rows if row.source is None]
    return {
        "path": str(target),
        "bytes": target.stat().st_size,
        "tensors": len(rows) - len(padding),
        "header_bytes": len(header),
        "padding_tensors": len(padding),
        "padding_bytes": sum(row.end - row.begin for row in padding),
    }


def _target(checkpoint: Checkpoint, out: Path) -> Path:
    # A directory may have a dot in its name (llama-3.1-8b); what ends like a file is one of another kind.
    other = out.suffix[1:].isalpha() and not out.is_dir()
    if not out.name.endswith(SUFFIX) and (out.is_file() or other):
        raise SettingsError(f"{out} is neither a directory nor a name that ends with {SUFFIX}")
    target = out if out.name.endswith(SUFFIX) else out / f"model{SUFFIX}"
    if target.exists():
        raise SettingsError(f"{target} exists; name another file, or remove it first")
    inside = any(target.parent.resolve() == file.path.parent.resolve() for file in checkpoint.files)
    # Beside a single file it disturbs nobody who names that file.
    if inside and (checkpoint.path.is_dir() or len(checkpoint.files) > 1):
        raise SettingsError(f"{target} would lie among the files it is made of, which would then be no checkpoint")
    return target


def _arrange(checkpoint: Checkpoint) -> Iterator[_Row]:
    stored = sorted(checkpoint.tensors.values(), key=lambda e: (e.file, e.offset, e.nbytes))
    whole = [entry for entry in stored if entry.nbytes % ALIGNMENT == 0]
    others = [entry for entry in stored if entry.nbytes % ALIGNMENT]
    position, count = 0, 0
    for entry in (*whole, *others):
        if gap := -position % ALIGNMENT:
            yield _Row(_padding_name(checkpoint, count), "U8", (gap,), position, position + gap, None)
            position, count = position + gap, count + 1
        yield _Row(entry.name, entry.dtype, entry.shape, position, position + entry.nbytes, entry)
        position += entry.nbytes


def _padding_name(checkpoint: Checkpoint, number: int) -> str:
    name = f"{PADDING_KEY}.{number}"
    if name in checkpoint.tensors:
        raise CheckpointError(f"{checkpoint.path} has a tensor {name}, which is the name of padding; rename it first")
    return name


def _header(checkpoint: Checkpoint, rows: list[_Row]) -> bytes:
    """Return length and JSON, filled with blanks up to a whole page."""
    metadata: dict[str, str] = {}
    for file in checkpoint.files:
        metadata |= metadata_of(file)
    metadata.pop(PADDING_KEY, None)
    if names := [row.name for row in rows if row.source is None]:
        metadata[PADDING_KEY] = json.dumps(names)
    described = {
        row.name: {"dtype": row.dtype, "shape": _stored_shape(row), "data_offsets": [row.begin, row.end]}
        for row in rows
    }
    text = json.dumps({"__metadata__": metadata, **described} if metadata else described).encode()
    text += b" " * (-(8 + len(text)) % PAGE)
    if len(text) > HEADER_LIMIT:
        raise CheckpointError(f"{checkpoint.path}: a header of {len(text)} bytes is more than the format allows")
    return struct.pack("<Q", len(text)) + text


def _stored_shape(row: _Row) -> list[int]:
    """Two F4 are one element to torch and two in the header."""
    return [*row.shape[:-1], row.shape[-1] * 2] if row.dtype == "F4" else list(row.shape)


def _write(checkpoint: Checkpoint, header: bytes, rows: list[_Row], target: Path) -> None:
    """Write under another name, force to disk, rename: nobody sees half a file."""
    fd, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}-")
    try:
        with os.fdopen(fd, "wb") as out:
            out.write(header)
            for row in rows:
                if row.source is None:
                    out.write(bytes(row.end - row.begin))
                    continue
                for part in _bytes_of(checkpoint.files[row.source.file], row.source):
                    out.write(part)
            out.flush()
            os.fsync(out.fileno())
        if changed := next((text for file in checkpoint.files if (text := file.changed())), None):
            raise CheckpointError(f"{changed}; nothing was written")
        Path(temporary).chmod(0o644)
        Path(temporary).replace(target)
        sync(target.parent)
    finally:
        Path(temporary).unlink(missing_ok=True)


def _bytes_of(file: CheckpointFile, entry: TensorEntry) -> Iterator[bytes]:
    end = entry.offset + entry.nbytes
    for position in range(entry.offset, end, STEP):
        yield read_exactly(file, min(STEP, end - position), position)
