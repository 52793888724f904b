"""The document of /status: additions stand beside the fixed names, and `report` can read what is written."""

import json
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from app.checkpoints import Checkpoint
from app.graph import Lane
from app.progress import Progress
from app.readiness import Check, Drain, Readiness
from app.report import BucketReport
from app.report_file import parse
from app.report_text import render
from app.settings import Settings
from app.stages import STARTUP
from app.startup import StageView, Startup, State
from app.status import Facts, document
from app.weights import ResidentWeights
from app.weights.disk import DiskSpeed
from app.weights.layout import plan_layout
from app.weights.reading import read_resident
from tests.unit.written import filled, written

SETTINGS = Settings(
    model={"name": "tiny", "factory": "a:b", "checkpoint": "/models/tiny"},
    inputs=[{"name": "x", "datatype": "FP32", "shape": ["batch"]}],
    outputs=[{"name": "y", "datatype": "FP32", "shape": ["batch"]}],
    dimensions={"batch": {"max": 8, "buckets": [1, 8]}},
    warmup={"budget_s": 20},
)
# When each stage of a start ran; those left out never began.
TIMES = {
    "open-checkpoint": (0.5, 0.6),
    "preflight": (0.6, 0.6),
    "read-weights": (0.6, 3.6),
    "import-runtime": (0.5, 2.5),
    "acquire-device": (2.5, 2.5),
    "find-artifact": (2.5, 2.6),
    "build-artifact": (2.6, 2.6),
    "compute-reference": (3.6, 3.6),
    "build-skeleton": (2.6, 2.6),
    "install-weights": (3.6, 3.7),
    "bind-engine": (3.7, 3.7),
    "warm-buckets": (3.7, 5.2),
    "prove-answers": (5.2, 5.3),
    "load-codec": (0.5, 0.5),
    "prove-codec": (5.3, 5.3),
    "rehearse-requests": (5.3, 5.4),
}


class Past:
    """A start-up as it stands, without having run."""

    def __init__(self, times: dict[str, tuple[float, float | None]], values: dict[Any, Any] | None = None) -> None:
        self.values, self.error = values or {}, None
        self._views = {one.name: self._view(one.name, one.lane, times) for one in STARTUP.stages}
        self.finished_s = times["rehearse-requests"][1] if "rehearse-requests" in times else None
        self.finished = self.finished_s is not None

    def _view(self, name: str, lane: Lane, times: dict[str, tuple[float, float | None]]) -> StageView:
        start, end = times.get(name, (None, None))
        state = State.WAITING if start is None else State.RUNNING if end is None else State.DONE
        needs = STARTUP.before(next(one for one in STARTUP.stages if one.name == name))
        rows = (
            (BucketReport("batch=8", False, "skipped", why="no time", peak_bytes=5),)
            if name == "warm-buckets" and end
            else ()
        )
        return StageView(name, state, needs, lane, start, end, 0, 0, "", None, "", rows)

    def snapshot(self) -> tuple[StageView, ...]:
        return tuple(self._views.values())

    def view(self, name: str) -> StageView:
        return self._views[name]


def written_by(startup: Any, now: float = 9.0) -> dict[str, Any]:
    """Return the document as the file has it."""
    clock = lambda: now  # noqa: E731
    ready = Readiness(Check("startup", lambda: None))
    began = datetime(2026, 1, 1, tzinfo=UTC)
    facts = Facts(SETTINGS, startup, ready, Drain(clock), began, clock, lambda: 0, dict)
    found: dict[str, Any] = json.loads(json.dumps(document(facts)))
    return found


@pytest.fixture
def resident(tmp_path: Path) -> Iterator[ResidentWeights]:
    checkpoint = written(tmp_path / "model", {"a": filled("F32", 5000)})
    yield read_resident(checkpoint, plan_layout(checkpoint, "map", "", None), Progress(), 1 << 20, {})
    checkpoint.close()


def test_a_report_of_the_first_moment_can_be_read_and_shown() -> None:
    made = written_by(Startup(STARTUP, {}, lambda: 0.0))

    assert (made["critical"], made["critical_path"]) == ([], [])
    unused = {"planned_s": 20, "used_s": None, "planned_bytes": None, "used_bytes": None}
    assert made["budgets"]["warmup"] == unused
    assert made["budgets"]["staging"] == {"planned_bytes": 268435456, "used_bytes": None}
    assert (
        made["weights"]["cached_ratio"] is made["weights"]["disk_bytes_per_s"] is made["weights"]["disk_ratio"] is None
    )
    assert render(parse(made, "report")).startswith("tiny 1: starting after 9.00 s (file cache unknown")


def test_the_critical_stages_say_how_much_sooner_ready_could_have_come() -> None:
    made = written_by(Past(TIMES))

    assert [row["stage"] for row in made["critical"]] == made["critical_path"]
    assert {row["stage"]: (row["seconds"], row["at_most_sooner_s"]) for row in made["critical"]} == {
        "open-checkpoint": (0.1, 0.1),
        "read-weights": (3.0, 1.0),  # then the imports and the look-up would have decided
        "install-weights": (0.1, 0.1),
        "warm-buckets": (1.5, 1.5),
        "prove-answers": (0.1, 0.1),
        "rehearse-requests": (0.1, 0.1),
    }
    assert "read-weights        1.00 s (it took 3.00 s)" in render(parse(made, "report"))


def test_the_warm_up_budget_shows_what_is_used_so_far_and_in_the_end() -> None:
    running: dict[str, tuple[float, float | None]] = {**TIMES, "warm-buckets": (3.7, None)}
    for name in ("prove-answers", "prove-codec", "rehearse-requests"):
        del running[name]

    planned = {"planned_s": 20, "planned_bytes": None}
    begun, ended = (written_by(Past(times), now=6.2)["budgets"]["warmup"] for times in (running, TIMES))
    assert begun == {**planned, "used_s": 2.5, "used_bytes": None}
    assert ended == {**planned, "used_s": 1.5, "used_bytes": 5}


def test_what_was_skipped_says_why() -> None:
    made = written_by(Past(TIMES))

    assert [(row["name"], row["state"], row["why"]) for row in made["buckets"]] == [("batch=8", "skipped", "no time")]
    assert "(skipped: no time)" in render(parse(made, "report"))


def test_the_file_cache_and_the_disk_stand_with_the_weights(resident: ResidentWeights) -> None:
    values: dict[Any, Any] = {Checkpoint: resident.checkpoint, ResidentWeights: resident}
    warm = written_by(Past(TIMES, values))
    disk = replace(resident, cached_ratio=0.123456, file_cache="cold", disk=DiskSpeed(2_000_000_000, 0.75))
    cold = written_by(Past(TIMES, {**values, ResidentWeights: disk}))

    assert (warm["file_cache"], warm["weights"]["cached_ratio"], warm["weights"]["disk_ratio"]) == ("warm", 1.0, None)
    assert warm["weights"]["notes"] == ["the disk's limit is not known: the files were in the page cache already"]
    assert (cold["file_cache"], cold["weights"]["cached_ratio"]) == ("cold", 0.1235)
    assert (cold["weights"]["disk_bytes_per_s"], cold["weights"]["disk_ratio"]) == (2_000_000_000, 0.75)
    assert cold["weights"]["notes"] == []
    assert cold["budgets"]["staging"]["used_bytes"] == 0
    assert "from the disk 75% of its best, 2.0 GB/s; 12% was in the file cache before" in render(parse(cold, "report"))
