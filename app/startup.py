"""Run the start-up graph: one enum of states, one table of moves, one object that changes."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from app.errors import StallError, WarmgateError
from app.graph import Graph, Lane, Skipped, Stage
from app.progress import Progress, Stopped

Clock = Callable[[], float]


class State(StrEnum):
    """The life of a stage."""

    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    SKIPPED = "skipped"
    STOPPED = "stopped"


MOVES: Mapping[State, frozenset[State]] = {
    State.WAITING: frozenset({State.RUNNING, State.STOPPED}),
    State.RUNNING: frozenset({State.DONE, State.FAILED, State.SKIPPED, State.STOPPED}),
    State.DONE: frozenset(),
    State.FAILED: frozenset(),
    State.SKIPPED: frozenset(),
    State.STOPPED: frozenset(),
}

FINISHED = frozenset({State.DONE, State.SKIPPED})


class LaneRunner(Protocol):
    """Runs a function on a lane and waits for it without blocking the event loop."""

    def __call__(self, work: Callable[[], Any], name: str) -> Awaitable[Any]:
        """Return an awaitable of the function's result."""


@dataclass(frozen=True, slots=True)
class StageView:
    """One stage as probes, metrics and reports see it; times in seconds since the process started."""

    name: str
    state: State
    needs: tuple[str, ...]
    lane: Lane
    start_s: float | None
    end_s: float | None
    done: int
    total: int
    unit: str
    ratio: float | None
    detail: str
    rows: tuple[Any, ...]

    @property
    def reason(self) -> str | None:
        """Why this stage keeps the process from being ready, or None."""
        if self.state in FINISHED:
            return None
        amount = f" {self.done} of {self.total} {self.unit}" if self.total else ""
        return f"{self.state}{amount}{': ' + self.detail if self.detail else ''}"


@dataclass(slots=True)
class _Record:
    stage: Stage
    progress: Progress = field(default_factory=Progress)
    state: State = State.WAITING
    start_s: float | None = None
    end_s: float | None = None
    life: tuple[int, str, int] = (0, "", 0)
    life_s: float = 0.0


Listener = Callable[[StageView], None]


class Startup:
    """The one mutable object of a start-up: runs the graph and answers how far it is."""

    def __init__(
        self, graph: Graph, lanes: Mapping[Lane, LaneRunner], clock: Clock, listener: Listener = lambda _: None
    ) -> None:
        self._graph, self._lanes, self._clock, self._listener = graph, lanes, clock, listener
        self._records = {one.name: _Record(one) for one in graph.stages}
        self._lock = threading.RLock()
        self.values: dict[Any, Any] = {}
        self.error: WarmgateError | None = None
        self.finished_s: float | None = None

    async def run(self, *seeds: Any) -> None:
        """Run every stage as soon as its needs are met; the first failure stops the rest and is raised.

        Raises WarmgateError, with the cause chained where the fault was not one of ours, or Stopped.
        """
        self.values = {type(seed): seed for seed in seeds}
        ended = {name: asyncio.Event() for name in self._records}
        try:
            async with asyncio.TaskGroup() as group:
                for record in self._records.values():
                    group.create_task(self._follow(record, ended), name=record.stage.name)
        except BaseExceptionGroup as errors:
            self.stop()
            if self.error is None and all(isinstance(error, Stopped) for error in errors.exceptions):
                raise Stopped from None
            self.error = self.error or _as_ours(errors.exceptions[0], "start-up")
            raise self.error from errors.exceptions[0]
        except asyncio.CancelledError:
            self.stop()
            raise
        self.finished_s = self._clock()

    async def _follow(self, record: _Record, ended: Mapping[str, asyncio.Event]) -> None:
        for name in self._graph.before(record.stage):
            await ended[name].wait()
        lane = self._lanes[record.stage.lane]
        self.values[record.stage.gives] = await lane(lambda: self._perform(record), record.stage.name)
        ended[record.stage.name].set()

    def _perform(self, record: _Record) -> Any:
        """Run one stage on the current thread."""
        if record.progress.stopped:
            raise Stopped
        self._move(record, State.RUNNING)
        given = [record.progress if need is Progress else self.values[need] for need in record.stage.needs]
        try:
            outcome = record.stage.run(*given)
        except Stopped:
            self._move(record, State.STOPPED)
            raise
        except (Exception, SystemExit) as error:
            with self._lock:
                record.progress.detail = str(error).split("\n")[0]
                self._move(record, State.FAILED)
                self.error = self.error or _as_ours(error, record.stage.name)
            if isinstance(error, SystemExit):
                raise self.error from error
            raise
        if isinstance(outcome, Skipped):
            record.progress.detail = outcome.why
            self._move(record, State.SKIPPED)
            return outcome.value
        self._move(record, State.DONE)
        return outcome

    def _move(self, record: _Record, to: State) -> None:
        with self._lock:
            if to not in MOVES[record.state]:
                return  # a stage that ends after it was stopped stays stopped
            record.state = to
            now = self._clock()
            record.life_s = now
            if to is State.RUNNING:
                record.start_s, record.life = now, record.progress.sign_of_life()
            else:
                record.end_s = now
        # Whoever watches (a closed pipe, a full disk under the log) must not decide over the start-up.
        with contextlib.suppress(Exception):
            self._listener(self._view(record))

    def show(self, name: str, rows: tuple[Any, ...]) -> None:
        """Publish records of a stage anew, after it has ended."""
        self._records[name].progress.show(rows)

    def stop(self) -> None:
        """End the start-up: waiting stages never start, running ones are asked to leave."""
        for record in self._records.values():
            record.progress.stop()
            self._move(record, State.STOPPED)

    def fail(self, error: WarmgateError) -> None:
        """End the start-up from outside, for example because it stalled."""
        self.error = self.error or error
        self.stop()

    def find_stall(self, limit_s: float) -> StallError | None:
        """Return an error that names a running stage without a sign of life for `limit_s`; call it regularly."""
        for record in self._records.values():
            if record.state is not State.RUNNING:
                continue
            now, life = self._clock(), record.progress.sign_of_life()
            if life != record.life:
                record.life, record.life_s = life, now
            elif now - record.life_s >= limit_s:
                where = self._view(record).reason
                return StallError(
                    f"stage {record.stage.name} made no progress for {now - record.life_s:.0f} s ({where}); "
                    f"the stacks in the log show where it hangs, startup.stall_timeout_s sets the limit"
                )
        return None

    @property
    def finished(self) -> bool:
        """Every stage has done its work."""
        return self.finished_s is not None

    def snapshot(self) -> tuple[StageView, ...]:
        """Return every stage as it stands, in an order in which they could run one after another."""
        return tuple(self._view(record) for record in self._records.values())

    def view(self, name: str) -> StageView:
        """Return one stage as it stands."""
        return self._view(self._records[name])

    def _view(self, record: _Record) -> StageView:
        one, progress = record.stage, record.progress
        return StageView(
            name=one.name,
            state=record.state,
            needs=self._graph.before(one),
            lane=one.lane,
            start_s=record.start_s,
            end_s=record.end_s,
            done=progress.done,
            total=progress.total,
            unit=progress.unit,
            ratio=1.0 if record.state in FINISHED else progress.ratio,
            detail=progress.detail,
            rows=progress.rows,
        )

    def missing(self) -> tuple[StageView, ...]:
        """Return the stages that have not finished; every request asks, so the answer after the end costs nothing."""
        if self.finished:
            return ()
        return tuple(view for view in self.snapshot() if view.state not in FINISHED)


def settle(startup: Startup, within_s: float = 5.0) -> None:
    """Stop the start-up and wait until no child process, and nothing of it on disk, is left."""
    startup.stop()
    until = time.monotonic() + within_s
    children = {view.name for view in startup.snapshot() if view.lane is Lane.PROCESS}
    while any(thread.name in children for thread in threading.enumerate()) and time.monotonic() < until:
        time.sleep(0.02)


def _as_ours(error: BaseException, where: str) -> WarmgateError:
    if isinstance(error, WarmgateError):
        return error
    return WarmgateError(f"{where} failed: {type(error).__name__}: {error}; the traceback is in the log")
