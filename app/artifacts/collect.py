"""Collect the identity of the code that this configuration, machine and checkpoint need."""

import hashlib
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import app
from app.artifacts.sources import describe_sources
from app.checkpoints import Checkpoint
from app.environment import compiler_environment
from app.identity import ArtifactIdentity
from app.settings import Settings


def collect(
    settings: Settings, checkpoint: Checkpoint, runtime: Mapping[str, str], device: Mapping[str, Any]
) -> ArtifactIdentity:
    """Return the identity; weights are in it by names, dtypes and shapes, not by values."""
    return ArtifactIdentity(
        {
            **runtime,
            "python": platform.python_version(),
            "c_library": " ".join(platform.libc_ver()),
            "device": device,
            "compile": {"engine": "aot", "specialize": settings.compile.specialize},
            "environment": compiler_environment(),
            "model": {
                "factory": settings.model.factory,
                "kwargs": settings.model.kwargs,
                "waive_missing": settings.model.waive.missing,
                "config": checkpoint.config_digest,
                "sources": describe_sources(settings.model.factory),
            },
            "inputs": [f"{t.name} {t.datatype}{list(t.shape)}" for t in settings.inputs],
            "outputs": [f"{t.name} {t.datatype}{list(t.shape)}" for t in settings.outputs],
            "dimensions": {d.name: f"{d.min}..{d.max}" for d in settings.symbolic},
            "buckets": [b.name for b in settings.buckets] if settings.compile.specialize == "bucket" else "any",
            "tensors": hashlib.sha256(repr(checkpoint.table()).encode()).hexdigest(),
            "warmgate": {"version": app.__version__, "builder": _own_code()},
        }
    )


def _own_code() -> str:
    """Digest the parts of this program that decide what is built and how it is bound."""
    root = Path(app.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(p for part in ("child", "engines", "weights") for p in (root / part).glob("*.py")):
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return digest.hexdigest()
