"""What the HTTP side may see of a model: its tensors by name and one call that answers. No torch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from app.buckets import Route

Array = NDArray[Any]

BYTES = "BYTES"
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

# Open Inference Protocol datatype → numpy dtype (protocol specification, "Tensor Data Types"). BF16 is an extension
# that clients know; elements of BYTES are Python's bytes, which only a codec takes.
DATATYPES: Mapping[str, str] = {
    "BOOL": "bool",
    "UINT8": "uint8",
    "UINT16": "uint16",
    "UINT32": "uint32",
    "UINT64": "uint64",
    "INT8": "int8",
    "INT16": "int16",
    "INT32": "int32",
    "INT64": "int64",
    "FP16": "float16",
    "FP32": "float32",
    "FP64": "float64",
    "BF16": "bfloat16",
    "BYTES": "object",
}


def is_floating(dtype: np.dtype[Any]) -> bool:
    """Floating point, bfloat16 among it, which numpy itself takes for nothing that it knows."""
    return dtype.kind == "f" or dtype == BFLOAT16


def is_finite(array: Array) -> bool:
    """No value is infinite or not a number."""
    return not is_floating(array.dtype) or bool(np.isfinite(array).all())


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A declared input or output; names in `shape` are symbolic dimensions."""

    name: str
    datatype: str
    shape: tuple[str | int, ...]
    pad: float | bool | None = None
    low: float | None = None
    high: float | None = None

    @property
    def symbolic(self) -> frozenset[str]:
        """The symbolic dimensions of the shape."""
        return frozenset(size for size in self.shape if isinstance(size, str))

    @property
    def dtype(self) -> np.dtype[Any]:
        """The numpy dtype of the declared datatype."""
        return np.dtype(DATATYPES[self.datatype])

    def sized(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Return the shape with every symbolic dimension filled in."""
        return tuple(sizes[size] if isinstance(size, str) else size for size in self.shape)


@dataclass(frozen=True, slots=True)
class Answer:
    """The outputs of one request in declared order, and how they were made.

    `items`: the request's own share of the batch.
    """

    outputs: Mapping[str, Array]
    items: int
    route: Route
    queue_s: float
    compute_s: float
    codec_s: float = 0.0


class Rejected(Exception):  # noqa: N818 - an answer to the client, not a fault of the server
    """A request that is not run; `status` is the HTTP status, `reason` the label of the metric."""

    def __init__(self, status: int, message: str, reason: str | None = None) -> None:
        super().__init__(message)
        self.status, self.reason = status, reason


def _still_there() -> bool:
    return False


@dataclass(frozen=True, slots=True)
class Question:
    """What a request asks of a model: one of its paths, and arrays by input name.

    `timeout_s`: the client's own limit until it starts to run; None as configured. `gone`: nobody waits for the answer
    any more; asked on the event loop.
    """

    path: str
    arrays: Mapping[str, Array]
    timeout_s: float | None = None
    gone: Callable[[], bool] = _still_there


class Servable(Protocol):
    """A model that has proven its answers."""

    async def answer(self, question: Question) -> Answer:
        """Run one request; raises Rejected."""
