"""Checkpoints written byte by byte, for tests that do without torch: any dtype, any bytes."""

import json
import random
import struct
from collections.abc import Mapping
from pathlib import Path

from app.checkpoints import Checkpoint, open_checkpoint
from app.dtypes import size_bytes

# Name → dtype, shape as torch counts it, bytes.
Tensors = Mapping[str, tuple[str, tuple[int, ...], bytes]]


def noise(size: int, salt: int = 0) -> bytes:
    """Return bytes that look random and are the same every time."""
    return random.Random(f"{size}|{salt}").randbytes(size)


def filled(dtype: str, *shape: int, salt: int = 0) -> tuple[str, tuple[int, ...], bytes]:
    """Return a tensor of noise; of a BOOL, zeros and ones."""
    data = noise(size_bytes(dtype, shape), salt)
    return dtype, shape, bytes(byte & 1 for byte in data) if dtype == "BOOL" else data


def safetensors_bytes(tensors: Tensors, padded: bool = True) -> bytes:
    """Return a safetensors file with the tensors in the order that is given; `padded`: its data begins at 8 bytes."""
    header: dict[str, object] = {}
    end = 0
    for name, (dtype, shape, data) in tensors.items():
        # The format counts the halves of a byte.
        sizes = [*shape[:-1], shape[-1] * 2] if dtype == "F4" else list(shape)
        header[name] = {"dtype": dtype, "shape": sizes, "data_offsets": [end, end + len(data)]}
        end += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8 if padded else 0)
    return struct.pack("<Q", len(text)) + text + b"".join(data for _, _, data in tensors.values())


def written(directory: Path, *shards: Tensors, padded: bool = True) -> Checkpoint:
    """Write and open a checkpoint: a single file, or shards with their index."""
    directory.mkdir(parents=True, exist_ok=True)
    names = {}
    for number, tensors in enumerate(shards):
        file = f"{number}.safetensors"
        (directory / file).write_bytes(safetensors_bytes(tensors, padded))
        names |= dict.fromkeys(tensors, file)
    if len(shards) > 1:
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return open_checkpoint(directory)
