"""Sample inputs are the same in every process for the same seed, and lie in the declared range."""

import hashlib
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from app.samples import sample_inputs
from app.servable import DATATYPES, TensorSpec

SPECS = (
    TensorSpec("ids", "INT64", ("batch", "sequence"), low=0, high=30522),
    TensorSpec("scale", "FP32", ("batch", 3), low=-2.0, high=5.0),
)
SIZES = {"batch": 4, "sequence": 16}


def raw(arrays: dict[str, Any]) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in arrays.items()}


def test_the_same_seed_gives_the_same_arrays() -> None:
    assert raw(sample_inputs(SPECS, SIZES, "a")) == raw(sample_inputs(SPECS, SIZES, "a"))


def test_another_seed_gives_other_arrays_for_every_input() -> None:
    one, two = raw(sample_inputs(SPECS, SIZES, "a")), raw(sample_inputs(SPECS, SIZES, "b"))

    assert {name: one[name] == two[name] for name in one} == {"ids": False, "scale": False}


def test_inputs_of_the_same_kind_differ_from_each_other() -> None:
    specs = [TensorSpec(name, "FP32", (8,)) for name in ("left", "right")]
    found = raw(sample_inputs(specs, {}, "a"))

    assert found["left"] != found["right"]


def test_an_input_does_not_depend_on_the_others() -> None:
    alone = sample_inputs(SPECS[1:], SIZES, "a")

    assert alone["scale"].tobytes() == sample_inputs(SPECS, SIZES, "a")["scale"].tobytes()


def test_another_process_gives_the_same_arrays() -> None:
    code = (
        "import hashlib; from app.samples import sample_inputs; from app.servable import TensorSpec\n"
        "array = sample_inputs([TensorSpec('x', 'FP32', (64,))], {}, 'batch=1')['x']\n"
        "print(hashlib.sha256(array.tobytes()).hexdigest())"
    )
    elsewhere = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    here = sample_inputs([TensorSpec("x", "FP32", (64,))], {}, "batch=1")["x"]

    assert elsewhere == hashlib.sha256(here.tobytes()).hexdigest()


@pytest.mark.parametrize("datatype", DATATYPES)
def test_dtype_and_shape_are_the_declared_ones(datatype: str) -> None:
    array = sample_inputs([TensorSpec("x", datatype, ("batch", 3, "sequence"))], SIZES, "a")["x"]

    assert (array.dtype.name, array.shape) == (DATATYPES[datatype], (4, 3, 16))


@pytest.mark.parametrize(
    ("datatype", "low", "high", "values"),
    [
        ("INT64", None, None, {0, 1}),
        ("UINT8", 3, None, {3, 4}),
        ("INT32", -2, 1, {-2, -1, 0}),
        ("INT8", 5, 6, {5}),
        ("INT8", 5, 5, {5}),
        ("BOOL", None, None, {False, True}),
        ("BOOL", 1, 2, {True}),
    ],
)
def test_whole_numbers_take_every_value_from_low_to_below_high(
    datatype: str, low: float | None, high: float | None, values: set[Any]
) -> None:
    array = sample_inputs([TensorSpec("x", datatype, (200,), low=low, high=high)], {}, "a")["x"]

    assert set(array.tolist()) == values


@pytest.mark.parametrize(
    ("datatype", "low", "high", "least", "most"),
    [
        ("FP32", None, None, 0.0, 1.0),
        ("FP64", 10.0, None, 10.0, 11.0),
        ("FP16", -4.0, 4.0, -4.0, 4.0),
        ("FP32", 2.0, 2.0, 2.0, 2.0),
    ],
)
def test_floats_lie_between_low_and_high(
    datatype: str, low: float | None, high: float | None, least: float, most: float
) -> None:
    array = sample_inputs([TensorSpec("x", datatype, (200,), low=low, high=high)], {}, "a")["x"].astype(np.float64)

    assert least <= array.min() <= array.max() <= most
    assert len(set(array.tolist())) > (100 if most > least else 0)


def test_inputs_come_in_call_order() -> None:
    assert list(sample_inputs(SPECS[::-1], SIZES, "a")) == ["scale", "ids"]
