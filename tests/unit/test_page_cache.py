"""Whether files are cached is found without reading them, counted by the kernel or by samples."""

import os
from pathlib import Path

import pytest

from app.checkpoints import Checkpoint, CheckpointFile
from app.weights import page_cache
from app.weights.page_cache import cached_ratio, cached_share, cached_shares, summary
from tests.unit.written import filled, written

SIZE = 24 << 20


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    return written(tmp_path, {"x": filled("U8", SIZE)}, {"y": filled("U8", 4 * SIZE)})


@pytest.fixture(params=["counted", "sampled"])
def how(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "sampled":
        monkeypatch.setattr(page_cache, "_counted", lambda file: None)
    return str(request.param)


def forget(file: CheckpointFile) -> None:
    os.fsync(file.fd)
    os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_DONTNEED)


@pytest.mark.usefixtures("how")
def test_files_that_were_just_written_are_warm(checkpoint: Checkpoint) -> None:
    assert cached_shares(checkpoint) == [1.0, 1.0]
    assert summary(cached_ratio(checkpoint, cached_shares(checkpoint))) == "warm"


@pytest.mark.usefixtures("how")
def test_files_that_were_dropped_are_cold(checkpoint: Checkpoint) -> None:
    for file in checkpoint.files:
        forget(file)

    assert summary(cached_ratio(checkpoint, cached_shares(checkpoint))) == "cold"


@pytest.mark.usefixtures("how")
def test_one_file_of_two_is_mixed(checkpoint: Checkpoint) -> None:
    forget(checkpoint.files[1])
    small, large = cached_shares(checkpoint)

    assert (small, large) == (1.0, pytest.approx(0.0, abs=0.1))
    assert cached_ratio(checkpoint, [small, large]) == pytest.approx(0.2, abs=0.1)


@pytest.mark.parametrize(
    ("shares", "ratio"),
    [([1.0, 0.0], 0.2), ([0.0, 1.0], 0.8), ([0.5, 0.5], 0.5), ([1.0, 1.0], 1.0), ([None, 1.0], None)],
)
def test_the_share_of_all_files_counts_bytes_and_is_unknown_where_one_cannot_say(
    checkpoint: Checkpoint, shares: list[float | None], ratio: float | None
) -> None:
    assert cached_ratio(checkpoint, shares) == (None if ratio is None else pytest.approx(ratio, abs=1e-3))


@pytest.mark.parametrize(
    ("ratio", "word"),
    [(0.0, "cold"), (0.25, "cold"), (0.26, "mixed"), (0.94, "mixed"), (0.95, "warm"), (None, "mixed")],
)
def test_the_share_is_said_in_a_word(ratio: float | None, word: str) -> None:
    assert summary(ratio) == word


def test_asking_the_kernel_brings_nothing_in(checkpoint: Checkpoint) -> None:
    forget(checkpoint.files[1])

    assert [cached_share(checkpoint.files[1], 16) for _ in range(3)] == [0.0] * 3


def test_a_file_system_that_cannot_say_is_mixed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_cache, "_counted", lambda file: None)
    reading, writing = os.pipe()
    file = CheckpointFile(Path("/pipe"), reading, 1, (0, 0, 0, 0))

    assert cached_share(file, 3) is None
    assert summary(None) == "mixed"
    os.close(reading)
    os.close(writing)


def test_an_empty_file_has_nothing_that_could_be_missing(tmp_path: Path) -> None:
    with (tmp_path / "empty").open("wb+") as opened:
        file = CheckpointFile(tmp_path, opened.fileno(), 0, (0, 0, 0, 0))
        assert cached_share(file, 1) == 1.0
        assert cached_ratio(Checkpoint(tmp_path, "", (file,), {}), [1.0]) == 1.0
