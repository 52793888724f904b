"""Forwards in process, with no server: `python -m benchmarks.bare NAME DIR` prints batch size → median seconds."""

import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from app import configure
from app.commands import run_part
from app.samples import sample_inputs
from app.settings import Settings
from app.stages import STARTUP
from app.stages.bind_engine import BoundEngine
from benchmarks.artifacts import runner
from benchmarks.process import EXAMPLE

SECONDS = 5.0
RUNS = 50
SEQUENCE = 32


def tiny(directory: Path) -> dict[int, float]:
    """The module itself on one row, as a script would call it."""
    from benchmarks.small import WIDTH, values
    from benchmarks.small import tiny as build

    module, x = build(), torch.from_numpy(values(1, WIDTH))
    return {1: _median_s(lambda: module(x).numpy())}


def minilm(directory: Path) -> dict[int, float]:
    """torch's own runner of the library that serves, on every batch size of the configured buckets."""
    settings = configure.load(EXAMPLE, [f"compile.artifacts={directory}", "compile.engine=aot"])
    call = runner(run_part(STARTUP.until(BoundEngine), settings, lambda _: None).values)
    return {batch: _median_s(partial(_run, call, _arrays(settings, batch))) for batch in batches(settings)}


def batches(settings: Settings) -> list[int]:
    return [sizes["batch"] for one in settings.buckets if (sizes := dict(one.sizes))["sequence"] == SEQUENCE]


def _arrays(settings: Settings, batch: int) -> list[Any]:
    (path,) = settings.model_paths
    return [*sample_inputs(path.inputs, {"batch": batch, "sequence": SEQUENCE}, seed="bare").values()]


def _run(call: Callable[[list[Any]], Any], arrays: list[Any]) -> Any:
    return call([torch.from_numpy(array) for array in arrays]).numpy()


def _median_s(call: Callable[[], Any]) -> float:
    """Return the median seconds of a call, after three that do not count."""
    times: list[float] = []
    with torch.inference_mode():
        until = time.monotonic() + SECONDS
        while len(times) < RUNS or time.monotonic() < until:
            began = time.perf_counter()
            call()
            times.append(time.perf_counter() - began)
    return statistics.median(times[3:])


if __name__ == "__main__":
    print(json.dumps({"tiny": tiny, "minilm": minilm}[sys.argv[1]](Path(sys.argv[2]))))
