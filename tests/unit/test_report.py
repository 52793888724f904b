"""The start report as text: which stages decided the time, one bar each, two starts side by side."""

from typing import Any

import pytest

from app.graph import Lane
from app.report import compare, critical_path, render
from app.startup import StageView, State


def view(name: str, start: float | None, end: float | None, *needs: str, lane: Lane = Lane.DISK) -> StageView:
    state = State.DONE if end is not None else State.RUNNING if start is not None else State.WAITING
    return StageView(name, state, needs, lane, start, end, 0, 0, "", None, "", ())


DEVICE = Lane.DEVICE


@pytest.mark.parametrize(
    ("stages", "path"),
    [
        pytest.param([], (), id="no stages"),
        pytest.param([view("a", None, None)], (), id="nothing has run"),
        pytest.param([view("a", 0, None)], (), id="nothing has ended"),
        pytest.param([view("a", 0, 1)], ("a",), id="one stage"),
        pytest.param(
            [view("a", 0, 1), view("b", 0, 3), view("c", 3, 5, "a", "b")], ("b", "c"), id="the later of two needs"
        ),
        pytest.param(
            [view("a", 0, 1), view("b", 1, 2, "a"), view("c", 0, 9)], ("c",), id="a long stage that needs nothing"
        ),
        pytest.param(
            [view("a", 0, 4, lane=DEVICE), view("b", 0, 1), view("c", 4, 6, "b", lane=DEVICE)],
            ("a", "c"),
            id="held up by the device lane",
        ),
        pytest.param(
            [view("a", 0, 4), view("b", 0, 1), view("c", 4, 6, "b")], ("b", "c"), id="other lanes hold nobody up"
        ),
        pytest.param(
            [view("a", 0, 4, lane=DEVICE), view("b", 0, 5), view("c", 5, 6, "b", lane=DEVICE)],
            ("b", "c"),
            id="the lane was free before the need was met",
        ),
        pytest.param([view("a", 0, 2), view("b", 2, 3, "a"), view("c", 3, None, "b")], ("a", "b"), id="still running"),
        pytest.param(
            [view("a", 0, 2), view("b", 2, 3, "a"), view("c", None, None, "b")], ("a", "b"), id="still waiting"
        ),
        pytest.param(
            [view("a", 0, 2), view("b", 2, 2, "a"), view("c", 2, 7, "b")], ("a", "b", "c"), id="a stage of no time"
        ),
    ],
)
def test_the_critical_path_is_the_chain_that_decided_when_the_last_stage_ended(
    stages: list[StageView], path: tuple[str, ...]
) -> None:
    assert critical_path(stages) == path


@pytest.mark.timeout(1)
def test_the_critical_path_ends_though_two_stages_of_one_lane_took_no_measurable_time() -> None:
    stages = [view("a", 5, 5, lane=DEVICE), view("b", 5, 5, "a", lane=DEVICE)]

    assert critical_path(stages)[-1] in {"a", "b"}


def stage(name: str, state: str, start: float | None, end: float | None, detail: str = "") -> dict[str, Any]:
    return {"name": name, "state": state, "start_s": start, "end_s": end, "detail": detail}


BUCKETS = [
    {
        "name": "batch=1,sequence=32",
        "first_s": 0.5,
        "second_s": 0.0125,
        "steady_s": 0.012,
        "proof": "golden",
        "max_error": 1.25e-7,
        "state": "warm",
    },
    {
        "name": "batch=8,sequence=32",
        "first_s": None,
        "second_s": None,
        "steady_s": None,
        "proof": "none",
        "max_error": None,
        "state": "skipped",
    },
]
REPORT: dict[str, Any] = {
    "model": {"name": "tiny", "version": "2"},
    "phase": "ready",
    "time_to_ready_s": 4.0,
    "elapsed_s": 99.0,
    "critical_path": ["import-runtime", "warm-buckets"],
    "file_cache": "cold",
    "compile_cache": "warm",
    "stages": [
        stage("open-checkpoint", "done", 0.0, 0.0),
        stage("import-runtime", "done", 0.0, 2.0, "torch 2.13.0"),
        stage("build-artifact", "skipped", 2.0, 2.0, "restored"),
        stage("warm-buckets", "done", 2.0, 4.0),
    ],
    "buckets": BUCKETS,
    "error": None,
}


def test_a_report_is_shown_with_one_bar_a_stage_and_one_line_a_bucket() -> None:
    blank, bar = " ", "█"
    assert render(REPORT).split("\n") == [
        "tiny 2: ready after 4.00 s (file cache cold, compile cache warm)",
        "",
        f"  open-checkpoint   {bar}{blank * 39}   0.00 s done",
        f"* import-runtime    {bar * 20}{blank * 20}   2.00 s done, torch 2.13.0",
        f"  build-artifact    {blank * 20}{bar}{blank * 19}   0.00 s skipped, restored",
        f"* warm-buckets      {blank * 20}{bar * 20}   2.00 s done",
        "",
        "* on the critical path",
        "",
        "  bucket                           first    second    steady  proof",
        "  batch=1,sequence=32           500.0 ms   12.5 ms   12.0 ms  golden, off by 1.2e-07 (warm)",
        "  batch=8,sequence=32                  -         -         -  none (skipped)",
    ]


def test_the_report_of_a_failed_start_shows_how_far_it_came_and_the_error() -> None:
    failed = {
        **REPORT,
        "phase": "failed",
        "time_to_ready_s": None,
        "elapsed_s": 8.0,
        "critical_path": [],
        "stages": [
            stage("open-checkpoint", "failed", 0.0, 6.0, "truncated"),
            stage("import-runtime", "running", 2.0, None),
            stage("warm-buckets", "stopped", None, 6.0),
        ],
        "buckets": [],
        "error": {"message": "x is truncated"},
    }

    assert render(failed).split("\n") == [
        "tiny 2: failed after 8.00 s (file cache cold, compile cache warm)",
        "",
        f"  open-checkpoint   {'█' * 30}{' ' * 10}   6.00 s failed, truncated",
        f"  import-runtime    {' ' * 10}{'█' * 30}   6.00 s running",
        f"  warm-buckets      {' ' * 40}          stopped",
        "",
        "* on the critical path",
        "",
        "error: x is truncated",
    ]


def test_a_report_from_the_first_moment_can_be_shown() -> None:
    first = {**REPORT, "time_to_ready_s": None, "elapsed_s": 0.0, "stages": [stage("a", "running", 0.0, None)]}

    assert render(first).split("\n")[2] == f"  a                 █{' ' * 39}   0.00 s running"


def test_two_starts_stand_side_by_side_with_the_ratio_of_the_second_to_the_first() -> None:
    two = {
        **REPORT,
        "time_to_ready_s": 1.0,
        "file_cache": "warm",
        "compile_cache": "none",
        "stages": [
            stage("import-runtime", "done", 0.0, 3.0),
            stage("warm-buckets", "running", 3.0, None),
            stage("new-stage", "done", 0.0, 0.25),
        ],
    }

    assert compare(REPORT, two).split("\n") == [
        "                      first    second   ratio",
        "ready                4.00 s    1.00 s   0.25x",
        "open-checkpoint      0.00 s         -       -",
        "import-runtime       2.00 s    3.00 s   1.50x",
        "build-artifact       0.00 s         -       -",
        "warm-buckets         2.00 s         -       -",
        "new-stage                 -    0.25 s       -",
        "",
        "caches: cold files, warm code → warm files, none code",
    ]


def test_a_start_that_never_became_ready_has_no_ratio() -> None:
    never = {**REPORT, "time_to_ready_s": None}

    assert [line for line in compare(never, REPORT).split("\n") if line.startswith("ready")] == [
        "ready                     -    4.00 s       -"
    ]
