"""A start report is input: whatever is in the file, it is shown, or refused with every problem and exit code 2."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app.comparison import compare
from app.errors import SettingsError
from app.report_file import LARGEST, parse, read
from app.report_text import render
from tests.unit.reports import Document, document

ROOT = Path(__file__).resolve().parents[2]
HEAD = "r is no start report; `curl …/status` or report.file writes one"


def problems(made: Any) -> tuple[str, ...]:
    with pytest.raises(SettingsError) as refused:
        parse(made, "r")
    assert str(refused.value).startswith(HEAD)
    return refused.value.problems


@pytest.mark.parametrize(
    ("made", "told"),
    [
        ([], "the document is [], expected an object"),
        (None, "the document is null, expected an object"),
        ("x", 'the document is "x", expected an object'),
        ({**document(), "stages": None}, "stages is null, expected a valid array"),
        ({**document(), "stages": {"a": 1}}, 'stages is {"a": 1}, expected a valid array'),
        ({**document(), "stages": [7]}, "stages.0 is 7, expected an object"),
        ({**document(), "stages": [{"name": "a", "state": "done", "start_s": 0}]}, "stages.0.end_s is missing"),
        ({**document(), "elapsed_s": "4"}, 'elapsed_s is "4", expected a valid number'),
        ({**document(), "elapsed_s": None}, "elapsed_s is null, expected a valid number"),
        ({**document(), "elapsed_s": True}, "elapsed_s is true, expected a valid number"),
        ({**document(), "elapsed_s": float("nan")}, "elapsed_s is NaN, expected a finite number"),
        ({**document(), "elapsed_s": float("inf")}, "elapsed_s is Infinity, expected a finite number"),
        ({**document(), "elapsed_s": -1}, "elapsed_s is -1, expected greater than or equal to 0"),
        ({**document(), "time_to_ready_s": 1e300}, "time_to_ready_s is 1e+300, expected less than or equal to"),
        ({**document(), "critical_path": [1]}, "critical_path.0 is 1, expected a valid string"),
        ({**document(), "model": {"name": "x"}}, "model.version is missing"),
        ({**document(), "weights": {"bytes": 10**400}}, "weights.bytes is 1000"),
        ({**document(), "weights": {"notes": "x"}}, 'weights.notes is "x", expected a valid array'),
        ({**document(), "buckets": [{}]}, "buckets.0.name is missing"),
        ({**document(), "budgets": {"warmup": None}}, "budgets.warmup is null, expected an object"),
        ({**document(), "error": "boom"}, 'error is "boom", expected an object'),
        ({**document(), "coverage": [[]]}, "coverage.0 is [], expected an object"),
    ],
)
def test_what_is_missing_null_or_of_another_type_is_named_with_its_value(made: Any, told: str) -> None:
    assert any(problem.startswith(told) for problem in problems(made)), problems(made)


def test_every_problem_is_told_at_once_and_thousands_are_counted() -> None:
    assert problems({**document(), "phase": 1, "elapsed_s": "x"}) == (
        "phase is 1, expected a valid string",
        'elapsed_s is "x", expected a valid number',
    )
    many = problems({**document(), "stages": [0] * 5000})
    assert (len(many), many[-1]) == (21, "4980 more")


def test_what_an_older_version_did_not_write_is_left_out() -> None:
    made = document()
    for name in ("critical", "budgets", "coverage"):
        del made[name]
    del made["weights"]["cached_ratio"]

    assert "budgets" not in render(parse(made, "r"))


def test_names_that_no_version_knows_are_nothing_wrong() -> None:
    assert parse({**document(), "later": {"x": [None]}}, "r") == parse(document(), "r")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (b"", "cannot be read as a start report: it is not JSON"),
        (b"{", "cannot be read as a start report: it is not JSON"),
        (b"\xff\xfe\x00", "cannot be read as a start report: it is not JSON"),
        (b"[" * 100_000, "cannot be read as a start report: it is not JSON"),
        (b'{"elapsed_s": ' + b"9" * 5000 + b"}", "cannot be read as a start report: it is not JSON"),
        (b" " * (LARGEST + 1), "is no start report: it is larger than 16777216 bytes"),
        (b"[]", "is no start report: it has no stages"),
        (b"{}", "is no start report: it has no stages"),
        (b'"stages"', "is no start report: it has no stages"),
        (b'{"stages": ' + b"[" * 900 + b"]" * 900 + b"}", "is no start report; "),
    ],
    ids=["empty", "cut", "binary", "deep", "long number", "large", "list", "no stages", "text", "rather deep"],
)
def test_a_file_that_is_something_else_is_refused_with_its_name(tmp_path: Path, text: bytes, told: str) -> None:
    file = tmp_path / "r.json"
    file.write_bytes(text)

    with pytest.raises(SettingsError) as refused:
        read(file)
    assert str(refused.value).startswith(f"{file} {told}")


def test_a_file_that_is_not_there_or_is_a_directory_is_refused(tmp_path: Path) -> None:
    for path, why in ((tmp_path / "absent", "No such file or directory"), (tmp_path, "Is a directory")):
        with pytest.raises(SettingsError, match=f"{path} cannot be read as a start report: {why}"):
            read(path)


def test_a_pipe_may_hold_a_report(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.write(writing, json.dumps(document()).encode())
    os.close(writing)

    assert read(Path(f"/proc/self/fd/{reading}")) == parse(document(), "r")
    os.close(reading)


def test_control_characters_of_a_report_do_not_reach_the_terminal() -> None:
    made = document(model={"name": "a\x1b[2J\ud800"}, error={"message": "one\x07\ntwo", "stage": None})
    text = render(parse(made, "r"))

    assert text.startswith("a\\x1b[2J?")
    assert text.endswith("error: one\\x07\ntwo")
    assert text.encode()


HOSTILE = (None, True, -1, 0, 5e-324, 1e300, float("nan"), 10**30, "", "x\x00\n", [], [None], {}, {"a": None})


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the place of every value in a document."""
    yield path
    rows = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, inner in rows:
        yield from places(inner, (*path, name))


def damaged(made: Document, path: tuple[Any, ...], value: Any) -> Any:
    """Return the document with another value at a place, or (...) without it."""
    if not path:
        return value
    copied = json.loads(json.dumps(made))
    inner = copied
    for name in path[:-1]:
        inner = inner[name]
    if value is ...:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return copied


@pytest.mark.parametrize("path", list(places(document())), ids=lambda path: ".".join(map(str, path)) or "all")
def test_whatever_stands_at_a_place_the_report_is_shown_and_compared_or_refused(path: tuple[Any, ...]) -> None:
    whole = parse(document(), "r")
    for value in (*HOSTILE, *([...] if path else [])):
        try:
            found = parse(damaged(document(), path, value), "r")
        except SettingsError:
            continue
        assert render(found)
        assert compare(whole, found)
        assert compare(found, whole)


def test_several_damages_at_once_are_shown_or_refused() -> None:
    generator = random.Random(0)
    spots = list(places(document()))[1:]
    for _ in range(300):
        made: Any = document()
        for path in generator.sample(spots, 3):
            try:
                made = damaged(made, path, generator.choice(HOSTILE))
            except (KeyError, IndexError, TypeError):  # the place is gone already
                continue
        try:
            found = parse(made, "r")
        except SettingsError:
            continue
        assert render(found)
        assert compare(found, parse(document(), "r"))


@pytest.mark.parametrize("text", [b"{}", b"[]", b'{"stages": 1}', b'{"stages": []}', b"\x00"])
def test_the_command_ends_with_code_2_and_no_traceback(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "r.json").write_bytes(text)
    command = [sys.executable, "-m", "app", "report", tmp_path / "r.json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"warmgate: {tmp_path}/r.json ")
    assert "report.file writes one" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_command_shows_one_report_compares_two_and_passes_the_documents_on(tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    file.write_text(json.dumps(document()))

    def shown(*arguments: object) -> str:
        command = [sys.executable, "-m", "app", "report", *map(str, arguments)]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout

    assert shown(file).startswith("minilm 1: ready after 4.00 s")
    assert shown(file, file).startswith("preparation (time to ready)\nready at the same time")
    assert json.loads(shown(file, "--json")) == document()
    compared = json.loads(shown(file, file, "--json"))
    assert (compared["later_s"], compared["differences"]) == (0.0, [])
    assert [row["name"] for row in compared["buckets"]] == [row["name"] for row in document()["buckets"]]
