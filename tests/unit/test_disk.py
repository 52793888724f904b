"""The disk's limit is what it was seen to deliver while readers waited for it; otherwise nothing, and why."""

import threading
from collections.abc import Iterable
from pathlib import Path

import pytest

from app.weights import disk
from app.weights.disk import DiskSpeed, DiskWatch, Sample, disk_speed, waits_for_disk

MB = 1_000_000


def samples(rates: Iterable[tuple[int, int]], waiting: float = 1.0) -> list[Sample]:
    """Return a sample every quarter of a second; `rates`: MB that were asked for and that arrived in each."""
    made = [Sample(10.0, 500, 7, waiting)]
    for stored, arrived in rates:
        last = made[-1]
        made.append(Sample(last.at_s + 0.25, last.stored + stored * MB, last.arrived + arrived * MB, waiting))
    return made


@pytest.mark.parametrize(
    ("seen", "warm", "speed"),
    [
        (samples([(100, 100)] * 4), False, DiskSpeed(400 * MB, 1.0)),
        (samples([(100, 100), (50, 50), (100, 100), (50, 50)]), False, DiskSpeed(400 * MB, 0.75)),
        # Asked for ahead of time in one window, arrived in the next: neither alone is the disk's speed.
        (samples([(300, 100), (0, 100), (0, 100), (100, 100)]), False, DiskSpeed(400 * MB, 1.0)),
        # Half of it lay in the cache and arrived at once.
        (samples([(0, 500), (100, 100), (100, 100)]), False, DiskSpeed(400 * MB, 0.6667)),
        (samples([(100, 100)] * 4), True, DiskSpeed(why="the files were in the page cache already")),
        (samples([(100, 100)]), False, DiskSpeed(why="the reading took 0.25 s, too short to tell")),
        (
            samples([(0, 100)] * 4),
            False,
            DiskSpeed(why="the kernel counts nothing that came from storage for this process"),
        ),
        (
            samples([(100, 100)] * 4, waiting=0.25),
            False,
            DiskSpeed(why="the readers waited for the disk 25% of their time, so something else held them up"),
        ),
        (
            samples([(100, 0), (0, 100), (100, 0)]),
            False,
            DiskSpeed(why="what was asked for and what arrived never met in one window"),
        ),
        (
            [],
            False,
            DiskSpeed(why="the kernel does not count what comes from storage, or the reading was over at once"),
        ),
    ],
)
def test_the_limit_is_the_best_window_and_the_share_is_the_whole_reading(
    seen: list[Sample], warm: bool, speed: DiskSpeed
) -> None:
    assert disk_speed(seen, warm) == speed


def test_a_reading_is_sampled_from_its_begin_to_its_end_with_those_who_read(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(disk, "bytes_from_storage", lambda: 3)
    monkeypatch.setattr(disk, "waits_for_disk", lambda thread: not asked.append(thread))

    with DiskWatch(lambda: 5) as watch:
        watch.watched(lambda: None)()

    assert [(one.stored, one.arrived, one.waiting) for one in watch.samples] == [(3, 5, 1.0)] * len(watch.samples)
    assert set(asked) == {threading.get_native_id()}


def test_a_kernel_that_does_not_count_gives_no_samples(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(disk, "Path", lambda _: tmp_path / "absent")

    with DiskWatch(lambda: 5) as watch:
        pass

    assert watch.samples == []
    assert not waits_for_disk(1)


def test_the_watch_ends_with_a_reading_that_fails() -> None:
    with pytest.raises(OSError, match="gone"), DiskWatch(lambda: 0):
        raise OSError("gone")

    assert not [thread for thread in threading.enumerate() if thread.name == "disk-watch"]


def test_a_thread_that_runs_or_is_gone_does_not_wait_for_the_disk() -> None:
    assert not waits_for_disk(threading.get_native_id())
    assert not waits_for_disk(1 << 30)
