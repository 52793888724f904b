"""Which requests run together, joined and split: for any mixture, each gets what it would get alone."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.buckets import FORWARD, Bucket, Coverage, Dimension, Kind, Refusal, Route, cross
from app.paths import ModelPath
from app.servable import Array, TensorSpec
from app.serving.batching import MOST_PADDING, Batching, volume

BATCH, LENGTH = Dimension("batch", 1, 8, (1, 4, 8)), Dimension("length", 1, 64, (16, 64))
TOKENS = TensorSpec("tokens", "INT64", ("batch", "length"), pad=0)
EACH = TensorSpec("each", "INT64", ("batch", "length"))
SUM = TensorSpec("sum", "INT64", ("batch",))


@dataclass(eq=False)
class One:
    sizes: Mapping[str, int]
    route: Route


def batching(dynamic: bool = True, pad: int | None = 0, *outputs: TensorSpec) -> Batching:
    tokens = TensorSpec("tokens", "INT64", ("batch", "length"), pad=pad)
    buckets = cross((BATCH, LENGTH))
    path = ModelPath(FORWARD, (tokens,), outputs or (EACH, SUM), (BATCH, LENGTH), buckets)
    return Batching.of(path, path.coverage(dynamic, "pad"))


def waiting(made: Batching, *sizes: tuple[int, int]) -> list[One]:
    found = []
    for batch, length in sizes:
        one = {"batch": batch, "length": length}
        route = made.coverage.route(one)
        assert isinstance(route, Route)
        found.append(One(one, route))
    return found


def chosen(made: Batching, *sizes: tuple[int, int]) -> tuple[list[tuple[int, int]], dict[str, int]]:
    batch, route = made.choose(waiting(made, *sizes))
    return [(one.sizes["batch"], one.sizes["length"]) for one in batch], dict(route.sizes)


def test_code_for_every_shape_runs_requests_of_like_lengths_at_their_own_size() -> None:
    made = batching()
    assert chosen(made, (1, 60), (1, 8), (1, 58), (1, 60)) == ([(1, 60), (1, 60), (1, 58)], {"batch": 3, "length": 60})


def test_the_oldest_request_always_runs_and_what_does_not_fit_waits() -> None:
    made = batching()
    assert chosen(made, (1, 8), (8, 8), (2, 8)) == ([(1, 8), (2, 8)], {"batch": 3, "length": 8})


def test_code_for_buckets_alone_runs_a_bucket_that_is_half_full_and_otherwise_what_fills_one() -> None:
    made = batching(dynamic=False)
    assert chosen(made, *[(1, 16)] * 2) == ([(1, 16)] * 2, {"batch": 4, "length": 16})
    assert chosen(made, *[(1, 16)] * 5) == ([(1, 16)] * 5, {"batch": 8, "length": 16})
    assert chosen(made, (1, 16), (1, 60)) == ([(1, 16)], {"batch": 1, "length": 16})


def test_a_request_that_pads_even_alone_has_company_of_its_own_bucket() -> None:
    made = batching(dynamic=False)
    assert chosen(made, (1, 20), (1, 24), (1, 40)) == ([(1, 20), (1, 24), (1, 40)], {"batch": 4, "length": 64})


def test_without_a_value_to_pad_with_only_equal_lengths_run_together() -> None:
    made = batching(True, None)
    assert chosen(made, (1, 30), (1, 31), (2, 30)) == ([(1, 30), (2, 30)], {"batch": 3, "length": 30})


@pytest.mark.parametrize(
    "output",
    [TensorSpec("all", "INT64", ()), TensorSpec("turned", "INT64", ("length", "batch")), TensorSpec("k", "FP32", (3,))],
)
def test_outputs_that_do_not_begin_with_the_batch_keep_requests_alone(output: TensorSpec) -> None:
    made = batching(True, 0, EACH, output)
    assert made.dimension is None
    assert chosen(made, (1, 8), (1, 8)) == ([(1, 8)], {"batch": 1, "length": 8})


def test_a_batch_against_a_batch_is_not_joined() -> None:
    assert batching(True, 0, TensorSpec("pairs", "FP32", ("batch", "batch"))).dimension is None


def test_what_no_bucket_covers_runs_alone() -> None:
    buckets = (Bucket((("batch", 4), ("length", 16))),)
    path = ModelPath(FORWARD, (TOKENS,), (EACH,), (BATCH, LENGTH), buckets)
    made = Batching.of(path, Coverage((BATCH, LENGTH), buckets, True, "pad"))
    assert chosen(made, (1, 20), (1, 20)) == ([(1, 20)], {"batch": 1, "length": 20})
    assert chosen(made, (1, 16), (1, 20), (1, 16)) == ([(1, 16), (1, 16)], {"batch": 2, "length": 16})


SIZES = st.lists(st.tuples(st.integers(1, 8), st.integers(1, 64)), min_size=1, max_size=12)


@given(SIZES, st.booleans())
@settings(max_examples=200, deadline=None)
def test_each_gets_its_own_rows_whatever_its_company(sizes: list[tuple[int, int]], dynamic: bool) -> None:
    made = batching(dynamic)
    left = waiting(made, *sizes)
    arrays = {
        id(one): {"tokens": np.arange(1, 1 + volume(one.sizes)).reshape(one.sizes["batch"], one.sizes["length"])}
        for one in left
    }
    while left:
        batch, route = made.choose(left)
        assert batch[0] is left[0]
        left = [one for one in left if one not in batch]
        joined = made.join([(arrays[id(one)], one.sizes) for one in batch], route)
        tokens = joined["tokens"]
        assert tokens.shape == tuple(size for _, size in route.sizes)
        assert route.kind in {Kind.EXACT, Kind.DYNAMIC, Kind.PADDED}
        assert not isinstance(made.coverage.route(dict(route.sizes)), Refusal)
        outputs: dict[str, Array] = {"each": tokens * 2, "sum": tokens.sum(1)}
        for one, own in zip(batch, made.split(outputs, [one.sizes for one in batch]), strict=True):
            given_tokens = arrays[id(one)]["tokens"]
            assert np.array_equal(own["each"], given_tokens * 2)
            assert np.array_equal(own["sum"], given_tokens.sum(1))


@given(SIZES)
@settings(max_examples=200, deadline=None)
def test_lengths_are_mixed_only_while_little_of_the_run_is_padding(sizes: list[tuple[int, int]]) -> None:
    made = batching()
    batch, route = made.choose(waiting(made, *sizes))
    asked = sum(volume(one.sizes) for one in batch)
    assert 1 - asked / volume(dict(route.sizes)) <= MOST_PADDING
