"""Every byte of a checkpoint is read once and left in memory; a file that changes meanwhile is never loaded."""

import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from app.checkpoints import Checkpoint, CheckpointFile, file_stamp
from app.errors import CheckpointError
from app.progress import Progress, Stopped
from app.weights import ResidentWeights, reading
from app.weights.reading import read_resident

CHUNK, STEP = 1 << 14, 1 << 12
# Neither a whole number of chunks nor of steps nor of pages.
SIZES = (3 * CHUNK + STEP + 77, 5, CHUNK)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "CHUNK", CHUNK)
    monkeypatch.setattr(reading, "STEP", STEP)


def content(size: int, salt: int = 0) -> bytes:
    return (hashlib.sha256(bytes([salt])).digest() * (size // 32 + 1))[:size]


def opened(directory: Path, *contents: bytes) -> Checkpoint:
    files = []
    for number, data in enumerate(contents):
        path = directory / f"{number}.bin"
        path.write_bytes(data)
        fd = os.open(path, os.O_RDONLY)
        status = os.fstat(fd)
        files.append(CheckpointFile(path, fd, status.st_size, file_stamp(status)))
    return Checkpoint(directory, "safetensors", tuple(files), {}, None)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Iterator[Checkpoint]:
    made = opened(tmp_path, *(content(size, salt) for salt, size in enumerate(SIZES)))
    yield made
    made.close()


def read(checkpoint: Checkpoint, threads: int = 2) -> ResidentWeights:
    return read_resident(checkpoint, Progress(), threads)


def digest_of(directory: Path, *contents: bytes, threads: int = 2) -> str:
    directory.mkdir()
    made = opened(directory, *contents)
    found = read(made, threads).digest
    made.close()
    return found


def test_the_maps_hold_every_byte_of_every_file(checkpoint: Checkpoint) -> None:
    resident = read(checkpoint)

    assert [bytes(one) for one in resident.maps] == [content(size, salt) for salt, size in enumerate(SIZES)]
    assert (resident.bytes_read, resident.mode, resident.checkpoint) == (sum(SIZES), "map", checkpoint)


def test_the_maps_outlive_the_open_files(tmp_path: Path) -> None:
    made = opened(tmp_path, content(100))
    resident = read(made)
    made.close()

    assert bytes(resident.maps[0]) == content(100)


def test_the_maps_cannot_be_written(checkpoint: Checkpoint) -> None:
    with pytest.raises(TypeError, match=r"read-only|readonly"):
        read(checkpoint).maps[0][0] = 1


def test_the_digest_is_that_of_the_digests_of_all_chunks_in_order(checkpoint: Checkpoint) -> None:
    parts = [
        hashlib.sha256(content(size, salt)[offset : offset + CHUNK]).digest()
        for salt, size in enumerate(SIZES)
        for offset in range(0, size, CHUNK)
    ]

    assert read(checkpoint).digest == hashlib.sha256(b"".join(parts)).hexdigest()


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_equal_bytes_have_the_same_digest_elsewhere_and_with_any_number_of_threads(
    tmp_path: Path, threads: int
) -> None:
    one, two = content(SIZES[0], 1), content(SIZES[1], 2)

    assert digest_of(tmp_path / "a", one, two, threads=threads) == digest_of(tmp_path / "b", one, two, threads=1)


@pytest.mark.parametrize(
    ("file", "byte"),
    [(0, 0), (0, STEP - 1), (0, STEP), (0, CHUNK), (0, SIZES[0] - 1), (1, 4), (2, CHUNK - 1)],
)
def test_one_flipped_bit_anywhere_gives_another_digest(tmp_path: Path, file: int, byte: int) -> None:
    before = [content(size, salt) for salt, size in enumerate(SIZES)]
    after = [bytearray(data) for data in before]
    after[file][byte] ^= 1

    assert digest_of(tmp_path / "a", *before) != digest_of(tmp_path / "b", *(bytes(data) for data in after))


def test_the_order_of_the_files_is_part_of_the_digest(tmp_path: Path) -> None:
    one, two = content(CHUNK, 1), content(CHUNK, 2)

    assert digest_of(tmp_path / "a", one, two) != digest_of(tmp_path / "b", two, one)


def test_progress_counts_every_byte(checkpoint: Checkpoint) -> None:
    progress = Progress()

    read_resident(checkpoint, progress, 2)

    assert (progress.done, progress.total, progress.unit, progress.ratio) == (sum(SIZES), sum(SIZES), "bytes", 1.0)


def test_after_reading_every_page_is_in_memory(checkpoint: Checkpoint) -> None:
    pages = sum(-(-size // os.sysconf("SC_PAGESIZE")) for size in SIZES)

    assert read(checkpoint).mapped_bytes == pages * os.sysconf("SC_PAGESIZE")


def test_files_that_were_just_written_are_found_in_the_file_cache(checkpoint: Checkpoint) -> None:
    assert read(checkpoint).file_cache == "warm"


def test_a_checkpoint_without_files_is_read_at_once() -> None:
    resident = read(Checkpoint(Path("/models/none"), "safetensors", (), {}, None))

    assert (resident.maps, resident.bytes_read, resident.digest) == ((), 0, hashlib.sha256(b"").hexdigest())


class Meddling(Progress):
    """Does something to the files once they are mapped, before the first byte is read."""

    def __init__(self, meddle: Callable[[], object]) -> None:
        super().__init__()
        self._meddle = meddle

    def expect(self, total: int, unit: str) -> None:
        super().expect(total, unit)
        self._meddle()


@pytest.mark.parametrize("left", [0, 100, STEP, 2 * CHUNK + 1, SIZES[0] - 1])
def test_a_file_that_is_truncated_while_it_is_read_is_refused_with_its_name_and_where_it_ends(
    checkpoint: Checkpoint, left: int
) -> None:
    file = checkpoint.files[0]

    with pytest.raises(CheckpointError) as caught:
        read_resident(checkpoint, Meddling(lambda: os.truncate(file.path, left)), 1)

    assert str(caught.value) == (
        f"{file.path} ends at byte {left}, it had {SIZES[0]} bytes when it was opened; it was truncated while it was "
        f"being loaded: publish checkpoints by renaming a complete directory"
    )


@pytest.mark.parametrize("left", [0, 100, SIZES[0] - 1])
def test_a_file_that_was_truncated_between_opening_and_reading_is_refused_by_its_name(
    checkpoint: Checkpoint, left: int
) -> None:
    file = checkpoint.files[0]
    os.truncate(file.path, left)

    with pytest.raises(CheckpointError) as caught:
        read(checkpoint)

    assert str(file.path) in str(caught.value)


def grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"x")


def rewrite(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(bytes(len(data)))
    os.utime(path, ns=(1, 1))


def touch(path: Path) -> None:
    os.utime(path, ns=(2, 2))


@pytest.mark.parametrize("change", [grow, rewrite, touch])
@pytest.mark.parametrize("meanwhile", [False, True], ids=["before reading", "while reading"])
def test_a_file_that_was_changed_in_place_after_it_was_opened_is_refused(
    checkpoint: Checkpoint, meanwhile: bool, change: Callable[[Path], None]
) -> None:
    file = checkpoint.files[1]
    if not meanwhile:
        change(file.path)

    with pytest.raises(CheckpointError) as caught:
        read_resident(checkpoint, Meddling(lambda: change(file.path)) if meanwhile else Progress(), 2)

    assert str(caught.value) == (
        f"{file.path} changed while it was being loaded; publish checkpoints by renaming a complete directory"
    )


def test_a_checkpoint_that_was_published_anew_by_renaming_is_still_the_one_that_was_opened(
    tmp_path: Path, checkpoint: Checkpoint
) -> None:
    (tmp_path / "new").write_bytes(content(SIZES[0], 9))
    (tmp_path / "new").rename(checkpoint.files[0].path)

    assert bytes(read(checkpoint).maps[0]) == content(SIZES[0], 0)


def test_a_stopped_start_up_stops_reading(checkpoint: Checkpoint) -> None:
    progress = Progress()
    progress.stop()

    with pytest.raises(Stopped):
        read_resident(checkpoint, progress, 2)

    assert progress.done == 0
