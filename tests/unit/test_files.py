"""Files of a checkpoint: what they were when they were opened, short reads, and the count of reads."""

import errno
import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from app.checkpoints import Checkpoint, CheckpointFile, file_stamp, fill, open_checkpoint, read_at, read_exactly
from app.checkpoints.safetensors import metadata_of
from app.errors import CheckpointError
from app.progress import Progress, reads_of_this_thread
from app.weights import ResidentWeights, reading
from app.weights.layout import Mode, plan_layout
from app.weights.memory import Memory
from app.weights.reading import read_resident
from app.weights.samples import sample
from tests.unit.written import filled, noise, safetensors_bytes, written

MODES: tuple[Mode, ...] = ("map", "read")
DATA = noise(100)


@pytest.fixture
def file(tmp_path: Path) -> Iterator[CheckpointFile]:
    path = tmp_path / "data.bin"
    path.write_bytes(DATA)
    fd = os.open(path, os.O_RDONLY)
    yield CheckpointFile(path, fd, len(DATA), file_stamp(os.fstat(fd)))
    os.close(fd)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let the kernel give at most seven bytes a call, as servers may; return how much each call asked for."""
    pread, preadv, asked = os.pread, os.preadv, []

    def short_pread(fd: int, count: int, offset: int) -> bytes:
        asked.append(count)
        return pread(fd, min(7, count), offset)

    def short_preadv(fd: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
        asked.append(len(buffers[0]))
        return preadv(fd, [memoryview(buffers[0])[:7]], offset, flags)

    monkeypatch.setattr(os, "pread", short_pread)
    monkeypatch.setattr(os, "preadv", short_preadv)
    return asked


@pytest.mark.parametrize("count", [0, 1, 6, 7, 8, 50, 98])
@pytest.mark.parametrize("offset", [0, 2])
def test_what_comes_in_short_reads_is_put_together(
    file: CheckpointFile, short: list[int], count: int, offset: int
) -> None:
    target = bytearray(count)
    fill(file, memoryview(target), offset)

    assert read_at(file.fd, count, offset) == DATA[offset : offset + count]
    assert read_exactly(file, count, offset) == bytes(target) == DATA[offset : offset + count]
    assert len(short) >= 3 * -(-count // 7)


@pytest.mark.parametrize(("count", "offset", "end"), [(101, 0, 100), (40, 97, 100), (1, 100, 100), (5, 1000, 1000)])
def test_where_a_file_ends_less_is_given_or_the_byte_is_told(
    file: CheckpointFile, short: list[int], count: int, offset: int, end: int
) -> None:
    assert read_at(file.fd, count, offset) == DATA[offset:]
    with pytest.raises(CheckpointError) as caught:
        read_exactly(file, count, offset)
    assert str(caught.value) == f"{file.path} ends at byte {end}; it was truncated after it was opened"
    with pytest.raises(
        CheckpointError, match=rf"^{file.path} ends at byte {end}, it had 100 bytes when it was opened;"
    ):
        fill(file, memoryview(bytearray(count)), offset)
    assert short


def test_a_disk_that_fails_is_told_with_the_byte(file: CheckpointFile, monkeypatch: pytest.MonkeyPatch) -> None:
    preadv = os.preadv

    def fail(*given: object) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def fail_later(fd: int, buffers: list[memoryview], offset: int) -> int:
        return preadv(fd, [buffers[0][:7]], offset) if offset < 20 else len(fail())

    monkeypatch.setattr(os, "pread", fail)
    monkeypatch.setattr(os, "preadv", fail_later)

    told = "cannot be read at byte {}: Input/output error; check the disk or its server"
    with pytest.raises(CheckpointError) as caught:
        read_exactly(file, 10, 5)
    assert str(caught.value) == f"{file.path} {told.format(5)}"
    with pytest.raises(CheckpointError) as caught:
        fill(file, memoryview(bytearray(50)), 3)
    assert str(caught.value) == f"{file.path} {told.format(24)}"


TENSORS = {"a": filled("F32", 1500), "n": filled("I64", 3, 2), "s": filled("BF16"), "u": filled("U8", 9000)}


@pytest.mark.parametrize("mode", MODES)
def test_headers_tensors_and_samples_of_safetensors_are_right_in_short_reads(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, mode: Mode
) -> None:
    # The kernel's table of pages is no file of a server, and is read in whole rows only.
    monkeypatch.setattr(reading, "resident_bytes", lambda memories: None)
    before = written(tmp_path, TENSORS, {"b": filled("F16", 300)})
    whole = read_resident(before, plan_layout(before, mode, "", None), Progress(), 1 << 20, {})
    asked = request.getfixturevalue("short")

    after = open_checkpoint(tmp_path)
    resident = read_resident(after, plan_layout(after, mode, "", None), Progress(), 1 << 20, {})

    assert (after.tensors, after.notes) == (before.tensors, before.notes)
    assert (resident.fingerprint, resident.warnings) == (whole.fingerprint, whole.warnings)
    for name, (_, _, data) in TENSORS.items():
        memory, place = resident.memory.find(after.tensors[name])
        assert memory[place.offset : place.offset + len(data)] == data
    assert max(asked) > 7
    before.close()
    after.close()


def test_what_a_file_says_about_itself_is_right_in_short_reads(tmp_path: Path, short: list[int]) -> None:
    text = json.dumps({"__metadata__": {"format": "pt", "by": "x" * 100}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    checkpoint = open_checkpoint(tmp_path)

    assert metadata_of(checkpoint.files[0]) == {"format": "pt", "by": "x" * 100}
    checkpoint.close()


def test_archives_of_torch_are_right_in_short_reads(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    state = {"a": torch.arange(1500.0), "view": torch.arange(20.0).view(4, 5).t(), "state": {"text": "x" * 50}}
    torch.save(state, tmp_path / "model.bin")
    before = open_checkpoint(tmp_path)
    asked = request.getfixturevalue("short")

    after = open_checkpoint(tmp_path)

    assert (after.tensors, after.objects) == (before.tensors, before.objects)
    assert after.objects == {"state": {"text": "x" * 50}}
    entry = after.tensors["a"]
    assert read_exactly(after.files[0], entry.nbytes, entry.offset) == state["a"].numpy().tobytes()
    assert max(asked) > 7
    before.close()
    after.close()


def test_samples_of_mapped_tensors_are_right_in_short_reads(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    checkpoint = written(tmp_path, {"u": filled("U8", 9000), "v": filled("U8", 2 << 20)})
    memory = Memory.reserve(checkpoint, plan_layout(checkpoint, "map", "", None))
    whole = sample(checkpoint, memory, Progress())
    asked = request.getfixturevalue("short")

    assert sample(checkpoint, memory, Progress()) == whole
    assert max(asked) == 4096
    checkpoint.close()


def rewrite(path: Path) -> None:
    with path.open("r+b") as opened:
        opened.write(b"other")
    os.utime(path, ns=(1, 1))


def swap(path: Path) -> None:
    (path.parent / "new").write_bytes(path.read_bytes())
    (path.parent / "new").rename(path)


# what happens → what `changed_in_place` says, what `changed` says
CHANGES: dict[str, tuple[Callable[[Path], object], str | None, str | None]] = {
    "nothing": (lambda path: None, None, None),
    "read": (Path.read_bytes, None, None),
    "linked to elsewhere too": (lambda path: os.link(path, path.parent / "more"), None, None),
    "rewritten": (rewrite, "was changed in place after it was opened", "was changed in place after it was opened"),
    "truncated": (
        lambda path: os.truncate(path, 9),
        "was changed in place after it was opened",
        "was changed in place after it was opened",
    ),
    "replaced": (swap, None, "was replaced after it was opened"),
    "removed": (Path.unlink, None, "went away after it was opened (No such file or directory)"),
    "moved away": (
        lambda path: path.rename(path.parent / "moved"),
        None,
        "went away after it was opened (No such file or directory)",
    ),
}


@pytest.mark.parametrize(("change", "in_place", "changed"), CHANGES.values(), ids=CHANGES)
def test_a_file_knows_whether_its_content_or_its_name_has_changed(
    file: CheckpointFile, change: Callable[[Path], object], in_place: str | None, changed: str | None
) -> None:
    change(file.path)

    assert file.changed_in_place() == (in_place and f"{file.path} {in_place}")
    assert file.changed() == (changed and f"{file.path} {changed}")


def resident_weights(checkpoint: Checkpoint, mode: Mode) -> ResidentWeights:
    return read_resident(checkpoint, plan_layout(checkpoint, mode, "", None), Progress(), 1 << 20, {})


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize(("change", "in_place", "changed"), CHANGES.values(), ids=CHANGES)
def test_mapped_weights_must_be_what_was_read_and_their_names_may_change(
    tmp_path: Path, change: Callable[[Path], object], in_place: str | None, changed: str | None, number: int
) -> None:
    checkpoint = written(tmp_path / "model", TENSORS, {"b": filled("F16", 300)})
    weights = resident_weights(checkpoint, "map")
    path = checkpoint.files[number].path
    assert weights.mapped_files == checkpoint.files
    change(path)

    if in_place is None:
        weights.check_unchanged()
    else:
        with pytest.raises(CheckpointError) as caught:
            weights.check_unchanged()
        assert str(caught.value) == (
            f"{path} {in_place}, and its mapped pages are the model; publish checkpoints by renaming a complete "
            f"directory, then restart"
        )
    checkpoint.close()


@pytest.mark.parametrize("change", [change for change, _, _ in CHANGES.values()], ids=CHANGES)
def test_weights_in_memory_of_our_own_do_not_care(tmp_path: Path, change: Callable[[Path], object]) -> None:
    checkpoint = written(tmp_path / "model", TENSORS)
    weights = resident_weights(checkpoint, "read")
    change(checkpoint.files[0].path)

    weights.check_unchanged()

    assert weights.mapped_files == ()
    checkpoint.close()


def test_only_files_with_mapped_tensors_must_stay_as_they_are(tmp_path: Path) -> None:
    checkpoint = written(tmp_path / "model", {"n": filled("I64", 9)}, {"b": filled("F32", 300)})
    layout = plan_layout(checkpoint, "map", "", "BF16")
    weights = read_resident(checkpoint, layout, Progress(), 1 << 20, {})
    rewrite(checkpoint.files[1].path)

    weights.check_unchanged()

    assert weights.mapped_files == checkpoint.files[:1]
    checkpoint.close()


def test_the_reads_of_a_thread_are_counted_also_for_others_who_ask(file: CheckpointFile) -> None:
    count = reads_of_this_thread()
    before = count()
    for _ in range(50):
        read_at(file.fd, 1, 0)
    mine = count()
    seen: list[int] = []
    other = threading.Thread(target=lambda: seen.append(count()))
    other.start()
    other.join()

    assert mine - before >= 50
    assert seen[0] >= mine


def test_the_reads_of_other_threads_are_not_counted(file: CheckpointFile) -> None:
    count = reads_of_this_thread()
    before = count()
    other = threading.Thread(target=lambda: [read_at(file.fd, 1, 0) for _ in range(500)])
    other.start()
    other.join()

    # Asking reads a few times itself.
    assert count() - before < 100


def test_a_thread_that_has_ended_has_no_reads() -> None:
    counts: list[Callable[[], int]] = []
    other = threading.Thread(target=lambda: counts.append(reads_of_this_thread()))
    other.start()
    other.join()

    end = 500
    while counts[0]() and end:
        end -= 1
    assert counts[0]() == 0


def test_opening_a_checkpoint_of_many_files_shows_signs_of_life(tmp_path: Path) -> None:
    count = reads_of_this_thread()
    progress = Progress()
    progress.observe(count)
    before = progress.sign_of_life()
    written(tmp_path, *({f"t{number}": filled("U8", 3)} for number in range(20))).close()

    assert progress.sign_of_life() != before
    assert progress.done - before[0] >= 40


def test_a_header_that_is_longer_than_one_short_read_is_compared_with_the_size(
    tmp_path: Path, short: list[int]
) -> None:
    (tmp_path / "model.safetensors").write_bytes(safetensors_bytes(TENSORS)[:-1])

    with pytest.raises(CheckpointError, match="its header describes"):
        open_checkpoint(tmp_path)
    assert short
