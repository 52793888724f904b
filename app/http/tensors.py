"""One tensor of the Open Inference Protocol, as JSON and as raw bytes: exact, or refused in words that name it."""

import itertools
import math
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from app.servable import BFLOAT16, BYTES, DATATYPES, Array, Rejected, is_finite, is_floating

AS_RAW = 'ask for it with the parameter "binary_data": true'
_LENGTH = struct.Struct("<I")


def from_json(name: str, data: Any, datatype: str, shape: Sequence[int]) -> Array:
    """Return values given flat or nested, row-major; raises Rejected (400)."""
    array = _texts(name, data) if datatype == BYTES else _numbers(name, data, np.dtype(DATATYPES[datatype]))
    if array.ndim > 1 and array.size and array.shape != tuple(shape):
        raise Rejected(400, f"input {name}: nested data of shape {list(array.shape)} for shape {list(shape)}")
    if array.size != math.prod(shape):
        raise Rejected(400, f"input {name}: {array.size} values for shape {list(shape)}, expected {math.prod(shape)}")
    return _shaped(name, array, shape)


def from_raw(name: str, raw: memoryview, datatype: str, shape: Sequence[int]) -> Array:
    """Return a view of little-endian, row-major bytes without padding, or the elements of BYTES; Rejected (400)."""
    if datatype == BYTES:
        return _shaped(name, _elements(name, raw, math.prod(shape)), shape)
    dtype = np.dtype(DATATYPES[datatype])
    expected = math.prod(shape) * dtype.itemsize
    if raw.nbytes != expected:
        raise Rejected(
            400, f"input {name}: {raw.nbytes} bytes for {datatype} of shape {list(shape)}, expected {expected}"
        )
    if datatype == "BOOL" and raw.nbytes and np.frombuffer(raw, np.uint8).max() > 1:
        raise Rejected(400, f"input {name}: a byte of BOOL is neither 0 nor 1")
    # Protocol and machine have the same byte order: torch runs on little-endian machines alone.
    return _shaped(name, np.frombuffer(raw, dtype), shape)


def to_json(name: str, array: Array) -> Any:
    """Return the values, flat; raises Rejected (500) for values that JSON cannot carry."""
    flat = np.ascontiguousarray(array).reshape(-1)
    if array.dtype.kind == "O":
        try:
            return [element.decode() for element in flat]
        except UnicodeDecodeError as error:
            raise Rejected(500, f"output {name} has bytes that are no UTF-8 text; {AS_RAW}") from error
    if not is_finite(flat):
        raise Rejected(500, f"output {name} has values that are not finite, which JSON cannot carry; {AS_RAW}")
    return flat.astype(np.float32) if flat.dtype == BFLOAT16 else flat


def to_raw(array: Array) -> bytes:
    """Return little-endian, row-major bytes; before each element of BYTES stands its length."""
    if array.dtype.kind == "O":
        return b"".join(_LENGTH.pack(len(element)) + element for element in array.reshape(-1))
    return array.tobytes()


def _shaped(name: str, array: Array, shape: Sequence[int]) -> Array:
    try:
        return array.reshape(shape)
    except ValueError as error:
        raise Rejected(400, f"input {name}: no array has the shape {list(shape)}") from error


def _elements(name: str, raw: memoryview, count: int) -> Array:
    """Take BYTES apart; stops at the count, which nothing has compared with the bytes that are there."""
    found: list[bytes] = []
    place, end = 0, raw.nbytes
    while place < end and len(found) <= count:
        first = place + _LENGTH.size
        place = first + _LENGTH.unpack_from(raw, place)[0] if first <= end else end + 1
        if place > end:
            raise Rejected(400, f"input {name}: element {len(found)} goes beyond its binary_data_size")
        found.append(bytes(raw[first:place]))
    if len(found) != count:
        told = f"more than {count}" if len(found) > count else str(len(found))
        raise Rejected(400, f"input {name}: {told} elements, expected {count}")
    return _objects(found)


def _objects(elements: Sequence[bytes]) -> Array:
    made: Array = np.empty(len(elements), object)
    made[:] = elements
    return made


def _leaves(data: Any) -> tuple[list[Any], tuple[int, ...]]:
    """Return the leaves of nested lists and their shape as far as all lists of a level are equally long."""
    level, shape = (data, (len(data),)) if isinstance(data, list) else ([data], ())
    while level and all(type(item) is list for item in level):
        lengths = {len(item) for item in level}
        shape = (*shape, lengths.pop() if len(lengths) == 1 else -1)
        level = list(itertools.chain.from_iterable(level))
    return level, shape


def _texts(name: str, data: Any) -> Array:
    leaves, shape = _leaves(data)
    if not all(type(leaf) is str for leaf in leaves) or -1 in shape:
        raise Rejected(400, f"input {name}: data is ragged or not texts")
    return _objects([leaf.encode() for leaf in leaves]).reshape(shape)


def _numbers(name: str, data: Any, dtype: np.dtype[Any]) -> Array:
    # numpy would make fixed-width text of one long string among many short ones.
    if not {type(leaf) for leaf in _leaves(data)[0]} <= {int, float, bool, list}:
        raise Rejected(400, f"input {name}: data is not {dtype}")
    try:
        found = np.asarray(data)
    except (ValueError, OverflowError) as error:
        raise Rejected(400, f"input {name}: data is ragged or not numbers") from error
    if found.size == 0:
        return np.zeros(found.shape, dtype)
    # numpy would cut 1.5 to 1 and wrap 300 to 44 without a word; each kind takes only what it can hold exactly.
    accepted = "uif" if is_floating(dtype) else {"b": "bui", "u": "ui", "i": "ui"}[dtype.kind]
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
    if not is_finite(made):
        raise Rejected(400, f"input {name}: values from {found.min()} to {found.max()} do not fit {dtype}")
    return made


def _integers(name: str, data: Any, dtype: np.dtype[Any]) -> Array:
    """Convert one by one: numpy makes floats of whole numbers when some need 64 unsigned bits and some are small."""
    values = np.asarray(data, dtype=object)
    if not all(type(value) is int for value in values.flat):
        raise Rejected(400, f"input {name}: data is not {dtype}")
    try:
        return values.astype(dtype)
    except OverflowError as error:
        raise Rejected(400, f"input {name}: a value does not fit {dtype}") from error
