"""One forward through the engine: shape, pad, run, check, slice. Requests and warm-up go through the same lines."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from app.arrays import to_array, to_tensor
from app.buckets import Bucket, Coverage, Kind, Refusal, Route
from app.errors import WarmupError
from app.paths import ModelPath
from app.servable import Array, Rejected, TensorSpec

if TYPE_CHECKING:
    from app.engines import Engine


class Forward:
    """The model as functions from named arrays to named arrays, one a path; called on the device lane only."""

    def __init__(
        self, engine: "Engine", paths: Sequence[ModelPath], uncovered: str, module: "Engine | None" = None
    ) -> None:
        """Make it; `module` runs what is uncovered where the policy `uncovered` is eager, else the engine does."""
        self.engine = engine
        self.paths: Mapping[str, ModelPath] = {path.name: path for path in paths}
        self.coverages: Mapping[str, Coverage] = {path.name: path.coverage(engine.dynamic, uncovered) for path in paths}
        self._uncovered, self._module = uncovered, module

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """What is promised, in the order of warming."""
        return tuple(bucket for path in self.paths.values() for bucket in path.buckets)

    def promising(self, wanted: Callable[[Bucket], bool]) -> "Forward":
        """Return the same forward, which promises only some of the buckets."""
        return self.along(path.keeping(wanted) for path in self.paths.values())

    def along(self, paths: Iterable[ModelPath]) -> "Forward":
        """Return the same forward along other forms of its paths."""
        return Forward(self.engine, tuple(paths), self._uncovered, self._module)

    def route(self, path: str, sizes: Mapping[str, int]) -> Route:
        """Return how inputs of these sizes are served; raises Rejected (400) for sizes that are not."""
        found = self.coverages[path].route(sizes)
        if isinstance(found, Refusal):
            raise Rejected(400, found.why, None if found.impossible else "uncovered")
        return found

    def __call__(self, arrays: Mapping[str, Array], route: Route) -> dict[str, Array]:
        """Run one batch; raises WarmupError when the outputs are not what is declared."""
        import torch

        path, sizes = self.paths[route.path], dict(route.sizes)
        engine = self._module if self._module and route.kind is Kind.UNCOVERED else self.engine
        # Compiled code checks nothing: dtype, shape and contiguity are made certain here, for every run.
        prepared = [_prepare(spec, arrays[spec.name], spec.sized(sizes)) for spec in path.inputs]
        with torch.inference_mode():
            tensors = engine.run([to_tensor(array) for array in prepared], path.name, route.bucket)
            raw = [to_array(tensor) for tensor in tensors]
        named = _name(path, raw, sizes)
        return _slice(path.outputs, named, measure(path.inputs, arrays)) if route.kind is Kind.PADDED else named


def _name(path: ModelPath, raw: Sequence[Array], sizes: Mapping[str, int]) -> dict[str, Array]:
    if len(raw) != len(path.outputs):
        raise WarmupError(f"{path.name} returns {len(raw)} tensors, {len(path.outputs)} outputs are configured")
    for spec, array in zip(path.outputs, raw, strict=True):
        if array.dtype != spec.dtype or array.shape != spec.sized(sizes):
            raise WarmupError(
                f"output {spec.name} of {path.name} is {array.dtype}{list(array.shape)}, configured is "
                f"{spec.datatype} {list(spec.sized(sizes))} for {sizes}"
            )
    return {spec.name: array for spec, array in zip(path.outputs, raw, strict=True)}


def measure(specs: Sequence[TensorSpec], arrays: Mapping[str, Array]) -> dict[str, int]:
    """Return the size of every symbolic dimension; raises Rejected (400) naming input, fact and expectation."""
    sizes: dict[str, int] = {}
    for spec in specs:
        array = arrays.get(spec.name)
        if array is None:
            raise Rejected(400, f"input {spec.name} is missing; the model takes {', '.join(s.name for s in specs)}")
        if array.dtype != spec.dtype:
            raise Rejected(400, f"input {spec.name} is {array.dtype}, expected {spec.datatype}")
        if array.ndim != len(spec.shape):
            raise Rejected(400, f"input {spec.name} has shape {list(array.shape)}, expected {list(spec.shape)}")
        for size, expected in zip(array.shape, spec.shape, strict=True):
            known = sizes.setdefault(expected, size) if isinstance(expected, str) else expected
            if size != known:
                raise Rejected(
                    400, f"input {spec.name} has shape {list(array.shape)}, expected {list(spec.shape)} with {sizes}"
                )
    if unknown := sorted(arrays.keys() - {spec.name for spec in specs}):
        raise Rejected(400, f"unknown input {unknown[0]}; the model takes {', '.join(s.name for s in specs)}")
    return sizes


def _prepare(spec: TensorSpec, array: Array, shape: tuple[int, ...]) -> Array:
    if array.shape == shape:
        # A raw tensor is a window on the request's body: nothing may write to it, and it begins at any byte.
        return array if array.flags.carray else np.array(array, order="C")
    padded: Array = np.full(shape, spec.pad or 0, dtype=spec.dtype)
    padded[tuple(slice(size) for size in array.shape)] = array
    return padded


def _slice(specs: Sequence[TensorSpec], outputs: Mapping[str, Array], sizes: Mapping[str, int]) -> dict[str, Array]:
    """Cut every symbolic dimension back to what was asked for."""

    def cut(spec: TensorSpec) -> tuple[Any, ...]:
        return tuple(slice(sizes[size]) if isinstance(size, str) else slice(None) for size in spec.shape)

    return {spec.name: outputs[spec.name][cut(spec)] for spec in specs}
