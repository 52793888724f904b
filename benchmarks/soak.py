"""Ten minutes of mixed load: nothing grows, nothing is compiled, nothing goes wrong.

WARMGATE_SOAK_SECONDS: how long instead.
"""

import os
import random
from collections.abc import Iterator
from pathlib import Path

from benchmarks.client import Plan, begin, bodies, finish
from benchmarks.mixed import INFER
from benchmarks.process import Sidecar, inference, probing, tokens
from benchmarks.table import Row
from benchmarks.trend import memory_row, watching
from benchmarks.wrk import Body, raw_body

SECONDS = int(os.environ.get("WARMGATE_SOAK_SECONDS", "600"))
# As JSON and as raw tensors, one row and several, short and long.
SHAPES = 120
MOST_ROWS, SHORTEST, LONGEST = 6, 2, 256
CLIENTS = 6
SEED = 7
READS = ("/metrics", "/status", "/readyz?verbose")


def measure_soak(directory: Path) -> Iterator[Row]:
    """Yield the rows."""
    with Sidecar(directory / "store", "compile.engine=aot") as sidecar:
        sidecar.wait()
        files = bodies(directory, _drawn())
        plan = Plan(sidecar.port, INFER, files, SECONDS, CLIENTS)
        running = begin(plan, directory / "plan")
        every_s = SECONDS / 600
        with (
            watching(sidecar, every_s) as memory,
            probing(sidecar, READS[0], every_s) as metrics,
            probing(sidecar, READS[1], every_s) as status,
            probing(sidecar, READS[2], every_s) as ready,
        ):
            samples = finish(running)
        late = sidecar.status()["late_compiles"]
    reads = [*metrics, *status, *ready]
    bad = [one for one in samples if one.status != 200 or one.wrong]
    errors = len(bad) + sum(code != 200 for code, _ in reads)
    what = f"{SECONDS} s, {len(samples)} requests of {len(files)} bodies, {len(reads)} scrapes and probes: errors"
    yield Row(what, errors, 0, "", f"none; the first: {bad[0]}" if bad else "none")
    yield Row("… late compiles", late, 0, "", "none")
    yield memory_row("… memory", memory)


def _drawn() -> Iterator[Body]:
    draw = random.Random(SEED)
    for number in range(SHAPES):
        rows, length = draw.randint(1, MOST_ROWS), draw.randint(SHORTEST, LONGEST)
        yield raw_body(tokens(rows, length), "INT64") if number % 2 else Body(inference(rows, length))
