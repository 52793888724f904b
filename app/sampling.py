"""Where warm-up takes its inputs from: random within the declared ranges, zeros, or a file of real ones."""

import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from safetensors import SafetensorError

from app.arrays import load_arrays
from app.buckets import Bucket
from app.errors import SettingsError
from app.paths import ModelPath
from app.samples import sample_inputs
from app.servable import Array, TensorSpec, is_finite, is_floating

ZEROS = "zeros"
_ABSENT: Array = np.empty(0)


# Makes the inputs of a bucket in call order, the same in every process.
Sampler = Callable[[Bucket], dict[str, Array]]


def sampler(source: str | None, paths: Sequence[ModelPath]) -> Sampler:
    """Return what makes inputs: `source` is None (random), `zeros`, or a safetensors or npz file.

    An array of the file is named like its input; where paths need different ones, `path:input` goes before `input`.
    Raises SettingsError where the file cannot be read or does not hold the declared inputs.
    """
    inputs = {path.name: path.inputs for path in paths}
    if source is None:
        return lambda bucket: sample_inputs(inputs[bucket.path], dict(bucket.sizes), seed=bucket.name)
    if source == ZEROS:
        return lambda bucket: {spec.name: _zeros(spec, dict(bucket.sizes)) for spec in inputs[bucket.path]}
    arrays = _read(Path(source))
    found = [_why_not(spec, _named(arrays, path.name, spec.name)) for path in paths for spec in path.inputs]
    if problems := [problem for problem in found if problem]:
        raise SettingsError(f"warmup.samples = {source} cannot be used", problems)
    return lambda bucket: {
        spec.name: _fitted(_named(arrays, bucket.path, spec.name), spec.sized(dict(bucket.sizes)))
        for spec in inputs[bucket.path]
    }


def _named(arrays: Mapping[str, Array], path: str, name: str) -> Array:
    """Return the array for an input, or one that stands for none."""
    return arrays.get(f"{path}:{name}", arrays.get(name, _ABSENT))


def _zeros(spec: TensorSpec, sizes: Mapping[str, int]) -> Array:
    """Zero, or where the declared range does not hold it what is nearest to it."""
    low = spec.low if spec.low is not None and spec.low > 0 else None
    high = spec.high if spec.high is not None and spec.high <= 0 else None
    step = 0 if is_floating(spec.dtype) else 1
    return np.full(spec.sized(sizes), low if low is not None else 0 if high is None else high - step, spec.dtype)


def _read(file: Path) -> Mapping[str, Array]:
    try:
        if file.suffix == ".npz":
            with file.open("rb") as opened, np.load(opened, allow_pickle=False) as archive:
                return {name: archive[name] for name in archive.files}
        return load_arrays(file.read_bytes())
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile, SafetensorError) as error:
        raise SettingsError(
            f"warmup.samples = {file} cannot be read: {type(error).__name__}: {error}; give a safetensors or npz file "
            f"with an array an input, or {ZEROS}"
        ) from error


def _why_not(spec: TensorSpec, array: Array) -> str:
    """Return why an array cannot stand for an input at every size, or nothing."""
    if array is _ABSENT:
        return f"input {spec.name} is missing"
    if array.dtype != spec.dtype:
        return f"input {spec.name} is {array.dtype}, declared is {spec.datatype}"
    same = [isinstance(wanted, str) or wanted == size for wanted, size in zip(spec.shape, array.shape, strict=False)]
    if array.ndim != len(spec.shape) or not all(same) or not array.size:
        return f"input {spec.name} has shape {list(array.shape)}, declared is {list(spec.shape)}"
    if not is_finite(array):
        return f"input {spec.name} has values that are not finite"
    if spec.low is not None and array.min() < spec.low:
        return f"input {spec.name} has the value {array.min()}, its low is {spec.low:g}"
    beyond = spec.high is not None and (
        array.max() > spec.high if is_floating(array.dtype) else array.max() >= spec.high
    )
    return f"input {spec.name} has the value {array.max()}, its high is {spec.high:g}" if beyond else ""


def _fitted(array: Array, shape: tuple[int, ...]) -> Array:
    """Cut every axis to its size, or begin again where the file has less."""
    for axis, size in enumerate(shape):
        array = np.take(array, np.arange(size), axis=axis, mode="wrap")
    return np.ascontiguousarray(array).reshape(shape)
