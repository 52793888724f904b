"""The dtypes that can be loaded, by the names of safetensors: an explicit table, nothing is guessed from a name."""

from collections.abc import Mapping
from math import prod
from types import MappingProxyType

# Bits of one element in the file. C128 is torch's alone: its own format has it, safetensors has not.
BITS: Mapping[str, int] = MappingProxyType({
    "F4": 4,
    "BOOL": 8, "U8": 8, "I8": 8,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64, "C64": 64,
    "C128": 128,
})  # fmt: skip

# Valid in safetensors, without a type in torch.
WITHOUT_TORCH = frozenset({"F6_E2M3", "F6_E3M2"})

# Those that an explicit cast (`model.dtype`) changes, as `module.to(dtype)` does.
FLOATING = frozenset(name for name in BITS if name.startswith(("F", "BF")) and name != "F4")


def item_bytes(dtype: str) -> int:
    """Return the bytes of one element as torch counts elements: two F4 are one."""
    return max(1, BITS[dtype] // 8)


def size_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Return the bytes of a tensor of torch's shape."""
    return item_bytes(dtype) * prod(shape)
