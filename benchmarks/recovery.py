"""Recovery and scale-out on the example: ready again after a crash, and replicas that start together.

Nothing here has a required figure, so the rows have no bounds; the text says what each is to be compared with.
"""

import os
import signal
import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from benchmarks.process import Sidecar, confined, ready_times
from benchmarks.table import Row

RESTARTS = 5
REPLICAS = (1, 2, 4)
ROUNDS = 3
ENDINGS = (signal.SIGTERM, signal.SIGKILL)


def measure_recovery(directory: Path) -> Iterator[Row]:
    """Yield the rows."""
    store = directory / "store"
    with Sidecar(store) as sidecar:
        sidecar.wait()
    yield from _recovery_rows(store)
    processors = sorted(os.sched_getaffinity(0))
    text = f"sharing {len(processors)} processors, each as if alone"
    yield from _scale_rows(store, [[processors] * count for count in REPLICAS], text)
    yield from _own_processor_rows(directory / "single", processors)


def _recovery_rows(store: Path) -> Iterator[Row]:
    times = _restarts(store)
    ended, killed = (statistics.median(times[number]) for number in ENDINGS)
    text = "what recovery is compared with"
    yield Row(f"restart after SIGTERM: median of {RESTARTS}", ended, None, "s", text)
    text = f"{killed / ended:.2f} × the restart after SIGTERM"
    yield Row(f"recovery from kill -9 of a ready one: median of {RESTARTS}", killed, None, "s", text)
    text = f"of SIGTERM {max(times[signal.SIGTERM]):.3g} s"
    yield Row("… worst", max(times[signal.SIGKILL]), None, "s", text)


def _restarts(store: Path) -> dict[signal.Signals, list[float]]:
    """Return the seconds to ready by how the one before was ended, in turn, so that both meet the same machine."""
    times: dict[signal.Signals, list[float]] = {number: [] for number in ENDINGS}
    before = None
    for turn in range(1 + RESTARTS * len(ENDINGS)):
        with Sidecar(store) as sidecar:
            seconds = sidecar.wait()
            sidecar.warm_status()
            if before is not None:
                times[before].append(seconds)
            before = ENDINGS[turn % len(ENDINGS)]
            sidecar.end(before)
    return times


def _own_processor_rows(store: Path, processors: Sequence[int]) -> Iterator[Row]:
    """Give each replica one processor, as many replicas as there are; their code is built for one thread."""
    with Sidecar(store, "device.threads=1") as sidecar:
        sidecar.wait()
    counts = [count for count in REPLICAS if count <= len(processors)]
    shares = [[[processor] for processor in processors[:count]] for count in counts]
    yield from _scale_rows(store, shares, "a processor of its own for each", "device.threads=1")


def _scale_rows(store: Path, fleets: Sequence[Sequence[Sequence[int]]], text: str, *assignments: str) -> Iterator[Row]:
    """Yield first and last ready of every fleet, which is given by the processors of each replica."""
    times: list[list[list[float]]] = [[] for _ in fleets]
    for _ in range(ROUNDS):
        for fleet, rounds in zip(fleets, times, strict=True):
            rounds.append(_start_together(store, fleet, assignments))
    alone = statistics.median(one[0] for one in times[0])
    for fleet, rounds in zip(fleets, times, strict=True):
        first, last = (statistics.median(one[place] for one in rounds) for place in (0, -1))
        if len(fleet) == 1:
            yield Row(f"1 replica, warm: median of {ROUNDS}", first, None, "s", text)
            continue
        yield Row(f"{len(fleet)} at once: first ready", first, None, "s", f"{first / alone:.2f} × one; {text}")
        yield Row("… last ready", last, None, "s", f"{last / alone:.2f} × one; {text}")


def _start_together(store: Path, fleet: Sequence[Sequence[int]], assignments: Sequence[str]) -> list[float]:
    """Return the seconds from the first exec until each of the fleet is ready, the shortest first."""
    with ExitStack() as stack:
        replicas = []
        for number, processors in enumerate(fleet):
            file = f"report.file={store.with_suffix(f'.{number}.json')}"
            with confined(processors):
                replicas.append(stack.enter_context(Sidecar(store, file, *assignments)))
        times = ready_times(replicas, every_s=0.01)
        for replica in replicas:
            replica.warm_status()
    return times
