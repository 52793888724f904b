"""safetensors dtype names and torch dtypes, both ways, by an explicit table."""

from collections.abc import Mapping

import torch

TORCH: Mapping[str, torch.dtype] = {
    "F4": torch.float4_e2m1fn_x2,
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F64": torch.float64,
    "C64": torch.complex64,
    "C128": torch.complex128,
}

NAMES: Mapping[torch.dtype, str] = {dtype: name for name, dtype in TORCH.items()}


def name_of(dtype: torch.dtype) -> str:
    """Return the safetensors name of a torch dtype; torch's own name for one that safetensors has not."""
    return NAMES.get(dtype, str(dtype))


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Compare dtype, shape and every bit: a NaN is the same as itself, minus zero is not zero."""
    return one.dtype == other.dtype and one.shape == other.shape and bool(torch.equal(_bytes(one), _bytes(other)))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor in C order; without a copy where they lie so."""
    # as_strided, since one element may keep a stride that no view of its bytes accepts.
    return tensor.detach().contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
