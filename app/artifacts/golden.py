"""Proven answers, kept beside the code that gave them, for one set of weights: a warm restart compares with these."""

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from app.artifacts import Artifact
from app.artifacts.seal import sync
from app.servable import Array

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
    try:
        flat = load((artifact.golden_directory / f"{weights_digest}.safetensors").read_bytes())
    except (OSError, SafetensorError, ValueError):
        return {}
    found: Golden = {}
    for name, array in flat.items():
        one, _, output = name.partition("|")
        found.setdefault(one, {})[output] = array
    return found


def keep(artifact: Artifact, weights_digest: str, cases: Mapping[str, Outputs]) -> None:
    """Write the record by rename; a store that cannot be written is not an error: the proof has been done."""
    flat = {f"{one}|{name}": np.ascontiguousarray(a) for one, outputs in cases.items() for name, a in outputs.items()}
    with contextlib.suppress(OSError):
        directory = artifact.golden_directory
        directory.mkdir(exist_ok=True)
        fd, temporary = tempfile.mkstemp(dir=directory)
        with os.fdopen(fd, "wb") as file:
            file.write(save(flat))
        sync(Path(temporary))
        Path(temporary).replace(directory / f"{weights_digest}.safetensors")
        sync(directory)
