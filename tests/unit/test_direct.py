"""Files that are not in the page cache are read past it: the same bytes, and the cache stays as it was."""

import mmap
import os
import random
from pathlib import Path

import pytest

from app.checkpoints import Checkpoint
from app.errors import CheckpointError
from app.progress import Progress
from app.weights import ResidentWeights, direct
from app.weights.layout import Block, plan_layout
from app.weights.memory import SelfClosing, address_of
from app.weights.page_cache import cached_ratio, cached_shares, summary
from app.weights.reading import read_resident
from tests.unit.written import filled, written

SIZES = (1, 4095, 4096, 4097, 3 << 20, 12_345_678, 7, 64, 2 << 20, 100_003)
SHARDS = tuple({f"{salt}.{n}": filled("U8", size, salt=salt + n) for n, size in enumerate(SIZES)} for salt in (0, 50))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    made = written(tmp_path / "model", *SHARDS)
    forget(made)
    if summary(cached_ratio(made, cached_shares(made))) != "cold":
        pytest.fail(f"the page cache cannot be dropped on the file system of {tmp_path}")
    return made


def forget(checkpoint: Checkpoint) -> None:
    for file in checkpoint.files:
        os.fsync(file.fd)
        os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_DONTNEED)


def read(checkpoint: Checkpoint, staging: int = 256 << 20, progress: Progress | None = None) -> ResidentWeights:
    return read_resident(checkpoint, plan_layout(checkpoint, "read", "", None), progress or Progress(), staging, {})


def wrong(resident: ResidentWeights) -> list[str]:
    """Name the tensors whose bytes in memory are not what was written."""
    found = []
    for name, (_, _, data) in {name: one for shard in SHARDS for name, one in shard.items()}.items():
        memory, place = resident.memory.find(resident.checkpoint.tensors[name])
        if memory[place.offset : place.offset + len(data)] != data:
            found.append(name)
    return found


@pytest.mark.parametrize("staging", [1 << 20, 5 << 20, 256 << 20])
def test_a_cold_file_is_read_past_the_cache_and_every_byte_is_right(checkpoint: Checkpoint, staging: int) -> None:
    progress = Progress()

    resident = read(checkpoint, staging, progress)

    assert resident.direct_bytes == resident.bytes_read == sum(SIZES) * 2
    assert not wrong(resident)
    assert summary(cached_ratio(checkpoint, cached_shares(checkpoint))) == "cold"
    assert 0 < resident.staging_bytes <= staging
    assert progress.ratio == 1


def test_a_file_in_the_cache_is_read_from_there(tmp_path: Path) -> None:
    made = written(tmp_path / "model", *SHARDS)

    resident = read(made)

    assert (resident.direct_bytes, resident.staging_bytes) == (0, 0)
    assert not wrong(resident)


def test_a_small_file_is_read_the_ordinary_way(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "SMALLEST", 1 << 40)

    resident = read(checkpoint)

    assert resident.direct_bytes == 0
    assert not wrong(resident)


def test_what_the_kernel_refuses_is_read_the_ordinary_way(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct, "UNIT", 24)  # no offset of a whole sector, except by chance

    resident = read(checkpoint)

    assert resident.direct_bytes < resident.bytes_read
    assert not wrong(resident)


def test_a_file_system_without_direct_reading_is_read_the_ordinary_way(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def refusing(path: str, flags: int, *more: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real(path, flags, *more)

    monkeypatch.setattr(os, "open", refusing)
    resident = read(checkpoint)

    assert resident.direct_bytes == 0
    assert not wrong(resident)


class Truncating(Progress):
    """Truncates a file at the first sign of life."""

    def __init__(self, path: Path, left: int) -> None:
        super().__init__()
        self._path, self._left, self._done = path, left, False

    def check(self) -> None:
        if not self._done:
            os.truncate(self._path, self._left)
            self._done = True
        super().check()


@pytest.mark.parametrize("left", [0, 100, 4096, 5_000_000, -1])
def test_a_file_that_is_truncated_meanwhile_is_named(checkpoint: Checkpoint, left: int) -> None:
    file = checkpoint.files[1]

    with pytest.raises(CheckpointError, match=f"{file.path} (ends at byte|was changed in place)"):
        read(checkpoint, progress=Truncating(file.path, left % file.size))


def test_blocks_of_any_size_and_distance_arrive_where_they_belong(tmp_path: Path) -> None:
    generator = random.Random(7)
    content = generator.randbytes(3_000_000)
    path = tmp_path / "file"
    path.write_bytes(content)
    for _ in range(40):
        blocks, offset, target = [], generator.randrange(5000), 0
        while len(blocks) < 30 and offset < len(content):
            size = min(generator.choice([1, 63, 4096, 5000, 70_000, 300_000]), len(content) - offset)
            blocks.append(Block(0, offset, size, target))
            offset += size + generator.choice([0, 0, 1, 4096, 50_000])
            target += size + generator.choice([0, 13])
        assert arrive(path, blocks, target) == expected(content, blocks, target)


def arrive(path: Path, blocks: list[Block], size: int) -> bytes:
    memory, scratch = mmap.mmap(-1, size), mmap.mmap(-1, 1 << 16)
    counts: list[int] = []
    with SelfClosing(os.open(path, os.O_RDONLY | os.O_DIRECT)) as opened:
        left = direct.read_blocks(opened, blocks, address_of(memory), memoryview(scratch), counts.append)
    assert left == []
    assert sum(counts) == sum(block.nbytes for block in blocks)
    return memory[:]


def expected(content: bytes, blocks: list[Block], size: int) -> bytes:
    memory = bytearray(size)
    for block in blocks:
        memory[block.target : block.target + block.nbytes] = content[block.offset : block.offset + block.nbytes]
    return bytes(memory)
