"""One forward with real tensors: padding and slicing, scalars, outputs that are not what is declared."""

from collections.abc import Mapping, Sequence

import numpy as np
import pytest
import torch

from app.buckets import FORWARD, Bucket, Dimension, Kind, Route
from app.errors import WarmupError
from app.paths import ModelPath
from app.servable import Array, TensorSpec
from app.serving.forward import Forward, measure

DIMENSIONS = (Dimension("batch", 1, 4, (4,)), Dimension("length", 1, 8, (8,)))
BUCKET = Bucket((("batch", 4), ("length", 8)))
TOKENS = TensorSpec("tokens", "INT64", ("batch", "length"), pad=7)
SCALE = TensorSpec("scale", "FP32", ())


class Recording:
    """An engine that keeps what it is given."""

    plugin = True
    name = "recording"

    def __init__(self, *outputs: str, dynamic: bool = True) -> None:
        self.outputs, self.dynamic = outputs, dynamic
        self.seen: list[torch.Tensor] = []

    def restore_buffers(self) -> tuple[str, ...]:
        return ()

    def run(self, inputs: Sequence[torch.Tensor], path: str, bucket: Bucket | None) -> Sequence[torch.Tensor]:
        self.seen = list(inputs)
        made = {
            "tokens": lambda x: x,
            "sum": lambda x: x.sum(1),
            "total": lambda x: x * 2,
            "floats": lambda x: x.float(),
        }
        return [made[name](inputs[0]) for name in self.outputs]


def forward_of(engine: Recording, inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...]) -> Forward:
    fixed = not any(spec.shape for spec in inputs)
    dimensions, buckets = ((), (Bucket(()),)) if fixed else (DIMENSIONS, (BUCKET,))
    return Forward(engine, [ModelPath(FORWARD, inputs, outputs, dimensions, buckets)], "pad")


def route_of(forward: Forward, arrays: Mapping[str, Array]) -> Route:
    return forward.route(FORWARD, measure(forward.paths[FORWARD].inputs, arrays))


def test_a_shape_between_buckets_is_padded_with_the_declared_value_and_sliced_back_in_every_dimension() -> None:
    engine = Recording("tokens", "sum", dynamic=False)
    outputs = (TensorSpec("tokens", "INT64", ("batch", "length")), TensorSpec("sum", "INT64", ("batch",)))
    forward = forward_of(engine, (TOKENS,), outputs)
    tokens = np.arange(6).reshape(2, 3)
    route = route_of(forward, {"tokens": tokens})
    answer = forward({"tokens": tokens}, route)

    assert (route.kind, route.padding) == (Kind.PADDED, 1 - 6 / 32)
    expected = np.full((4, 8), 7)
    expected[:2, :3] = tokens
    assert engine.seen[0].tolist() == expected.tolist()
    assert answer["tokens"].tolist() == tokens.tolist()
    assert answer["sum"].tolist() == expected.sum(1)[:2].tolist()


def test_scalars_stay_scalars() -> None:
    engine = Recording("total")
    forward = forward_of(engine, (SCALE,), (TensorSpec("total", "FP32", ()),))
    arrays = {"scale": np.array(1.5, np.float32)}
    answer = forward(arrays, route_of(forward, arrays))
    assert engine.seen[0].shape == ()
    assert (answer["total"].shape, float(answer["total"])) == ((), 3.0)


def test_an_array_that_is_not_contiguous_reaches_the_engine_contiguous() -> None:
    engine = Recording("tokens")
    outputs = (TensorSpec("tokens", "INT64", ("batch", "length")),)
    forward = forward_of(engine, (TOKENS,), outputs)
    tokens = np.arange(32).reshape(8, 4).T
    answer = forward({"tokens": tokens}, route_of(forward, {"tokens": tokens}))
    assert engine.seen[0].is_contiguous()
    assert answer["tokens"].tolist() == tokens.tolist()


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (("tokens", "sum"), "forward returns 2 tensors, 1 outputs are configured"),
        (("sum",), "output tokens of forward is int64[4], configured is INT64 [4, 8] for {'batch': 4, 'length': 8}"),
        (
            ("floats",),
            "output tokens of forward is float32[4, 8], configured is INT64 [4, 8] for {'batch': 4, 'length': 8}",
        ),
    ],
)
def test_outputs_that_are_not_what_is_declared_are_an_error_with_both_sides(
    made: tuple[str, ...], message: str
) -> None:
    outputs = (TensorSpec("tokens", "INT64", ("batch", "length")),)
    forward = forward_of(Recording(*made), (TOKENS,), outputs)
    tokens = {"tokens": np.zeros((4, 8), np.int64)}
    with pytest.raises(WarmupError) as caught:
        forward(tokens, route_of(forward, tokens))
    assert str(caught.value) == message
