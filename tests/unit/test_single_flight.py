"""Many processes on one empty store: one builds, the others wait; the dead are replaced, the slow are not."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from app.artifacts import Artifact, Missed, Restored
from app.artifacts.flight import flight
from app.artifacts.lease import Lease, Terms
from app.artifacts.seal import seal, verify
from app.artifacts.store import Store
from app.errors import ArtifactError
from app.progress import Progress, Stopped
from tests.unit.contender import CONTENT, IDENTITY, MISSED, NOWHERE, build, fill

ROOT = Path(__file__).resolve().parents[2]
QUICK = Terms(renew_s=0.05, expire_s=0.6)


class Contenders:
    """Processes that start together on one store, and what they tell."""

    def __init__(self, directory: Path) -> None:
        self.store, self.events = directory / "store", directory / "events"
        self.processes: list[subprocess.Popen[bytes]] = []

    def add(self, count: int, build_s: float, **options: object) -> None:
        arguments = [str(self.store), str(self.events), str(build_s), *(f"{n}={v}" for n, v in options.items())]
        self.processes += [
            subprocess.Popen(
                [sys.executable, "-m", "tests.unit.contender", *arguments], cwd=ROOT, stderr=subprocess.PIPE
            )
            for _ in range(count)
        ]
        self.wait_for("started", len(self.processes))

    def go(self) -> None:
        self.events.with_name("go").touch()

    def told(self, event: str) -> list[int]:
        """Return the processes that told it."""
        rows = [line.split() for line in self.events.read_text().splitlines()] if self.events.exists() else []
        return [int(row[1]) for row in rows if row[0] == event]

    def wait_for(self, event: str, count: int = 1) -> list[int]:
        until = time.monotonic() + 60
        while len(self.told(event)) < count:
            assert time.monotonic() < until, f"{event} was told {len(self.told(event))} times"
            time.sleep(0.01)
        return self.told(event)

    def end(self) -> list[str]:
        """Wait for all; return what they wrote on standard error."""
        return [process.communicate(timeout=60)[1].decode() for process in self.processes]


@pytest.fixture
def contenders(tmp_path: Path) -> Iterator[Contenders]:
    found = Contenders(tmp_path)
    yield found
    for process in found.processes:
        process.kill()
        process.communicate()


def names(store: Path) -> list[str]:
    return sorted(path.name for path in store.iterdir())


def test_of_eight_processes_that_start_together_exactly_one_builds(contenders: Contenders) -> None:
    contenders.add(8, build_s=0.5)
    contenders.go()

    assert contenders.end() == [""] * 8
    assert (len(contenders.told("building")), len(contenders.told("restored"))) == (1, 7)
    assert isinstance(verify(contenders.store / IDENTITY.key(), IDENTITY), Artifact)
    assert names(contenders.store) == [IDENTITY.key()], "leases and workspaces are gone"


def test_a_killed_builder_on_this_machine_is_replaced_at_once_and_by_one(contenders: Contenders) -> None:
    contenders.add(4, build_s=60, expire_s=600)
    contenders.go()
    victim = contenders.wait_for("building")[0]
    contenders.add(3, build_s=0.3, expire_s=600)
    for process in contenders.processes[:4]:
        if process.pid != victim:
            process.kill()
    began = time.monotonic()
    os.kill(victim, signal.SIGKILL)

    contenders.wait_for("built")
    contenders.wait_for("restored", 2)
    assert time.monotonic() - began < 10, "nobody waited for the lease to expire"
    assert len(contenders.told("building")) == 2


def test_a_slow_builder_that_renews_its_lease_keeps_it(contenders: Contenders) -> None:
    contenders.add(3, build_s=4, renew_s=0.1, expire_s=1.5)
    contenders.go()

    contenders.end()
    assert (len(contenders.told("building")), len(contenders.told("restored"))) == (1, 2)


def test_a_builder_that_hangs_loses_its_lease_and_takes_the_others_artifact_once_it_goes_on(
    contenders: Contenders,
) -> None:
    contenders.add(1, build_s=0, then="stop", renew_s=0.1, expire_s=0.8)
    contenders.go()
    hanging = contenders.wait_for("building")[0]
    contenders.add(3, build_s=0.2, renew_s=0.1, expire_s=0.8)
    contenders.wait_for("restored", 2)
    inode = (contenders.store / IDENTITY.key()).stat().st_ino
    os.kill(hanging, signal.SIGCONT)

    contenders.end()
    assert len(contenders.told("building")) == 2
    assert (contenders.store / IDENTITY.key()).stat().st_ino == inode
    assert names(contenders.store) == [IDENTITY.key()]


def test_after_a_failed_build_all_that_waited_try_at_once_and_none_waits_for_another(contenders: Contenders) -> None:
    contenders.add(4, build_s=1, then="raise")
    contenders.go()
    began = time.monotonic()

    errors = contenders.end()

    assert len(contenders.told("building")) == 4
    assert time.monotonic() - began < 3, "one after the other would take four seconds"
    assert sum("failed (the compiler says no): this process does not wait any longer" in text for text in errors) >= 2


def test_a_builder_that_is_stopped_is_followed_by_one_that_waited(contenders: Contenders) -> None:
    progress, failed = Progress(), []

    def first() -> None:
        try:
            with flight(Store(contenders.store), MISSED, NOWHERE, progress, 60, QUICK):
                contenders.add(3, build_s=0.3)
                contenders.go()
                time.sleep(0.6)
                raise Stopped
        except Stopped:
            failed.append(True)

    first()

    contenders.end()
    assert failed
    assert (len(contenders.told("building")), len(contenders.told("restored"))) == (1, 2)


def hold(store: Path, terms: Terms = QUICK) -> Lease:
    """Leave a lease of a process on another machine."""
    store.mkdir(exist_ok=True)
    lease = Lease(store, IDENTITY.key(), terms)
    held = lease.acquire()
    assert held is not None
    content = held.path.read_bytes()
    changed = content.replace(held.holder.boot.encode(), b"x" * len(held.holder.boot))
    held.path.write_bytes(changed)
    return lease


def test_waiting_is_shown_with_its_holder_and_changes_only_when_the_lease_is_renewed(tmp_path: Path) -> None:
    terms = Terms(1, 600)
    lease = hold(tmp_path / "store", terms)
    progress = Progress()
    waiting = threading.Thread(target=lambda: stopped(lambda: build(tmp_path / "store", progress, terms=terms)))
    waiting.start()

    def said(before: str, within_s: float) -> str:
        until = time.monotonic() + within_s
        while progress.detail == before and time.monotonic() < until:
            time.sleep(0.01)
        return progress.detail

    first = said("", within_s=10)
    assert said(first, within_s=1.5) == first, "a holder that is silent is no sign of life"
    renewed = tmp_path / "renewed"  # by rename: whoever looks in the middle of a write would see nobody
    renewed.write_bytes(lease.head.read_bytes()[:-2] + b"7\n")
    renewed.replace(lease.head)
    second = said(first, within_s=10)
    progress.stop()
    waiting.join()

    told = re.compile(rf"waiting for the build of {re.escape(os.uname().nodename)} \(process {os.getpid()}\), (\d+) s")
    before, after = told.fullmatch(first), told.fullmatch(second)
    assert before is not None
    assert after is not None
    assert int(before[1]) < int(after[1])


def stopped(work: Callable[[], object]) -> None:
    with pytest.raises(Stopped):
        work()


@pytest.mark.parametrize("skew_s", [-86400 * 365, 86400 * 365])
def test_a_lease_of_another_machine_expires_by_the_watchers_own_clock_whatever_its_time_says(
    tmp_path: Path, skew_s: float
) -> None:
    lease = hold(tmp_path / "store")
    stamp = time.time() + skew_s
    os.utime(lease.head, (stamp, stamp))
    began = time.monotonic()

    build(tmp_path / "store", terms=QUICK)

    assert QUICK.expire_s <= time.monotonic() - began < QUICK.expire_s + 2


def test_a_process_that_has_waited_long_enough_builds_beside_the_holder_and_says_so(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    hold(store.path, Terms(1, 600))

    with flight(store, MISSED, NOWHERE, Progress(), 0.3, Terms(1, 600)) as turn:
        assert (turn.published, turn.held) == (None, None)
        assert turn.why.startswith("built by this start too, since compile.wait_s = 0.3 s are over and ")
        with store.workspace() as workspace:
            fill(workspace / "payload")
            seal(workspace / "payload", IDENTITY, CONTENT)
            turn.publish(workspace / "payload")
    assert isinstance(store.find(IDENTITY, NOWHERE), Restored)


def test_a_process_that_is_told_to_stop_does_not_wait_on(tmp_path: Path) -> None:
    hold(tmp_path / "store", Terms(1, 600))
    progress = Progress()
    threading.Timer(0.2, progress.stop).start()
    began = time.monotonic()

    with pytest.raises(Stopped):
        build(tmp_path / "store", progress, terms=Terms(1, 600))

    assert time.monotonic() - began < 2


def test_what_was_published_while_waiting_is_restored_and_its_layer_tells_by_whom(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    with flight(store, MISSED, NOWHERE, Progress(), 60, QUICK) as first:
        turns = []

        def wait() -> None:
            with flight(store, MISSED, NOWHERE, Progress(), 60, QUICK) as turn:
                turns.append(turn)

        waiting = threading.Thread(target=wait)
        waiting.start()
        time.sleep(0.4)
        with store.workspace() as workspace:
            fill(workspace / "payload")
            seal(workspace / "payload", IDENTITY, CONTENT)
            artifact = first.publish(workspace / "payload")
    waiting.join()

    assert turns[0].published is not None
    assert turns[0].published.artifact == artifact
    why = f"built by {os.uname().nodename} (process {os.getpid()}) while this process waited {{}} s"
    assert [(one.name, one.result) for one in turns[0].published.layers] == [("sealed-artifact", "hit")]
    assert turns[0].published.layers[0].why in {why.format(0), why.format(1)}


def test_a_damaged_artifact_is_replaced_but_not_one_that_another_process_has_repaired_meanwhile(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    build(store.path)
    damaged = store.path / IDENTITY.key() / "code.so"
    damaged.write_bytes(b"damaged")
    lookup = store.find(IDENTITY, NOWHERE)
    assert isinstance(lookup, Missed)
    with flight(store, lookup, NOWHERE, Progress(), 60, QUICK) as turn, store.workspace() as workspace:
        fill(workspace / "payload")
        seal(workspace / "payload", IDENTITY, CONTENT)
        repaired = turn.publish(workspace / "payload")
        inode = repaired.path.stat().st_ino
        fill(workspace / "second")
        seal(workspace / "second", IDENTITY, CONTENT)
        turn.publish(workspace / "second")

    assert (store.path / IDENTITY.key()).stat().st_ino == inode
    assert [path.name.partition("-")[0] for path in store.path.iterdir() if path.name != IDENTITY.key()] == [
        ".rejected"
    ]


def test_a_miss_on_a_store_that_cannot_be_written_is_the_error_that_names_the_setting() -> None:
    with pytest.raises(
        ArtifactError, match=r"^compile\.artifacts = /sys cannot be written: .*; give a writable directory$"
    ):
        build(Path("/sys"))


def test_a_start_that_cannot_write_still_waits_for_the_one_that_builds(tmp_path: Path) -> None:
    contender = Lease(tmp_path, IDENTITY.key(), QUICK)
    held = contender.acquire()
    assert held is not None
    progress = Progress()
    threading.Timer(0.3, progress.stop).start()

    with pytest.raises(Stopped):
        build(tmp_path, progress)
    assert progress.detail.startswith("waiting for the build of ")
