"""What the commands beside `serve` do: run a part of the start-up graph in this process and tell the outcome."""

import asyncio
import signal
import time
from collections.abc import Callable
from typing import Any

from app.artifacts import Compiled, Missed, Restored, Uncompiled
from app.buckets import Coverage
from app.checkpoints import Checkpoint
from app.errors import ArtifactError
from app.graph import Graph, Lane
from app.lanes import DeviceLane, run_on_thread
from app.settings import Settings
from app.stages import STARTUP
from app.stages.preflight import Preflight
from app.startup import StageView, Startup, settle
from app.weights.plan import ModelTable, WeightsPlan, plan_weights

Tell = Callable[[StageView], None]


def run_part(graph: Graph, settings: Settings, tell: Tell) -> Startup:
    """Run a part of the graph to its end; raises WarmgateError, or SystemExit (143) on SIGTERM or Ctrl-C.

    No child process and no half artifact is left behind.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    began = time.monotonic()
    clock = lambda: time.monotonic() - began  # noqa: E731
    lanes = {Lane.DISK: run_on_thread, Lane.PROCESS: run_on_thread, Lane.DEVICE: DeviceLane(clock).run}
    startup = Startup(graph, lanes, clock, tell)
    try:
        asyncio.run(startup.run(settings))
    except KeyboardInterrupt:
        settle(startup)
        raise SystemExit(128 + signal.SIGTERM) from None
    return startup


def build(settings: Settings, tell: Tell) -> dict[str, Any]:
    """Make sure that the artifact of this configuration exists; raises ArtifactError where it cannot be built."""
    startup = run_part(STARTUP.until(Compiled | Uncompiled), settings, tell)
    code: Compiled | Uncompiled = startup.values[Compiled | Uncompiled]
    if isinstance(code, Uncompiled) and settings.compile.engine != "eager":
        raise ArtifactError(code.why)
    if isinstance(code, Uncompiled):
        return {"outcome": "none", "why": code.why}
    return {
        "outcome": code.outcome,
        "identity": code.artifact.identity.digest,
        "path": str(code.artifact.path),
        "differences": list(code.differences),
    }


def check(settings: Settings, tell: Tell) -> dict[str, Any]:
    """Validate checkpoint, model and artifact without loading weights; returns the plan, raises WarmgateError."""
    startup = run_part(STARTUP.until(Preflight, Restored | Missed), settings, tell)
    checkpoint: Checkpoint = startup.values[Checkpoint]
    lookup: Restored | Missed = startup.values[Restored | Missed]
    if isinstance(lookup, Restored):
        table = ModelTable.from_json(lookup.artifact.content["model"])
    else:
        from app.weights.skeleton import build_skeleton

        table = build_skeleton(settings.model).table
    plan = plan_weights(table, checkpoint, settings.model.waive)
    checkpoint.close()
    return _document(settings, checkpoint, lookup, plan)


def _document(
    settings: Settings, checkpoint: Checkpoint, lookup: Restored | Missed, plan: WeightsPlan
) -> dict[str, Any]:
    dynamic = settings.compile.specialize == "none"
    hit = isinstance(lookup, Restored)
    identity = lookup.artifact.identity if isinstance(lookup, Restored) else lookup.identity
    return {
        "model": {"name": settings.model.name, "version": settings.model.version},
        "checkpoint": {
            "path": str(checkpoint.path),
            "format": checkpoint.format,
            "files": len(checkpoint.files),
            "tensors": len(checkpoint.tensors),
            "bytes": checkpoint.tensor_bytes,
        },
        "plan": {
            "installed": len(plan.sources),
            "rebuilt": list(plan.rebuilt),
            "waived": {kind: list(names) for kind, names in plan.waived.items()},
        },
        "artifact": {
            "result": "hit" if hit else "miss",
            "identity": identity.digest,
            "why": "" if isinstance(lookup, Restored) else lookup.why,
            "differences": [] if isinstance(lookup, Restored) else list(lookup.differences),
        },
        "buckets": [{"name": bucket.name, "required": bucket.required} for bucket in settings.buckets],
        "coverage": Coverage(settings.symbolic, settings.buckets, dynamic, settings.uncovered).rows(),
    }
