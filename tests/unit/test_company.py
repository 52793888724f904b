"""Requests run together only where the answer of each is the same as alone: tried on models that differ in it."""

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from app.buckets import FORWARD, Dimension, Route, cross
from app.paths import Company, ModelPath
from app.servable import Array, TensorSpec
from app.serving.company import in_company
from app.serving.forward import Forward

BATCH, LENGTH = Dimension("batch", 1, 8, (1, 4)), Dimension("length", 1, 32, (16,))
TOKENS = TensorSpec("tokens", "FP32", ("batch", "length"), pad=0)
Compute = Callable[[Array], Array]


class Computing(Forward):
    """Routes as the real one; what it computes is a function of the tokens."""

    def __init__(self, compute: Compute, pad: float | None = 0, output: tuple[str, ...] = ("batch",)) -> None:
        engine: Any = SimpleNamespace(dynamic=True, restore_buffers=tuple)
        tokens = TensorSpec("tokens", "FP32", ("batch", "length"), pad=pad)
        outputs = (TensorSpec("y", "FP32", output),)
        path = ModelPath(FORWARD, (tokens,), outputs, (BATCH, LENGTH), cross((BATCH, LENGTH)))
        super().__init__(engine, [path], "pad")
        self.compute = compute

    def __call__(self, arrays: Mapping[str, Array], route: Route) -> dict[str, Array]:
        return {"y": self.compute(arrays["tokens"])}


def differs(one: Mapping[str, Array], other: Mapping[str, Array]) -> str:
    return "" if np.allclose(one["y"], other["y"]) else "y differs"


def tried(forward: Computing) -> ModelPath:
    random = np.random.default_rng(0)
    shapes = {bucket.name: tuple(size for _, size in bucket.sizes) for bucket in forward.buckets}
    inputs = {name: {"tokens": random.random(shape, np.float32)} for name, shape in shapes.items()}
    outputs = {name: {"y": forward.compute(arrays["tokens"])} for name, arrays in inputs.items()}
    return in_company(forward, inputs, outputs, differs).paths[FORWARD]


class Counting:
    """Answers otherwise each time."""

    calls = 0

    def __call__(self, tokens: Array) -> Array:
        self.calls += 1
        found: Array = tokens.sum(1) + self.calls
        return found


@pytest.mark.parametrize(
    ("compute", "company", "why"),
    [
        (lambda x: x.sum(1), Company.ANY, ""),
        (lambda x: (x - x.mean(0)).sum(1), Company.NONE, "row 0 of batch=4,length=16 answers otherwise when alone"),
        (lambda x: np.cumsum(x.sum(1)), Company.NONE, "row 3 of batch=4,length=16 answers otherwise when alone"),
        (Counting(), Company.NONE, "row 0 of batch=4,length=16 answers otherwise when alone: y differs"),
        (lambda x: x.mean(1), Company.SAME_LENGTHS, "a shorter row of batch=4,length=16 answers otherwise padded"),
    ],
)
def test_a_model_bears_as_much_company_as_does_not_change_its_answers(
    compute: Compute, company: Company, why: str
) -> None:
    path = tried(Computing(compute))
    assert path.company is company
    assert path.company_why.startswith(why)
    assert bool(path.company_why) == bool(why)


def test_without_a_value_to_pad_with_lengths_must_be_equal() -> None:
    path = tried(Computing(lambda x: x.sum(1), pad=None))
    why = "batch=4,length=16 cannot be padded: an input has no value to pad with"
    assert (path.company, path.company_why) == (Company.SAME_LENGTHS, why)


def test_outputs_that_do_not_begin_with_the_batch_are_for_one_request() -> None:
    path = tried(Computing(lambda x: x.sum(0), output=("length",)))
    assert path.company is Company.NONE
    assert path.company_why == "its tensors do not all begin with one symbolic dimension"


def test_a_model_that_cannot_run_a_row_alone_keeps_its_requests_apart() -> None:
    def fussy(tokens: Array) -> Array:
        if len(tokens) == 1:
            raise RuntimeError("one is not enough")
        found: Array = tokens.sum(1)
        return found

    forward = Computing(fussy)
    four = {"tokens": np.ones((4, 16), np.float32)}
    path = in_company(
        forward, {"batch=4,length=16": four}, {"batch=4,length=16": {"y": fussy(four["tokens"])}}, differs
    )
    assert path.paths[FORWARD].company is Company.NONE
    assert path.paths[FORWARD].company_why == "a row of batch=4,length=16 could not be run alone: one is not enough"
