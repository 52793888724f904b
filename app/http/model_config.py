"""The model as the protocol's configuration extension describes it, from the same declarations as its metadata."""

from collections.abc import Sequence
from typing import Any

from app.paths import ModelPath
from app.servable import BYTES, TensorSpec

# The extension has names of its own for two datatypes, and a prefix for all.
_TYPES = {BYTES: "TYPE_STRING"}
PLATFORM = "pytorch_safetensors"

Row = dict[str, Any]


def metadata(name: str, version: str, paths: Sequence[ModelPath], raw: ModelPath | None = None) -> Row:
    """Return inputs and outputs of the first path; further paths and what a codec takes stand beside it."""
    first, *_ = paths
    several = {path.name: _tensors(path) for path in paths} if len(paths) > 1 else {}
    described = {"name": name, "versions": [version], "platform": PLATFORM, **_tensors(first)}
    coded = {} if raw is None else {"codec": _tensors(raw)}
    return {**described, **({"paths": several} if several else {}), **coded}


def configuration(name: str, paths: Sequence[ModelPath], delay_ms: float) -> Row:
    """Return what load tools read: the largest batch, and inputs and outputs without their batch."""
    first, *_ = paths
    batch = _batch(first)
    most = next((one.max for one in first.dimensions if one.name == batch), 0)
    batching = {"dynamic_batching": {"max_queue_delay_microseconds": round(delay_ms * 1000)}} if most > 1 else {}
    return {
        "name": name,
        "platform": PLATFORM,
        "backend": "pytorch",
        "max_batch_size": most,
        "input": [_row(spec, batch) for spec in first.inputs],
        "output": [_row(spec, batch) for spec in first.outputs],
        **batching,
    }


def _tensors(path: ModelPath) -> Row:
    def rows(specs: Sequence[TensorSpec]) -> list[Row]:
        return [{"name": s.name, "datatype": s.datatype, "shape": _sizes(s.shape)} for s in specs]

    return {"inputs": rows(path.inputs), "outputs": rows(path.outputs)}


def _batch(path: ModelPath) -> str | None:
    """Return the dimension that all tensors begin with, if there is one."""
    leading = {spec.shape[0] if spec.shape else None for spec in (*path.inputs, *path.outputs)}
    one = leading.pop() if len(leading) == 1 else None
    return one if isinstance(one, str) else None


def _row(spec: TensorSpec, batch: str | None) -> Row:
    dims = _sizes(spec.shape[1:] if batch else spec.shape)
    return {"name": spec.name, "data_type": _TYPES.get(spec.datatype, f"TYPE_{spec.datatype}"), "dims": dims}


def _sizes(shape: Sequence[str | int]) -> list[int]:
    return [-1 if isinstance(size, str) else size for size in shape]
