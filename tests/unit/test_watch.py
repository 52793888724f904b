"""Mapped files are looked at from a thread of its own; whoever asks gets an answer at once."""

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from app.checkpoints import Checkpoint, CheckpointFile
from app.weights import watch
from app.weights.watch import SILENT_S, FileWatch
from tests.unit.written import filled, written


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def checkpoint(tmp_path: Path) -> Iterator[Checkpoint]:
    made = written(tmp_path, {"a": filled("F32", 10)}, {"b": filled("F32", 10)})
    yield made
    made.close()


def grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"x")


CHANGES: dict[str, Callable[[Path], object]] = {
    "grown": grow,
    "truncated": lambda path: os.truncate(path, 3),
    "touched": lambda path: os.utime(path, ns=(2, 2)),
}


def test_files_that_are_what_they_were_are_in_order(checkpoint: Checkpoint) -> None:
    looking = FileWatch(checkpoint.files, Clock())

    for _ in range(3):
        looking.look()
        assert looking.why_not() is None


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_file_that_was_changed_in_place_is_told_and_stays_so(
    checkpoint: Checkpoint, change: Callable[[Path], object], number: int
) -> None:
    looking, file = FileWatch(checkpoint.files, Clock()), checkpoint.files[number]
    before = file.path.stat()
    change(file.path)
    assert looking.why_not() is None

    looking.look()

    told = f"{file.path} was changed in place after it was opened; its mapped pages are the model: restart"
    assert looking.why_not() == told
    os.truncate(file.path, before.st_size)
    os.utime(file.path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert looking.why_not() == told


@pytest.mark.parametrize("change", ["replaced", "removed"])
def test_another_file_under_its_name_changes_nothing(checkpoint: Checkpoint, change: str) -> None:
    path = checkpoint.files[0].path
    if change == "replaced":
        (path.parent / "new").write_bytes(b"another")
        (path.parent / "new").rename(path)
    else:
        path.unlink()
    looking = FileWatch(checkpoint.files, Clock())

    looking.look()

    assert looking.why_not() is None


@pytest.mark.parametrize("code", [errno.ESTALE, errno.EIO, errno.ENOTCONN])
def test_a_file_whose_server_is_gone_is_told(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def fail(fd: int) -> os.stat_result:
        raise OSError(code, os.strerror(code))

    looking = FileWatch(checkpoint.files, Clock())
    with monkeypatch.context() as patched:
        patched.setattr(os, "fstat", fail)
        looking.look()

    assert looking.why_not() == (
        f"{checkpoint.files[0].path} is gone: {os.strerror(code)}; its mapped pages are the model: restart"
    )


@pytest.mark.parametrize(("silent", "told"), [(0, False), (SILENT_S, False), (SILENT_S + 0.6, True), (3600, True)])
def test_a_file_system_that_does_not_answer_is_told_until_it_does(
    checkpoint: Checkpoint, silent: float, told: bool
) -> None:
    clock = Clock()
    looking = FileWatch(checkpoint.files, clock)
    looking.look()
    clock.now += silent

    text = f"the file system of {checkpoint.files[0].path} has not answered for {silent:.0f} s"
    assert looking.why_not() == (text if told else None)
    looking.look()
    assert looking.why_not() is None


def test_ten_seconds_of_silence_are_borne() -> None:
    assert SILENT_S == 10


def test_where_no_file_is_mapped_nothing_is_looked_at() -> None:
    clock = Clock()
    looking = FileWatch((), clock)
    before = threading.active_count()

    looking.start()
    clock.now += 3600

    assert threading.active_count() == before
    assert looking.why_not() is None


def until(done: Callable[[], object]) -> bool:
    end = time.monotonic() + 30
    while not done() and time.monotonic() < end:
        time.sleep(0.005)
    return bool(done())


def test_a_started_watch_looks_again_and_again_and_ends_with_a_change(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "EVERY_S", 0.001)
    looks: list[int] = []
    real = CheckpointFile.changed_in_place
    monkeypatch.setattr(CheckpointFile, "changed_in_place", lambda file: (looks.append(file.fd), real(file))[1])
    looking = FileWatch(checkpoint.files)
    looking.start()

    assert until(lambda: len(looks) > 20)
    assert set(looks) == {file.fd for file in checkpoint.files}
    assert looking.why_not() is None
    grow(checkpoint.files[1].path)
    assert until(looking.why_not)
    assert until(lambda: "file-watch" not in {thread.name for thread in threading.enumerate()})


def test_an_answer_is_given_at_once_while_a_look_hangs(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    hangs, release = threading.Event(), threading.Event()

    def hang(file: CheckpointFile) -> str:
        hangs.set()
        release.wait(60)
        return "released"

    monkeypatch.setattr(CheckpointFile, "changed_in_place", hang)
    clock = Clock()
    looking = FileWatch(checkpoint.files, clock)
    looking.start()
    try:
        assert hangs.wait(60)
        assert looking.why_not() is None
        clock.now += 11
        assert looking.why_not() == f"the file system of {checkpoint.files[0].path} has not answered for 11 s"
        assert not release.is_set()
    finally:
        release.set()
    assert until(lambda: looking.why_not() == "released; its mapped pages are the model: restart")
