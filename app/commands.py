"""What the commands beside `serve` do: run a part of the start-up graph in this process and tell the outcome."""

import asyncio
import signal
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from app.artifacts import Artifact, Compiled, Missed, Restored, Uncompiled
from app.artifacts.opening import open_store, why_not_kept
from app.artifacts.prune import Rules, prune
from app.checkpoints import Checkpoint
from app.codecs import LoadedCodec
from app.errors import ArtifactError
from app.graph import Graph, Lane
from app.lanes import DeviceLane, run_on_thread
from app.ledger import Row
from app.paths import coverage_rows
from app.settings import Settings
from app.stages import STARTUP
from app.stages.preflight import Preflight
from app.startup import StageView, Startup, settle
from app.weights.plan import ModelTable, WeightsPlan, plan_weights, rebuilt_bytes

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


def build(settings: Settings, tell: Tell, rules: Rules | None = None) -> dict[str, Any]:
    """Make sure that the artifact of this configuration exists; raises ArtifactError where it cannot be built.

    With rules, what they do not keep is removed from the store afterwards, and told under `pruned`.
    """
    if settings.compile.engine != "eager" and (alone := why_not_kept(settings.compile)):
        return _found(settings, tell, alone)
    if settings.compile.on_miss == "eager_then_swap":
        now = settings.compile.model_copy(update={"on_miss": "build"})
        settings = settings.model_copy(update={"compile": now})
    startup = run_part(STARTUP.until(Compiled | Uncompiled), settings, tell)
    document = _made(settings, startup.values[Compiled | Uncompiled])
    if rules is not None:
        lookup: Restored | Missed = startup.values[Restored | Missed]
        identity = lookup.artifact.identity if isinstance(lookup, Restored) else lookup.identity
        document["pruned"] = prune(open_store(settings.compile), identity, rules)
    return document


def _made(settings: Settings, code: Compiled | Uncompiled) -> dict[str, Any]:
    if isinstance(code, Uncompiled) and settings.compile.engine != "eager":
        raise ArtifactError(code.why)
    if isinstance(code, Uncompiled):
        return {"outcome": "none", "why": code.why}
    return _built(code.outcome, code.artifact, code.differences)


def _found(settings: Settings, tell: Tell, alone: str) -> dict[str, Any]:
    """Return the artifact that is there; raises ArtifactError where none is, since none could be kept."""
    lookup: Restored | Missed = run_part(STARTUP.until(Restored | Missed), settings, tell).values[Restored | Missed]
    if isinstance(lookup, Missed):
        raise ArtifactError(f"{lookup.why}; nothing is built, since it could not be kept: {alone}")
    return _built("restored", lookup.artifact, ())


def _built(outcome: str, artifact: Artifact, differences: tuple[str, ...]) -> dict[str, Any]:
    return {
        "outcome": outcome,
        "identity": artifact.identity.digest,
        "path": str(artifact.path),
        "signature": artifact.told,
        "differences": list(differences),
    }


def check(settings: Settings, tell: Tell) -> dict[str, Any]:
    """Validate all but the weights themselves, which are not loaded; returns the plan, raises WarmgateError."""
    startup = run_part(STARTUP.until(Preflight, LoadedCodec, Restored | Missed), settings, tell)
    checkpoint: Checkpoint = startup.values[Checkpoint]
    lookup: Restored | Missed = startup.values[Restored | Missed]
    table, construction = _table(settings, lookup)
    plan = plan_weights(table, checkpoint, settings.model)
    checkpoint.close()
    engine = lookup.artifact.content["engine"] if isinstance(lookup, Restored) else settings.compile.engine
    dynamic = settings.compile.specialize == "none" and engine != "jit"
    return {
        "model": {"name": settings.model.name, "version": settings.model.version},
        "checkpoint": describe(checkpoint),
        "plan": {
            **_reading(startup.values[Preflight], plan, construction),
            "memory": [
                {"name": row.name, "planned_bytes": row.planned_bytes} for row in _planned(startup, table, plan)
            ],
        },
        "artifact": _artifact(lookup),
        "buckets": [{"name": bucket.name, "required": bucket.required} for bucket in settings.buckets],
        "coverage": coverage_rows(
            (path.coverage(dynamic, settings.uncovered) for path in settings.model_paths), engine
        ),
    }


def describe(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return what a checkpoint is, without its tensors one by one."""
    return {
        "path": str(checkpoint.path),
        "format": checkpoint.format,
        "files": len(checkpoint.files),
        "tensors": len(checkpoint.tensors),
        "bytes": checkpoint.tensor_bytes,
        "dtypes": dict(sorted(Counter(entry.dtype for entry in checkpoint.tensors.values()).items())),
        "notes": list(checkpoint.notes),
    }


def _table(settings: Settings, lookup: Restored | Missed) -> tuple[ModelTable, str]:
    """Return what the model wants: from the artifact that was built for it, else from the module itself."""
    if isinstance(lookup, Restored):
        content = lookup.artifact.content
        return ModelTable.from_json(content["model"]), str(content["construction"])
    from app.weights.skeleton import build_skeleton

    skeleton = build_skeleton(settings.model, settings.configured_paths)
    return skeleton.table, skeleton.construction


def _reading(preflight: Preflight, plan: WeightsPlan, construction: str) -> dict[str, Any]:
    return {
        "mode": preflight.choice.layout.mode,
        "why": preflight.choice.layout.why,
        "measured_first": preflight.choice.measure,
        "construction": construction,
        "installed": len(plan.sources),
        "rebuilt": list(plan.rebuilt),
        "cast": [{"name": name, "from": a, "to": b} for name, (a, b) in plan.cast.items()],
        "extra_state": list(plan.extra_state),
        "waived": {kind: list(names) for kind, names in plan.waived.items()},
        "verified": sorted(preflight.digests),
    }


def _planned(startup: Startup, table: ModelTable, plan: WeightsPlan) -> tuple[Row, ...]:
    """Return the planned ledger, now that the model has told what it rebuilds."""
    preflight: Preflight = startup.values[Preflight]
    checkpoint: Checkpoint = startup.values[Checkpoint]
    return (*preflight.rows(checkpoint, preflight.choice.layout), Row("rebuilt_buffers", rebuilt_bytes(table, plan)))


def _artifact(lookup: Restored | Missed) -> dict[str, Any]:
    if isinstance(lookup, Restored):
        return {"result": "hit", "identity": lookup.artifact.identity.digest, "why": "", "differences": []}
    return {
        "result": "miss",
        "identity": lookup.identity.digest,
        "why": lookup.why,
        "differences": list(lookup.differences),
    }
