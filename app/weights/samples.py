"""Samples of tensors: a fingerprint of the weights, signs of broken ones, and whether files are cached already."""

import hashlib
import os
from dataclasses import dataclass
from math import prod

import numpy as np

from app.checkpoints import Checkpoint, CheckpointFile, TensorEntry
from app.errors import CheckpointError

# Up to this size a tensor is a sample as a whole.
WHOLE = 4096
# From this size on a tensor that is all zeros in its first and last sample is told.
LARGE = 1 << 20
# The exponent bits of floating-point types; all of them set, and any bit below, means not a number.
_EXPONENT = {"F16": ("<u2", 0x7C00), "BF16": ("<u2", 0x7F80), "F32": ("<u4", 0x7F800000), "F64": ("<u8", 0x7FF << 52)}


@dataclass(frozen=True, slots=True)
class Sampled:
    """What samples tell; `warnings` are sentences for people."""

    fingerprint: str
    warnings: tuple[str, ...]


def sample(checkpoint: Checkpoint) -> Sampled:
    """Look at the first, middle and last bytes of every tensor, small ones as a whole; raises CheckpointError.

    The bytes are read from the files and not from mappings, where a fault would end the process.
    """
    strides = sorted((e.name, e.stride) for e in checkpoint.tensors.values() if e.stride is not None)
    digest = hashlib.sha256(repr((checkpoint.table(), strides)).encode())
    warnings = []
    for entry in sorted(checkpoint.tensors.values(), key=lambda e: e.name):
        parts = [_read(checkpoint.files[file], offset, size) for file, offset, size in _stretches(entry)]
        for part in parts:
            digest.update(part)
        if entry.nbytes >= LARGE and not any(any(part) for part in (parts[0], parts[-1])):
            warnings.append(f"{entry.name} is all zeros where it was sampled; was the file written completely?")
        if any(_no_numbers(entry.dtype, part) for part in parts):
            warnings.append(f"{entry.name} holds values that are no numbers (NaN)")
    return Sampled(digest.hexdigest(), tuple(warnings))


def _stretches(entry: TensorEntry) -> list[tuple[int, int, int]]:
    """Return file, offset and size of the samples of a tensor, in whole elements."""
    if entry.pieces and entry.nbytes:
        item = entry.nbytes // prod(entry.shape)
        sizes = (item * min(prod(piece.shape), WHOLE // item) for piece in entry.pieces)
        return [(piece.file, piece.offset, size) for piece, size in zip(entry.pieces, sizes, strict=True)]
    if entry.nbytes <= WHOLE:
        return [(entry.file, entry.offset, entry.nbytes)]
    size = WHOLE if entry.nbytes >= LARGE else 256
    places = (0, entry.nbytes // 2 // 16 * 16, entry.nbytes - size)
    return [(entry.file, entry.offset + place, size) for place in places]


def _read(file: CheckpointFile, offset: int, size: int) -> bytes:
    try:
        data = os.pread(file.fd, size, offset)
    except OSError as error:
        raise CheckpointError(
            f"{file.path} cannot be read at byte {offset}: {error.strerror}; check the disk"
        ) from error
    if len(data) != size:
        raise CheckpointError(
            f"{file.path} ends at byte {offset + len(data)}; it was truncated while it was being loaded"
        )
    return data


def _no_numbers(dtype: str, data: bytes) -> bool:
    if dtype not in _EXPONENT:
        return False
    kind, exponent = _EXPONENT[dtype]
    values = np.frombuffer(data, kind)
    mantissa = (exponent & -exponent) - 1
    return bool((((values & exponent) == exponent) & ((values & mantissa) != 0)).any())


def file_cache(checkpoint: Checkpoint) -> str:
    """Say whether the files were in the page cache before anything was read, by samples that wait for no disk."""
    samples = [(file, offset) for file in checkpoint.files for offset in range(0, file.size, max(1, file.size // 64))]
    cached = [is_cached(file, offset) for file, offset in samples]
    return "warm" if all(cached) else "cold" if cached.count(False) == len(cached) else "mixed"


def is_cached(file: CheckpointFile, offset: int) -> bool | None:
    """Return None where the file system cannot say."""
    try:
        return os.preadv(file.fd, [bytearray(1)], offset, os.RWF_NOWAIT) == 1
    except BlockingIOError:
        return False
    except OSError:
        return None
