"""A start report as text: one bar a stage, what ready waited for, and what was skipped and why."""

from typing import Any

from app.report_file import parse
from app.report_text import render
from tests.unit.reports import Document, bucket, document, stage


def shown(**changed: Any) -> list[str]:
    return render(parse(document(**changed), "report")).split("\n")


def after(lines: list[str], start: str) -> list[str]:
    """Return the section whose first line begins so."""
    first = next(number for number, line in enumerate(lines) if line.startswith(start))
    return lines[first : lines.index("", first)] if "" in lines[first:] else lines[first:]


SHORT: Document = {
    "time_to_ready_s": 4.0,
    "critical_path": ["import-runtime", "warm-buckets"],
    "critical": [],
    "stages": [
        stage("open-checkpoint", 0.0, 0.0),
        stage("import-runtime", 0.0, 2.0, detail="torch 2.13.0"),
        stage("build-artifact", 2.0, 2.0, "skipped", "restored"),
        stage("warm-buckets", 2.0, 4.0),
    ],
}


def test_a_report_begins_with_the_result_and_one_bar_a_stage() -> None:
    blank, bar = " ", "█"
    assert shown(**SHORT)[:8] == [
        "minilm 1: ready after 4.00 s (file cache warm, compile cache warm)",
        "",
        f"  open-checkpoint   {bar}{blank * 39}   0.00 s done",
        f"* import-runtime    {bar * 20}{blank * 20}   2.00 s done, torch 2.13.0",
        f"  build-artifact    {blank * 20}{bar}{blank * 19}   0.00 s skipped, restored",
        f"* warm-buckets      {blank * 20}{bar * 20}   2.00 s done",
        "",
        "* on the critical path",
    ]


def test_the_stages_that_ready_waited_for_are_ranked_by_what_they_could_gain() -> None:
    assert after(shown(), "* on the critical path") == [
        "* on the critical path; had such a stage taken no time, ready would have come sooner by",
        "  warm-buckets        1.60 s (it took 1.60 s)",
        "  import-runtime      1.50 s (it took 1.90 s)",
        "  find-artifact       0.10 s (it took 0.10 s)",
    ]


def test_what_a_stage_could_gain_is_not_told_as_long_as_ready_has_not_come() -> None:
    running = [{"stage": "import-runtime", "seconds": 2.0, "at_most_sooner_s": None}]

    assert after(shown(critical=running, time_to_ready_s=None), "* on") == ["* on the critical path"]


def test_weights_code_and_budgets_are_told_with_their_limits() -> None:
    assert after(shown(), "weights: ") == [
        "weights: 90.9 MB by map, 699.0 MB/s; 100% was in the file cache before",
        "  the disk's limit is not known: the files were in the page cache already",
        "code: engine aot, restored",
        "budgets: warm-up used 1.60 s of 300 s, 12.0 MB for a bucket; staging 0 bytes of 268.4 MB",
    ]


def test_a_limit_of_memory_for_a_bucket_is_told_with_the_most_that_one_took() -> None:
    warmup = {"planned_s": 300.0, "used_s": 1.6, "planned_bytes": 2_000_000, "used_bytes": 1_500_000}
    budgets = {**document()["budgets"], "warmup": warmup}

    assert after(shown(budgets=budgets), "weights: ")[-1] == (
        "budgets: warm-up used 1.60 s of 300 s, 1.5 MB of 2.0 MB for a bucket; staging 0 bytes of 268.4 MB"
    )


def test_a_cold_file_is_told_with_its_share_of_what_the_disk_gave_at_best() -> None:
    cold = {"cached_ratio": 0.03, "disk_bytes_per_s": 2_000_000_000, "disk_ratio": 0.67, "notes": []}

    assert after(shown(weights=cold), "weights: ")[0] == (
        "weights: 90.9 MB by map, 699.0 MB/s; from the disk 67% of its best, 2.0 GB/s; 3% was in the file cache before"
    )


def test_code_that_was_built_is_told_with_what_differed() -> None:
    differences = ["torch 2.13.0 → 2.14.1", *(f"field {number}" for number in range(6))]
    built = {"outcome": "rebuilt", "why": "aot could not be built", "differences": differences}

    assert after(shown(artifacts=built), "weights: ")[2:9] == [
        "code: engine aot, rebuilt; aot could not be built",
        "  torch 2.13.0 → 2.14.1",
        "  field 0",
        "  field 1",
        "  field 2",
        "  field 3",
        "  2 more differences",
    ]


def test_every_bucket_has_a_line_and_one_that_was_skipped_says_why() -> None:
    rows = [bucket("batch=1", 0.012), bucket("batch=8", None, "skipped", "warmup.budget_s = 1 was spent")]

    assert after(shown(buckets=rows), "  bucket") == [
        "  bucket                           first    second    steady  proof",
        "  batch=1                       500.0 ms   12.5 ms   12.0 ms  golden, off by 1.2e-07 (warm)",
        "  batch=8                              -         -         -  none (skipped: warmup.budget_s = 1 was spent)",
    ]


def test_shapes_that_are_no_bucket_are_told_with_the_policy() -> None:
    assert after(shown(), "  other shapes") == [
        "  other shapes (uncovered: pad)",
        "  within batch=8,sequence=32               dynamic, the smallest that holds it",
        "  beyond, within batch=32,sequence=256     uncovered, policy pad",
    ]


def test_the_report_of_a_failed_start_shows_how_far_it_came_and_the_error() -> None:
    failed = shown(
        phase="failed",
        time_to_ready_s=None,
        elapsed_s=8.0,
        file_cache="",
        critical_path=[],
        critical=[],
        stages=[
            stage("open-checkpoint", 0.0, 6.0, "failed", "truncated"),
            stage("import-runtime", 2.0, None, "running"),
            stage("warm-buckets", None, 6.0, "stopped"),
        ],
        weights={"bytes_per_s": 0},
        artifacts={"engine": ""},
        buckets=[],
        coverage=[],
        budgets={"warmup": {"planned_s": 300, "used_s": None}, "staging": {"planned_bytes": 1000, "used_bytes": None}},
        error={"kind": "CheckpointError", "stage": "open-checkpoint", "exit_code": 3, "message": "x:\n  - truncated"},
    )

    assert failed == [
        "minilm 1: failed after 8.00 s (file cache unknown, compile cache warm)",
        "",
        f"  open-checkpoint   {'█' * 30}{' ' * 10}   6.00 s failed, truncated",
        f"  import-runtime    {' ' * 10}{'█' * 30}   6.00 s running",
        f"  warm-buckets      {' ' * 40}          stopped",
        "",
        "* on the critical path",
        "",
        "budgets: warm-up used nothing yet of 300 s; staging nothing yet of 1.0 kB",
        "",
        "error: x:",
        "  - truncated",
    ]


def test_a_report_from_the_first_moment_can_be_shown() -> None:
    first = shown(time_to_ready_s=None, elapsed_s=0.0, stages=[stage("a", 0.0, None, "running")])

    assert first[2] == f"  a                 █{' ' * 39}   0.00 s running"
