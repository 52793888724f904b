"""A process that is killed at any step leaves nothing or a whole artifact, and is in nobody's way afterwards."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from app.artifacts.seal import seal
from app.artifacts.store import Store
from tests.unit.contender import CONTENT, IDENTITY, fill

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_a_process_killed_at_any_step_leaves_nothing_or_a_whole_artifact(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.killed", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]

    assert len(rows) > 300, "every line and every call of it was a step"
    nothing = [f"nothing stored in {tmp_path / str(row['step'])}" for row in rows]
    assert [row for row, none in zip(rows, nothing, strict=True) if row["found"] not in (True, none)] == []
    assert [row for row in rows if not row["next"]] == [], "the next process has the artifact"
    assert [row for row in rows if row["after"] != [IDENTITY.key()]] == [], "and pruning leaves nothing else"
    assert {name for row in rows for name in row["left"]} == {".building", ".lease"}
    found = [row["found"] is True for row in rows]
    assert found == sorted(found), "once published it stays"
    assert set(found) == {False, True}


def test_every_byte_and_every_name_is_on_disk_before_the_artifact_is_seen(tmp_path: Path) -> None:
    code = f"""
import os, sys
from pathlib import Path
told, fsync, store = [], os.fsync, Path({str(tmp_path)!r})
def recording(fd):
    told.append(os.path.relpath(os.readlink(f"/proc/self/fd/{{fd}}"), store))
    fsync(fd)
os.fsync = recording
sys.addaudithook(lambda event, a: told.append(f"-> {{Path(a[1]).name}}") if event == "os.rename" else None)
from tests.unit.contender import build
build(store)
print("\\n".join(told))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    told = done.stdout.splitlines()

    seen = told.index(f"-> {IDENTITY.key()}")
    before = {one.partition("/payload")[2] for one in told[:seen] if "/payload" in one}
    assert before == {"", "/code.so", "/constants.safetensors", "/deep", "/deep/table.json", "/manifest.json"}
    assert told[seen + 1] == ".", "and then the store itself, which has the new name"


def test_what_a_file_server_has_renamed_though_it_says_no_is_published(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    with store.workspace() as workspace:
        fill(workspace / "payload")
        seal(workspace / "payload", IDENTITY, CONTENT)
        (workspace / "payload").rename(store.path / IDENTITY.key())  # the request whose answer was lost

        assert store.publish(workspace / "payload", IDENTITY).path == store.path / IDENTITY.key()


def test_the_workspace_of_a_living_process_is_not_taken_for_a_killed_ones(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with store.workspace() as mine:
        os.utime(mine, (0, 0))
        renewed = mine.stat().st_mtime
        os.utime(mine)  # what the renewal does
        with store.workspace():
            assert mine.is_dir()
        assert renewed == 0
