"""Collect the identity of the code that this configuration, machine and checkpoint need.

At least as strict as torch's own keys (FxGraphHashDetails, AOTAutogradCacheDetails); what of theirs is covered by what:

| torch hashes | here |
|---|---|
| graph, its constants and triton kernels | model.sources, kwargs, kwargs_files, config, waive_missing; compile.* |
| inputs and weights: dtype, shape, stride | tensors, inputs, dimensions, example_sizes, buckets, paths, model.dtype |
| torch_key(): version and python sources | torch, torch_code (the wheel's hashes of libraries and headers besides) |
| get_system(): triton, CUDA, GPU name | triton, device |
| inductor, dynamo and functorch configuration | warmgate.code (OPTIONS), torch_code (defaults), environment |
| deterministic algorithms, default dtype, autocast, matmul precision and reductions | numerics |
| number of threads (CPU) | device.threads |
| cache_key_tag | environment |
| nothing: instruction set, C and C++ library, python, operators' own switches | device.features, c_library, ... |
"""

import hashlib
import platform
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import app
from app.artifacts.inputs import BESIDE_CHECKPOINT, LARGEST
from app.artifacts.sources import describe_sources
from app.buckets import FORWARD
from app.checkpoints import Checkpoint, TensorEntry
from app.environment import compiler_environment
from app.identity import ArtifactIdentity
from app.paths import ModelPath
from app.samples import example_sizes
from app.settings import Settings

# What decides what is built and how it is bound; a test compares with what the child and the engines import.
OWN_CODE = (
    "__init__.py", "arrays.py", "artifacts", "buckets.py", "checkpoints", "child", "codecs.py", "devices",
    "differences.py", "dtypes.py", "engines", "environment.py", "errors.py", "identity.py", "keys.py", "numerics.py",
    "paths.py", "plugins.py", "private.py", "progress.py", "samples.py", "sampling.py", "servable.py", "serving",
    "settings.py", "units.py", "weights",
)  # fmt: skip


def collect(
    settings: Settings,
    checkpoint: Checkpoint,
    runtime: Mapping[str, Any],
    device: Mapping[str, Any],
    engine: str,
) -> ArtifactIdentity:
    """Return the identity; weights are in it by names, dtypes and shapes, not by values."""
    # Code for the whole range still has its loops chosen by the sizes it was exported at.
    dynamic = engine == "aot" and settings.compile.specialize == "none"
    paths = {path.name: _path(path, dynamic) for path in settings.model_paths}
    forward = paths.pop(FORWARD, {})
    return ArtifactIdentity(
        {
            **machine(runtime, device),
            "compile": {"engine": engine, "specialize": settings.compile.specialize},
            "model": _model(settings, checkpoint),
            **forward,
            **({"paths": paths} if paths else {}),
            "tensors": {entry.name: _described(entry) for entry in checkpoint.tensors.values()},
        }
    )


def _path(path: ModelPath, dynamic: bool) -> dict[str, Any]:
    return {
        "inputs": [f"{t.name} {t.datatype}{list(t.shape)}" for t in path.inputs],
        "outputs": [f"{t.name} {t.datatype}{list(t.shape)}" for t in path.outputs],
        "dimensions": {d.name: f"{d.min}..{d.max}" for d in path.dimensions},
        "example_sizes": example_sizes(path.dimensions) if dynamic else {},
        "buckets": "any" if dynamic else [b.name for b in path.buckets],
    }


def machine(runtime: Mapping[str, Any], device: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of an identity that no configuration decides: this machine and what is installed on it.

    The compiler is not in it, because code is restored where there is none; the manifest has it among its tools.
    """
    return {
        **runtime,
        "python": platform.python_version(),
        "python_implementation": platform.python_implementation(),
        "python_abi": sysconfig.get_config_var("SOABI"),
        "c_library": " ".join(platform.libc_ver()),
        "device": device,
        "environment": compiler_environment(),
        "warmgate": {"version": app.__version__, "code": _own_code()},
    }


def _model(settings: Settings, checkpoint: Checkpoint) -> dict[str, Any]:
    model, directory = settings.model, _directory(checkpoint.path)
    return {
        "factory": model.factory,
        "kwargs": _portable(model.kwargs, directory),
        "kwargs_files": {_portable(n, directory): digest for n, digest in _named_files(model.kwargs)},
        "waive_missing": model.waive.missing,
        "dtype": model.dtype,
        "config": _config_digest(directory),
        "sources": describe_sources(model.factory),
    }


def _described(entry: TensorEntry) -> str:
    shape = ",".join(map(str, entry.shape))
    return f"{entry.dtype}[{shape}]" + (f" strides {list(entry.stride)}" if entry.stride is not None else "")


def _directory(checkpoint: Path) -> Path:
    return checkpoint if checkpoint.is_dir() else checkpoint.parent


def _portable(value: Any, directory: Path) -> Any:
    """Name what lies in the checkpoint's directory relative to it: another machine may mount it elsewhere."""
    if isinstance(value, Mapping):
        return {name: _portable(item, directory) for name, item in value.items()}
    if isinstance(value, list):
        return [_portable(item, directory) for item in value]
    inside = isinstance(value, str) and directory != Path() and f"{value}/".startswith(f"{directory}/")
    return f"{BESIDE_CHECKPOINT}{value[len(str(directory)) + 1 :]}" if inside else value


def _named_files(value: Any) -> Iterator[tuple[str, str]]:
    """Yield file → sha256 for every argument that names a file, and for the JSON files of every directory named."""
    if isinstance(value, Mapping | list):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _named_files(item)
    elif isinstance(value, str) and value and len(value) < 4096 and "\0" not in value:
        path = Path(value)
        files = sorted(path.glob("*.json")) if path.is_dir() else [path] if path.is_file() else []
        yield from ((str(f), hashlib.sha256(f.read_bytes()).hexdigest()) for f in files if f.stat().st_size <= LARGEST)


def _config_digest(directory: Path) -> str | None:
    """Return the sha256 of a config.json beside the weights: factories read it, so compiled code depends on it."""
    config = directory / "config.json"
    return hashlib.sha256(config.read_bytes()).hexdigest() if config.is_file() else None


def _own_code() -> str:
    """Digest the parts of this program that decide what is built and how it is bound."""
    root = Path(app.__file__).parent
    digest = hashlib.sha256()
    for place in (root / name for name in OWN_CODE):
        for path in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return digest.hexdigest()
