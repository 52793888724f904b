"""What load tools read of a model: batch apart from the rest where all tensors begin with it, and whole where not."""

import pytest

from app.buckets import Dimension
from app.http.model_config import configuration, metadata
from app.paths import ModelPath
from app.servable import TensorSpec

BATCH = Dimension("batch", 1, 8, (1, 8))
LENGTH = Dimension("length", 1, 32, (32,))
TEXT, IDS = TensorSpec("text", "BYTES", ("batch",)), TensorSpec("ids", "INT64", ("batch", "length"))
VECTOR, SCALAR = TensorSpec("vector", "FP16", ("batch", 4)), TensorSpec("scale", "FP32", ())


def path(inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...], name: str = "forward") -> ModelPath:
    return ModelPath(name, inputs, outputs, (BATCH, LENGTH), ())


def test_the_batch_is_told_apart_where_every_tensor_begins_with_it() -> None:
    assert configuration("m", [path((TEXT, IDS), (VECTOR,))], 1.5) == {
        "name": "m",
        "platform": "pytorch_safetensors",
        "backend": "pytorch",
        "max_batch_size": 8,
        "input": [
            {"name": "text", "data_type": "TYPE_STRING", "dims": []},
            {"name": "ids", "data_type": "TYPE_INT64", "dims": [-1]},
        ],
        "output": [{"name": "vector", "data_type": "TYPE_FP16", "dims": [4]}],
        "dynamic_batching": {"max_queue_delay_microseconds": 1500},
    }


@pytest.mark.parametrize("other", [SCALAR, TensorSpec("fixed", "FP32", (3, 4)), TensorSpec("l", "FP32", ("length",))])
def test_a_tensor_without_the_batch_makes_whole_shapes_and_no_batching(other: TensorSpec) -> None:
    found = configuration("m", [path((IDS, other), (VECTOR,))], 2)

    assert (found["max_batch_size"], "dynamic_batching" in found) == (0, False)
    assert found["input"][0]["dims"] == [-1, -1]
    assert found["input"][1]["dims"] == [-1 if isinstance(size, str) else size for size in other.shape]


def test_metadata_names_further_paths_beside_the_first() -> None:
    one = metadata("m", "3", [path((IDS,), (VECTOR,))])
    two = metadata("m", "3", [path((IDS,), (VECTOR,)), path((TEXT,), (VECTOR,), "encode")])

    assert "paths" not in one
    assert {name: found["inputs"][0]["name"] for name, found in two["paths"].items()} == {
        "forward": "ids",
        "encode": "text",
    }
    assert {name: two[name] for name in one} == one
