"""Bodies of the Open Inference Protocol: JSON, and JSON with raw tensors behind it, in both directions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from app.buckets import FORWARD
from app.codecs import chosen
from app.http import tensors
from app.http.compression import inflate
from app.http.parameters import Parameters, flag, is_count, parameters_of, timeout_s
from app.paths import ModelPath
from app.servable import BYTES, DATATYPES, Array, Rejected, TensorSpec

JSON_BYTES = "Inference-Header-Content-Length"


@dataclass(frozen=True, slots=True)
class Head:
    """What the headers say of a request's body: how it is encoded, and how much of it is JSON (None: all of it)."""

    coding: str = ""
    json_bytes: str | None = None


@dataclass(frozen=True, slots=True)
class Wanted:
    """An output that the client wants, and whether as raw bytes."""

    spec: TensorSpec
    raw: bool = False


@dataclass(frozen=True, slots=True)
class Ask:
    """A decoded request: its path, arrays by input name, the outputs wanted in their order, the id to echo.

    `timeout_s`: how long the client would wait for it to start; None as configured.
    """

    path: str
    arrays: Mapping[str, Array]
    wanted: tuple[Wanted, ...]
    id: str | None = None
    timeout_s: float | None = None


@dataclass(frozen=True, slots=True)
class Encoded:
    """The body of an answer; `json_bytes`: how much of it is JSON where raw tensors follow, else None."""

    body: bytes
    json_bytes: int | None = None


def decode(head: Head, body: bytes, paths: Sequence[ModelPath], limit: int, raw: ModelPath | None = None) -> Ask:
    """Parse a request body of at most `limit` bytes when inflated; raises Rejected naming what is wrong.

    The request's parameter `path` says which of the model's methods is asked; without it the first is. `raw`: the form
    of requests for a codec, which their inputs' names tell.
    """
    body = inflate(body, head.coding, limit) if head.coding else body
    size = len(body)
    if head.json_bytes is not None:
        size = _json_bytes(head.json_bytes, len(body))
        if size == 0:
            return _bare(body, paths[0] if raw is None or len(paths[0].inputs) == 1 else raw)
    try:
        request = orjson.loads(body[:size])
    except orjson.JSONDecodeError as error:
        raise Rejected(400, f"the body is not JSON: {error}") from error
    if not isinstance(request, dict) or not isinstance(request.get("inputs"), list):
        raise Rejected(400, 'the body must be an object with "inputs": [{"name", "shape", "datatype", "data"}, …]')
    parameters = parameters_of("the request", request)
    path = _path(parameters, paths)
    arrays = _arrays(request["inputs"], memoryview(body)[size:])
    path = chosen(path, raw, arrays)
    identifier = request.get("id")
    if identifier is not None and not isinstance(identifier, str):
        raise Rejected(400, '"id" must be a string')
    wanted = _wanted(request.get("outputs"), path.outputs, flag("the request", parameters, "binary_data_output"))
    return Ask(path.name, arrays, wanted, identifier, timeout_s(parameters))


def encode(model: str, version: str, ask: Ask, outputs: Mapping[str, Array]) -> Encoded:
    """Return the answer's body; raises Rejected (500) for values that JSON cannot carry."""
    rows, raws = [], []
    for one in ask.wanted:
        array = outputs[one.spec.name]
        row = {"name": one.spec.name, "datatype": one.spec.datatype, "shape": list(array.shape)}
        if one.raw:
            raws.append(tensors.to_raw(array))
            rows.append({**row, "parameters": {"binary_data_size": len(raws[-1])}})
        else:
            rows.append({**row, "data": tensors.to_json(one.spec.name, array)})
    identifier = {"id": ask.id} if ask.id is not None else {}
    answer = {"model_name": model, "model_version": version, **identifier, "outputs": rows}
    head = orjson.dumps(answer, option=orjson.OPT_SERIALIZE_NUMPY)
    return Encoded(b"".join([head, *raws]), len(head)) if raws else Encoded(head)


def request_body(path: ModelPath, arrays: Mapping[str, Array]) -> bytes:
    """Return what a client sends for these arrays."""
    rows = [
        {
            "name": s.name,
            "datatype": s.datatype,
            "shape": list(arrays[s.name].shape),
            "data": tensors.to_json(s.name, arrays[s.name]),
        }
        for s in path.inputs
    ]
    parameters = {} if path.name == FORWARD else {"parameters": {"path": path.name}}
    return orjson.dumps({"inputs": rows, **parameters}, option=orjson.OPT_SERIALIZE_NUMPY)


def _json_bytes(told: str, size: int) -> int:
    if not (told.isascii() and told.isdecimal() and len(told) <= len(str(size)) + 1 and int(told) <= size):
        raise Rejected(400, f"{JSON_BYTES} = {told!r}: allowed are 0 to {size}, the bytes of the (inflated) body")
    return int(told)


def _bare(body: bytes, path: ModelPath) -> Ask:
    """Read a body that is nothing but the bytes of the only input; all outputs go back raw.

    Of several variable sizes the first is 1; one that is left follows from the number of bytes.
    """
    if len(path.inputs) != 1:
        names = ", ".join(spec.name for spec in path.inputs)
        raise Rejected(400, f"{JSON_BYTES} = 0 is for models of one input; this one takes {names}")
    (spec,) = path.inputs
    variable = [axis for axis, size in enumerate(spec.shape) if isinstance(size, str)]
    shape = [1 if isinstance(size, str) else size for size in spec.shape]
    rest, known = variable[1:] or variable, 1
    if len(rest) > 1:
        raise Rejected(400, f"{JSON_BYTES} = 0: the shape {list(spec.shape)} of input {spec.name} cannot be guessed")
    for size in shape:
        known *= size
    if rest and spec.datatype != BYTES:
        shape[rest[0]] = len(body) // (known * spec.dtype.itemsize)
    raw = tensors.from_raw(spec.name, memoryview(body), spec.datatype, shape)
    return Ask(path.name, {spec.name: raw}, tuple(Wanted(one, raw=True) for one in path.outputs))


def _arrays(rows: Sequence[Any], behind: memoryview) -> dict[str, Array]:
    """Return the inputs; those with raw bytes take them in their order from what stands behind the JSON."""
    arrays: dict[str, Array] = {}
    place = 0
    for row in rows:
        if not isinstance(row, dict) or not isinstance(row.get("name"), str):
            raise Rejected(400, "every input must be an object with a name")
        name = row["name"]
        if name in arrays:
            raise Rejected(400, f"input {name} is given twice")
        parameters = parameters_of(f"input {name}", row)
        datatype, shape, size = _datatype(name, row), _shape(name, row), _raw_bytes(name, row, parameters)
        if size is None:
            arrays[name] = tensors.from_json(name, row["data"], datatype, shape)
            continue
        if size > behind.nbytes - place:
            raise Rejected(400, f"input {name}: binary_data_size = {size}, but {behind.nbytes - place} bytes are left")
        arrays[name] = tensors.from_raw(name, behind[place : place + size], datatype, shape)
        place += size
    if place != behind.nbytes:
        raise Rejected(400, f"{behind.nbytes} bytes follow the JSON, the inputs' binary_data_size take {place}")
    return arrays


def _datatype(name: str, row: Mapping[str, Any]) -> str:
    found = row.get("datatype")
    if not isinstance(found, str) or found not in DATATYPES:
        raise Rejected(400, f"input {name}: datatype {found!r} is unknown; known are {', '.join(DATATYPES)}")
    return found


def _shape(name: str, row: Mapping[str, Any]) -> list[int]:
    found = row.get("shape")
    if not isinstance(found, list) or not all(is_count(size) for size in found):
        raise Rejected(400, f"input {name}: shape must be a list of whole numbers, got {found!r}")
    return [int(size) for size in found]


def _raw_bytes(name: str, row: Mapping[str, Any], parameters: Parameters) -> int | None:
    """Return the input's binary_data_size, or None where its values stand in `data`."""
    size = parameters.get("binary_data_size")
    if (size is None) == (row.get("data") is None):
        given = "both data and binary_data_size" if size is not None else "data is missing"
        raise Rejected(400, f"input {name}: {given}; give one of data and binary_data_size")
    if size is not None and not is_count(size):
        raise Rejected(400, f"input {name}: binary_data_size must be a whole number, got {size!r}")
    return None if size is None else int(size)


def _path(parameters: Parameters, paths: Sequence[ModelPath]) -> ModelPath:
    first, *_ = paths
    name = parameters.get("path", first.name)
    found = next((path for path in paths if path.name == name), None)
    if found is None:
        raise Rejected(400, f"unknown path {name!r}; the model has {', '.join(path.name for path in paths)}")
    return found


def _wanted(asked: Any, outputs: Sequence[TensorSpec], raw: bool) -> tuple[Wanted, ...]:
    """Return the outputs in the order asked for; `raw`: as bytes where an output does not say otherwise."""
    if asked is None or asked == []:
        return tuple(Wanted(spec, raw) for spec in outputs)
    known = {spec.name: spec for spec in outputs}
    found = []
    for row in asked if isinstance(asked, list) else [None]:
        name = row.get("name") if isinstance(row, dict) else None
        if not isinstance(row, dict) or not isinstance(name, str) or name not in known:
            raise Rejected(400, f"unknown output {name!r}; the model gives {', '.join(known)}")
        owner = f"output {name}"
        found.append(Wanted(known[name], flag(owner, parameters_of(owner, row), "binary_data", raw)))
    return tuple(found)
