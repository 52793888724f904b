"""Requests on their way to the device lane: admitted, timed, refused; the lane is real, the model a function."""

import asyncio
import threading
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from app.buckets import FORWARD, Bucket, Dimension, Kind, Route
from app.lanes import DeviceLane
from app.paths import ModelPath
from app.servable import Answer, Array, Rejected, TensorSpec
from app.serving.executor import Executor
from app.serving.forward import Forward, measure
from app.serving.requests import RequestMetrics
from app.settings import Serving

BATCH = Dimension("batch", 1, 8, (2, 4))
BUCKETS = (Bucket((("batch", 2),)), Bucket((("batch", 4),)))
INPUTS = (TensorSpec("x", "FP32", ("batch", 3), pad=-1),)
OUTPUTS = (TensorSpec("y", "FP32", ("batch", 3)),)


class Doubling(Forward):
    """Routes as the real one; the computation is a function of arrays that may wait for a gate."""

    def __init__(self, opened: threading.Event | None = None, dynamic: bool = True, policy: str = "pad") -> None:
        engine: Any = SimpleNamespace(dynamic=dynamic)
        super().__init__(engine, [ModelPath(FORWARD, INPUTS, OUTPUTS, (BATCH,), BUCKETS)], policy)
        self.opened, self.runs = opened, 0

    def __call__(self, arrays: Mapping[str, Array], route: Route) -> dict[str, Array]:
        if self.opened:
            self.opened.wait(30)
        self.runs += 1
        return {"y": arrays["x"] * 2}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def executor(forward: Forward, clock: Clock | None = None, **limits: Any) -> tuple[Executor, RequestMetrics]:
    clock = clock or Clock()
    metrics = RequestMetrics(CollectorRegistry(), (bucket.name for bucket in BUCKETS))
    return Executor(forward, DeviceLane(clock), Serving(**limits), metrics, clock, lambda _: None), metrics


def rows(count: int) -> dict[str, Array]:
    return {"x": np.ones((count, 3), np.float32)}


def test_an_answer_comes_with_its_route_and_first_requests_are_kept_for_buckets_alone() -> None:
    made, metrics = executor(Doubling())

    async def scenario() -> list[Answer]:
        return [await made.answer(FORWARD, rows(count)) for count in (2, 3, 7)]

    answers = asyncio.run(scenario())
    assert [answer.route.kind for answer in answers] == [Kind.EXACT, Kind.DYNAMIC, Kind.UNCOVERED]
    assert answers[1].outputs["y"].tolist() == [[2.0] * 3] * 3
    assert {name: value is not None for name, value in metrics.first.items()} == {"batch=2": True, "batch=4": False}
    assert metrics.uncovered.labels("pad")._value.get() == 1


def test_more_requests_than_may_wait_are_refused_at_once_and_the_others_are_answered() -> None:
    opened = threading.Event()
    made, _ = executor(Doubling(opened), max_queue_items=2)

    async def scenario() -> tuple[Rejected, list[Answer]]:
        running = [asyncio.create_task(made.answer(FORWARD, rows(2))) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(Rejected) as refused:
            await made.answer(FORWARD, rows(2))
        opened.set()
        return refused.value, await asyncio.gather(*running)

    refused, answers = asyncio.run(scenario())
    assert (refused.status, refused.reason) == (503, "queue_full")
    assert len(answers) == 2


def test_a_request_that_has_not_started_in_time_is_answered_504_at_once_and_never_runs() -> None:
    opened = threading.Event()
    forward = Doubling(opened)
    made, _ = executor(forward, timeout_s=0.05)

    async def scenario() -> Rejected:
        first = asyncio.create_task(made.answer(FORWARD, rows(2)))
        await asyncio.sleep(0)
        with pytest.raises(Rejected) as late:
            await made.answer(FORWARD, rows(2))  # the lane is busy with the first, which waits for this test
        opened.set()
        await first
        return late.value

    late = asyncio.run(scenario())
    assert (late.status, late.reason) == (504, "deadline")
    assert str(late) == "not started within serving.timeout_s = 0.05 s"
    assert forward.runs == 1


def test_a_shape_that_is_refused_is_counted_under_its_policy() -> None:
    made, metrics = executor(Doubling(dynamic=False, policy="reject"))
    with pytest.raises(Rejected) as refused:
        asyncio.run(made.answer(FORWARD, rows(3)))
    assert (refused.value.status, refused.value.reason) == (400, "uncovered")
    assert metrics.uncovered.labels("reject")._value.get() == 1


SPECS = (TensorSpec("a", "INT64", ("n", "m")), TensorSpec("b", "FP32", ("m",)), TensorSpec("c", "BOOL", ()))
GOOD = {"a": np.zeros((2, 5), np.int64), "b": np.zeros(5, np.float32), "c": np.array(True)}


def test_sizes_come_from_all_inputs_together() -> None:
    assert measure(SPECS, GOOD) == {"n": 2, "m": 5}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"b": np.zeros(4, np.float32)}, "input b has shape [4], expected ['m'] with {'n': 2, 'm': 5}"),
        ({"b": np.zeros(5)}, "input b is float64, expected FP32"),
        ({"a": np.zeros(5, np.int64)}, "input a has shape [5], expected ['n', 'm']"),
        ({"d": np.zeros(1)}, "unknown input d; the model takes a, b, c"),
    ],
)
def test_inputs_that_do_not_fit_are_refused_with_name_fact_and_expectation(
    change: dict[str, Array], message: str
) -> None:
    with pytest.raises(Rejected) as refused:
        measure(SPECS, {**GOOD, **change})
    assert (refused.value.status, str(refused.value)) == (400, message)
