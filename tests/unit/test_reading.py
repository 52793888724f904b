"""Every byte of a checkpoint is brought into memory once; a file that changes meanwhile is never loaded."""

import errno
import hashlib
import mmap
import os
import random
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from app.checkpoints import Checkpoint, CheckpointFile, TensorEntry, file_stamp
from app.dtypes import size_bytes
from app.errors import CheckpointError
from app.progress import Progress, Stopped
from app.weights import ResidentWeights, reading, segments
from app.weights.disk import DiskSpeed
from app.weights.layout import Mode, plan_layout
from app.weights.memory import POPULATE_WRITE, Memory
from app.weights.reading import planned_staging, read_resident
from tests.unit.written import Tensors, filled, noise, written

MODES: tuple[Mode, ...] = ("map", "read")
PAGE = mmap.PAGESIZE
STEP, CALL, SCRATCH = 1 << 13, 1 << 12, 1 << 12
STAGING = 4 * SCRATCH

# Neither a whole number of steps nor of pages, many small ones, and some at odd addresses.
SHARDS: tuple[Tensors, ...] = (
    {"scalar": filled("F64"), "large": filled("F32", 2 * STEP + 19), "empty": filled("F32", 0, 3)},
    {f"small.{number}": filled("BF16", number % 40 + 1, salt=number) for number in range(300)},
    {"odd": filled("U8", 3), "after": filled("I64", 900), "flags": filled("BOOL", 7), "last": filled("I32", 11, 13)},
)
TENSORS = {name: tensor for shard in SHARDS for name, tensor in shard.items()}
BYTES = sum(len(data) for _, _, data in TENSORS.values())


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "STEP", STEP)
    monkeypatch.setattr(reading, "CALL", CALL)
    monkeypatch.setattr(reading, "SCRATCH", SCRATCH)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Iterator[Checkpoint]:
    made = written(tmp_path / "model", *SHARDS)
    yield made
    made.close()


def read(
    checkpoint: Checkpoint,
    mode: Mode,
    progress: Progress | None = None,
    digests: Mapping[str, str] | None = None,
    staging: int = STAGING,
) -> ResidentWeights:
    layout = plan_layout(checkpoint, mode, "", None)
    return read_resident(checkpoint, layout, progress or Progress(), staging, digests or {})


def digests_of(checkpoint: Checkpoint) -> dict[str, str]:
    return {file.path.name: hashlib.sha256(file.path.read_bytes()).hexdigest() for file in checkpoint.files}


def held(checkpoint: Checkpoint, memory: Memory) -> dict[str, bytes]:
    """Return the bytes of every tensor as they are in memory."""
    found = {}
    for name, entry in checkpoint.tensors.items():
        if entry.nbytes:
            data, place = memory.find(entry)
            found[name] = bytes(memoryview(data)[place.offset : place.offset + entry.nbytes])
    return found


WITH_BYTES = {name: data for name, (_, _, data) in TENSORS.items() if data}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("verify", [False, True], ids=["plain", "verified"])
@pytest.mark.parametrize("staging", [SCRATCH, STAGING, 64 * SCRATCH])
def test_every_byte_of_every_tensor_is_in_memory(
    checkpoint: Checkpoint, mode: Mode, verify: bool, staging: int
) -> None:
    digests = digests_of(checkpoint) if verify else {}

    resident = read(checkpoint, mode, digests=digests, staging=staging)

    assert held(checkpoint, resident.memory) == WITH_BYTES
    assert (resident.checkpoint, resident.verified) == (checkpoint, digests)
    assert resident.seconds > 0


@pytest.mark.parametrize("verify", [False, True], ids=["plain", "verified"])
@pytest.mark.parametrize("seed", range(12))
def test_views_holes_and_odd_addresses_of_any_arrangement_are_read_right(
    tmp_path: Path, seed: int, verify: bool
) -> None:
    """Several names of one storage, as torch's own format has them: they overlap, and not every byte is a tensor's."""
    generator = random.Random(seed)
    files, entries = [], {}
    for number in range(2):
        path = tmp_path / f"{number}.bin"
        path.write_bytes(noise(generator.randint(1, 120_000), seed * 2 + number))
        fd = os.open(path, os.O_RDONLY)
        files.append(CheckpointFile(path, fd, path.stat().st_size, file_stamp(os.fstat(fd))))
        for count in range(generator.randint(0, 30)):
            dtype = generator.choice(["U8", "BF16", "F32", "C128"])
            item = size_bytes(dtype, ())
            offset = generator.randrange(files[number].size)
            size = generator.randint(0, min(20_000, files[number].size - offset) // item)
            name = f"{number}.{count}"
            entries[name] = TensorEntry(name, dtype, (size,), number, offset, size * item)
    checkpoint = Checkpoint(tmp_path, "raw", tuple(files), entries)
    wanted = {
        name: files[entry.file].path.read_bytes()[entry.offset : entry.offset + entry.nbytes]
        for name, entry in entries.items()
        if entry.nbytes
    }

    for mode in MODES:
        progress = Progress()
        resident = read(checkpoint, mode, progress, digests_of(checkpoint) if verify else {})
        assert held(checkpoint, resident.memory) == wanted
        assert progress.done == progress.total == resident.bytes_read
    checkpoint.close()


@pytest.mark.parametrize("mode", MODES)
def test_a_checkpoint_without_tensors_is_read_at_once(tmp_path: Path, mode: Mode) -> None:
    checkpoint = written(tmp_path, {})

    resident = read(checkpoint, mode, digests=digests_of(checkpoint))
    checkpoint.close()

    assert (resident.bytes_read, resident.resident_bytes, resident.copied_bytes) == (0, 0, 0)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("verify", [False, True], ids=["plain", "verified"])
def test_progress_counts_what_was_planned_and_ends_at_its_total(
    checkpoint: Checkpoint, mode: Mode, verify: bool
) -> None:
    progress = Progress()

    resident = read(checkpoint, mode, progress, digests_of(checkpoint) if verify else {})

    assert (progress.unit, progress.ratio) == ("bytes", 1.0)
    assert progress.done == progress.total == resident.bytes_read
    assert resident.bytes_read >= BYTES
    assert resident.bytes_read == sum(part.nbytes for part in segments.segments(resident.memory.layout, 0))


@pytest.mark.parametrize("mode", MODES)
def test_after_reading_every_page_of_the_weights_is_resident(checkpoint: Checkpoint, mode: Mode) -> None:
    resident = read(checkpoint, mode)
    pages = sum(-(-file.size // PAGE) * PAGE for file in checkpoint.files)
    slab = resident.memory.layout.slab_bytes

    assert resident.resident_bytes == (pages if mode == "map" else 0)
    assert -(-slab // PAGE) * PAGE == resident.copied_bytes
    assert (slab > BYTES) is (mode == "read")


@pytest.mark.parametrize("mode", MODES)
def test_the_memory_outlives_the_open_files(checkpoint: Checkpoint, tmp_path: Path, mode: Mode) -> None:
    again = written(tmp_path / "again", *SHARDS)
    resident = read(again, mode)
    again.close()

    assert held(again, resident.memory) == WITH_BYTES


@pytest.mark.parametrize("mode", MODES)
def test_another_process_maps_the_same_memory_for_reading_only(checkpoint: Checkpoint, mode: Mode) -> None:
    resident = read(checkpoint, mode)
    layout = plan_layout(checkpoint, mode, "elsewhere", None)

    # Its own number for the same memory, as it would inherit one.
    slab = resident.memory.slab_file
    memory = Memory.reserve(checkpoint, layout, os.dup(slab.fileno()) if slab else None)
    memory.populate(checkpoint)

    assert held(checkpoint, memory) == WITH_BYTES
    for one in (*memory.maps.values(), *([memory.slab] if memory.slab else [])):
        with pytest.raises(TypeError, match=r"read-only|readonly|modify"):
            one[0] = 1


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("verify", [False, True], ids=["plain", "verified"])
@pytest.mark.parametrize("staging", [SCRATCH, 2 * SCRATCH + 1, 100 * SCRATCH])
def test_scratch_memory_is_what_was_planned_and_within_its_bound(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, mode: Mode, verify: bool, staging: int
) -> None:
    taken: list[int] = []

    class Counting(mmap.mmap):
        def __new__(cls, fileno: int, length: int, **options: int) -> "Counting":
            if fileno == -1:
                taken.append(length)
            return super().__new__(cls, fileno, length, **options)

    monkeypatch.setattr(mmap, "mmap", Counting)

    resident = read(checkpoint, mode, digests=digests_of(checkpoint) if verify else {}, staging=staging)

    assert sum(taken) <= resident.staging_bytes <= staging
    assert resident.staging_bytes <= planned_staging(resident.memory.layout, staging, verify)
    assert bool(taken) is bool(resident.staging_bytes) is verify


def test_no_file_is_opened_that_stays_open(checkpoint: Checkpoint) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))

    resident = read(checkpoint, "map")

    # Each mapping keeps its file, and so does the slab beside its own.
    assert len(list(Path("/proc/self/fd").iterdir())) - before == len(resident.memory.maps) + 2


class Meddling(Progress):
    """Does something to the files once they are mapped and before the first byte is read, or when all are read."""

    def __init__(self, meddle: Callable[[], object], last: bool = False) -> None:
        super().__init__()
        self._meddle, self._last = meddle, last

    def expect(self, total: int, unit: str) -> None:
        super().expect(total, unit)
        if not self._last:
            self._meddle()

    def advance(self, count: int = 1) -> None:
        super().advance(count)
        if self._last and self.done == self.total:
            self._meddle()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("verify", ["plain", "verify"])
def test_a_file_that_is_truncated_while_it_is_read_is_an_error_and_no_signal(
    tmp_path: Path, mode: Mode, verify: str
) -> None:
    command = [sys.executable, "-m", "tests.unit.truncated", mode, verify, str(tmp_path)]

    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)

    assert (done.returncode, done.stderr[-2000:]) == (0, "")
    assert set(done.stdout.split()) == {"refused"}
    assert len(done.stdout.split()) == 24


@pytest.mark.parametrize(
    ("mode", "left", "message"),
    [
        ("map", 0, "ends at byte {first}, it had {size} bytes when it was opened; it was truncated while it was "),
        ("map", -1, "was changed in place after it was opened; publish checkpoints by renaming a complete directory"),
        (
            "read",
            100,
            "ends at byte {first}, it had {size} bytes when it was opened; it was truncated while it was being ",
        ),
        ("read", 20_000, "ends at byte 20000, it had {size} bytes when it was opened; it was truncated while it was "),
        ("read", -1, "ends at byte {last}, it had {size} bytes when it was opened; it was truncated while it was "),
    ],
)
def test_a_truncated_file_is_told_with_its_name_and_the_byte(
    checkpoint: Checkpoint, mode: Mode, left: int, message: str
) -> None:
    file = checkpoint.files[0]
    first = min(entry.offset for entry in checkpoint.tensors.values() if entry.file == 0)
    meddle = Meddling(lambda: os.truncate(file.path, left % file.size))

    with pytest.raises(CheckpointError) as caught:
        read(checkpoint, mode, meddle, staging=SCRATCH)

    told = message.format(first=first, size=file.size, last=file.size - 1)
    assert str(caught.value).startswith(f"{file.path} {told}")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("left", [0, 100, -1])
def test_a_file_that_was_truncated_between_opening_and_reading_is_refused_by_its_name(
    checkpoint: Checkpoint, mode: Mode, left: int
) -> None:
    file = checkpoint.files[0]
    os.truncate(file.path, left % file.size)

    with pytest.raises(CheckpointError, match=str(file.path)):
        read(checkpoint, mode)


def grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"x")


def rewrite(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(bytes(8))
    os.utime(path, ns=(1, 1))


def touch(path: Path) -> None:
    os.utime(path, ns=(2, 2))


def replace(path: Path) -> None:
    path.with_suffix(".new").write_bytes(path.read_bytes())
    path.with_suffix(".new").rename(path)


def link_elsewhere(path: Path) -> None:
    path.with_suffix(".new").write_bytes(path.read_bytes())
    path.unlink()
    path.symlink_to(path.with_suffix(".new"))


WAYS: dict[str, tuple[Callable[[Path], object], str]] = {
    "grown": (grow, "was changed in place after it was opened"),
    "overwritten in place": (rewrite, "was changed in place after it was opened"),
    "touched": (touch, "was changed in place after it was opened"),
    "replaced by renaming": (replace, "was replaced after it was opened"),
    "replaced by a link": (link_elsewhere, "was replaced after it was opened"),
    "removed": (Path.unlink, "went away after it was opened (No such file or directory)"),
}


@pytest.mark.parametrize(("change", "told"), WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("when", ["before reading", "while reading", "after the last byte"])
def test_a_file_that_is_not_what_was_opened_any_more_is_refused(
    checkpoint: Checkpoint, when: str, mode: Mode, change: Callable[[Path], None], told: str
) -> None:
    path = checkpoint.files[1].path
    if when == "before reading":
        change(path)
    progress = Progress() if when == "before reading" else Meddling(lambda: change(path), when.startswith("after"))

    with pytest.raises(CheckpointError) as caught:
        read(checkpoint, mode, progress)

    assert str(caught.value) == f"{path} {told}; publish checkpoints by renaming a complete directory, then restart"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("number", range(3))
def test_a_file_with_another_sha256_is_refused_with_both(checkpoint: Checkpoint, mode: Mode, number: int) -> None:
    path = checkpoint.files[number].path
    digests = digests_of(checkpoint)
    found, digests[path.name] = digests[path.name], "0" * 64

    with pytest.raises(CheckpointError) as caught:
        read(checkpoint, mode, digests=digests)

    assert str(caught.value) == (
        f"{path} has sha256 {found}, model.sha256 says {'0' * 64}; it is damaged or another file: download it again, "
        f"or correct the list"
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("byte", [0, 20, 5000, -1])
def test_one_flipped_bit_anywhere_in_a_file_is_found_by_its_sha256(
    checkpoint: Checkpoint, tmp_path: Path, mode: Mode, byte: int
) -> None:
    data = bytearray(checkpoint.files[0].path.read_bytes())
    data[byte] ^= 1
    digests = {**digests_of(checkpoint), checkpoint.files[0].path.name: hashlib.sha256(data).hexdigest()}

    with pytest.raises(CheckpointError, match=r"model\.sha256 says"):
        read(checkpoint, mode, digests=digests)


@pytest.mark.parametrize("verify", [False, True], ids=["plain", "verified"])
def test_a_page_that_cannot_be_brought_into_memory_is_told_with_file_and_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verify: bool
) -> None:
    plain = written(tmp_path, SHARDS[0])
    monkeypatch.setattr(reading, "populate", lambda *_: errno.EIO)

    with pytest.raises(CheckpointError) as caught:
        read(plain, "map", digests=digests_of(plain) if verify else {}, staging=SCRATCH)
    plain.close()

    offset = min(entry.offset for entry in plain.tensors.values())
    assert str(caught.value) == (
        f"{plain.files[0].path} cannot be mapped at byte {offset}: Input/output error; set model.reading: read"
    )


def test_memory_that_is_not_to_be_had_is_told(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "populate", lambda *_: errno.ENOMEM)

    with pytest.raises(CheckpointError, match=r"no memory for \d+ bytes of weights: Cannot allocate memory; raise the"):
        read(checkpoint, "read")


@pytest.mark.parametrize("verify", [False, True], ids=["plain", "verified"])
def test_a_kernel_that_cannot_populate_reads_into_memory_of_our_own_the_same(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, verify: bool
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(reading, "populate", lambda _, __, advice: asked.append(advice) or errno.EINVAL)

    resident = read(checkpoint, "read", digests=digests_of(checkpoint) if verify else {})

    assert held(checkpoint, resident.memory) == WITH_BYTES
    assert bool(asked) is not verify


@pytest.mark.parametrize("verify", [False, True], ids=["plain", "verified"])
def test_on_a_kernel_that_cannot_populate_a_mapping_that_was_asked_for_is_refused_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verify: bool
) -> None:
    plain = written(tmp_path, SHARDS[0])
    monkeypatch.setattr(reading, "populate", lambda *_: errno.EINVAL)

    with pytest.raises(CheckpointError) as caught:
        read(plain, "map", digests=digests_of(plain) if verify else {}, staging=SCRATCH)
    plain.close()

    offset = min(entry.offset for entry in plain.tensors.values())
    assert str(caught.value) == (
        f"{plain.files[0].path} cannot be mapped at byte {offset}: Invalid argument; set model.reading: read"
    )


def test_on_a_kernel_that_cannot_populate_a_truncated_file_is_found_by_reading_it(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "populate", lambda *_: errno.EINVAL)
    file = checkpoint.files[0]

    with pytest.raises(CheckpointError, match=rf"{file.path} ends at byte 5000,"):
        read(checkpoint, "map", Meddling(lambda: os.truncate(file.path, 5000)), staging=SCRATCH)


@pytest.mark.parametrize("mode", MODES)
def test_a_server_that_gives_less_than_was_asked_for_is_asked_again(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, mode: Mode
) -> None:
    real = os.preadv

    def short(fd: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
        return real(fd, [buffers[0][: max(1, len(buffers[0]) // 3)]], offset, flags)

    monkeypatch.setattr(os, "preadv", short)

    resident = read(checkpoint, mode, digests=digests_of(checkpoint))

    assert held(checkpoint, resident.memory) == WITH_BYTES


def test_a_disk_that_fails_is_told_with_file_and_byte(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    real, file = os.preadv, checkpoint.files[0]

    def failing(fd: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
        if fd == file.fd and offset >= 10_000:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, [buffers[0][:500]], offset, flags)

    monkeypatch.setattr(os, "preadv", failing)

    with pytest.raises(CheckpointError) as caught:
        read(checkpoint, "read", staging=SCRATCH)

    told = re.fullmatch(
        rf"{file.path} cannot be read at byte (\d+): Input/output error; check the disk or its server",
        str(caught.value),
    )
    assert told is not None
    assert 10_000 <= int(told[1]) < 10_500


@pytest.mark.parametrize("mode", MODES)
def test_a_stopped_start_up_stops_reading(checkpoint: Checkpoint, mode: Mode) -> None:
    progress = Progress()
    progress.stop()

    with pytest.raises(Stopped):
        read(checkpoint, mode, progress)

    assert progress.done == 0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("verify", [False, True], ids=["plain", "verified"])
def test_a_start_up_that_is_stopped_while_it_reads_ends_soon(checkpoint: Checkpoint, mode: Mode, verify: bool) -> None:
    progress = Meddling(lambda: None)
    progress.advance = lambda count=1: (Progress.advance(progress, count), progress.stop())[0]  # type: ignore[method-assign]

    with pytest.raises(Stopped):
        read(checkpoint, mode, progress, digests_of(checkpoint) if verify else {})

    assert 0 < progress.done <= 4 * STEP


class Failing(Progress):
    """Fails at one piece of work and counts those that are begun."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.begun, self.threads = 0, set()
        self._at, self._guard = at, threading.Lock()

    def check(self) -> None:
        with self._guard:
            self.begun += 1
            self.threads.add(threading.get_ident())
            if self.begun == self._at:
                raise RuntimeError("this piece")


def test_the_first_failure_ends_all_threads_at_their_next_piece(tmp_path: Path) -> None:
    checkpoint = written(tmp_path, {f"t{number}": filled("U8", STEP, salt=number) for number in range(100)})
    progress = Failing(at=9)

    with pytest.raises(RuntimeError, match="this piece"):
        read(checkpoint, "read", progress)
    checkpoint.close()

    # Each piece is checked as it begins and as each of its two calls returns.
    assert progress.begun < 9 + 4 * 4
    assert len(progress.threads) <= 4


def test_the_first_failure_is_told_at_once_though_another_thread_still_waits(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, waiting, release = os.preadv, threading.Event(), threading.Event()
    threads: list[threading.Thread] = []
    hanging, failing = checkpoint.files[0].fd, checkpoint.files[2].fd

    def hang_or_fail(fd: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
        if fd == hanging and not flags and not threads:
            threads.append(threading.current_thread())
            waiting.set()
            release.wait(60)
        if fd == failing and not flags:
            waiting.wait(60)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, buffers, offset, flags)

    monkeypatch.setattr(os, "preadv", hang_or_fail)
    try:
        with pytest.raises(CheckpointError, match=rf"{checkpoint.files[2].path} cannot be read at byte \d+: Input/"):
            read(checkpoint, "read")
        still_waits = [thread.is_alive() for thread in threads]
    finally:
        release.set()
    for thread in threads:
        thread.join(60)

    assert still_waits == [True]


@pytest.mark.parametrize(
    ("mode", "staging", "threads"),
    [
        ("map", SCRATCH, 1),
        ("map", SCRATCH * 3 // 2, 1),
        ("map", 1000 * SCRATCH, reading.THREADS["map"]),
        ("read", SCRATCH, 1),
        ("read", 3 * SCRATCH + 1, 3),
        ("read", 1000 * SCRATCH, 12),
    ],
)
def test_work_is_done_by_as_many_threads_as_the_scratch_memory_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: Mode, staging: int, threads: int
) -> None:
    checkpoint = written(tmp_path, {f"t{number}": filled("U8", STEP, salt=number) for number in range(100)})
    used: set[int] = set()
    # Every thread keeps its first piece until all are there: none of them can take the work of another.
    together, real = threading.Barrier(threads), reading._Reader.take_all

    def counted(self: reading._Reader, parts: list[segments.Segment]) -> None:
        if threading.get_ident() not in used:
            used.add(threading.get_ident())
            if len(used) <= threads:
                together.wait(30)
        real(self, parts)

    monkeypatch.setattr(reading._Reader, "take_all", counted)
    read(checkpoint, mode, staging=staging)
    checkpoint.close()

    assert len(used) == threads


def test_pages_of_the_slab_are_faulted_in_before_they_are_filled(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, ranges = reading.populate, []
    monkeypatch.setattr(reading, "populate", lambda *given: (ranges.append(given), real(*given))[1])

    resident = read(checkpoint, "read")

    assert {advice for _, _, advice in ranges} == {POPULATE_WRITE}
    assert sum(length for _, length, _ in ranges) >= BYTES
    assert sum(length for _, length, _ in ranges) <= resident.memory.layout.slab_bytes


def test_files_that_were_just_written_are_found_in_the_file_cache(checkpoint: Checkpoint) -> None:
    resident = read(checkpoint, "map")

    assert (resident.file_cache, resident.cached_ratio) == ("warm", 1.0)
    assert resident.disk == DiskSpeed(why="the files were in the page cache already")


def test_what_was_cached_before_somebody_else_looked_into_the_files_counts(checkpoint: Checkpoint) -> None:
    layout = plan_layout(checkpoint, "map", "", None)
    resident = read_resident(checkpoint, layout, Progress(), STAGING, {}, [0.0] * len(checkpoint.files))

    assert (resident.file_cache, resident.cached_ratio) == ("cold", 0.0)
    assert (resident.disk.bytes_per_s, resident.disk.ratio) == (None, None)
    assert resident.disk.why


def test_both_ways_of_reading_give_the_same_fingerprint(checkpoint: Checkpoint) -> None:
    assert read(checkpoint, "map").fingerprint == read(checkpoint, "read").fingerprint
