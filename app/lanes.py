"""Threads that work is handed to: one for the device, as many as asked for files and child processes."""

import asyncio
import queue
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Any, TypeVar

from app.errors import DeviceLostError
from app.startup import Clock

T = TypeVar("T")


def _settle(future: "Future[T]", work: Callable[[], T]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(work())
    except BaseException as error:  # noqa: BLE001 - whatever happened belongs to the caller, not to this thread
        future.set_exception(error)


def spawn(work: Callable[[], T], name: str) -> "Future[T]":
    """Run work on a new daemon thread: one that hangs in a system call must not keep the process from leaving."""
    future: Future[T] = Future()
    threading.Thread(target=_settle, args=(future, work), name=name, daemon=True).start()
    return future


async def run_on_thread(work: Callable[[], Any], name: str) -> Any:
    """Run work on a thread of its own and wait for it."""
    return await asyncio.wrap_future(spawn(work, name))


def run_in_parallel(work: Sequence[Callable[[], None]], threads: int, name: str) -> None:
    """Do everything on several threads; the first failure ends the others at their next piece of work."""
    todo = iter(work)
    lock = threading.Lock()
    failed = threading.Event()

    def drain() -> None:
        while not failed.is_set():
            with lock:
                one = next(todo, None)
            if one is None:
                return
            try:
                one()
            except BaseException:
                failed.set()
                raise

    futures = [spawn(drain, f"{name}-{number}") for number in range(threads)]
    # The first failure is told at once, even while another thread waits for a server that does not answer.
    for future in wait(futures, return_when=FIRST_EXCEPTION).done:
        future.result()
    for future in futures:
        future.result()


class Crew:
    """As many threads as asked for, that work is handed to in the order of its arrival.

    Daemons, unlike those of a library's pools: user's code that hangs must not keep the process from leaving.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        for number in range(threads):
            threading.Thread(target=self._serve, name=f"{name}-{number}", daemon=True).start()

    def _serve(self) -> None:
        while True:
            _settle(*self._jobs.get())

    async def run(self, work: Callable[[], T]) -> T:
        """Hand work to the next thread that is free and wait for it; what is cancelled before never begins."""
        future: Future[T] = Future()
        self._jobs.put((future, work))
        return await asyncio.wrap_future(future)


class DeviceLane:
    """The one thread that touches the device, from importing the runtime to the last request.

    One thread, not a pool: a captured graph belongs to the thread that captured it (pytorch#123177), a compiled
    function warmed on one thread is cold on another, and a second thread that ever ran a parallel operator keeps an
    OpenMP team of its own and slows every later forward. A daemon, because a thread that is stuck in a driver cannot
    be ended and must not keep the process alive.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        self.busy_since: float | None = None
        self.lost: str | None = None
        self._lost_s = 0.0
        self.heartbeat = clock()
        self._thread = threading.Thread(target=self._serve, name="device", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        try:
            while True:
                self._serve_one()
        finally:
            self.lose("the device thread has ended")

    def _serve_one(self) -> None:
        try:
            future, work = self._jobs.get(timeout=1.0)
        except queue.Empty:
            self.heartbeat = self._clock()
            return
        self.busy_since = self.heartbeat = self._clock()
        _settle(future, work)
        self.busy_since = None
        self.heartbeat = self._clock()

    def submit(self, work: Callable[[], T]) -> "Future[T]":
        """Hand work to the device thread; raises DeviceLostError when that thread or the device is gone."""
        if self.lost:
            raise DeviceLostError(f"{self.lost}; restart the process")
        future: Future[T] = Future()
        self._jobs.put((future, work))
        return future

    def lose(self, reason: str) -> None:
        """Take no more work: the device does not answer, and only a new process gets it back."""
        if self.lost is None:
            self.lost, self._lost_s = reason, self._clock()

    def run(self, work: Callable[[], Any], name: str) -> Awaitable[Any]:
        """Hand work to the device thread and wait for it without blocking the event loop."""
        del name
        return asyncio.wrap_future(self.submit(work))

    def why_not(self, limit_s: float) -> str | None:
        """Reason for the `engine` check: the device or its thread is gone, or one piece of work does not end."""
        if self.lost:
            return self.lost
        since = self.busy_since
        if since is not None and self._clock() - since > limit_s:
            return f"one call has been running for {self._clock() - since:.0f} s"
        return None

    def why_dead(self, limit_s: float, grace_s: float) -> str | None:
        """Reason to restart the process: as `why_not`, but the loss of the device counts only after `grace_s`.

        Until then readiness alone is off, so that what waits is answered and no more is sent.
        """
        if self.lost and self._clock() - self._lost_s < grace_s:
            return None
        return self.why_not(limit_s)
