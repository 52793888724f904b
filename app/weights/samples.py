"""Samples of tensors: a fingerprint of the weights, and signs of broken ones."""

import hashlib
from dataclasses import dataclass

import numpy as np

from app.checkpoints import Checkpoint, TensorEntry, read_exactly
from app.dtypes import size_bytes
from app.progress import Progress
from app.weights.memory import Memory

# Up to this size a tensor is a sample as a whole.
WHOLE = 4096
# Tensors between two signs of life.
EVERY = 500
# From this size on a tensor that is all zeros in its first and last sample is told.
LARGE = 1 << 20
# The exponent bits of floating-point types; all of them set, and any bit below, means not a number.
_EXPONENT = {"F16": ("<u2", 0x7C00), "BF16": ("<u2", 0x7F80), "F32": ("<u4", 0x7F800000), "F64": ("<u8", 0x7FF << 52)}


@dataclass(frozen=True, slots=True)
class Sampled:
    """What samples tell; `warnings` are sentences for people."""

    fingerprint: str
    warnings: tuple[str, ...]


def sample(checkpoint: Checkpoint, memory: Memory, progress: Progress) -> Sampled:
    """Look at the first, middle and last bytes of every tensor, small ones as a whole; raises CheckpointError.

    What lies in memory of our own is looked at there, the rest in the files and not in their mappings, where a fault
    would end the process.
    """
    strides = sorted((e.name, e.stride) for e in checkpoint.tensors.values() if e.stride is not None)
    digest = hashlib.sha256(repr((checkpoint.table(), strides)).encode())
    warnings = []
    entries = sorted(checkpoint.tensors.values(), key=lambda e: e.name)
    for count, entry in enumerate(entries):
        if count % EVERY == 0:
            progress.check()
            progress.say(f"sampling, {count} of {len(entries)} tensors")
        dtype, nbytes, parts = _parts(checkpoint, memory, entry)
        for part in parts:
            digest.update(part)
        if nbytes >= LARGE and not any(any(part) for part in (parts[0], parts[-1])):
            warnings.append(f"{entry.name} is all zeros where it was sampled; was the file written completely?")
        if any(_no_numbers(dtype, part) for part in parts):
            warnings.append(f"{entry.name} holds values that are no numbers (NaN)")
    return Sampled(digest.hexdigest(), tuple(warnings))


def _parts(checkpoint: Checkpoint, memory: Memory, entry: TensorEntry) -> tuple[str, int, list[bytes]]:
    """Return dtype and bytes of a tensor where it lies, and its samples."""
    place = memory.layout.places.get(entry.name)
    if place is None or memory.slab is None:
        file = checkpoint.files[entry.file]
        return entry.dtype, entry.nbytes, [read_exactly(file, n, entry.offset + at) for at, n in _spots(entry.nbytes)]
    nbytes = entry.nbytes if place.stride is not None else size_bytes(place.dtype, entry.shape)
    spots = ((place.offset + at, size) for at, size in _spots(nbytes))
    return place.dtype, nbytes, [memory.slab[begin : begin + size] for begin, size in spots]


def _spots(nbytes: int) -> list[tuple[int, int]]:
    """Return offset and size of the samples, in whole elements of up to 16 bytes."""
    if nbytes <= WHOLE:
        return [(0, nbytes)]
    size = WHOLE if nbytes >= LARGE else 256
    return [(0, size), (nbytes // 2 // 16 * 16, size), (nbytes - size, size)]


def _no_numbers(dtype: str, data: bytes) -> bool:
    if dtype not in _EXPONENT:
        return False
    kind, exponent = _EXPONENT[dtype]
    values = np.frombuffer(data, kind)
    mantissa = (exponent & -exponent) - 1
    return bool((((values & exponent) == exponent) & ((values & mantissa) != 0)).any())
