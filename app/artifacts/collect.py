"""Collect the identity of the code that this configuration, machine and checkpoint need."""

import hashlib
import platform
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import app
from app.artifacts.inputs import LARGEST
from app.artifacts.sources import describe_sources
from app.checkpoints import Checkpoint
from app.environment import compiler_environment
from app.identity import ArtifactIdentity
from app.settings import Settings


def collect(
    settings: Settings, checkpoint: Checkpoint, runtime: Mapping[str, str], device: Mapping[str, Any], engine: str
) -> ArtifactIdentity:
    """Return the identity of code for an engine; weights are in it by names, dtypes and shapes, not by values."""
    return ArtifactIdentity(
        {
            **runtime,
            "python": platform.python_version(),
            "c_library": " ".join(platform.libc_ver()),
            "device": device,
            "compile": {"engine": engine, "specialize": settings.compile.specialize},
            "environment": compiler_environment(),
            "model": {
                "factory": settings.model.factory,
                "kwargs": settings.model.kwargs,
                "kwargs_files": dict(_named_files(settings.model.kwargs)),
                "waive_missing": settings.model.waive.missing,
                "dtype": settings.model.dtype,
                "config": _config_digest(checkpoint.path),
                "sources": describe_sources(settings.model.factory),
            },
            "inputs": [f"{t.name} {t.datatype}{list(t.shape)}" for t in settings.inputs],
            "outputs": [f"{t.name} {t.datatype}{list(t.shape)}" for t in settings.outputs],
            "dimensions": {d.name: f"{d.min}..{d.max}" for d in settings.symbolic},
            "buckets": [b.name for b in settings.buckets] if _specialized(settings, engine) else "any",
            "tensors": hashlib.sha256(repr(checkpoint.table()).encode()).hexdigest(),
            "warmgate": {"version": app.__version__, "builder": _own_code()},
        }
    )


def _specialized(settings: Settings, engine: str) -> bool:
    return settings.compile.specialize == "bucket" or engine == "jit"


def _named_files(value: Any) -> Iterator[tuple[str, str]]:
    """Yield file → sha256 for every argument that names a file, and for the JSON files of every directory named."""
    if isinstance(value, Mapping | list):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _named_files(item)
    elif isinstance(value, str) and value and len(value) < 4096 and "\0" not in value:
        path = Path(value)
        files = sorted(path.glob("*.json")) if path.is_dir() else [path] if path.is_file() else []
        yield from ((str(f), hashlib.sha256(f.read_bytes()).hexdigest()) for f in files if f.stat().st_size <= LARGEST)


def _config_digest(path: Path) -> str | None:
    """Return the sha256 of a config.json beside the weights: factories read it, so compiled code depends on it."""
    config = (path if path.is_dir() else path.parent) / "config.json"
    return hashlib.sha256(config.read_bytes()).hexdigest() if config.is_file() else None


def _own_code() -> str:
    """Digest the parts of this program that decide what is built and how it is bound."""
    root = Path(app.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(p for part in ("child", "engines", "weights") for p in (root / part).glob("*.py")):
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return digest.hexdigest()
