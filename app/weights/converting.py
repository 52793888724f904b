"""Cast boxes of tensors, or put them together, on their way from the scratch memory into their final place."""

from collections.abc import Callable

import torch

from app.dtypes import size_bytes
from app.errors import CheckpointError
from app.weights.dtypes import TORCH
from app.weights.memory import Memory
from app.weights.segments import Box

Convert = Callable[[memoryview, Box], None]


def converter(memory: Memory) -> Convert:
    """Return a function that takes the bytes of a box and writes its elements where they belong, cast if need be."""
    if memory.slab is None:
        raise CheckpointError("tensors are to be converted, but no memory was reserved for them")
    slab = torch.frombuffer(memoryview(memory.slab), dtype=torch.uint8)

    def convert(data: memoryview, box: Box) -> None:
        entry, place = box.conversion.entry, box.conversion.place
        nbytes = size_bytes(place.dtype, entry.shape)
        whole = slab[place.offset : place.offset + nbytes].view(TORCH[place.dtype]).view(entry.shape)
        for axis, (first, count) in enumerate(zip(box.start, box.shape, strict=True)):
            whole = whole.narrow(axis, first, count)
        whole.copy_(torch.frombuffer(data, dtype=TORCH[entry.dtype]).view(box.shape))

    return convert
