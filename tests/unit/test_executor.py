"""Requests on their way to the device lane: admitted, timed, refused; the lane is real, the model a function."""

import asyncio
import threading
import time
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from app.buckets import FORWARD, Bucket, Dimension, Kind, Route
from app.errors import DeviceLostError
from app.lanes import DeviceLane
from app.paths import ModelPath
from app.servable import Answer, Array, Question, Rejected, TensorSpec
from app.serving.executor import Executor
from app.serving.forward import Forward, measure
from app.serving.requests import RequestMetrics
from app.serving.runs import AfterRun
from app.settings import Serving

BATCH = Dimension("batch", 1, 8, (2, 4))
BUCKETS = (Bucket((("batch", 2),)), Bucket((("batch", 4),)))
INPUTS = (TensorSpec("x", "FP32", ("batch", 3), pad=-1),)
OUTPUTS = (TensorSpec("y", "FP32", ("batch", 3)),)


class Doubling(Forward):
    """Routes as the real one; the computation is a function of arrays that may wait for a gate or fail on a value."""

    def __init__(
        self,
        opened: threading.Event | None = None,
        dynamic: bool = True,
        policy: str = "pad",
        fails: Mapping[float, Exception] | None = None,
    ) -> None:
        engine: Any = SimpleNamespace(dynamic=dynamic)
        super().__init__(engine, [ModelPath(FORWARD, INPUTS, OUTPUTS, (BATCH,), BUCKETS)], policy)
        self.opened, self.fails, self.batches = opened, fails or {}, list[int]()
        self.began = threading.Event()

    def __call__(self, arrays: Mapping[str, Array], route: Route) -> dict[str, Array]:
        self.began.set()
        if self.opened:
            self.opened.wait(30)
        for value, error in self.fails.items():
            if (arrays["x"] == value).any():
                raise error
        self.batches.append(len(arrays["x"]))
        return {"y": arrays["x"] * 2}


def executor(forward: Forward, after_run: AfterRun = lambda _: None, **limits: Any) -> tuple[Executor, RequestMetrics]:
    metrics = RequestMetrics(CollectorRegistry(), (bucket.name for bucket in BUCKETS))
    lane = DeviceLane(time.monotonic)
    return Executor(forward, lane, Serving(**limits), metrics, time.monotonic, after_run), metrics


async def answer(made: Executor, arrays: dict[str, Array], *limits: Any) -> Answer:
    return await made.answer(Question(FORWARD, arrays, *limits))


def rows(count: int, value: float = 1) -> dict[str, Array]:
    return {"x": np.full((count, 3), value, np.float32)}


def test_an_answer_comes_with_its_route_and_first_requests_are_kept_for_buckets_alone() -> None:
    made, metrics = executor(Doubling())

    async def scenario() -> list[Answer]:
        return [await answer(made, rows(count)) for count in (2, 3, 7)]

    answers = asyncio.run(scenario())
    assert [answer.route.kind for answer in answers] == [Kind.EXACT, Kind.DYNAMIC, Kind.UNCOVERED]
    assert answers[1].outputs["y"].tolist() == [[2.0] * 3] * 3
    assert {name: value is not None for name, value in metrics.first.items()} == {"batch=2": True, "batch=4": False}
    assert metrics.uncovered.labels("pad")._value.get() == 1


def test_more_requests_than_may_wait_are_refused_at_once_and_the_others_are_answered() -> None:
    opened = threading.Event()
    made, _ = executor(Doubling(opened), max_queue_items=2)

    async def scenario() -> tuple[Rejected, list[Answer]]:
        running = [asyncio.create_task(answer(made, rows(2))) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(Rejected) as refused:
            await answer(made, rows(2))
        opened.set()
        return refused.value, await asyncio.gather(*running)

    refused, answers = asyncio.run(scenario())
    assert (refused.status, refused.reason) == (503, "queue_full")
    assert len(answers) == 2


def test_a_request_that_has_not_started_in_time_is_answered_504_and_never_runs() -> None:
    opened = threading.Event()
    forward = Doubling(opened)
    made, _ = executor(forward, timeout_s=30)

    async def scenario() -> list[Rejected]:
        first = asyncio.create_task(answer(made, rows(2)))
        await asyncio.sleep(0)
        late = []
        for asked in (0.01, 0.02):
            with pytest.raises(Rejected) as caught:
                await answer(made, rows(2), asked)  # the lane is busy with the first, which waits for this test
            late.append(caught.value)
        opened.set()
        await first
        return late

    late = asyncio.run(scenario())
    assert [(one.status, one.reason) for one in late] == [(504, "deadline")] * 2
    assert str(late[1]) == "not started within 0.02 s"
    assert forward.batches == [2]


def test_a_client_may_shorten_the_configured_time_and_not_lengthen_it() -> None:
    opened = threading.Event()
    made, _ = executor(Doubling(opened), timeout_s=0.02)

    async def scenario() -> str:
        first = asyncio.create_task(answer(made, rows(2)))
        await asyncio.sleep(0)
        with pytest.raises(Rejected) as caught:
            await answer(made, rows(2), 25.0)
        opened.set()
        await first
        return str(caught.value)

    assert asyncio.run(scenario()) == "not started within 0.02 s"


def test_a_request_whose_client_has_left_never_runs() -> None:
    opened = threading.Event()
    forward = Doubling(opened)
    made, _ = executor(forward)

    async def scenario() -> Rejected:
        first = asyncio.create_task(answer(made, rows(2)))
        await asyncio.sleep(0)
        with pytest.raises(Rejected) as caught:
            await answer(made, rows(4), None, lambda: True)
        opened.set()
        await first
        return caught.value

    left = asyncio.run(scenario())
    assert (left.status, left.reason) == (503, "disconnected")
    assert forward.batches == [2]


def test_a_handler_that_was_cancelled_leaves_nothing_that_runs() -> None:
    opened = threading.Event()
    forward = Doubling(opened)
    made, metrics = executor(forward)

    async def scenario() -> None:
        first = asyncio.create_task(answer(made, rows(2)))
        second = asyncio.create_task(answer(made, rows(4)))
        await asyncio.sleep(0)
        second.cancel()
        await asyncio.wait([second])
        opened.set()
        await first

    asyncio.run(scenario())
    assert forward.batches == [2]
    assert metrics.queue_items.collect()[0].samples[0].value == 0


async def _behind(made: Executor, forward: Doubling, requests: Sequence[dict[str, Array]]) -> list[Any]:
    """Let requests queue behind one that runs, then let all run; returns their answers or errors."""
    assert forward.opened is not None
    first = asyncio.create_task(answer(made, rows(1)))
    await asyncio.to_thread(forward.began.wait, 30)
    waiting = [asyncio.create_task(answer(made, request)) for request in requests]
    await asyncio.sleep(0)
    forward.opened.set()
    await first
    return await asyncio.gather(*waiting, return_exceptions=True)


def test_requests_that_wait_run_together_up_to_the_largest_bucket_and_each_gets_its_own_rows() -> None:
    forward = Doubling(threading.Event())
    made, metrics = executor(forward)
    answers = asyncio.run(_behind(made, forward, [rows(1, value) for value in range(6)]))
    assert [answer.outputs["y"].tolist() for answer in answers] == [[[2.0 * value] * 3] for value in range(6)]
    assert forward.batches == [1, 4, 2]
    assert metrics.positions.labels("request")._value.get() == 7
    assert metrics.positions.labels("padding")._value.get() == 0


@pytest.mark.parametrize("bad", [ValueError("bad"), MemoryError("no memory"), RuntimeError("broken")])
def test_an_error_that_belongs_to_one_request_does_not_reach_its_neighbours(bad: Exception) -> None:
    forward = Doubling(threading.Event(), fails={2.0: bad})
    made, _ = executor(forward)
    answers = asyncio.run(_behind(made, forward, [rows(1, value) for value in range(4)]))
    assert answers[2] is bad
    assert [answers[i].outputs["y"][0, 0] for i in (0, 1, 3)] == [0.0, 2.0, 6.0]


def test_a_lost_device_fails_what_waits_and_what_comes_at_once() -> None:
    forward = Doubling(threading.Event(), fails={1.0: DeviceLostError("the device fell off the bus")})
    made, _ = executor(forward)

    async def scenario() -> list[Any]:
        first = asyncio.create_task(answer(made, rows(1)))
        waiting = asyncio.create_task(answer(made, rows(2)))
        await asyncio.to_thread(forward.began.wait, 30)
        assert forward.opened is not None
        forward.opened.set()
        found = await asyncio.gather(first, waiting, return_exceptions=True)
        return [*found, *await asyncio.gather(answer(made, rows(1)), return_exceptions=True)]

    found = asyncio.run(scenario())
    assert [(one.status, one.reason) for one in found] == [(503, "not_ready")] * 3
    assert all("the device fell off the bus" in str(one) for one in found)


def test_what_other_work_on_the_device_thread_makes_late_never_runs() -> None:
    forward, opened = Doubling(), threading.Event()
    made, _ = executor(forward)

    async def scenario() -> list[Any]:
        other = asyncio.wrap_future(made._lane.submit(lambda: opened.wait(30)))
        late = asyncio.create_task(answer(made, rows(2), 0.02))
        await asyncio.sleep(0.05)  # its time passes while it waits for the thread
        opened.set()
        await other
        return [*await asyncio.gather(late, return_exceptions=True), await answer(made, rows(4))]

    late, found = asyncio.run(scenario())
    assert (late.status, late.reason) == (504, "deadline")
    assert found.outputs["y"].shape == (4, 3)
    assert forward.batches == [4]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_device_thread_that_has_ended_is_a_lost_device() -> None:
    made, _ = executor(Doubling())
    broken: Any = None
    made._lane._jobs.put(broken)
    made._lane._thread.join(10)
    with pytest.raises(Rejected, match="the device thread has ended; restart the process") as refused:
        asyncio.run(answer(made, rows(2)))
    assert (refused.value.status, made._lane.why_not(60)) == (503, "the device thread has ended")


def test_the_loss_of_the_device_ends_readiness_at_once_and_liveness_after_the_grace() -> None:
    now = 0.0
    lane = DeviceLane(lambda: now)
    lane.lose("gone")
    assert (lane.why_not(60), lane.why_dead(60, grace_s=5)) == ("gone", None)
    now = 5.0
    assert lane.why_dead(60, grace_s=5) == "gone"


def test_a_client_alone_is_never_delayed_and_several_are_waited_for() -> None:
    """The delay is longer than the test may take: only what does not wait can pass."""
    forward = Doubling()
    made, _ = executor(forward, max_batch_delay_ms=1e6)

    async def scenario() -> None:
        for _ in range(3):
            await answer(made, rows(1))
        several = [answer(made, rows(1)) for _ in range(3)]
        await asyncio.gather(*several)  # the first runs alone: none was expected with it
        assert forward.batches == [1, 1, 1, 1, 2]
        await asyncio.gather(*(answer(made, rows(1)) for _ in range(2)))
        assert forward.batches[5:] == [2]

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_a_shape_that_is_refused_is_counted_under_its_policy() -> None:
    made, metrics = executor(Doubling(dynamic=False, policy="reject"))
    with pytest.raises(Rejected) as refused:
        asyncio.run(answer(made, rows(3)))
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
