"""Copy a safetensors checkpoint without its data: enough for `build`, in an image that should not carry the weights.

The copies have the size of the originals and hold nothing but their headers, which say so; no start serves them.
"""

import json
import os
import shutil
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from app.artifacts.inputs import LARGEST
from app.artifacts.seal import sync
from app.checkpoints import Checkpoint, CheckpointFile, read_exactly
from app.checkpoints.safetensors import HEADER_LIMIT, HEADERS_ONLY_KEY
from app.errors import CheckpointError, ResourceError, SettingsError


def copy_headers(checkpoint: Checkpoint, out: Path) -> dict[str, Any]:
    """Fill a directory and return what it holds; beside the headers go the small files that a factory may read.

    Raises SettingsError where the directory is there already, CheckpointError for other formats, ResourceError where it
    cannot be written.
    """
    if checkpoint.format != "safetensors":
        raise CheckpointError(f"{checkpoint.path} is of the format {checkpoint.format}; only safetensors has headers")
    if out.exists():
        raise SettingsError(f"{out} exists; name a directory that is to be made")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as half:
            made = Path(half) / "made"
            made.mkdir()
            for file in checkpoint.files:
                _copy_header(file, made / file.path.name)
            others = [path.name for path in _companions(checkpoint)]
            for name in others:
                shutil.copyfile(_directory(checkpoint) / name, made / name)
            for path in (*made.iterdir(), made):
                sync(path)
            made.rename(out)
        sync(out.parent)
    except OSError as error:
        raise ResourceError(f"{out} cannot be written: {error.strerror}; is the disk full?") from error
    return {
        "path": str(out),
        "files": [file.path.name for file in checkpoint.files],
        "companions": others,
        "bytes": sum(path.stat().st_size for path in out.iterdir()),
        "bytes_on_disk": sum(path.stat().st_blocks * 512 for path in out.iterdir()),
    }


def _directory(checkpoint: Checkpoint) -> Path:
    return checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent


def _companions(checkpoint: Checkpoint) -> Iterator[Path]:
    """Yield what lies beside the weights and may be read by a factory: of a directory every small file, else JSON."""
    held = {file.path.name for file in checkpoint.files}
    pattern = "*" if checkpoint.path.is_dir() else "*.json"
    for path in sorted(_directory(checkpoint).glob(pattern)):
        if path.is_file() and path.name not in held and path.stat().st_size <= LARGEST:
            yield path


def _copy_header(file: CheckpointFile, target: Path) -> None:
    (length,) = struct.unpack("<Q", read_exactly(file, 8, 0))
    header = json.loads(read_exactly(file, length, 8))
    header["__metadata__"] = {**header.get("__metadata__", {}), HEADERS_ONLY_KEY: "true"}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > HEADER_LIMIT:
        raise CheckpointError(f"{file.path}: a header of {len(text)} bytes is more than the format allows")
    with target.open("xb") as copy:
        copy.write(struct.pack("<Q", len(text)) + text)
        os.truncate(copy.fileno(), 8 + len(text) + file.size - 8 - length)
