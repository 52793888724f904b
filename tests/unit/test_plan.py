"""The planner: known answers, the choices worth showing, times from start reports, and files that are refused."""

import copy
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from app import plan, plan_file, plan_text
from app.__main__ import cli
from app.buckets import Bucket
from app.errors import SettingsError
from app.plan import BucketTimes, Plan, Row, StageTimes, Start

R22 = """
weights_s: 6          # read and install
restore_s: 0.5        # artifact load on a hit
build_s: 8            # compile on a miss
overlap: false
buckets:
  - {name: a, warm_s: 0.2, steady_s: 0.05, uncovered_extra_s: 0.4, share: 1}
  - {name: b, warm_s: 0.2, steady_s: 0.05, uncovered_extra_s: 0.4, share: 1}
  - {name: c, warm_s: 0.2, steady_s: 0.05, uncovered_extra_s: 0.4, share: 1}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "plan.yaml"
    path.write_text(R22)
    return path


def rows_of(found: Plan) -> dict[tuple[str, str], Row]:
    return {(row.cache, "".join(sorted(row.warmed))): row for row in plan.rows(found)}


def changed(path: str, value: Any) -> dict[str, Any]:
    """Return the plan of R22 with one field replaced; `...` removes it."""
    found = yaml.safe_load(R22)
    at: Any = found
    *parents, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    for part in parents:
        at = at[part]
    if value is ...:
        del at[last]
    else:
        at[last] = value
    return dict(found)


def write(file: Path, document: object) -> Path:
    file.write_text(yaml.safe_dump(document, sort_keys=False))
    return file


def refusal(*files: Path) -> str:
    with pytest.raises(SettingsError) as caught:
        plan_file.read(files)
    assert caught.value.exit_code == 2
    return str(caught.value)


@pytest.mark.parametrize(
    ("cache", "warmed", "ready_s"),
    [
        ("miss", "", 14.0),
        ("miss", "a", 14.2),
        ("miss", "b", 14.2),
        ("miss", "bc", 14.4),
        ("miss", "abc", 14.6),
        ("hit", "", 6.5),
        ("hit", "c", 6.7),
        ("hit", "ab", 6.9),
        ("hit", "abc", 7.1),
    ],
)
def test_the_known_answers(file: Path, cache: str, warmed: str, ready_s: float) -> None:
    row = rows_of(plan_file.read([file]))[cache, warmed]

    assert row.ready_s == ready_s
    assert row.first_request_s == {name: 0.05 if name in warmed else 0.45 for name in "abc"}
    assert row.expected_first_request_s == round(0.05 + 0.4 * (3 - len(warmed)) / 3, 6)
    assert row.worst_first_request_s == (0.05 if warmed == "abc" else 0.45)
    assert row.why_not == ("" if warmed else "for comparison: ready needs a warmed bucket")


@pytest.mark.parametrize(
    ("weights_s", "build_s", "restore_s", "miss_s", "hit_s"),
    [(6, 8, 0.5, 8.6, 7.1), (9, 8, 0.5, 9.6, 10.1), (1, 8, 3, 8.6, 4.6), (0, 0, 0, 0.6, 0.6)],
)
def test_with_overlap_the_longer_of_reading_and_building_counts_and_what_is_restored_comes_after(
    file: Path, weights_s: float, build_s: float, restore_s: float, miss_s: float, hit_s: float
) -> None:
    times = {"weights_s": weights_s, "build_s": build_s, "restore_s": restore_s, "overlap": True}
    found = rows_of(plan_file.read([write(file, {**yaml.safe_load(R22), **times})]))

    assert (found["miss", "abc"].ready_s, found["hit", "abc"].ready_s) == (miss_s, hit_s)


def buckets(*rows: tuple[str, float, float, float]) -> list[BucketTimes]:
    return [BucketTimes(name, warm_s, 0.01, extra_s) for name, warm_s, extra_s, _ in rows]


def planned(*rows: tuple[str, float, float, float]) -> Plan:
    """Return a plan of buckets: name, warm-up, extra of a request that is not covered, share."""
    starts = [plan.given_start(cache, 1, code_s, False, buckets(*rows)) for cache, code_s in (("miss", 5), ("hit", 1))]
    return Plan(tuple(starts), {name: share for name, _, _, share in rows})


@pytest.mark.parametrize(
    ("rows", "order"),
    [
        pytest.param([("a", 1, 1, 0.5), ("b", 1, 1, 0.5)], "ab", id="equal ones as given"),
        pytest.param([("b", 1, 1, 0.5), ("a", 1, 1, 0.5)], "ba", id="equal ones as given, turned"),
        pytest.param([("a", 1, 1, 0.2), ("b", 1, 1, 0.8)], "ba", id="the larger share"),
        pytest.param([("a", 2, 1, 0.5), ("b", 1, 1, 0.5)], "ba", id="the shorter warm-up"),
        pytest.param([("a", 1, 1, 0.5), ("b", 1, 3, 0.5)], "ba", id="the larger extra"),
        pytest.param([("a", 1, 0, 0.5), ("b", 9, 1, 0.5)], "ba", id="nothing is gained by a"),
        pytest.param([("a", 1, 9, 0.5), ("b", 0, 1, 0.5)], "ba", id="b costs nothing"),
        pytest.param([("a", 1, 1, 0.5), ("b", 0, 0, 0.5)], "ab", id="b costs nothing and gives nothing"),
    ],
)
def test_the_order_of_warming_goes_by_gain_per_second(rows: Any, order: str) -> None:
    assert "".join(plan.gains(planned(*rows))) == order


def test_of_few_buckets_every_subset_is_a_row_and_of_many_the_beginnings_of_the_order() -> None:
    assert [len(list(plan.choices("abcdefghijkl"[:count]))) for count in range(1, 7)] == [2, 4, 8, 16, 6, 7]
    assert list(plan.choices("ab")) == [(), ("a",), ("b",), ("a", "b")]
    assert list(plan.choices("abcde"))[-2:] == [("a", "b", "c", "d"), ("a", "b", "c", "d", "e")]


def test_a_choice_that_another_beats_is_not_advised_and_says_which() -> None:
    # b takes longer to warm than a and saves less: only as an addition it is worth anything.
    found = rows_of(planned(("a", 1, 1, 0.9), ("b", 2, 0.5, 0.1)))

    assert {warmed: found["hit", warmed].why_not for warmed in ("a", "b", "ab")} == {
        "a": "",
        "b": "a is ready no later, its first requests no slower",
        "ab": "",
    }
    assert found["miss", "b"].beaten_by == ("a",)


def test_equal_choices_do_not_speak_against_each_other_and_warming_what_gains_nothing_is_not_advised() -> None:
    found = rows_of(planned(("a", 1, 1, 0.4), ("b", 1, 1, 0.4), ("c", 1, 0, 0.2)))

    advised = {warmed for (cache, warmed), row in found.items() if cache == "hit" and not row.why_not}

    assert advised == {"a", "b", "ab"}
    assert found["hit", "abc"].beaten_by == ("a", "b")


def test_stages_that_do_not_wait_for_warming_bound_what_leaving_buckets_out_can_win() -> None:
    stages = (
        StageTimes("bind-engine", (), 1.0, 0.5),
        StageTimes("compute-reference", (), 4.0),
        StageTimes("warm-buckets", ("bind-engine",), 99.0, 0.1),
        StageTimes("prove-answers", ("warm-buckets", "compute-reference"), 99.0),
    )
    start = Start("miss", stages, (BucketTimes("a", 1, 0, 0, 0.2), BucketTimes("b", 3, 0, 0, 0.3)), tail_s=0.25)

    assert {w: round(plan.ready_s(start, w), 6) for w in ("", "a", "b", "ab")} == {
        "": 4.25,
        "a": 4.45,
        "b": 5.15,
        "ab": 6.35,
    }


# ——— requests

SHAPES = ["batch=1,sequence=32", "batch=8,sequence=32", "batch=8,sequence=128"]


@pytest.mark.parametrize(
    ("requests", "shares", "uncovered"),
    [
        ([((1, 32), 1)], (1, 0, 0), 0),
        ([((1, 33), 1)], (0, 0, 1), 0),
        ([((2, 1), 1)], (0, 1, 0), 0),
        ([((1, 1), 3), ((8, 128), 1)], (0.75, 0, 0.25), 0),
        ([((1, 1), 3), ((9, 1), 1)], (1, 0, 0), 0.25),
        ([((1, 1), 1), ((1, 10**15), 3)], (1, 0, 0), 0.75),
    ],
)
def test_each_shape_goes_to_the_smallest_bucket_that_holds_it(
    requests: Sequence[tuple[tuple[int, int], int]], shares: tuple[float, ...], uncovered: float
) -> None:
    rows = [("forward", {"sequence": sequence, "batch": batch}, count) for (batch, sequence), count in requests]

    assert plan.attribute(SHAPES, rows) == (dict(zip(SHAPES, shares, strict=True)), uncovered)


@pytest.mark.parametrize(
    ("names", "sizes", "problem"),
    [
        (["a"], {"batch": 1}, "'a' is no name of a bucket, like batch=1,sequence=32"),
        (["batch=1", "sequence=1"], {"batch": 1}, "the buckets have different dimensions"),
        (["batch=1"], {"batch": 2}, "no bucket covers any of the requests"),
    ],
)
def test_requests_that_no_bucket_can_have_are_refused(names: list[str], sizes: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        plan.attribute(names, [("forward", sizes, 1)])


@pytest.mark.parametrize("name", ["fixed", "batch=1", "batch=1,sequence=32", "_a1=999999999999999999"])
def test_a_bucket_is_found_again_by_its_name(name: str) -> None:
    assert Bucket.named(name).name == name


@pytest.mark.parametrize("name", ["", "batch", "batch=", "batch=0", "batch=-1", "batch=1,", "batch=1,batch=2", "1a=1"])
def test_other_text_is_no_name_of_a_bucket(name: str) -> None:
    with pytest.raises(ValueError, match="is no name of a bucket"):
        Bucket.named(name)


def shaped(**more: Any) -> dict[str, Any]:
    found = yaml.safe_load(R22)
    for bucket, name in zip(found["buckets"], SHAPES, strict=True):
        bucket["name"] = name
        del bucket["share"]
    return {**found, **more}


@pytest.mark.parametrize("form", ["in the plan", "json", "yaml"])
def test_requests_give_the_shares_and_what_no_bucket_covers_is_told_apart(file: Path, form: str) -> None:
    requests: Any = [{"batch": 1, "sequence": 20, "count": 60}, {"batch": 5, "sequence": 99, "count": 20}]
    requests.append({"batch": 9, "sequence": 1, "count": 20})
    if form != "in the plan":
        dump = json.dumps if form == "json" else yaml.safe_dump
        (file.parent / "requests").write_text(dump(requests))
        requests = "requests"

    found = plan.document(plan_file.read([write(file, shaped(requests=requests))]))

    assert found["shares"] == dict(zip(SHAPES, (0.75, 0, 0.25), strict=True))
    assert found["uncovered_share"] == pytest.approx(0.2)
    assert found["notes"] == [
        "20.0% of the requests fit into no bucket; they count in none of the first-request times",
    ]
    assert found["order"] == [SHAPES[0], SHAPES[2], SHAPES[1]]
    assert next(r for r in found["rows"] if r["warmed"] == [SHAPES[0]])["expected_first_request_s"] == 0.15


# ——— files that are refused

TWO = [{"name": "a", "warm_s": 1, "steady_s": 1, "uncovered_extra_s": 1}] * 2
MISTAKES: list[tuple[str, Any, str]] = [
    ("weight_s", 1, "weight_s is no field; did you mean weights_s?"),
    ("buckets.0.warms", 1, "buckets.0.warms is no field; did you mean warm_s?"),
    ("weights_s", ..., "weights_s is not set"),
    ("buckets", ..., "buckets is not set"),
    ("buckets.1.steady_s", ..., "buckets.1.steady_s is not set"),
    ("weights_s", -1, "weights_s = -1: greater than or equal to 0"),
    ("weights_s", float("nan"), "weights_s = nan: greater than or equal to 0"),
    ("weights_s", float("inf"), "weights_s = inf: less than or equal to 1000000000"),
    ("weights_s", 1e300, "weights_s = 1e+300: less than or equal to 1000000000"),
    ("weights_s", "six", "weights_s = 'six': a valid number, unable to parse string as a number"),
    ("weights_s", True, "weights_s = True: a number"),
    ("weights_s", None, "weights_s = None: a valid number"),
    ("overlap", "perhaps", "overlap = 'perhaps': a valid boolean, unable to interpret input"),
    ("buckets", [], "buckets = []: List should have at least 1 item after validation, not 0"),
    ("buckets", "abc", "buckets = 'abc': a valid list"),
    ("buckets.0", 7, "buckets.0 = 7: a valid dictionary or instance of _GivenBucket"),
    ("buckets", TWO, f"buckets = {str(TWO)[:77]}...: each name once, given twice: a"),
    ("buckets.0.name", 3, "buckets.0.name = 3: a valid string"),
    ("buckets.2.share", -0.5, "buckets.2.share = -0.5: greater than or equal to 0"),
    ("requests", [], "requests = []: List should have at least 1 item after validation, not 0"),
    ("requests", 3, "requests = 3: a valid list"),
    ("requests", [{"batch": 0, "count": 1}], "requests.0.batch = 0: greater than or equal to 1"),
    (
        "requests",
        [{"batch": 1.5, "count": 1}],
        "requests.0.batch = 1.5: a valid integer, got a number with a fractional part",
    ),
    ("requests", [{"batch": 1}], "requests.0.count is not set"),
    ("requests", [{"path": 3, "batch": 1, "count": 1}], "requests.0.path = 3: a valid string"),
]


@pytest.mark.parametrize(
    ("path", "value", "problem"), MISTAKES, ids=[f"{path}-{number}" for number, (path, *_) in enumerate(MISTAKES)]
)
def test_one_mistake_is_one_problem_with_field_value_and_what_is_allowed(
    file: Path, path: str, value: Any, problem: str
) -> None:
    assert refusal(write(file, changed(path, value))) == f"{file}: the plan has 1 problem(s)\n  - {problem}"


def test_all_problems_are_told_at_once(file: Path) -> None:
    document = changed("weights_s", -1)
    document["buckets"][2]["warm_s"] = "x"
    document["biuld_s"] = document.pop("build_s")

    assert refusal(write(file, document)).split("\n")[1:] == [
        "  - weights_s = -1: greater than or equal to 0",
        "  - build_s is not set",
        "  - buckets.2.warm_s = 'x': a valid number, unable to parse string as a number",
        "  - biuld_s is no field; did you mean build_s?",
    ]


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"requests": [{"batch": 1, "count": 1}]}, "requests.0 gives ['batch'], expected are ['batch', 'sequence']"),
        ({"requests": [{"batch": 99, "sequence": 1, "count": 1}]}, "no bucket covers any of the requests"),
        ({"requests": "absent.json"}, "absent.json cannot be read: No such file or directory"),
        ({"requests": "a\0b"}, "is not text: embedded null byte"),
        ({"reports": ["absent.json"]}, "weights_s is no field"),
    ],
)
def test_plans_that_contradict_themselves_are_refused(file: Path, more: Mapping[str, Any], told: str) -> None:
    assert told in refusal(write(file, shaped(**more)))


def test_a_share_beside_requests_is_refused(file: Path) -> None:
    document = shaped(requests=[{"batch": 1, "sequence": 1, "count": 1}])
    document["buckets"][1]["share"] = 1

    assert f"bucket {SHAPES[1]} has a share, but shares come from the requests" in refusal(write(file, document))


def test_shares_that_are_all_zero_are_refused(file: Path) -> None:
    file.write_text(R22.replace("share: 1", "share: 0"))

    assert refusal(file) == f"{file}: every share is 0, so no request is expected; give at least one bucket a share"


DEEP = "[" * 100_000


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "holds NoneType, expected a plan (weights_s …) or a start report"),
        (b"[1]", "holds list, expected a plan (weights_s …) or a start report"),
        (b"{}", "build_s is not set"),
        (b"\xff\xfe\x00", "is not text: "),
        (b"a: [", "is not YAML: "),
        (b"weights_s: 1\nweights_s: 2", "given twice: ['weights_s']"),
        (b"weights_s: 2001-99-99", "is not YAML: month must be in 1..12"),
        (b"weights_s: " + b"9" * 5000, "is not YAML: Exceeds the limit"),
        (DEEP.encode(), "is not YAML: maximum recursion depth exceeded"),
        (b"a: &a [*a]", "a is no field"),
        (b'{"weights_s": NaN}', "weights_s = nan: greater than or equal to 0"),
        (b"1: 2", "1 = 1: Keys should be strings"),
    ],
)
def test_files_that_are_no_plan_are_refused(file: Path, content: bytes, told: str) -> None:
    file.write_bytes(content)

    assert told in refusal(file)


def test_a_file_that_is_not_there_or_a_directory_is_refused(tmp_path: Path) -> None:
    remedy = "give a plan file or a start report"
    absent = tmp_path / "absent"

    assert refusal(absent) == f"{absent} cannot be read: No such file or directory; {remedy}"
    assert refusal(tmp_path) == f"{tmp_path} cannot be read: Is a directory; {remedy}"


# ——— start reports


def stage(name: str, start_s: float, end_s: float, *needs: str, state: str = "done") -> dict[str, Any]:
    return {"name": name, "state": state, "needs": list(needs), "start_s": start_s, "end_s": end_s, "detail": ""}


def bucket(name: str, first_s: float, second_s: float, steady_s: float) -> dict[str, Any]:
    return {"name": name, "state": "warm", "first_s": first_s, "second_s": second_s, "steady_s": steady_s}


# Reading and importing side by side, three runs of each bucket (0.56 s and 0.24 s), 0.1 s until ready.
HIT: dict[str, Any] = {
    "model": {"name": "tiny", "version": "2"},
    "time_to_ready_s": 4.2,
    "file_cache": "warm",
    "compile_cache": "warm",
    "stages": [
        stage("open-checkpoint", 0.5, 0.6),
        stage("import-runtime", 0.5, 2.5),
        stage("read-weights", 0.7, 1.7, "open-checkpoint"),
        stage("find-artifact", 2.5, 2.6, "open-checkpoint", "import-runtime"),
        stage("build-artifact", 2.6, 2.6, "find-artifact", state="skipped"),
        stage("compute-reference", 2.6, 2.6, "find-artifact", "read-weights", state="skipped"),
        stage("bind-engine", 2.6, 3.0, "build-artifact", "read-weights"),
        stage("warm-buckets", 3.0, 3.8, "bind-engine"),
        stage("prove-answers", 3.8, 3.9, "warm-buckets", "compute-reference"),
        stage("rehearse-requests", 3.95, 4.1, "prove-answers"),
    ],
    "buckets": [bucket(SHAPES[0], 0.36, 0.1, 0.1), bucket(SHAPES[1], 0.12, 0.06, 0.06)],
}


def missed() -> dict[str, Any]:
    """Return the report of a start that built for 20 s and computed the reference for 30 s meanwhile."""
    found = copy.deepcopy(HIT)
    shift = {"bind-engine": 20, "warm-buckets": 20, "prove-answers": 28.8, "rehearse-requests": 28.8}
    for one in found["stages"]:
        one["start_s"] += shift.get(one["name"], 0)
        one["end_s"] += {"build-artifact": 20, "compute-reference": 30, **shift}.get(one["name"], 0)
        one["state"] = "done"
    return {**found, "compile_cache": "cold", "time_to_ready_s": 33.0}


def report(directory: Path, name: str, document: object) -> Path:
    path = directory / name
    path.write_text(json.dumps(document))
    return path


def test_with_all_buckets_warmed_the_next_start_takes_as_long_as_the_measured_one(tmp_path: Path) -> None:
    files = [report(tmp_path, "hit.json", HIT), report(tmp_path, "miss.json", missed())]

    found = [row for row in plan.rows(plan_file.read(files)) if len(row.warmed) == 2]

    assert [(row.cache, row.ready_s) for row in found] == [("miss", 33.0), ("hit", 4.2)]


def test_from_a_report_a_bucket_costs_its_runs_and_its_proof(tmp_path: Path) -> None:
    found = plan_file.read([report(tmp_path, "hit.json", HIT)])
    one, two = found.starts[0].buckets

    # 0.56 s and 0.24 s of runs: the third of each is seen in the duration of the stage alone.
    assert (one.warm_s, two.warm_s) == (pytest.approx(0.56), pytest.approx(0.24))
    assert (one.proof_s, two.proof_s) == (pytest.approx(0.1 * 0.1 / 0.16), pytest.approx(0.1 * 0.06 / 0.16))
    assert (one.steady_s, one.uncovered_extra_s) == (0.1, pytest.approx(0.26))
    rows = {row.warmed: row for row in plan.rows(found)}
    assert rows[SHAPES[0],].ready_s == pytest.approx(4.2 - 0.24 - 0.0375)
    assert rows[SHAPES[0],].first_request_s == {SHAPES[0]: 0.1, SHAPES[1]: 0.12}


def test_what_the_start_waits_for_anyway_is_not_saved_by_warming_less(tmp_path: Path) -> None:
    rows = {row.warmed: row for row in plan.rows(plan_file.read([report(tmp_path, "miss.json", missed())]))}

    # The reference ends at 32.6 s, long after any warm-up: only the proof becomes shorter.
    assert rows[SHAPES[0],].ready_s == pytest.approx(33.0 - 0.0375)


def test_what_cannot_be_known_is_said(tmp_path: Path) -> None:
    hit, miss = report(tmp_path, "hit.json", HIT), report(tmp_path, "miss.json", missed())
    without = "there are no rows for a {}: no report of a start with compile_cache {} is given, and what such a start "

    assert plan_file.read([hit]).notes[-1].startswith(without.format("miss", "cold"))
    assert plan_file.read([miss]).notes[-1].startswith(without.format("hit", "warm"))
    assert plan_file.read([hit, miss]).notes == (
        f"hit: measured in {hit} (file cache warm)",
        f"hit: 3 runs of each bucket, from the duration of warm-buckets; a first request that is not covered takes as "
        f"long as the first of them, which for {SHAPES[0]} holds what a process does only once",
        f"miss: measured in {miss} (file cache warm)",
        f"miss: 3 runs of each bucket, from the duration of warm-buckets; a first request that is not covered takes as "
        f"long as the first of them, which for {SHAPES[0]} holds what a process does only once",
    )


def test_what_makes_a_measured_start_a_special_one_is_said(tmp_path: Path) -> None:
    waited = {**missed(), "compile_cache": "warm"}
    waited["buckets"] = [*HIT["buckets"], {**bucket(SHAPES[2], 0, 0, 0), "state": "skipped", "first_s": None}]

    notes = plan_file.read([report(tmp_path, "waited.json", waited)]).notes[2:5]

    assert notes == (
        f"hit: not warm in the report, and left out: {SHAPES[2]} (skipped)",
        "hit: this start waited for the build of another process (build-artifact, 20.00 s); the next need not, and may "
        "be ready earlier",
        "hit: this start had no recorded answers for its weights and computed them (compute-reference, 30.00 s); the "
        "next need not, and may be ready earlier",
    )


def test_a_start_of_the_module_itself_is_a_miss(tmp_path: Path) -> None:
    found = plan_file.read([report(tmp_path, "eager.json", {**HIT, "compile_cache": "none"})])

    assert {row.cache for row in plan.rows(found)} == {"miss"}
    assert "miss: compile_cache is none: the module itself was served, as no code was restored" in found.notes


def test_reports_are_found_from_the_plan_file_and_weighed_by_its_buckets(tmp_path: Path) -> None:
    (tmp_path / "measured").mkdir()
    report(tmp_path / "measured", "hit.json", HIT)
    listed = [{"name": SHAPES[1], "share": 3}, {"name": SHAPES[0], "warm_s": 0.5}]
    listed.append({"name": "later", "warm_s": 1, "steady_s": 0.1, "uncovered_extra_s": 2, "share": 0})

    found = plan_file.read([write(tmp_path / "plan.yaml", {"reports": ["measured/hit.json"], "buckets": listed})])

    assert found.shares == {SHAPES[1]: 0.75, SHAPES[0]: 0.25, "later": 0}
    assert {one.name: round(one.warm_s, 6) for one in found.starts[0].buckets} == {
        SHAPES[1]: 0.24,
        SHAPES[0]: 0.5,
        "later": 1,
    }


def test_measured_buckets_that_the_plan_does_not_list_are_not_warmed(tmp_path: Path) -> None:
    report(tmp_path, "hit.json", HIT)
    file = write(tmp_path / "plan.yaml", {"reports": ["hit.json"], "buckets": [{"name": SHAPES[0]}]})

    found = plan_file.read([file])

    assert plan.rows(found)[-1].ready_s == pytest.approx(4.2 - 0.24 - 0.0375)
    assert f"not in the list of buckets and taken as never warmed: {SHAPES[1]}" in found.notes


def test_a_listed_bucket_that_no_report_measured_needs_all_its_times(tmp_path: Path) -> None:
    report(tmp_path, "hit.json", HIT)
    file = write(tmp_path / "plan.yaml", {"reports": ["hit.json"], "buckets": [{"name": "other", "warm_s": 1}]})

    assert refusal(file) == (
        f"{file}: the plan has 1 problem(s)\n  - bucket other was not warmed in {tmp_path / 'hit.json'}; under "
        f"`buckets`, give its warm_s, steady_s and uncovered_extra_s, or list the others alone"
    )


def put(path: str, value: Any) -> dict[str, Any]:
    found: Any = copy.deepcopy(HIT)
    at = found
    *parents, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    for part in parents:
        at = at[part]
    at[last] = value
    return dict(found)


BAD_REPORTS: list[tuple[str, Any, str]] = [
    ("time_to_ready_s", None, "is of a start that did not become ready; give the report of one that did"),
    ("time_to_ready_s", 1.0, "time_to_ready_s = 1.0: before the last stage has ended"),
    ("time_to_ready_s", float("nan"), "time_to_ready_s = nan: greater than or equal to 0"),
    ("compile_cache", "mixed", "compile_cache = 'mixed': 'cold', 'warm' or 'none'"),
    ("stages", [], "stages = []: List should have at least 1 item"),
    ("stages", {"a": 1}, "stages = {'a': 1}: a valid list"),
    ("stages.3.end_s", None, "stages.3.end_s = None: a valid number"),
    ("stages.3.start_s", -1, "stages.3.start_s = -1: greater than or equal to 0"),
    ("stages.3.end_s", 1e300, "stages.3.end_s = 1e+300: less than or equal to 1000000000"),
    ("stages.3.end_s", 2.4, "stage find-artifact ends at 2.4 s, before it begins at 2.5 s"),
    ("stages.3.start_s", 1.0, "stage find-artifact begins at 1.0 s, before what it needs has ended"),
    ("stages.3.needs", ["find-artifact"], "stage find-artifact needs find-artifact, which does not stand before it"),
    ("stages.3.needs", ["bind-engine"], "stage find-artifact needs bind-engine, which does not stand before it"),
    ("stages.3.name", "import-runtime", "stage import-runtime stands twice"),
    ("stages.7.name", "warm", "there is no stage warm-buckets"),
    ("stages.0.name", "\x1b[2J", r"stages.0.name = '\x1b[2J': String should match pattern"),
    ("buckets", [], "no bucket is warm, so nothing is known of any"),
    ("buckets.1.first_s", None, "a bucket that is warm has first_s, second_s and steady_s"),
    ("buckets.1.steady_s", float("inf"), "buckets.1.steady_s = inf: less than or equal to 1000000000"),
    ("buckets.1.name", SHAPES[0], f"bucket {SHAPES[0]} stands twice"),
    ("model", "tiny", "model = 'tiny': a valid dictionary"),
]


@pytest.mark.parametrize(
    ("path", "value", "told"), BAD_REPORTS, ids=[f"{path}-{number}" for number, (path, *_) in enumerate(BAD_REPORTS)]
)
def test_reports_that_nothing_can_be_predicted_from_are_refused(
    tmp_path: Path, path: str, value: Any, told: str
) -> None:
    assert told in refusal(report(tmp_path, "hit.json", put(path, value)))


def test_runs_that_took_no_time_or_hardly_any_are_planned_with(tmp_path: Path) -> None:
    document = {**HIT, "buckets": [bucket("a", 0, 0, 0), bucket("b", 0, 0, 0)]}
    assert [one.warm_s for one in plan_file.read([report(tmp_path, "none", document)]).starts[0].buckets] == [
        pytest.approx(0.4),
        pytest.approx(0.4),
    ]

    document = {**HIT, "buckets": [bucket("a", 1e-320, 0, 1e-320)]}
    assert plan.rows(plan_file.read([report(tmp_path, "hardly", document)]))[-1].ready_s == 4.2


def test_reports_of_the_same_kind_or_of_different_models_are_refused(tmp_path: Path) -> None:
    one, two = report(tmp_path, "1.json", HIT), report(tmp_path, "2.json", HIT)
    other = report(tmp_path, "3.json", {**missed(), "model": {"name": "large"}})

    remedy = "give reports of one model, one start that missed the cache and one that hit it"
    assert refusal(one, two) == f"{one} (tiny, hit), {two} (tiny, hit): {remedy}"
    assert refusal(one, other) == f"{one} (tiny, hit), {other} (large, miss): {remedy}"
    assert "at most 2 items" in refusal(one, two, other)


def test_several_files_must_all_be_reports(tmp_path: Path, file: Path) -> None:
    assert refusal(report(tmp_path, "1.json", HIT), file) == (
        "2 files, not all of them start reports; give one plan file, or reports alone"
    )


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("{}", "is no start report: it has no stages"),
        ("[]", "is no start report: it has no stages"),
        ("no json", "cannot be read as a start report"),
        (DEEP, "cannot be read as a start report"),
    ],
)
def test_a_plan_that_names_something_else_as_its_report_is_refused(tmp_path: Path, content: str, told: str) -> None:
    (tmp_path / "hit.json").write_text(content)

    assert told in refusal(write(tmp_path / "plan.yaml", {"reports": ["hit.json"]}))


# ——— what is shown


def test_the_answer_as_text(file: Path) -> None:
    assert plan_text.render(plan_file.read([write(file, changed("overlap", True))])).split("\n") == [
        "Proposed order of warming, the greatest gain first: what a second of warm-up takes off the expected first",
        "request, (first if not - first if warm) * share / warm-up",
        "",
        "order   bucket   share   warm-up   first if warm    if not    gain",
        "─" * 66,
        "    1   a        33.3%   0.200 s         0.050 s   0.450 s   0.667",
        "    2   b        33.3%   0.200 s         0.050 s   0.450 s   0.667",
        "    3   c        33.3%   0.200 s         0.050 s   0.450 s   0.667",
        "",
        "cache   warmed    ready   expected     worst   advised",
        "─" * 94,
        "miss    none     8.00 s    0.450 s   0.450 s   no: for comparison: ready needs a warmed bucket",
        "miss    a        8.20 s    0.317 s   0.450 s   yes",
        "miss    b        8.20 s    0.317 s   0.450 s   yes",
        "miss    c        8.20 s    0.317 s   0.450 s   yes",
        "miss    a + b    8.40 s    0.183 s   0.450 s   yes",
        "miss    a + c    8.40 s    0.183 s   0.450 s   yes",
        "miss    b + c    8.40 s    0.183 s   0.450 s   yes",
        "miss    all 3    8.60 s    0.050 s   0.050 s   yes",
        "hit     none     6.50 s    0.450 s   0.450 s   no: for comparison: ready needs a warmed bucket",
        "hit     a        6.70 s    0.317 s   0.450 s   yes",
        "hit     b        6.70 s    0.317 s   0.450 s   yes",
        "hit     c        6.70 s    0.317 s   0.450 s   yes",
        "hit     a + b    6.90 s    0.183 s   0.450 s   yes",
        "hit     a + c    6.90 s    0.183 s   0.450 s   yes",
        "hit     b + c    6.90 s    0.183 s   0.450 s   yes",
        "hit     all 3    7.10 s    0.050 s   0.050 s   yes",
        "",
        "expected, worst: the first request, over all buckets by their shares, and of the slowest bucket; of buckets",
        "that are not warmed the answers are not proven either",
        "",
        "miss, all buckets warmed: ready after 8.60 s",
        f"  weights           {'█' * 28}{' ' * 12}   6.00 s",
        f"  build             {'█' * 37}{' ' * 3}   8.00 s",
        f"  warm-buckets      {' ' * 37}{'█' * 3}   0.60 s",
        "",
        "hit, all buckets warmed: ready after 7.10 s",
        f"  weights           {'█' * 28}{' ' * 12}   6.00 s",
        f"  restore           {' ' * 27}{'█' * 2}{' ' * 11}   0.50 s",
        f"  warm-buckets      {' ' * 30}{'█' * 3}{' ' * 7}   0.60 s",
    ]


def test_long_names_are_shown_by_their_place_in_the_order_and_markup_is_text(tmp_path: Path) -> None:
    names = ["[red]a[/red]", "a bucket of a long name"]
    rows = [{"name": name, "warm_s": 1, "steady_s": 0, "uncovered_extra_s": 1} for name in names]
    document = {"weights_s": 0, "restore_s": 0, "build_s": 0, "buckets": rows}

    shown = plan_text.render(plan_file.read([write(tmp_path / "plan.yaml", document)]))

    assert "    1   [red]a[/red]              50.0%" in shown
    assert "miss    2        1.00 s    0.500 s   1.000 s   yes" in shown


def test_of_many_buckets_the_table_shows_how_far_in_the_order_warming_goes(tmp_path: Path) -> None:
    rows = [{"name": f"b{n}", "warm_s": 1, "steady_s": 0, "uncovered_extra_s": n} for n in range(5)]
    document = {"weights_s": 0, "restore_s": 0, "build_s": 0, "buckets": rows}

    shown = plan_text.render(plan_file.read([write(tmp_path / "plan.yaml", document)]))

    assert "hit     1 to 3   3.00 s" in shown
    assert "hit     all 5    5.00 s    0.000 s   0.000 s   no: 1 to 4 is ready no later, no slower" in shown


def test_the_command_answers_with_json(file: Path) -> None:
    done = CliRunner().invoke(cli, ["plan", str(file), "--json"])

    found = json.loads(done.stdout)
    assert done.exit_code == 0
    assert next(row for row in found["rows"] if row["warmed"] == ["a"]) == {
        "cache": "miss",
        "warmed": ["a"],
        "ready_s": 14.2,
        "first_request_s": {"a": 0.05, "b": 0.45, "c": 0.45},
        "expected_first_request_s": 0.316667,
        "worst_first_request_s": 0.45,
        "advised": True,
        "why": "",
    }
    assert len(found["rows"]) == 16
    assert (found["order"], found["notes"], found["uncovered_share"]) == (["a", "b", "c"], [], None)


def test_the_command_takes_reports_and_shows_text(tmp_path: Path) -> None:
    files = [str(report(tmp_path, "hit.json", HIT)), str(report(tmp_path, "miss.json", missed()))]

    done = CliRunner().invoke(cli, ["plan", *files])

    assert done.exit_code == 0
    assert "hit, all buckets warmed: ready after 4.20 s" in done.stdout
    assert f"note: hit: measured in {files[0]}" in done.stdout.replace("\n  ", " ")


def test_a_bad_file_ends_the_command_with_code_2_and_one_line_of_json(tmp_path: Path) -> None:
    absent = tmp_path / "absent"

    done = subprocess.run(
        [sys.executable, "-m", "app", "plan", absent, "--json"], capture_output=True, text=True, check=False
    )

    assert (done.returncode, done.stdout) == (2, "")
    assert json.loads(done.stderr) == {
        "error": f"{absent} cannot be read: No such file or directory; give a plan file or a start report",
        "kind": "SettingsError",
        "exit_code": 2,
    }
