"""Compile the module bucket by bucket with torch.compile and collect its caches."""

import shutil
from typing import Any

import torch
from safetensors.torch import save_file

from app.artifacts import CONSTANTS
from app.buckets import Route
from app.child import Work
from app.child.blank import Blank
from app.devices.cpu import available_processors
from app.engines import _inductor
from app.engines._compiler import Compiler
from app.engines.jit import JitEngine
from app.samples import sample_inputs
from app.serving.forward import Forward
from app.settings import Settings

# The second run of a bucket shows whether the first one left a graph that holds.
RUNS = 2


def work(given: Work) -> dict[str, Any]:
    """Fill the directory with the caches of every bucket's graphs; return the manifest's content."""
    settings, tell = given.settings, given.tell
    torch.set_num_threads(settings.device.threads or available_processors())
    blank = Blank.build(settings)
    blank.give_memory()
    tell()
    compiler = Compiler()
    compiler.answer()
    live = _inductor.prepare(given.key, len(settings.buckets), settings.device.threads or available_processors())
    shutil.rmtree(live, ignore_errors=True)
    live.mkdir(mode=0o700)
    engine = JitEngine(blank.skeleton.module, frozenset(), live, {})
    _run_buckets(settings, engine)
    tell()
    _inductor.collect(live, given.directory)
    save_file({}, given.directory / CONSTANTS)
    counts = {layer.name: layer.count for layer in engine.layers() if layer.name in {"aotautograd", "fx-graph"}}
    tell()
    return blank.manifest(
        "jit",
        [{"name": name, "count": count} for name, count in counts.items()],
        compiler=compiler.answers,
        graph_breaks=_graph_breaks(),
    )


def _run_buckets(settings: Settings, engine: JitEngine) -> None:
    """Run each bucket through the lines that requests go through, so that guards and keys are theirs."""
    forward = Forward(engine, settings.model_paths, settings.uncovered)
    for bucket in forward.buckets:
        arrays = sample_inputs(forward.paths[bucket.path].inputs, dict(bucket.sizes), seed=bucket.name)
        for _ in range(RUNS):
            forward(arrays, Route.exactly(bucket))


def _graph_breaks() -> list[str]:
    """Return why the module could not be traced as a whole, first lines only."""
    from torch._dynamo.utils import counters

    return sorted({str(reason).partition("\n")[0][:200] for reason in counters["graph_break"]})
