"""safetensors, one file or shards with an index; the header rules are those of the format's own reader, or stricter.

Format: https://huggingface.co/docs/safetensors - eight bytes little-endian length, that many bytes of JSON, data.
"""

import json
import math
import struct
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

from app.checkpoints import CheckpointFile, Scan, TensorEntry, read_at
from app.checkpoints._index import INDEX, compare_with_index, expected_files
from app.dtypes import BITS, WITHOUT_TORCH, size_bytes

SUFFIX = ".safetensors"
# The limit of the format's reference implementation; a longer header is an attack or a broken file.
HEADER_LIMIT = 100_000_000
# The most that torch gives a tensor.
DIMENSIONS = 64
# More elements than any memory holds: beyond it the reference implementation's own counting ends.
LARGEST = 1 << 60
FIELDS = frozenset({"dtype", "shape", "data_offsets"})
# Names of tensors that hold no weights but keep the others aligned; `inspect --repack` writes them.
PADDING_KEY = "warmgate.padding"
# Says that a file has the size of one with data and no data; `inspect --headers` writes it.
HEADERS_ONLY_KEY = "warmgate.headers_only"


class Safetensors:
    """The format's entry for the loader."""

    plugin = True
    name = "safetensors"

    @classmethod
    def files(cls, path: Path) -> tuple[str, ...]:
        """Return the names at `path` that are safetensors, indexes included."""
        ends = (SUFFIX, SUFFIX + INDEX)
        if path.is_dir():
            return tuple(sorted(p.name for p in path.iterdir() if p.name.endswith(ends)))
        return (path.name,) if path.name.endswith(ends) else ()

    @classmethod
    def fill(cls, scan: Scan, trust_pickle: bool) -> None:
        """Look at every shard; nothing in this format is a pickle."""
        del trust_pickle
        for shard, promised in expected_files(scan, cls.files(scan.path), "safetensors").items():
            if (number := scan.open_file(shard)) is None:
                continue
            before = len(scan.problems)
            entries, padding = _read_header(scan, number)
            for entry in entries:
                if entry.name not in padding:
                    scan.add(entry)
            if entries or len(scan.problems) == before:
                compare_with_index(scan, shard, promised, (e.name for e in entries if e.name not in padding))
        if scan.headers_only:
            scan.notes.append("headers only, no data: for `build` and `check`, never served")


def _read_header(scan: Scan, number: int) -> tuple[list[TensorEntry], frozenset[str]]:
    """Return the tensors of one file and which of them are padding."""
    file = scan.files[number]
    name = file.path.name
    head = read_at(file.fd, 8, 0)
    length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
    if not 2 <= length <= min(HEADER_LIMIT, file.size - 8):
        scan.problems.append(
            f"{name}: {file.size} bytes with a header of {length} bytes; truncated, or not safetensors"
        )
        return [], frozenset()
    try:
        text = read_at(file.fd, length, 8).decode()
        rows = json.loads(
            text, object_pairs_hook=_no_name_twice, parse_int=_whole, parse_float=_finite, parse_constant=_finite
        )
        metadata = rows.pop("__metadata__", {})
        padding = frozenset(_padding_names(metadata))
        scan.headers_only |= HEADERS_ONLY_KEY in metadata
    except (ValueError, AttributeError, TypeError, RecursionError) as error:
        scan.problems.append(f"{name}: the header is not JSON of this format ({error})")
        return [], frozenset()
    entries = [e for key, row in rows.items() if (e := _entry(scan, number, key, row, 8 + length))]
    if len(entries) == len(rows):
        scan.problems += _holes(name, file.size, entries, 8 + length)
    return entries, padding


def metadata_of(file: CheckpointFile) -> dict[str, str]:
    """Return the texts that a valid file carries about itself."""
    length = struct.unpack("<Q", read_at(file.fd, 8, 0))[0]
    found: dict[str, str] = json.loads(read_at(file.fd, length, 8)).get("__metadata__", {})
    return found


def _whole(text: str) -> int | float:
    # As the format's reader: beyond 64 bits, and minus zero, it is no whole number.
    number = int(text)
    return number if text != "-0" and -(1 << 63) <= number < 1 << 64 else float(text)


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is no number")
    return number


def _no_name_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name!r} is there twice")
        for text in (name, value):
            if isinstance(text, str):
                text.encode()  # half a surrogate pair is no text
        found[name] = value
    return found


def _padding_names(metadata: Any) -> Iterator[str]:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("__metadata__ must map texts to texts")
    try:
        names = json.loads(metadata.get(PADDING_KEY, "[]"))
    except ValueError:
        names = None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{PADDING_KEY} must list names")
    yield from names


def _entry(scan: Scan, number: int, name: str, row: Any, base: int) -> TensorEntry | None:
    try:
        dtype, shape, begin = _described(row)
    except ValueError as error:
        scan.problems.append(f"{scan.files[number].path.name}: tensor {name} {error}")
        return None
    return TensorEntry(name, dtype, shape, number, base + begin, size_bytes(dtype, shape))


def _described(row: Any) -> tuple[str, tuple[int, ...], int]:
    """Return dtype, shape and first byte of a tensor; raises ValueError that says what is wrong with it."""
    try:
        dtype, shape, (begin, end) = row["dtype"], row["shape"], row["data_offsets"]
    except (KeyError, TypeError, ValueError):
        raise ValueError("has no dtype, shape and data_offsets") from None
    if not isinstance(shape, list) or not isinstance(row["data_offsets"], list):
        raise ValueError("has no dtype, shape and data_offsets")
    if nested := [name for name, value in row.items() if name not in FIELDS and isinstance(value, dict | list)]:
        raise ValueError(f"has {nested[0]}, which is not of this format")
    if len(shape) > DIMENSIONS or not all(type(n) is int and n >= 0 for n in (*shape, begin, end)):
        raise ValueError(
            f"has shape {shape[:DIMENSIONS]} at {[begin, end]}, expected whole numbers from 0 and at most {DIMENSIONS} "
            f"dimensions"
        )
    if prod(size for size in shape if size) >= LARGEST:
        raise ValueError(f"has shape {shape}, more elements than can be counted")
    if not isinstance(dtype, str) or dtype not in BITS or dtype == "C128":
        why = "for which torch has no type" if str(dtype) in WITHOUT_TORCH else "which cannot be read here"
        known = ", ".join(one for one in BITS if one != "C128")
        raise ValueError(f"is {dtype}, {why}; known are {known}")
    torch_shape = _two_in_one(shape) if dtype == "F4" else tuple(shape)
    count = size_bytes(dtype, torch_shape)
    if end - begin != count:
        raise ValueError(f"{dtype}{shape} needs {count} bytes, its offsets give {end - begin}")
    return dtype, torch_shape, begin


def _two_in_one(shape: list[int]) -> tuple[int, ...]:
    """Two F4 are one byte, and one element to torch."""
    if not shape or shape[-1] % 2:
        raise ValueError(f"is F4{shape}; two of them are one byte, one is left over")
    return (*shape[:-1], shape[-1] // 2)


def _holes(file: str, size: int, entries: list[TensorEntry], base: int) -> Iterator[str]:
    """The data must be covered without hole or overlap to the last byte: this is what finds a truncated file."""
    position = base
    for entry in sorted(entries, key=lambda e: (e.offset, e.nbytes)):
        if entry.offset != position:
            where = f"begins at {entry.offset}, expected {position}"
            yield f"{file}: tensor {entry.name} {where} (hole or overlap)"
            return
        position += entry.nbytes
    if position != size:
        word = "truncated" if position > size else "with bytes that no tensor owns"
        yield f"{file}: {size} bytes, its header describes {position}: {word}"
