"""The start report: one document put together from the values of the stages, for /status, metrics and the file."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any

from app import ledger
from app.artifacts import Compiled, Layer, Missed, Restored, Uncompiled
from app.checkpoints import Checkpoint
from app.critical import critical_path, deciding
from app.devices import AcquiredDevice
from app.ledger import Row
from app.paths import coverage_rows
from app.readiness import Drain, Readiness
from app.report import BucketReport
from app.settings import Settings
from app.stages.bind_engine import BoundEngine
from app.stages.preflight import Preflight
from app.stages.prove_answers import ProvenModel
from app.stages.warm_buckets import WarmEngine
from app.startup import StageView, Startup
from app.weights import LoadedModel, ResidentWeights
from app.weights.plan import rebuilt_bytes


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything the report is put together from."""

    settings: Settings
    startup: Startup
    readiness: Readiness
    drain: Drain
    started_at: datetime
    clock: Callable[[], float]
    late_compiles: Callable[[], int]
    first_requests: Callable[[], Mapping[str, float | None]]


def phase(facts: Facts) -> str:
    """Return the one word for the state of the process."""
    if facts.drain.begun:
        return "draining"
    if facts.startup.error:
        return "failed"
    if not facts.startup.finished:
        return "starting"
    return "ready" if facts.readiness.verdict().holds else "degraded"


def document(facts: Facts) -> dict[str, Any]:
    """Return the report; cheap, and true at the moment it is asked for."""
    startup, values = facts.startup, facts.startup.values
    stages = startup.snapshot()
    code = values.get(Compiled | Uncompiled)
    now = phase(facts)
    return {
        "model": {"name": facts.settings.model.name, "version": facts.settings.model.version},
        "phase": now,
        "ready": now == "ready",
        "started_at": facts.started_at.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "elapsed_s": round(facts.clock(), 4),
        "time_to_ready_s": startup.finished_s,
        "critical_path": list(critical_path(stages)),
        "critical": [asdict(one) for one in deciding(stages)],
        "file_cache": _file_cache(values.get(ResidentWeights)),
        "compile_cache": _compile_cache(code),
        "stages": [_stage(view) for view in stages],
        "weights": _weights(values.get(Checkpoint), values.get(ResidentWeights), values.get(LoadedModel), startup),
        "memory": [asdict(row) for row in memory_rows(values)],
        "artifacts": _artifacts(values),
        "buckets": [{**asdict(row), "first_request_s": facts.first_requests().get(row.name)} for row in buckets(facts)],
        "coverage": _coverage(values),
        "batching": _batching(values.get(ProvenModel)),
        "budgets": _budgets(facts, values.get(ResidentWeights)),
        "restored_state": list(values[WarmEngine].restored) if WarmEngine in values else [],
        "uncovered_policy": facts.settings.uncovered,
        "late_compiles": facts.late_compiles(),
        "device": _device(values.get(AcquiredDevice)),
        "error": _error(startup),
    }


def _coverage(values: Mapping[Any, Any]) -> list[dict[str, str]]:
    """Return how every shape is served, by what is known best: buckets that could not be warmed are not promised."""
    holder = next((values[one] for one in (ProvenModel, WarmEngine, BoundEngine) if one in values), None)
    return coverage_rows(holder.forward.coverages.values(), holder.forward.engine.name) if holder else []


def _batching(proven: ProvenModel | None) -> list[dict[str, str]]:
    """Return for every path which requests run together, and what speaks against more."""
    paths = proven.forward.paths.values() if proven else ()
    return [{"path": path.name, "company": str(path.company), "why": path.company_why} for path in paths]


def buckets(facts: Facts) -> Sequence[BucketReport]:
    """Return every configured bucket with what is known of it so far."""
    for name in ("prove-answers", "warm-buckets"):
        if rows := facts.startup.view(name).rows:
            return rows
    return [BucketReport(bucket.name, bucket.required) for bucket in facts.settings.buckets]


def memory_rows(values: Mapping[Any, Any]) -> tuple[Row, ...]:
    """Return the ledger: every object with what was planned and measured, the process, and its cgroup."""
    plan, resident, loaded = values.get(Preflight), values.get(ResidentWeights), values.get(LoadedModel)
    rows = {name: Row(name) for name in ledger.OBJECTS}
    if plan:
        layout = resident.memory.layout if resident else plan.choice.layout
        rows |= {row.name: row for row in plan.rows(values[Checkpoint], layout)}
    if resident:
        own = resident.copied_bytes
        copied = None if own is None else own + (loaded.copied_bytes if loaded else 0)
        _measure(rows, "checkpoint_mapped", sum(len(one) for one in resident.memory.maps.values()))
        _measure(rows, "checkpoint_resident", resident.resident_bytes)
        _measure(rows, "anonymous_copies", copied)
        _measure(rows, "staging", 0, resident.staging_bytes)
    if loaded:
        code = values.get(Compiled | Uncompiled)
        constants = int(code.artifact.content["constant_bytes"]) if isinstance(code, Compiled) else 0
        rows["rebuilt_buffers"] = Row("rebuilt_buffers", planned_bytes=rebuilt_bytes(loaded.table, loaded.plan))
        rows["engine_constants"] = Row("engine_constants", planned_bytes=constants)
        _measure(rows, "rebuilt_buffers", loaded.rebuilt_bytes)
        _measure(rows, "engine_constants", loaded.constant_bytes)
    books = ledger.Books()
    return (*rows.values(), *books.process_rows(), books.cgroup_row())


def _measure(rows: dict[str, Row], name: str, held: int | None, peak: int | None = None) -> None:
    rows[name] = replace(rows[name], measured_bytes=held, peak_bytes=held if peak is None else peak)


def _stage(view: StageView) -> dict[str, Any]:
    names = ("name", "state", "needs", "start_s", "end_s", "done", "total", "unit", "detail")
    return {name: getattr(view, name) for name in names}


def _file_cache(resident: ResidentWeights | None) -> str:
    return resident.file_cache if resident else ""


def _compile_cache(code: Compiled | Uncompiled | None) -> str:
    if not isinstance(code, Compiled):
        return "none"
    return "warm" if code.outcome == "restored" else "cold"


def _weights(
    checkpoint: Checkpoint | None, resident: ResidentWeights | None, loaded: LoadedModel | None, startup: Startup
) -> dict[str, Any]:
    read = startup.view("read-weights")
    speed = round(resident.bytes_read / resident.seconds) if resident and resident.seconds else 0
    layout = resident.memory.layout if resident else None
    plan = loaded.plan if loaded else None
    return {
        "format": checkpoint.format if checkpoint else "",
        "tensors": len(checkpoint.tensors) if checkpoint else 0,
        "bytes": checkpoint.tensor_bytes if checkpoint else 0,
        "bytes_read": read.done,
        "bytes_per_s": speed,
        "cached_ratio": _rounded(resident.cached_ratio) if resident else None,
        "disk_bytes_per_s": resident.disk.bytes_per_s if resident else None,
        "disk_ratio": resident.disk.ratio if resident else None,
        "mode": layout.mode if layout else "",
        "why": layout.why if layout else "",
        "fingerprint": f"sha256:{resident.fingerprint}" if resident else "",
        "verified": dict(resident.verified) if resident else {},
        "warnings": list(resident.warnings) if resident else [],
        "notes": [*(checkpoint.notes if checkpoint else ()), *_disk_notes(resident)],
        "waived": dict(plan.waived) if plan else {},
        "cast": [{"name": name, "from": a, "to": b} for name, (a, b) in plan.cast.items()] if plan else [],
        "rebuilt_buffers": list(plan.rebuilt) if plan else [],
        "ties": [list(names) for names in loaded.table.ties] if loaded else [],
    }


def _disk_notes(resident: ResidentWeights | None) -> list[str]:
    return [f"the disk's limit is not known: {resident.disk.why}"] if resident and resident.disk.why else []


def _rounded(ratio: float | None) -> float | None:
    return None if ratio is None else round(ratio, 4)


def _budgets(facts: Facts, resident: ResidentWeights | None) -> dict[str, Any]:
    """Say what was planned and what of it is used, so far or in the end; None as long as nothing has begun."""
    view, settings = facts.startup.view("warm-buckets"), facts.settings
    peaks = [row.peak_bytes for row in buckets(facts) if row.peak_bytes is not None]
    end = facts.clock() if view.end_s is None else view.end_s
    used = None if view.start_s is None else round(end - view.start_s, 4)
    staging = resident.staging_bytes if resident else None
    return {
        "warmup": {
            "planned_s": settings.warmup.budget_s,
            "used_s": used,
            "planned_bytes": settings.warmup.budget_bytes,
            "used_bytes": max(peaks, default=None),
        },
        "staging": {"planned_bytes": settings.memory.staging_bytes, "used_bytes": staging},
    }


def _artifacts(values: Mapping[Any, Any]) -> dict[str, Any]:
    lookup, code = values.get(Restored | Missed), values.get(Compiled | Uncompiled)
    identity = lookup.artifact.identity if isinstance(lookup, Restored) else lookup.identity if lookup else None
    layers: tuple[Layer, ...] = code.layers if code else lookup.layers if lookup else ()
    caches = values[BoundEngine].forward.engine.layers() if BoundEngine in values else ()
    differences = lookup.differences if isinstance(lookup, Missed) else ()
    return {
        "engine": "" if code is None else code.engine if isinstance(code, Compiled) else "eager",
        "why": (code.why if code else "") or (lookup.why if isinstance(lookup, Missed) else ""),
        "identity": identity.digest if identity else "",
        "outcome": _outcome(code, caches, proven=ProvenModel in values),
        "layers": [asdict(layer) for layer in (*layers, *caches)],
        "differences": list(differences),
    }


def _outcome(code: Compiled | Uncompiled | None, caches: Sequence[Layer], proven: bool) -> str:
    """Say restored only where every cache answered and the answers are proven."""
    if not isinstance(code, Compiled) or not proven:
        return "none"
    return "rebuilt" if any(layer.result == "miss" for layer in caches) else code.outcome


def _device(acquired: AcquiredDevice | None) -> dict[str, Any]:
    # The host is the device of this version; its books can be read before it is acquired.
    room = ledger.Books().room()
    memory = {"used": room.used_bytes, "total": room.limit_bytes}
    if acquired is None:
        return {"kind": "", "name": "", "fingerprint": "", "memory": memory}
    device = acquired.device
    shown = " ".join(f"{name}={value}" for name, value in acquired.fingerprint.items() if name != "flags")
    return {"kind": device.kind, "name": device.name, "fingerprint": shown, "memory": memory}


def _error(startup: Startup) -> dict[str, Any] | None:
    if startup.error is None:
        return None
    failed = next((view.name for view in startup.snapshot() if view.state == "failed"), None)
    return failure(startup.error, failed)


def failure(error: Any, stage: str | None) -> dict[str, Any]:
    """Return a fatal error as one flat object: what, where, and the exit code that goes with it."""
    return {"kind": type(error).__name__, "stage": stage, "exit_code": error.exit_code, "message": str(error)}
