"""Start reports as the sidecar writes them: a warm restart of the example, and ways to change it."""

import copy
from collections.abc import Mapping
from typing import Any

Document = dict[str, Any]


def stage(name: str, start: float | None, end: float | None, state: str = "done", detail: str = "") -> Document:
    return {
        "name": name,
        "state": state,
        "needs": [],
        "start_s": start,
        "end_s": end,
        "done": 0,
        "total": 0,
        "unit": "",
        "detail": detail,
    }


def bucket(name: str, steady_s: float | None, state: str = "warm", why: str = "") -> Document:
    warm = steady_s is not None
    return {
        "name": name,
        "required": True,
        "state": state,
        "first_s": 0.5 if warm else None,
        "second_s": 0.0125 if warm else None,
        "steady_s": steady_s,
        "proof": "golden" if warm else "none",
        "max_error": 1.25e-7 if warm else None,
        "graph": "none",
        "why": why,
        "first_request_s": None,
    }


_WARM: Document = {
    "model": {"name": "minilm", "version": "1"},
    "phase": "ready",
    "ready": True,
    "started_at": "2026-11-30T07:00:00.000Z",
    "elapsed_s": 4.01,
    "time_to_ready_s": 4.0,
    "critical_path": ["import-runtime", "find-artifact", "warm-buckets", "prove-answers"],
    "critical": [
        {"stage": "import-runtime", "seconds": 1.9, "at_most_sooner_s": 1.5},
        {"stage": "find-artifact", "seconds": 0.1, "at_most_sooner_s": 0.1},
        {"stage": "warm-buckets", "seconds": 1.6, "at_most_sooner_s": 1.6},
        {"stage": "prove-answers", "seconds": 0.0, "at_most_sooner_s": 0.0},
    ],
    "file_cache": "warm",
    "compile_cache": "warm",
    "stages": [
        stage("open-checkpoint", 0.4, 0.41, detail="safetensors, 1 file(s), 103 tensors, 90.9 MB"),
        stage("read-weights", 0.41, 0.54),
        stage("import-runtime", 0.4, 2.3, detail="torch 2.13.0"),
        stage("find-artifact", 2.3, 2.4, detail="hit 0123456789ab, aot"),
        stage("build-artifact", 2.4, 2.4, "skipped", "the artifact was restored"),
        stage("compute-reference", 2.4, 2.4, "skipped", "recorded for these weights by an earlier start"),
        stage("warm-buckets", 2.4, 4.0),
        stage("prove-answers", 4.0, 4.0),
    ],
    "weights": {
        "format": "safetensors",
        "tensors": 103,
        "bytes": 90_900_000,
        "bytes_read": 90_900_000,
        "bytes_per_s": 699_000_000,
        "cached_ratio": 1.0,
        "disk_bytes_per_s": None,
        "disk_ratio": None,
        "mode": "map",
        "fingerprint": "sha256:aa",
        "notes": ["the disk's limit is not known: the files were in the page cache already"],
    },
    "memory": [],
    "artifacts": {"engine": "aot", "why": "", "identity": "sha256:bb", "outcome": "restored", "differences": []},
    "buckets": [bucket("batch=1,sequence=32", 0.008), bucket("batch=8,sequence=32", 0.027)],
    "coverage": [
        {"shapes": "batch=1,sequence=32", "served": "exact", "by": "batch=1,sequence=32"},
        {"shapes": "within batch=8,sequence=32", "served": "dynamic", "by": "the smallest that holds it"},
        {"shapes": "beyond, within batch=32,sequence=256", "served": "uncovered", "by": "policy pad"},
    ],
    "budgets": {
        "warmup": {"planned_s": 300.0, "used_s": 1.6, "planned_bytes": None, "used_bytes": 12_000_000},
        "staging": {"planned_bytes": 268_435_456, "used_bytes": 0},
    },
    "uncovered_policy": "pad",
    "late_compiles": 0,
    "device": {"kind": "cpu", "name": "x86_64", "fingerprint": "kind=cpu threads=2", "memory": {}},
    "error": None,
}


def document(**changed: Any) -> Document:
    """Return the report of a warm restart; mappings are merged into it, `stages` and `buckets` by name."""
    made = copy.deepcopy(_WARM)
    for name, value in changed.items():
        made[name] = {**made[name], **value} if isinstance(value, Mapping) and made[name] is not None else value
    return made


def with_stages(made: Document, *changed: Document) -> Document:
    """Return the report with these stages in the place of those of the same name."""
    by_name = {one["name"]: one for one in changed}
    return {**made, "stages": [by_name.get(one["name"], one) for one in made["stages"]]}


def cold(**changed: Any) -> Document:
    """Return the report of a start that compiled, with cold files and another torch."""
    made = document(
        time_to_ready_s=33.7,
        elapsed_s=33.71,
        critical_path=["import-runtime", "find-artifact", "build-artifact", "warm-buckets", "prove-answers"],
        critical=[{"stage": "build-artifact", "seconds": 29.1, "at_most_sooner_s": 20.0}],
        file_cache="cold",
        compile_cache="cold",
        weights={"cached_ratio": 0.02, "bytes_per_s": 70_000_000},
        artifacts={"outcome": "rebuilt", "differences": ["torch 2.13.0 → 2.14.1", "torch's own code changed"]},
    )
    made = with_stages(
        made,
        stage("read-weights", 0.41, 1.74),
        stage("import-runtime", 0.4, 2.5, detail="torch 2.14.1"),
        stage("find-artifact", 2.5, 2.6, detail="nothing is stored for this identity"),
        stage("build-artifact", 2.6, 31.7, detail="built"),
        stage("compute-reference", 2.6, 12.3),
        stage("warm-buckets", 31.7, 33.7),
        stage("prove-answers", 33.7, 33.7),
    )
    return {**made, **changed}
