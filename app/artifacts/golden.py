"""Proven answers, kept beside the code that gave them, for one set of weights: a warm restart compares with these."""

import hashlib
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save

from app.arrays import load_arrays
from app.artifacts import Artifact
from app.artifacts.seal import sync
from app.servable import Array

FILE = "answers.safetensors"

Outputs = Mapping[str, Array]
Golden = dict[str, dict[str, Array]]  # bucket and digest of its inputs → output name → values


def case(bucket: str, inputs: Mapping[str, Array]) -> str:
    """Name a case so that other inputs are another case."""
    digest = hashlib.sha256()
    for name, array in inputs.items():
        digest.update(f"{name}:{array.dtype}:{array.shape}:".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return f"{bucket}#{digest.hexdigest()[:32]}"


def recall(artifact: Artifact, weights_digest: str) -> Golden:
    """Return the record for these weights; empty when there is none or it cannot be read."""
    return read(artifact.golden_directory / f"{weights_digest}.safetensors")


def read(file: Path) -> Golden:
    """Return the answers in a file; empty when it is not there or not whole."""
    try:
        flat = load_arrays(file.read_bytes())
    except (OSError, SafetensorError, ValueError, KeyError):
        return {}
    found: Golden = {}
    for name, array in flat.items():
        one, _, output = name.partition("|")
        found.setdefault(one, {})[output] = array
    return found


def write(file: Path, cases: Mapping[str, Outputs]) -> None:
    """Write answers by rename, forced to disk."""
    flat = {f"{one}|{name}": np.asarray(a, order="C") for one, outputs in cases.items() for name, a in outputs.items()}
    fd, temporary = tempfile.mkstemp(prefix=".writing-", dir=file.parent)
    try:
        with os.fdopen(fd, "wb") as target:
            target.write(save(flat))
        Path(temporary).chmod(0o644)  # mkstemp makes it private, but other pods of the store read it
        sync(Path(temporary))
        Path(temporary).replace(file)
        sync(file.parent)
    finally:
        Path(temporary).unlink(missing_ok=True)


def keep(artifact: Artifact, weights_digest: str, cases: Mapping[str, Outputs]) -> None:
    """Keep the record beside the artifact; raises OSError where the store cannot be written."""
    artifact.golden_directory.mkdir(mode=0o700, exist_ok=True)
    write(artifact.golden_directory / f"{weights_digest}.safetensors", cases)
