"""Two starts compared say in words where the difference came from, and keep preparation and steady speed apart."""

from collections.abc import Callable
from typing import Any

import pytest

from app import comparison
from app.comparison import BETWEEN, changes, compare
from app.report_file import StartReport, parse
from tests.unit.reports import Document, bucket, cold, document, stage, with_stages


def report(made: Document) -> StartReport:
    return parse(made, "report")


def told(one: Document, two: Document) -> dict[str, list[str]]:
    """Return the sections by their headings."""
    preparation, stages, steady, *buckets = compare(report(one), report(two)).split("\n\n")
    assert preparation.startswith("preparation (time to ready)\n")
    assert steady.startswith("steady speed\n")
    return {
        "preparation": preparation.split("\n")[1:],
        "stages": stages.split("\n"),
        "steady": steady.split("\n")[1:],
        "buckets": buckets[0].split("\n") if buckets else [],
    }


def test_a_start_that_compiled_is_explained_by_what_took_its_time_the_most_first() -> None:
    assert told(document(), cold())["preparation"] == [
        "ready 29.70 s later: 33.70 s instead of 4.00 s",
        "   +29.10 s  build-artifact 29.10 s instead of 0.00 s "
        "(code was compiled: torch 2.13.0 → 2.14.1, torch's own code changed)",
        "    +0.40 s  warm-buckets 2.00 s instead of 1.60 s (torch 2.14.1 instead of torch 2.13.0)",
        "    +0.20 s  all else together",
        "  beside the critical path: read-weights 1.33 s instead of 0.13 s "
        "(files cold instead of warm, 2% cached instead of 100%)",
        "  beside the critical path: compute-reference 9.70 s instead of 0.00 s (code was compiled)",
    ]


def test_the_comparison_as_json_has_every_stage_with_what_explains_it() -> None:
    made = comparison.document(report(document()), report(cold()))

    assert (made["time_to_ready_s"], made["later_s"]) == ([4.0, 33.7], pytest.approx(29.7))
    first, second, *_ = made["stages"]
    assert (first["name"], first["critical"], first["seconds"][0]) == ("build-artifact", [False, True], 0.0)
    assert first["seconds"][1] == pytest.approx(29.1)
    assert first["because"] == ["code was compiled: torch 2.13.0 → 2.14.1, torch's own code changed"]
    assert (second["name"], second["later_s"]) == ("warm-buckets", pytest.approx(0.4))
    assert {row["name"] for row in made["stages"]} >= {"read-weights", BETWEEN}
    assert [row["name"] for row in made["buckets"]] == [row["name"] for row in cold()["buckets"]]
    assert set(first["because"]) < set(made["differences"])


def test_the_other_way_round_everything_is_sooner() -> None:
    lines = told(cold(), document())["preparation"]

    assert lines[:2] == [
        "ready 29.70 s sooner: 4.00 s instead of 33.70 s",
        "   -29.10 s  build-artifact 0.00 s instead of 29.10 s (code was restored)",
    ]


def test_what_stages_and_the_time_between_them_contribute_is_the_whole_difference() -> None:
    rows = changes(report(document()), report(cold()))

    assert sum(row.later_s for row in rows) == pytest.approx(33.7 - 4.0)
    assert {row.stage: round(row.later_s, 6) for row in rows if abs(row.later_s) > 1e-9} == {
        "build-artifact": 29.1,
        "warm-buckets": 0.4,
        "import-runtime": 0.2,
    }


def test_time_that_passed_between_stages_is_told_as_such() -> None:
    late = document(time_to_ready_s=9.0)

    assert told(document(), late)["preparation"] == [
        "ready 5.00 s later: 9.00 s instead of 4.00 s",
        f"    +5.00 s  {BETWEEN} 5.40 s instead of 0.40 s",
    ]


def test_a_stage_that_came_to_the_critical_path_says_that_its_times_do_not_explain_all() -> None:
    one = with_stages(document(), stage("read-weights", 0.41, 1.41))
    path = ["open-checkpoint", "read-weights", "warm-buckets", "prove-answers"]
    two = with_stages(
        document(time_to_ready_s=8.01, critical_path=path),
        stage("read-weights", 0.41, 6.41),
        stage("warm-buckets", 6.41, 8.01),
        stage("prove-answers", 8.01, 8.01),
    )

    assert told(one, two)["preparation"] == [
        "ready 4.01 s later: 8.01 s instead of 4.00 s",
        "    +6.00 s  read-weights 6.00 s instead of 1.00 s, on the critical path now",
        "    -1.90 s  import-runtime 1.90 s instead of 1.90 s, off the critical path now",
        "    -0.10 s  find-artifact 0.10 s instead of 0.10 s, off the critical path now",
    ]


def test_two_starts_alike_are_told_as_such() -> None:
    assert told(document(), document(time_to_ready_s=4.02)) == {
        "preparation": ["ready at the same time: 4.02 s instead of 4.00 s"],
        "stages": [
            "                      first    second   ratio",
            "ready                4.00 s    4.02 s   1.00x",
            "open-checkpoint      0.01 s    0.01 s   1.00x",
            "read-weights         0.13 s    0.13 s   1.00x",
            "import-runtime       1.90 s    1.90 s   1.00x",
            "find-artifact        0.10 s    0.10 s   1.00x",
            "build-artifact       0.00 s    0.00 s       -",
            "compute-reference    0.00 s    0.00 s       -",
            "warm-buckets         1.60 s    1.60 s   1.00x",
            "prove-answers        0.00 s    0.00 s       -",
        ],
        "steady": ["  no bucket changed by more than 10%"],
        "buckets": [
            "                        first    second   ratio",
            "batch=1,sequence=32    8.0 ms    8.0 ms   1.00x",
            "batch=8,sequence=32   27.0 ms   27.0 ms   1.00x",
        ],
    }


def test_a_start_that_was_never_ready_says_where_it_ended_and_why_and_which_stages_differ() -> None:
    failed = with_stages(
        document(
            phase="failed",
            time_to_ready_s=None,
            error={"kind": "WarmupError", "stage": "prove-answers", "exit_code": 6, "message": "not proven:\n  - x"},
        ),
        stage("warm-buckets", 2.4, 5.4),
        stage("prove-answers", None, 5.4, "stopped"),
    )

    for one, two, word, warm in (
        (document(), failed, "second", "warm-buckets 3.00 s instead of 1.60 s"),
        (failed, document(), "first", "warm-buckets 1.60 s instead of 3.00 s"),
    ):
        lines = told(one, two)["preparation"]
        assert lines[0] == f"the {word} start was not ready, but failed in prove-answers: not proven:"
        assert f"  {warm}" in lines
        assert not any("later" in line or "sooner" in line for line in lines)
    assert told(document(), failed)["stages"][1] == "ready                4.00 s         -       -"


def slow(name: str, by_s: float) -> Callable[[Document], Document]:
    """Return a change that makes a stage of the critical path, and ready, later."""

    def change(made: Document) -> Document:
        old = next(one for one in made["stages"] if one["name"] == name)
        later = {**old, "end_s": old["end_s"] + by_s}
        return {**with_stages(made, later), "time_to_ready_s": made["time_to_ready_s"] + by_s}

    return change


THREE = [bucket("batch=1,sequence=32", 0.008), bucket("batch=8,sequence=32", 0.027), bucket("batch=32", 0.1)]
SKIPPED = [bucket("batch=1,sequence=32", 0.008), bucket("batch=8,sequence=32", None, "skipped", "the budget was spent")]
CHANGES: dict[str, tuple[dict[str, Any], str, str]] = {
    "bytes": ({"weights": {"bytes": 181_800_000}}, "warm-buckets", "181.8 MB of weights instead of 90.9 MB"),
    "buckets added": ({"buckets": THREE}, "warm-buckets", "1 bucket more: batch=32"),
    "bucket skipped": (
        {"buckets": SKIPPED},
        "warm-buckets",
        "bucket batch=8,sequence=32 skipped (the budget was spent) instead of warm",
    ),
    "budget": (
        {"budgets": {**document()["budgets"], "warmup": {"planned_s": 10, "used_s": 1}}},
        "warm-buckets",
        "warmup.budget_s 10 instead of 300",
    ),
    "budget of memory": (
        {"budgets": {**document()["budgets"], "warmup": {"planned_s": 300, "used_s": 1, "planned_bytes": 5_000_000}}},
        "warm-buckets",
        "warmup.budget_bytes 5.0 MB instead of none",
    ),
    "device": (
        {"device": {"fingerprint": "kind=cpu threads=1"}},
        "warm-buckets",
        "device threads=1 instead of threads=2",
    ),
    "engine": (
        {"artifacts": {"engine": "jit", "why": "no aot: a branch"}},
        "warm-buckets",
        "engine jit instead of aot: no aot: a branch",
    ),
    "device name": ({"device": {"name": "arm64"}}, "import-runtime", "device arm64 instead of x86_64"),
    "other weights": ({"weights": {"fingerprint": "sha256:zz"}}, "prove-answers", "other weights"),
    "no store": ({"compile_cache": "none"}, "build-artifact", "compile cache none instead of warm"),
}


@pytest.mark.parametrize(("changed", "name", "cause"), CHANGES.values(), ids=CHANGES)
def test_a_cause_that_the_documents_know_stands_beside_the_stage_that_it_explains(
    changed: dict[str, Any], name: str, cause: str
) -> None:
    made = document(**changed)
    if name not in made["critical_path"]:
        made["critical_path"] = [*made["critical_path"], name]
    lines = told(document(), slow(name, 2.0)(made))["preparation"]

    assert lines[1].startswith(f"    +2.00 s  {name} ")
    assert lines[1].endswith(f" ({cause})")


@pytest.mark.parametrize(("changed", "name", "cause"), CHANGES.values(), ids=CHANGES)
def test_a_cause_that_explains_no_stage_is_told_all_the_same(changed: dict[str, Any], name: str, cause: str) -> None:
    del name
    assert f"  also different: {cause}" in told(document(), document(**changed))["preparation"]


def test_a_cause_that_can_only_slow_down_does_not_explain_what_became_faster() -> None:
    one = slow("read-weights", 3.0)(document())
    one["time_to_ready_s"] = 4.0
    two = document(file_cache="cold", weights={"cached_ratio": None})

    assert told(one, two)["preparation"] == [
        "ready at the same time: 4.00 s instead of 4.00 s",
        "  beside the critical path: read-weights 0.13 s instead of 3.13 s",
        "  also different: files cold instead of warm",
    ]


def test_code_that_was_compiled_for_no_known_difference_says_what_the_look_up_said() -> None:
    two = cold(artifacts={**document()["artifacts"], "outcome": "rebuilt"})

    assert "(code was compiled: nothing is stored for this identity)" in told(document(), two)["preparation"][1]


def test_many_differences_are_cut_and_the_model_is_told() -> None:
    differences = [f"field {number}" for number in range(9)]
    two = cold(artifacts={"engine": "aot", "outcome": "rebuilt", "differences": differences})
    two["model"] = {"name": "other", "version": "2"}
    lines = told(document(), two)["preparation"]

    assert "(code was compiled: field 0, field 1, field 2, 6 more)" in lines[1]
    assert lines[-1] == "  also different: model other instead of minilm; model version 2 instead of 1"


def test_a_bucket_whose_steady_speed_changed_is_named_apart_from_the_preparation() -> None:
    rows = [bucket("batch=1,sequence=32", 0.0087), bucket("batch=8,sequence=32", 0.0351), bucket("new", 0.1)]
    sections = told(document(), document(buckets=rows, device={"fingerprint": "kind=cpu threads=1"}))

    assert sections["steady"] == [
        "  batch=8,sequence=32 is 30% slower: 35.1 ms instead of 27.0 ms (device threads=1 instead of threads=2)"
    ]
    assert sections["preparation"][0].startswith("ready at the same time")
    assert sections["buckets"][1:] == [
        "batch=1,sequence=32    8.0 ms    8.7 ms   1.09x",
        "batch=8,sequence=32   27.0 ms   35.1 ms   1.30x",
        "new                         -  100.0 ms       -",
    ]


def test_a_bucket_that_became_faster_is_named_too() -> None:
    rows = [bucket("batch=1,sequence=32", 0.004), bucket("batch=8,sequence=32", 0.027)]

    assert told(document(), document(buckets=rows))["steady"] == [
        "  batch=1,sequence=32 is 50% faster: 4.0 ms instead of 8.0 ms"
    ]


def test_a_stage_that_took_nothing_has_no_multiple_and_long_names_have_room() -> None:
    names = "compute-everything-twice"
    one = document(stages=[stage("build-artifact", 2.0, 2.0002), stage(names, 0.0, 1.0)])
    two = document(stages=[stage("build-artifact", 2.0, 55.0), stage(names, 0.0, 2.0)])

    assert told(one, two)["stages"][2:] == [
        "build-artifact              0.00 s   53.00 s       -",
        "compute-everything-twice    1.00 s    2.00 s   2.00x",
    ]


def test_reports_without_buckets_have_no_table_of_them() -> None:
    assert told(document(buckets=[]), document(buckets=[]))["buckets"] == []
