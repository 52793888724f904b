"""Arrays that cross a border: tensors of torch, and safetensors in memory; bfloat16 passes both as itself."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from safetensors import deserialize

from app.servable import BFLOAT16, Array

# Names of dtypes in a safetensors header → numpy dtype, as the format's documentation lists them.
STORED: Mapping[str, str] = {
    "BOOL": "bool",
    "U8": "uint8",
    "U16": "uint16",
    "U32": "uint32",
    "U64": "uint64",
    "I8": "int8",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
    "F16": "float16",
    "F32": "float32",
    "F64": "float64",
    "BF16": "bfloat16",
}


def load_arrays(content: bytes) -> dict[str, Array]:
    """Return the arrays of safetensors in memory; raises SafetensorError, or KeyError for a dtype that numpy lacks."""
    return {
        name: np.frombuffer(row["data"], np.dtype(STORED[row["dtype"]])).reshape(row["shape"])
        for name, row in deserialize(content)  # type: ignore[no-untyped-call]
    }


def to_tensor(array: Array) -> Any:
    """Return a tensor on the array's own memory."""
    import torch

    if array.dtype == BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def to_array(tensor: Any) -> Array:
    """Return an array on the memory of a tensor of the CPU."""
    import torch

    if tensor.dtype == torch.bfloat16:
        viewed: Array = tensor.view(torch.int16).numpy()
        return viewed.view(BFLOAT16)
    found: Array = tensor.numpy()
    return found
