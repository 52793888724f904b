"""From a request's arrays to its answer: admission, the wait for company, the device lane, deadlines."""

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import Future

from app.buckets import Kind, Route
from app.errors import DeviceLostError
from app.lanes import DeviceLane
from app.paths import ModelPath
from app.servable import Answer, Question, Rejected
from app.serving.batching import Batching, volume
from app.serving.forward import Forward, measure
from app.serving.requests import RequestMetrics
from app.serving.runs import AfterRun, Outcome, Run, Runner, Waiting
from app.settings import Serving
from app.startup import Clock

# What waits is looked after this often: deadlines that have passed, clients that have left, a device that is gone.
TEND_S = 0.05


class Executor:
    """The servable: bounded, batched, timed. Its methods run on the event loop, what it runs on the device lane."""

    def __init__(
        self,
        forward: Forward,
        lane: DeviceLane,
        limits: Serving,
        metrics: RequestMetrics,
        clock: Clock,
        after_run: AfterRun,
    ) -> None:
        self.use(forward)
        self._lane, self._limits, self._metrics, self._clock = lane, limits, metrics, clock
        self._run = Runner(clock, after_run)
        self._queue: list[Waiting] = []
        self._running: Sequence[Waiting] = ()
        self._admitted = self._admitted_bytes = 0
        self._expected, self._ended_s = 1, float("-inf")
        self._later: asyncio.TimerHandle | None = None
        self._tending: asyncio.TimerHandle | None = None
        metrics.queue_items.set_function(lambda: self._admitted)
        metrics.queue_bytes.set_function(lambda: self._admitted_bytes)

    async def answer(self, question: Question) -> Answer:
        """Run one request; raises Rejected when its shape, the queue or its deadline does not allow it.

        A client's own timeout only shortens the configured one.
        """
        one = self._waiting(question)
        self._admit(one)
        self._queue.append(one)
        try:
            self._start()
            self._tend_later()
            return await one.answer
        finally:
            self._admitted -= 1
            self._admitted_bytes -= one.bytes

    def path(self, name: str) -> ModelPath:
        """Return one of the model's paths as it is served now."""
        return self._forward.paths[name]

    def use(self, forward: Forward) -> None:
        """Run the requests that arrive from now on by another forward; those that wait keep theirs."""
        self._forward = forward
        paths = forward.paths.items()
        self._batchings = {name: Batching.of(path, forward.coverages[name]) for name, path in paths}

    def _waiting(self, question: Question) -> Waiting:
        forward, batching, now = self._forward, self._batchings[question.path], self._clock()
        sizes = measure(forward.paths[question.path].inputs, question.arrays)
        route = self._route(forward, question.path, sizes)
        size = sum(array.nbytes for array in question.arrays.values())
        deadline = now + min(question.timeout_s or self._limits.timeout_s, self._limits.timeout_s)
        answer = asyncio.get_running_loop().create_future()
        return Waiting(question, forward, batching, sizes, route, size, now, deadline, answer)

    def _route(self, forward: Forward, path: str, sizes: Mapping[str, int]) -> Route:
        policy = forward.coverages[path].policy
        try:
            route = forward.route(path, sizes)
        except Rejected as refusal:
            if refusal.reason == "uncovered":
                self._metrics.uncovered.labels(policy).inc()
            raise
        if route.kind in {Kind.PADDED, Kind.UNCOVERED}:
            self._metrics.uncovered.labels(policy).inc()
        return route

    def _admit(self, one: Waiting) -> None:
        if self._admitted >= self._limits.max_queue_items or (
            self._admitted and self._admitted_bytes + one.bytes > self._limits.max_queue_bytes
        ):
            raise Rejected(503, f"{self._admitted} requests are waiting; try again later", "queue_full")
        self._admitted += 1
        self._admitted_bytes += one.bytes

    def _start(self) -> None:
        """Hand the next batch to the device, unless one runs or more requests are on their way."""
        if self._running:  # what waits meanwhile is looked after by `_tend`
            return
        if self._later is not None:
            self._later.cancel()
            self._later = None
        self._sort_out()
        if not self._queue:
            return
        if (wait_s := self._worth_waiting_s()) > 0:
            self._later = asyncio.get_running_loop().call_later(wait_s, self._start)
            return
        self._launch(*self._next())

    def _worth_waiting_s(self) -> float:
        """Return how long to wait for company: never on an idle device, never longer than the oldest may wait.

        Clients that have just been answered usually ask again at once: as many as were there when the last batch
        began are waited for, so that a batch of 32 is not followed by one of 1 and one of 31.
        """
        now, oldest = self._clock(), self._queue[0]
        delay = self._limits.max_batch_delay_ms / 1000
        if now - self._ended_s >= delay or len(self._queue) >= min(self._expected, oldest.batching.most):
            return 0.0
        return oldest.arrived + delay - now

    def _next(self) -> tuple[list[Waiting], Route]:
        """Take the requests of the next run out of the queue."""
        leader = self._queue[0]
        alike = [one for one in self._queue if one.batching is leader.batching]
        batch, route = leader.batching.choose(alike)
        taken = set(map(id, batch))
        self._queue = [one for one in self._queue if id(one) not in taken]
        return batch, route

    def _launch(self, batch: list[Waiting], route: Route) -> None:
        loop = asyncio.get_running_loop()
        self._running, self._expected = batch, len(batch) + len(self._queue)
        try:
            running = self._lane.submit(lambda: self._run(batch, route))
        except DeviceLostError as error:
            self._fail(error)
            return
        running.add_done_callback(lambda ended: loop.call_soon_threadsafe(self._finish, batch, ended))

    def _finish(self, batch: Sequence[Waiting], running: "Future[list[Run]]") -> None:
        """Answer a batch, once the next one is on its way."""
        self._ended_s = self._clock()
        error = running.exception()
        if isinstance(error, DeviceLostError):
            self._lane.lose(str(error))
            self._fail(error)
            return
        self._running = ()
        self._start()
        runs = [Run(batch, batch[0].route, [error] * len(batch))] if error else running.result()
        for run in runs:
            for one, outcome in zip(run.batch, run.outcomes, strict=True):
                _settle(one, outcome)
            self._count(run)

    def _fail(self, error: DeviceLostError) -> None:
        """Answer everything that waits or runs: nothing will run any more."""
        lost, self._running, self._queue = [*self._running, *self._queue], (), []
        for one in lost:
            _settle(one, Rejected(503, str(error), "not_ready"))

    def _sort_out(self) -> None:
        """Drop what must not run any more."""
        now, left = self._clock(), list[Waiting]()
        for one in self._queue:
            if one.answer.done():  # its handler was cancelled
                continue
            if now >= one.deadline:
                _settle(one, one.late())
            else:
                left.append(one)
        self._queue = left

    def _tend(self) -> None:
        """Look after what waits and what runs until nothing does."""
        self._sort_out()
        long_ago = self._clock() - TEND_S
        for one in [one for one in self._queue if one.arrived <= long_ago and one.question.gone()]:
            self._queue.remove(one)
            _settle(one, Rejected(503, "the client left before its request ran", "disconnected"))
        if self._lane.lost:
            self._fail(DeviceLostError(f"{self._lane.lost}; restart the process"))
        self._tending = None
        if self._queue or self._running:
            self._tend_later()

    def _tend_later(self) -> None:
        if self._tending is None:
            self._tending = asyncio.get_running_loop().call_later(TEND_S, self._tend)

    def _count(self, run: Run) -> None:
        if run.seconds is None:
            return
        metrics = self._metrics
        asked = sum(volume(one.sizes) for one in run.batch)
        computed = volume(dict(run.route.sizes))
        metrics.batch_size.observe(len(run.batch))
        metrics.padding.set(1 - asked / computed)
        metrics.positions.labels("request").inc(asked)
        metrics.positions.labels("padding").inc(computed - asked)
        for one in run.outcomes:
            if isinstance(one, Answer):
                metrics.duration.labels("queue").observe(one.queue_s)
                metrics.duration.labels("compute").observe(one.compute_s)
        if run.route.kind is Kind.EXACT and run.route.bucket:
            metrics.note_first(run.route.bucket.name, run.seconds)


def _settle(one: Waiting, outcome: Outcome) -> None:
    """Give a request its answer, unless nobody waits for it any more."""
    if one.answer.done():
        return
    if isinstance(outcome, Answer):
        one.answer.set_result(outcome)
    else:
        one.answer.set_exception(outcome)
