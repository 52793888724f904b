"""Tensors of the Open Inference Protocol as JSON: flat or nested, exact integers, errors that name the input."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from app.buckets import FORWARD
from app.paths import ModelPath
from app.servable import DATATYPES, Array, Rejected, TensorSpec


@dataclass(frozen=True, slots=True)
class Ask:
    """A decoded request: its path, arrays by input name, the outputs wanted in their order, the id to echo.

    `timeout_s`: how long the client would wait for it to start; None as configured.
    """

    path: str
    arrays: Mapping[str, Array]
    wanted: tuple[TensorSpec, ...]
    id: str | None
    timeout_s: float | None = None


def decode(body: bytes, paths: Sequence[ModelPath]) -> Ask:
    """Parse a request body; raises Rejected (400, or 501 for binary tensors) naming what is wrong.

    The request's parameter `path` says which of the model's methods is asked; without it the first is.
    """
    try:
        request = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise Rejected(400, f"the body is not JSON: {error}") from error
    if not isinstance(request, dict) or not isinstance(request.get("inputs"), list):
        raise Rejected(400, 'the body must be an object with "inputs": [{"name", "shape", "datatype", "data"}, …]')
    parameters = _parameters("the request", request)
    path = _path(parameters, paths)
    arrays: dict[str, Array] = {}
    for row in request["inputs"]:
        name, array = _tensor(row)
        if name in arrays:
            raise Rejected(400, f"input {name} is given twice")
        arrays[name] = array
    identifier = request.get("id")
    if identifier is not None and not isinstance(identifier, str):
        raise Rejected(400, '"id" must be a string')
    return Ask(path.name, arrays, _wanted(request.get("outputs"), path.outputs), identifier, _timeout_s(parameters))


def _path(parameters: Mapping[str, Any], paths: Sequence[ModelPath]) -> ModelPath:
    first, *_ = paths
    name = parameters.get("path", first.name)
    found = next((path for path in paths if path.name == name), None)
    if found is None:
        raise Rejected(400, f"unknown path {name!r}; the model has {', '.join(path.name for path in paths)}")
    return found


def _timeout_s(parameters: Mapping[str, Any]) -> float | None:
    """Return the parameter `timeout`, which clients give in microseconds; 0 means none of their own."""
    asked = parameters.get("timeout")
    if asked is None:
        return None
    # Some languages write whole numbers as 3e7; a boolean is a number for Python alone.
    if type(asked) not in (int, float) or asked < 0 or not float(asked).is_integer():
        raise Rejected(400, f"the parameter timeout must be whole microseconds, got {asked!r}")
    return asked / 1e6 or None


def request_body(path: ModelPath, arrays: Mapping[str, Array]) -> bytes:
    """Return what a client sends for these arrays."""
    rows = [
        {
            "name": s.name,
            "datatype": s.datatype,
            "shape": list(arrays[s.name].shape),
            "data": arrays[s.name].reshape(-1),
        }
        for s in path.inputs
    ]
    parameters = {} if path.name == FORWARD else {"parameters": {"path": path.name}}
    return orjson.dumps({"inputs": rows, **parameters}, option=orjson.OPT_SERIALIZE_NUMPY)


def _tensor(row: Any) -> tuple[str, Array]:
    if not isinstance(row, dict) or not isinstance(row.get("name"), str):
        raise Rejected(400, "every input must be an object with a name")
    name, datatype, shape = row["name"], row.get("datatype"), row.get("shape")
    if "binary_data_size" in _parameters(f"input {name}", row):
        raise Rejected(501, f"input {name}: binary tensors are not supported by this version; send data as JSON")
    if not isinstance(datatype, str) or datatype not in DATATYPES:
        raise Rejected(400, f"input {name}: datatype {datatype!r} is unknown; known are {', '.join(DATATYPES)}")
    if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
        raise Rejected(400, f"input {name}: shape must be a list of whole numbers, got {shape!r}")
    if "data" not in row:
        raise Rejected(400, f"input {name}: data is missing")
    array = _array(name, row["data"], np.dtype(DATATYPES[datatype]))
    if array.ndim > 1 and array.size and list(array.shape) != shape:
        raise Rejected(400, f"input {name}: nested data of shape {list(array.shape)} for shape {shape}")
    if array.size != math.prod(shape):
        raise Rejected(400, f"input {name}: {array.size} values for shape {shape}, expected {math.prod(shape)}")
    try:
        return name, array.reshape(shape)
    except ValueError as error:
        raise Rejected(400, f"input {name}: no array has the shape {shape}") from error


def _parameters(owner: str, row: Mapping[str, Any]) -> Mapping[str, Any]:
    found = row.get("parameters")
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise Rejected(400, f"{owner}: parameters must be an object")
    return found


def _array(name: str, data: Any, dtype: np.dtype[Any]) -> Array:
    if not _only_numbers(data):
        raise Rejected(400, f"input {name}: data is not {dtype}")
    try:
        found = np.asarray(data)
    except (ValueError, OverflowError) as error:
        raise Rejected(400, f"input {name}: data is ragged or not numbers") from error
    if found.size == 0:
        return np.zeros(found.shape, dtype)
    # numpy would cut 1.5 to 1 and wrap 300 to 44 without a word; each kind takes only what it can hold exactly.
    accepted = {"b": "bui", "u": "ui", "i": "ui", "f": "uif"}[dtype.kind]
    if dtype.kind in "ui" and found.dtype.kind not in accepted:
        found = _integers(name, data, dtype)
    if found.dtype.kind not in accepted:
        raise Rejected(400, f"input {name}: data is not {dtype}")
    if dtype.kind in "bui":
        limits = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
        low, high = int(found.min()), int(found.max())
        if low < limits[0] or high > limits[1]:
            raise Rejected(400, f"input {name}: values from {low} to {high} do not fit {dtype}")
    with np.errstate(over="ignore"):
        made = found.astype(dtype, copy=False)
    if dtype.kind == "f" and not np.isfinite(made).all():
        raise Rejected(400, f"input {name}: values from {found.min()} to {found.max()} do not fit {dtype}")
    return made


def _only_numbers(data: Any) -> bool:
    """Every leaf is a number: numpy would make fixed-width text of one long string among many short ones."""
    level = data if isinstance(data, list) else [data]
    while level and all(type(item) is list for item in level):
        level = list(itertools.chain.from_iterable(level))
    return {type(item) for item in level} <= {int, float, bool, list}


def _integers(name: str, data: Any, dtype: np.dtype[Any]) -> Array:
    """Convert one by one: numpy makes floats of whole numbers when some need 64 unsigned bits and some are small."""
    values = np.asarray(data, dtype=object)
    if not all(type(value) is int for value in values.flat):
        raise Rejected(400, f"input {name}: data is not {dtype}")
    try:
        return values.astype(dtype)
    except OverflowError as error:
        raise Rejected(400, f"input {name}: a value does not fit {dtype}") from error


def _wanted(asked: Any, outputs: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
    if asked is None or asked == []:
        return tuple(outputs)
    known = {spec.name: spec for spec in outputs}
    names = [row.get("name") if isinstance(row, dict) else None for row in asked] if isinstance(asked, list) else [None]
    for name in names:
        if not isinstance(name, str) or name not in known:
            raise Rejected(400, f"unknown output {name!r}; the model gives {', '.join(known)}")
    return tuple(known[str(name)] for name in names)


def encode(model: str, version: str, ask: Ask, outputs: Mapping[str, Array]) -> dict[str, Any]:
    """Return the response object; raises Rejected (500) for values that JSON cannot carry."""
    identifier = {"id": ask.id} if ask.id is not None else {}
    rows = [_row(spec, outputs[spec.name]) for spec in ask.wanted]
    return {"model_name": model, "model_version": version, **identifier, "outputs": rows}


def _row(spec: TensorSpec, array: Array) -> dict[str, Any]:
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise Rejected(500, f"output {spec.name} has values that are not finite, which JSON cannot carry")
    flat = np.ascontiguousarray(array).reshape(-1)
    return {"name": spec.name, "datatype": spec.datatype, "shape": list(array.shape), "data": flat}
