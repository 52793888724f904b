"""From a request's arrays through one queue to the device lane, and back."""

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import Future

from app.buckets import Kind, Route
from app.errors import DeviceLostError
from app.lanes import DeviceLane
from app.servable import Answer, Array, Rejected
from app.serving.forward import Forward
from app.serving.requests import RequestMetrics
from app.settings import Serving
from app.startup import Clock

# Called on the device lane after each run with its inputs.
AfterRun = Callable[[Mapping[str, Array]], None]


class Executor:
    """The servable: bounded, timed, one request a run."""

    def __init__(
        self,
        forward: Forward,
        lane: DeviceLane,
        limits: Serving,
        metrics: RequestMetrics,
        clock: Clock,
        after_run: AfterRun,
    ) -> None:
        self._forward, self._lane, self._limits = forward, lane, limits
        self._metrics, self._clock, self._after_run = metrics, clock, after_run
        self._waiting = 0
        self._waiting_bytes = 0

    async def answer(self, path: str, arrays: Mapping[str, Array]) -> Answer:
        """Run one request by one of the model's paths.

        Raises Rejected when its shape, the queue or its deadline does not allow it.
        """
        # Whatever takes its place meanwhile: a request is run by the forward that has found its route.
        forward = self._forward
        route = self._route(forward, path, arrays)
        size = sum(array.nbytes for array in arrays.values())
        self._admit(size)
        arrived = self._clock()
        try:
            answer = await self._wait(self._lane.submit(lambda: self._run(forward, arrays, route, arrived)))
        except DeviceLostError as error:
            raise Rejected(503, str(error), "not_ready") from error
        finally:
            self._waiting -= 1
            self._waiting_bytes -= size
            self._publish()
        self._count(answer)
        return answer

    def use(self, forward: Forward) -> None:
        """Run the requests that arrive from now on by another forward."""
        self._forward = forward

    def _route(self, forward: Forward, path: str, arrays: Mapping[str, Array]) -> Route:
        policy = forward.coverages[path].policy
        try:
            route = forward.route(path, arrays)
        except Rejected as refusal:
            if refusal.reason == "uncovered":
                self._metrics.uncovered.labels(policy).inc()
            raise
        if route.kind in {Kind.PADDED, Kind.UNCOVERED}:
            self._metrics.uncovered.labels(policy).inc()
        return route

    async def _wait(self, running: "Future[Answer]") -> Answer:
        """Wait for the answer; raises Rejected (504) when the request has not started within its time."""
        waited = asyncio.wrap_future(running)
        await asyncio.wait([waited], timeout=self._limits.timeout_s)
        if not waited.done() and running.cancel():
            raise self._late()
        return await waited

    def _late(self) -> Rejected:
        return Rejected(504, f"not started within serving.timeout_s = {self._limits.timeout_s:g} s", "deadline")

    def _admit(self, size: int) -> None:
        if self._waiting >= self._limits.max_queue_items or (
            self._waiting and self._waiting_bytes + size > self._limits.max_queue_bytes
        ):
            raise Rejected(503, f"{self._waiting} requests are waiting; try again later", "queue_full")
        self._waiting += 1
        self._waiting_bytes += size
        self._publish()

    def _publish(self) -> None:
        self._metrics.queue_items.set(self._waiting)
        self._metrics.queue_bytes.set(self._waiting_bytes)

    def _run(self, forward: Forward, arrays: Mapping[str, Array], route: Route, arrived: float) -> Answer:
        began = self._clock()
        if began - arrived > self._limits.timeout_s:
            raise self._late()
        outputs = forward(arrays, route)
        ended = self._clock()
        self._after_run(arrays)
        return Answer(outputs, route, began - arrived, ended - began)

    def _count(self, answer: Answer) -> None:
        metrics, route = self._metrics, answer.route
        metrics.duration.labels("queue").observe(answer.queue_s)
        metrics.duration.labels("compute").observe(answer.compute_s)
        metrics.batch_size.observe(1)
        if route.kind is Kind.EXACT and route.bucket:
            metrics.note_first(route.bucket.name, answer.compute_s)
        metrics.padding.set(route.padding)
