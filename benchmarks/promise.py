"""The promise on the example: no request pays for being the first, nothing compiles late, warm-up costs its runs.

What a request is compared with comes from the same process, later. A shape has one first request in a process, so
several warm starts are pooled. No measurement is left out: what the machine alone does to such ratios is shown by the
second requests, of which there are as many, against the same medians.
"""

import itertools
import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app import configure
from app.settings import Settings
from benchmarks.process import EXAMPLE, KUBELET_S, Sidecar, inference
from benchmarks.table import Row

# Bounds of the ratios of first requests to later ones: of their median, and of the worst.
MEDIAN, WORST = 1.05, 1.5
STARTS = 3
SHAPES = 50
# Rounds through all shapes after the first and the second request of each: their median is the steady time.
STEADY_ROUNDS = 10
# Engine → requests of the run that looks for late compiles. aot has no compiler to call, so its run is the long one
# that any request may spoil; jit could compile in a request, and pads every shape to a bucket, which takes longer.
REQUESTS = {"aot": 10_000, "jit": 1_000}
CLIENTS = 4
SEED = 19
COMPUTE = 'warmgate_request_duration_seconds_sum{part="compute"}'

Shape = tuple[int, ...]
Ask = Callable[[bytes], float]


@dataclass(frozen=True)
class Start:
    """What one warm start gave: seconds by shape, in the order of asking; `compute_s`: of each bucket once."""

    first: Mapping[Shape, float]
    second: Mapping[Shape, float]
    steady: Mapping[Shape, float]
    warmup_s: float
    compute_s: float

    def ratios(self, seconds: Mapping[Shape, float], shapes: Sequence[Shape]) -> list[float]:
        return [seconds[shape] / self.steady[shape] for shape in shapes]


def measure_promise(directory: Path) -> Iterator[Row]:
    """Yield the rows."""
    settings = configure.load(EXAMPLE)
    for engine in REQUESTS:
        with Sidecar(directory / engine, f"compile.engine={engine}") as sidecar:
            sidecar.wait(every_s=KUBELET_S)
    buckets, between = _promised(settings)
    drawn = random.Random(SEED).sample(between, SHAPES)
    starts = [_start(directory / "aot", buckets, drawn, number) for number in range(STARTS)]
    yield from _request_rows(starts, f"{len(buckets)} buckets", buckets)
    yield from _request_rows(starts, f"{SHAPES} random shapes", drawn)
    yield _very_first_row(starts)
    yield _warmup_row(starts, settings.warmup.calls, len(buckets))
    for engine, requests in REQUESTS.items():
        yield _late_compiles_row(directory / engine, [*buckets, *between], requests)


def _promised(settings: Settings) -> tuple[list[Shape], list[Shape]]:
    """Return the buckets, and every other shape that fits into one; sizes in the order of the dimensions."""
    buckets = [tuple(size for _, size in bucket.sizes) for bucket in settings.buckets]
    (path,) = settings.model_paths
    shapes = itertools.product(*(range(one.min, one.max + 1) for one in path.dimensions))
    names = [one.name for one in path.dimensions]
    fitting = (s for s in shapes if any(b.holds(dict(zip(names, s, strict=True))) for b in settings.buckets))
    return buckets, [shape for shape in fitting if shape not in buckets]


def _start(store: Path, buckets: Sequence[Shape], drawn: Sequence[Shape], number: int) -> Start:
    """Start warm; ask for each shape once a round, so that later requests follow other shapes as the first ones do."""
    order = random.Random(SEED + number)
    bodies = {shape: inference(*shape) for shape in (*buckets, *drawn)}
    with Sidecar(store, "compile.engine=aot") as sidecar:
        sidecar.wait(every_s=KUBELET_S)
        ask = sidecar.asker()
        first, second, *later = [_round(ask, bodies, order) for _ in range(2 + STEADY_ROUNDS)]
        compute_s = sum(_compute_s(sidecar, ask, bodies[shape]) for shape in buckets)
        stage = next(stage for stage in sidecar.warm_status()["stages"] if stage["name"] == "warm-buckets")
    steady = {shape: statistics.median(one[shape] for one in later) for shape in bodies}
    return Start(first, second, steady, stage["end_s"] - stage["start_s"], compute_s)


def _round(ask: Ask, bodies: Mapping[Shape, bytes], order: random.Random) -> dict[Shape, float]:
    """Return the seconds of one request of each shape; each round in an order of its own."""
    return {shape: ask(bodies[shape]) for shape in order.sample(list(bodies), len(bodies))}


def _compute_s(sidecar: Sidecar, ask: Ask, body: bytes) -> float:
    """Return the median seconds in the engine of as many further requests as there were rounds, as the server counts.

    A mean would let one disturbed request loosen the bound.
    """
    sums = [sidecar.metric(COMPUTE)]
    for _ in range(STEADY_ROUNDS):
        ask(body)
        sums.append(sidecar.metric(COMPUTE))
    return statistics.median(after - before for before, after in itertools.pairwise(sums))


def _request_rows(starts: Sequence[Start], what: str, shapes: Sequence[Shape]) -> Iterator[Row]:
    first = [ratio for start in starts for ratio in start.ratios(start.first, shapes)]
    second = [ratio for start in starts for ratio in start.ratios(start.second, shapes)]
    text = f"of the shape's median of {STEADY_ROUNDS} later"
    median = statistics.median(first)
    yield Row(f"first request, {what}: median of {len(first)}", median, MEDIAN, "×", f"{MEDIAN} × {text}")
    yield Row("… worst", max(first), WORST, "×", f"{WORST} × {text}")
    noise = statistics.median(second)
    # Requests that are nobody's first are as fast as later ones on a machine that does the same all the time.
    quiet = abs(noise - 1) <= MEDIAN - 1
    text = "the machine alone" if quiet else "the machine alone: too restless for these rows to say anything"
    yield Row("… second request: median", noise, None, "×", text)
    yield Row("… worst", max(second), None, "×", text)


def _very_first_row(starts: Sequence[Start]) -> Row:
    shapes = [next(iter(start.first)) for start in starts]
    ratios = [start.first[shape] / start.steady[shape] for start, shape in zip(starts, shapes, strict=True)]
    told = ", ".join("×".join(map(str, shape)) for shape in shapes)
    what = f"the very first after ready: worst of {STARTS}"
    return Row(what, max(ratios), None, "×", f"among those above; shapes {told}")


def _warmup_row(starts: Sequence[Start], calls: int, buckets: int) -> Row:
    took = statistics.median(start.warmup_s for start in starts)
    steady = calls * statistics.median(start.compute_s for start in starts)
    text = f"1.2 × as many runs of later requests, median of {STEADY_ROUNDS}; probed once a second"
    what = f"warm-up on a hit: {calls} runs of {buckets} buckets, median of {STARTS}"
    return Row(what, took, 1.2 * steady, "s", text)


def _late_compiles_row(store: Path, shapes: Sequence[Shape], requests: int) -> Row:
    """Draw each shape with a weight of one over its tokens: small ones come often, large ones take as long in all."""
    weights = [1 / (rows * length) for rows, length in shapes]
    drawn = random.Random(SEED).choices(shapes, weights, k=requests)
    bodies = {shape: inference(*shape) for shape in set(drawn)}
    with Sidecar(store, f"compile.engine={store.name}") as sidecar:
        sidecar.wait(every_s=KUBELET_S)
        report = _ask_all(sidecar, [bodies[shape] for shape in drawn])
        late = max(report["late_compiles"], sidecar.metric("warmgate_late_compiles_total"))
    what = f"late compiles of {store.name} in {requests:,} requests of {len(bodies)} shapes, {CLIENTS} clients"
    return Row(what, late, 0, "", "none, in /status and in the metric; weight of a shape 1 / tokens")


def _ask_all(sidecar: Sidecar, bodies: Sequence[bytes]) -> Any:
    """Share the requests between the clients, each on a connection of its own; return the status after them."""

    def client(number: int) -> None:
        ask = sidecar.asker()
        for body in bodies[number::CLIENTS]:
            ask(body)

    with ThreadPoolExecutor(CLIENTS) as clients:
        list(clients.map(client, range(CLIENTS)))
    return sidecar.warm_status()
