"""A lease has one holder: taken by one, renewed by its holder, taken over from the dead, ended once."""

import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.artifacts.holder import Holder
from app.artifacts.lease import Held, Lease, Terms

TERMS = Terms(renew_s=0.05, expire_s=10)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def elsewhere(held: Held) -> None:
    """Make the lease one of another machine: only silence tells that its holder is dead."""
    other = replace(held.holder, boot="another")
    held.path.write_bytes(other.as_json().ljust(4096) + held.path.read_bytes()[4096:])


def acquired(lease: Lease) -> Held:
    held = lease.acquire()
    assert held is not None
    return held


def test_a_lease_is_had_by_one_until_it_is_given_back(tmp_path: Path) -> None:
    one, other = Lease(tmp_path, "a", TERMS), Lease(tmp_path, "a", TERMS)

    held = acquired(one)
    assert (other.acquire(), held.holds()) == (None, True)
    held.release()
    assert (list(tmp_path.iterdir()), held.holds(), held.renew()) == ([], False, False)
    assert acquired(other).holds()


def test_leases_of_other_names_are_others(tmp_path: Path) -> None:
    assert acquired(Lease(tmp_path, "a", TERMS)).holds()
    assert acquired(Lease(tmp_path, "b", TERMS)).holds()


def test_a_lease_is_taken_over_when_it_was_silent_on_the_watchers_clock_and_not_before(tmp_path: Path) -> None:
    clock = Clock()
    elsewhere(acquired(Lease(tmp_path, "a", TERMS)))
    watcher = Lease(tmp_path, "a", TERMS, clock)

    assert watcher.acquire() is None
    clock.now = 9.9
    assert watcher.acquire() is None
    clock.now = 10
    assert acquired(watcher).holds()


def test_every_renewal_starts_the_time_anew(tmp_path: Path) -> None:
    clock = Clock()
    held = acquired(Lease(tmp_path, "a", TERMS))
    watcher = Lease(tmp_path, "a", TERMS, clock)
    for _ in range(5):
        assert watcher.acquire() is None
        clock.now += 9
        assert held.renew()
    assert watcher.acquire() is None


def test_a_renewal_never_writes_into_the_lease_of_a_successor(tmp_path: Path) -> None:
    held = acquired(Lease(tmp_path, "a", TERMS))
    before = held.path.read_bytes()
    successor = Lease(tmp_path, "a", TERMS).create(held.lease.after(held.holder))
    assert successor is not None

    assert (held.renew(), held.holds(), successor.holds()) == (False, False, True)
    held.release()
    assert successor.holds(), "giving back what one has lost changes nothing"
    assert held.path.read_bytes() == before
    successor.release()
    assert list(tmp_path.iterdir()) == []


def test_of_many_contenders_for_one_dead_lease_exactly_one_succeeds(tmp_path: Path) -> None:
    for number in range(40):
        name = f"n{number}"
        elsewhere(acquired(Lease(tmp_path, name, TERMS)))
        clock, won = Clock(), []
        contenders = [Lease(tmp_path, name, TERMS, clock) for _ in range(3)]
        assert [one.acquire() for one in contenders] == [None] * 3
        clock.now = 10
        barrier = threading.Barrier(3)

        def contend(lease: Lease, barrier: threading.Barrier = barrier, won: list[Held] = won) -> None:
            barrier.wait()
            if held := lease.acquire():
                won.append(held)

        threads = [threading.Thread(target=contend, args=(one,)) for one in contenders]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [held.holds() for held in won] == [True]


def test_a_contender_that_judged_a_lease_dead_long_ago_takes_nothing_from_a_later_holder(tmp_path: Path) -> None:
    clock = Clock()
    elsewhere(acquired(Lease(tmp_path, "a", TERMS)))
    late, quick = Lease(tmp_path, "a", TERMS, clock), Lease(tmp_path, "a", TERMS, clock)
    judged = late.look()
    assert judged is not None
    quick.look()
    clock.now = 10
    acquired(quick).release()
    newcomer = acquired(Lease(tmp_path, "a", TERMS))

    assert late.create(late.after(judged.holder)) is None
    assert newcomer.holds()
    assert list(tmp_path.iterdir()) == [newcomer.path]


def test_who_took_over_and_died_is_taken_over_from_in_turn(tmp_path: Path) -> None:
    clock = Clock()
    for _ in range(4):
        watcher = Lease(tmp_path, "a", TERMS, clock)
        watcher.look()
        clock.now += 10
        held = acquired(watcher)
        elsewhere_before = held.holds()
        elsewhere(held)
        assert elsewhere_before
    watcher.look()
    clock.now += 10
    last = acquired(watcher)
    assert len(list(tmp_path.iterdir())) == 5
    last.release()
    assert list(tmp_path.iterdir()) == []


CODE = """
import os, sys
from pathlib import Path
from app.artifacts.lease import Lease
assert Lease(Path(sys.argv[1]), "a").acquire()
os._exit(0)
"""


def test_the_lease_of_a_dead_process_of_this_machine_is_free_at_once(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", CODE, str(tmp_path)])
    while (found := Lease(tmp_path, "a", TERMS).look()) is None or found.holder is None:
        time.sleep(0.01)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)

    assert acquired(Lease(tmp_path, "a", TERMS)).holds(), "even while nobody has taken its exit code"
    assert process.wait() == 0


@pytest.mark.parametrize(
    ("changes", "dead"),
    [
        ({}, False),
        ({"started": 1}, True),
        ({"pid": 4_000_000_000}, True),
        ({"pid": 4_000_000_000, "boot": "another"}, False),
        ({"pid": 4_000_000_000, "host": "another"}, False),
        ({"pid": 4_000_000_000, "namespace": "pid:[1]"}, False),
    ],
    ids=["alive", "number given again", "gone", "other boot", "other pod", "other namespace"],
)
def test_a_process_is_known_dead_only_where_its_number_means_something(changes: dict[str, Any], dead: bool) -> None:
    assert replace(Holder.this_process(), **changes).is_known_dead() is dead


HOSTILE = {
    "empty": b"",
    "noise": b"\xff" * 5000,
    "list": b"[]",
    "deep": b"[" * 4000,
    "path": json.dumps({**json.loads(Holder.this_process().as_json()), "token": "../../etc/x"}).encode(),
    "types": json.dumps({**json.loads(Holder.this_process().as_json()), "pid": "1"}).encode(),
    "surplus": json.dumps({**json.loads(Holder.this_process().as_json()), "more": 1}).encode(),
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
def test_a_lease_that_cannot_be_read_is_waited_for_and_then_taken_over_within_its_directory(
    tmp_path: Path, content: bytes
) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / ".lease-a").write_bytes(content)
    clock = Clock()
    lease = Lease(tmp_path / "store", "a", TERMS, clock)

    assert lease.acquire() is None
    clock.now = 10
    held = acquired(lease)
    assert held.path == tmp_path / "store" / ".lease-a.unreadable"
    held.release()
    assert [list((tmp_path / "store").iterdir()), len(list(tmp_path.iterdir()))] == [[], 1]


def test_a_lease_is_a_link_to_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("mine")
    (tmp_path / ".lease-a").symlink_to("target")

    with pytest.raises(OSError, match="Too many levels"):
        Lease(tmp_path, "a", TERMS).acquire()
    assert (tmp_path / "target").read_text() == "mine"


def test_a_lease_is_renewed_while_the_block_runs_and_given_back_after_an_error(tmp_path: Path) -> None:
    watcher = Lease(tmp_path, "a", TERMS)

    def work() -> None:
        with acquired(Lease(tmp_path, "a", TERMS)).keep():
            seen = {watcher.look()}
            until = time.monotonic() + 5
            while len(seen) < 4 and time.monotonic() < until:
                seen.add(watcher.look())
                time.sleep(0.01)
            assert len(seen) == 4
            raise RuntimeError("over")

    with pytest.raises(RuntimeError, match="over"):
        work()
    assert list(tmp_path.iterdir()) == []
    assert not any(thread.name == "renewal" for thread in threading.enumerate())


def test_where_there_are_no_hard_links_the_lease_is_created_all_the_same(tmp_path: Path) -> None:
    code = f"""
import os, errno
from pathlib import Path
def link(*_, **__):
    raise OSError(errno.EPERM, "Operation not permitted")
os.link = link
from app.artifacts.lease import Lease
one, other = Lease(Path({str(tmp_path)!r}), "a"), Lease(Path({str(tmp_path)!r}), "a")
held = one.acquire()
print(held.holds(), other.acquire(), held.renew())
held.release()
print(list(Path({str(tmp_path)!r}).iterdir()))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.splitlines() == ["True None True", "[]"]
