"""safetensors, one file or shards with an index; the header rules are those of the format's own reader.

Format: https://huggingface.co/docs/safetensors - eight bytes little-endian length, that many bytes of JSON, data.
"""

import hashlib
import json
import os
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from app.checkpoints import Checkpoint, CheckpointFile, TensorEntry, file_stamp
from app.errors import CheckpointError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
# The limit of the format's reference implementation; a longer header is an attack or a broken file.
HEADER_LIMIT = 100_000_000

# Bits an element; sub-byte types and those without a torch dtype are named so that the error can name them.
BITS: Mapping[str, int] = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}  # fmt: skip


class Safetensors:
    """The format's entry for the loader."""

    plugin = True
    name = "safetensors"

    @classmethod
    def files(cls, path: Path) -> tuple[str, ...]:
        """Return the names at `path` that are safetensors."""
        if path.is_file():
            return (path.name,) if path.suffix == ".safetensors" or path.name.endswith(INDEX) else ()
        return tuple(sorted(p.name for p in path.glob("*.safetensors")))

    @classmethod
    def open(cls, path: Path) -> Checkpoint:
        """Open and validate every shard; raises CheckpointError with all problems of all shards."""
        problems: list[str] = []
        expected = _expected_files(path, problems)
        files: list[CheckpointFile] = []
        tensors: dict[str, TensorEntry] = {}
        for shard, promised in expected.items():
            try:
                files.append(_open_file(shard))
            except (OSError, ValueError) as error:
                problems.append(f"{shard} cannot be opened: {getattr(error, 'strerror', error)}")
                continue
            found = len(problems)
            entries = list(_read_header(files[-1], len(files) - 1, problems))
            if entries or len(problems) == found:
                problems += _against_index(shard, promised, entries)
            for entry in entries:
                if entry.name in tensors:
                    other = files[tensors[entry.name].file].path.name
                    problems.append(
                        f"{shard.name}: tensor {entry.name} is also in {other}; a name belongs to one shard"
                    )
                tensors[entry.name] = entry
        if problems:
            for file in files:
                os.close(file.fd)
            raise CheckpointError(f"{path} is not a complete checkpoint: {len(problems)} problem(s)", problems)
        return Checkpoint(path, cls.name, tuple(files), tensors, _config_digest(path))


def _expected_files(path: Path, problems: list[str]) -> dict[Path, frozenset[str] | None]:
    """Return the shards to open and the names each must hold by the index (None: no index says)."""
    index = path / INDEX if path.is_dir() else path
    if index.name.endswith(INDEX) and index.exists():
        return _from_index(index, problems)
    if path.is_file():
        return {path: None}
    found = sorted(path.glob("*.safetensors"))
    if len(found) > 1:
        names = ", ".join(p.name for p in found[:5])
        problems.append(f"{len(found)} safetensors files without {INDEX} ({names}): which belong together is unknown")
        return {}
    return {found[0]: None}


def _from_index(index: Path, problems: list[str]) -> dict[Path, frozenset[str] | None]:
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        shards = {str(shard) for shard in weight_map.values()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        problems.append(f"{index.name} is no index: {type(error).__name__}: {error}")
        return {}
    expected: dict[Path, frozenset[str] | None] = {}
    for shard in sorted(shards):
        if Path(shard).name != shard or shard in {"", ".", ".."}:
            problems.append(f"{index.name} names {shard!r}, which is not a file name beside it")
            continue
        expected[index.parent / shard] = frozenset(name for name, where in weight_map.items() if where == shard)
    extra = {p.name for p in index.parent.glob("*.safetensors")} - shards
    problems += [f"{name} is not named by {index.name}; remove it or make the index anew" for name in sorted(extra)]
    return expected


def _open_file(path: Path) -> CheckpointFile:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    status = os.fstat(fd)
    return CheckpointFile(path, fd, status.st_size, file_stamp(status))


def _read_header(file: CheckpointFile, number: int, problems: list[str]) -> Iterator[TensorEntry]:
    """Yield the tensors of one file; what is wrong with it goes to `problems`."""
    name = file.path.name
    try:
        head = os.pread(file.fd, 8, 0)
    except OSError as error:
        problems.append(f"{name} cannot be read: {error.strerror}")
        return
    length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
    if not 2 <= length <= min(HEADER_LIMIT, file.size - 8):
        problems.append(f"{name}: {file.size} bytes with a header of {length} bytes; truncated, or not safetensors")
        return
    try:
        header = json.loads(os.pread(file.fd, length, 8))
        rows = {key: value for key, value in header.items() if key != "__metadata__"}
    except (ValueError, AttributeError, RecursionError) as error:
        problems.append(f"{name}: the header is not JSON ({error})")
        return
    entries = [e for key, row in rows.items() if (e := _entry(name, key, row, number, 8 + length, problems))]
    problems += _holes(file, entries, 8 + length) if len(entries) == len(rows) else []
    yield from entries


def _entry(file: str, name: str, row: Any, number: int, base: int, problems: list[str]) -> TensorEntry | None:
    try:
        dtype, shape, (begin, end) = row["dtype"], tuple(row["shape"]), row["data_offsets"]
        whole = all(type(n) is int and n >= 0 for n in (*shape, begin, end))
    except (KeyError, TypeError, ValueError):
        problems.append(f"{file}: tensor {name} has no dtype, shape and data_offsets")
        return None
    if not whole:
        problems.append(
            f"{file}: tensor {name} has shape {list(shape)} at {[begin, end]}, expected whole numbers from 0"
        )
        return None
    if not isinstance(dtype, str) or dtype not in BITS:
        problems.append(f"{file}: tensor {name} is {dtype}, which cannot be read here; known are {', '.join(BITS)}")
        return None
    count = BITS[dtype] // 8
    for size in shape:
        count *= size
    if end - begin != count:
        problems.append(
            f"{file}: tensor {name} {dtype}{list(shape)} needs {count} bytes, its offsets give {end - begin}"
        )
        return None
    return TensorEntry(name, dtype, shape, number, base + begin, count)


def _holes(file: CheckpointFile, entries: list[TensorEntry], base: int) -> Iterator[str]:
    """The data must be covered without hole or overlap to the last byte: this is what finds a truncated file."""
    position = base
    for entry in sorted(entries, key=lambda e: (e.offset, e.nbytes)):
        if entry.offset != position:
            where = f"begins at {entry.offset}, expected {position}"
            yield f"{file.path.name}: tensor {entry.name} {where} (hole or overlap)"
            return
        position += entry.nbytes
    if position != file.size:
        word = "truncated" if position > file.size else "with bytes that no tensor owns"
        yield f"{file.path.name}: {file.size} bytes, its header describes {position}: {word}"


def _against_index(shard: Path, promised: frozenset[str] | None, entries: list[TensorEntry]) -> Iterator[str]:
    if promised is None:
        return
    held = {entry.name for entry in entries}
    for name in sorted(promised - held):
        yield f"{shard.name}: the index promises {name}, the file does not hold it"
    for name in sorted(held - promised):
        yield f"{shard.name}: holds {name}, which the index does not place there"


def _config_digest(path: Path) -> str | None:
    """Return the sha256 of a config.json beside the weights: factories read it, so compiled code depends on it."""
    config = (path if path.is_dir() else path.parent) / "config.json"
    return hashlib.sha256(config.read_bytes()).hexdigest() if config.is_file() else None
