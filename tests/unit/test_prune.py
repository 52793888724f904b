"""Pruning removes what nobody uses, and never what somebody uses, makes or has just made."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.artifacts import Artifact, Restored, golden, prune
from app.artifacts.lease import Lease
from app.artifacts.prune import DAY_S, HOUR_S, Rules
from app.artifacts.seal import seal
from app.artifacts.store import Store
from app.errors import ArtifactError
from app.identity import ArtifactIdentity
from tests.unit.contender import CONTENT, IDENTITY, NOWHERE, fill


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def publish(store: Store, torch: str, factory: str = "m:f") -> Artifact:
    identity = ArtifactIdentity({"torch": torch, "model": {"factory": factory, "kwargs": {}}, "tensors": "t"})
    with store.workspace() as workspace:
        fill(workspace / "payload")
        seal(workspace / "payload", identity, CONTENT)
        artifact = store.publish(workspace / "payload", identity)
    golden.keep(artifact, "w", {"case": {"out": np.ones(1)}})
    return artifact


def used(store: Store, artifact: Artifact, days_ago: float, monkeypatch: pytest.MonkeyPatch | None = None) -> None:
    """Stamp it as used; a day is where `later` is."""
    store.mark_used(artifact.identity)
    stamp = later(monkeypatch) - days_ago * DAY_S
    os.utime(store.path / f"{artifact.path.name}.used", (stamp, stamp))


def later(monkeypatch: pytest.MonkeyPatch | None) -> float:
    """Let the file system's clock say that all here was made a year ago: times of change cannot be set."""
    now = time.time() + 365 * DAY_S
    if monkeypatch:
        monkeypatch.setattr(prune, "_now", lambda _: now)
    return now


def removed(document: dict[str, Any]) -> dict[str, str]:
    return {row["name"]: row["why"] for row in document["removed"]}


def test_what_is_in_use_lately_or_among_the_newest_of_its_model_is_kept(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, lately, newest, older, oldest = (publish(store, torch) for torch in ("1", "2", "3", "4", "5"))
    other = publish(store, "1", "other:model")
    for artifact, days in ((mine, 300), (lately, 29), (newest, 28), (older, 31), (oldest, 90), (other, 200)):
        used(store, artifact, days, monkeypatch)

    found = prune.prune(store, mine.identity, Rules(newest=1, unused_days=30))

    assert removed(found) == {
        older.path.name: "not used for 31 days",
        oldest.path.name: "not used for 90 days",
        **{f"{one.path.name}{end}": "its artifact is gone" for one in (older, oldest) for end in (".golden", ".used")},
    }
    kept = {one.path.name for one in (mine, lately, newest, other)}
    assert {path.name for path in store.path.iterdir()} == {
        f"{key}{end}" for key in kept for end in ("", ".golden", ".used")
    }
    assert found["kept"] == 4
    assert found["freed_bytes"] == sum(row["bytes"] for row in found["removed"]) > 2 * 13000
    assert golden.recall(mine, "w") != {}


def test_the_newest_of_a_model_are_kept_however_long_nobody_used_them(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two, three = (publish(store, torch) for torch in ("1", "2", "3"))
    for artifact, days in ((one, 100), (two, 200), (three, 300)):
        used(store, artifact, days, monkeypatch)

    found = prune.prune(store, IDENTITY, Rules(newest=2, unused_days=30))

    assert set(removed(found)) & {a.path.name for a in (one, two, three)} == {three.path.name}


def test_what_was_published_within_the_last_hour_is_kept_whoever_uses_it(store: Store) -> None:
    for torch in ("1", "2", "3"):
        publish(store, torch)

    found = prune.prune(store, IDENTITY, Rules(newest=0, unused_days=0))

    assert (found["removed"], found["kept"]) == ([], 3)


def test_what_killed_processes_left_goes_and_what_living_ones_need_stays(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact = publish(store, "1")
    living, dead = Lease(store.path, "a" * 64), Lease(store.path, "b" * 64)
    held, left = living.acquire(), dead.acquire()
    assert held is not None
    assert left is not None
    successor = living.create(living.after(held.holder))
    assert successor is not None
    now = later(monkeypatch)
    for name, age_s in ((".building-dead", HOUR_S + 60), (".building-living", HOUR_S - 60)):
        (store.path / name).mkdir()
        os.utime(store.path / name, (now - age_s, now - age_s))
    os.utime(successor.path, (now, now))  # only the last of a chain is renewed
    (store.path / ".rejected-x-1").mkdir()
    (store.path / ".discarded-x").mkdir()
    (store.path / (artifact.path.name + ".golden") / ".writing-x").touch()
    for name in ("c" * 64 + ".golden", "lost+found", "d" * 63, ".snapshot"):
        (store.path / name).mkdir()

    found = prune.prune(store, artifact.identity, Rules())

    assert removed(found) == {
        ".building-dead": "abandoned build",
        ".discarded-x": "interrupted removal",
        ".lease-" + "b" * 64: "expired lease",
        ".rejected-x-1": "rejected artifact",
        "c" * 64 + ".golden": "its artifact is gone",
        artifact.path.name + ".golden/.writing-x": "interrupted write",
    }
    assert successor.holds()
    others = {"lost+found", "d" * 63, ".snapshot", ".building-living"}
    assert others <= {path.name for path in store.path.iterdir()}


def test_a_damaged_artifact_that_nobody_uses_goes_too(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    artifact = publish(store, "1")
    (artifact.path / "manifest.json").write_text("[]")
    later(monkeypatch)

    found = prune.prune(store, IDENTITY, Rules(newest=5))

    assert removed(found)[artifact.path.name] == "not used for 365 days"


def test_a_link_in_place_of_an_artifact_costs_only_the_link(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").touch()
    store.path.mkdir()
    (store.path / ("e" * 64)).symlink_to(tmp_path / "precious")
    later(monkeypatch)

    assert removed(prune.prune(store, IDENTITY, Rules(newest=0))) == {"e" * 64: "not used for 365 days"}
    assert (tmp_path / "precious" / "file").exists()


def test_a_store_that_is_not_there_has_nothing_to_prune(store: Store) -> None:
    assert prune.prune(store, IDENTITY, Rules()) == {"removed": [], "freed_bytes": 0, "kept": 0}


def test_a_store_that_cannot_be_written_is_the_error_that_names_the_setting() -> None:
    with pytest.raises(ArtifactError, match=r"^compile\.artifacts = /sys cannot be written: "):
        prune.prune(Store(Path("/sys")), IDENTITY, Rules())


def test_the_stamp_of_use_is_renewed_once_a_day_and_never_an_error(store: Store) -> None:
    store.path.mkdir()
    stamp = store.path / f"{IDENTITY.key()}.used"
    store.mark_used(IDENTITY)
    for age_s, renewed in ((3600, False), (2 * DAY_S, True), (-2 * DAY_S, True)):
        before = time.time() - age_s
        os.utime(stamp, (before, before))
        store.mark_used(IDENTITY)
        assert (abs(stamp.stat().st_mtime - before) > 60) is renewed, age_s
    Store(Path("/sys")).mark_used(IDENTITY)


READER = """
import sys
from pathlib import Path
from app.artifacts import Restored
from app.artifacts.store import Store
from tests.unit.contender import IDENTITY, NOWHERE
store, seen = Store(Path(sys.argv[1])), set()
while not (store.path / "over").exists():
    found = store.find(IDENTITY, NOWHERE)
    seen.add("whole" if isinstance(found, Restored) else found.why.split(" in /")[0])
print(sorted(seen))
"""


def test_readers_see_the_whole_artifact_or_none_while_it_is_published_and_discarded(store: Store) -> None:
    store.path.mkdir()
    reader = subprocess.Popen(
        [sys.executable, "-c", READER, str(store.path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    until = time.monotonic() + 2
    while time.monotonic() < until:
        with store.workspace() as workspace:
            fill(workspace / "payload")
            seal(workspace / "payload", IDENTITY, CONTENT)
            assert isinstance(store.publish(workspace / "payload", IDENTITY), Artifact)
        assert isinstance(store.find(IDENTITY, NOWHERE), Restored)
        store.discard(store.path / IDENTITY.key())
    (store.path / "over").touch()
    seen, errors = reader.communicate(timeout=30)

    assert errors == ""
    assert seen.strip() == "['nothing stored', 'whole']"
