"""Sample inputs: random within each input's declared range, the same in every process for the same seed."""

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np

from app.buckets import Dimension
from app.servable import Array, TensorSpec, is_floating


def example_sizes(dimensions: Sequence[Dimension]) -> dict[str, int]:
    """Return the sizes that dynamic code is exported at, and by which the compiler chooses its loops.

    Such that no rule of the exporter takes them for constants: above one and different from each other.
    """
    sizes: dict[str, int] = {}
    for dimension in dimensions:
        choices = [*reversed(dimension.buckets), *range(min(dimension.max, dimension.min + 64), dimension.min - 1, -1)]
        free = [size for size in choices if size > 1 and size not in sizes.values()]
        sizes[dimension.name] = free[0] if free else dimension.max
    return sizes


def sample_inputs(specs: Sequence[TensorSpec], sizes: Mapping[str, int], seed: str) -> dict[str, Array]:
    """Return one array an input, in call order; whole numbers below `high`, which defaults to low + 2.

    The generator is seeded by the text alone, so a golden record made elsewhere meets the same inputs.
    """
    arrays = {}
    for spec in specs:
        digest = hashlib.sha256(f"{seed}|{spec.name}".encode()).digest()
        generator = np.random.Generator(np.random.PCG64(int.from_bytes(digest[:8], "little")))
        low = 0.0 if spec.low is None else spec.low
        shape, dtype = spec.sized(sizes), spec.dtype
        if is_floating(dtype):
            high = low + 1.0 if spec.high is None else spec.high
            arrays[spec.name] = generator.uniform(low, high, shape).astype(dtype)
        else:
            high = low + 2 if spec.high is None else spec.high
            arrays[spec.name] = generator.integers(int(low), max(int(high), int(low) + 1), shape).astype(dtype)
    return arrays
