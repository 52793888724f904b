"""How a checkpoint is read follows from the kind of its file system; what is not known is measured."""

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from app.checkpoints import Checkpoint, open_checkpoint
from app.errors import CheckpointError
from app.weights import choosing, filesystems
from app.weights.choosing import Choice, choose_layout, probe_mapping
from app.weights.layout import plan_layout
from tests.unit.written import filled, written

MIB = 1 << 20


def on(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Let every file lie on a file system of this kind."""
    monkeypatch.setattr(filesystems, "_mount_table", lambda: f"27 1 8:1 / / rw - {kind} x rw")


@pytest.fixture
def worth_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let files of any size be large enough to be measured."""
    monkeypatch.setattr(choosing, "SMALLEST_PROBE", 0)


@pytest.fixture
def old_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the kernel have no MADV_POPULATE_READ."""
    monkeypatch.setattr(choosing, "can_populate", lambda: False)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Iterator[Checkpoint]:
    made = written(tmp_path / "model", {"a": filled("F32", 100), "n": filled("I64", 5)}, {"b": filled("F32", 3000)})
    yield made
    made.close()


@pytest.mark.parametrize("kind", ["ext4", "nfs4", "fuse.odd"])
@pytest.mark.parametrize("wanted", ["map", "read"])
@pytest.mark.parametrize("cast", [None, "BF16"])
def test_what_is_asked_for_is_done_wherever_the_files_lie(
    monkeypatch: pytest.MonkeyPatch, checkpoint: Checkpoint, kind: str, wanted: str, cast: str | None
) -> None:
    on(monkeypatch, kind)

    choice = choose_layout(checkpoint, wanted, cast)

    assert (choice.layout.mode, choice.layout.why) == (wanted, f"model.reading is {wanted}")
    assert (choice.measure, choice.in_memory) == (False, False)
    assert {one.place.dtype for one in choice.layout.conversions} == ({cast} if cast else set())


# the kind of file system → mode, why, whether it is measured, whether the files are memory
AUTO: dict[str, tuple[str, str, bool, bool]] = {
    "ext4": ("map", "/ is ext4, a local file system", False, False),
    "tmpfs": ("map", "/ is tmpfs, a local file system", False, True),
    "ramfs": ("map", "/ is ramfs, a local file system", False, True),
    "nfs4": ("read", "/ is nfs4, a network file system", False, False),
    "fuse.gcsfuse": ("read", "/ is fuse.gcsfuse, a network file system", False, False),
    "fuse.odd": ("map", "/ is fuse.odd, not known to be local", True, False),
}


@pytest.mark.usefixtures("worth_measuring")
@pytest.mark.parametrize(("kind", "mode", "why", "measure", "in_memory"), [(k, *row) for k, row in AUTO.items()])
def test_local_files_are_mapped_remote_ones_read_and_unknown_ones_measured_first(
    monkeypatch: pytest.MonkeyPatch,
    checkpoint: Checkpoint,
    kind: str,
    mode: str,
    why: str,
    measure: bool,
    in_memory: bool,
) -> None:
    on(monkeypatch, kind)

    choice = choose_layout(checkpoint, "auto", None)

    assert choice == Choice(
        plan_layout(checkpoint, "map" if mode == "map" else "read", why, None), measure=measure, in_memory=in_memory
    )


@pytest.mark.parametrize("wanted", ["map", "read"])
@pytest.mark.parametrize(("kind", "in_memory"), [("tmpfs", True), ("ramfs", True), ("ext4", False)])
def test_files_that_are_memory_are_known_as_such_whatever_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, checkpoint: Checkpoint, wanted: str, kind: str, in_memory: bool
) -> None:
    on(monkeypatch, kind)

    assert choose_layout(checkpoint, wanted, None).in_memory is in_memory


@pytest.mark.parametrize(("smallest", "mode"), [(0, "map"), (-1, "map"), (1, "read")])
def test_files_on_an_unknown_file_system_that_are_too_small_to_measure_are_read(
    monkeypatch: pytest.MonkeyPatch, checkpoint: Checkpoint, smallest: int, mode: str
) -> None:
    on(monkeypatch, "fuse.odd")
    monkeypatch.setattr(choosing, "SMALLEST_PROBE", max(file.size for file in checkpoint.files) + smallest)

    choice = choose_layout(checkpoint, "auto", None)

    told = "/ is fuse.odd, not known to be local" + (", and too small to measure" if mode == "read" else "")
    assert (choice.layout.mode, choice.layout.why, choice.measure) == (mode, told, mode == "map")


def test_eight_mebibytes_are_the_least_that_is_measured() -> None:
    assert choosing.SMALLEST_PROBE == 8 * MIB


@pytest.mark.usefixtures("worth_measuring", "old_kernel")
@pytest.mark.parametrize("kind", AUTO)
def test_on_a_kernel_that_cannot_populate_a_mapping_every_file_is_read(
    monkeypatch: pytest.MonkeyPatch, checkpoint: Checkpoint, kind: str
) -> None:
    on(monkeypatch, kind)

    choice = choose_layout(checkpoint, "auto", None)

    told = "this kernel, before 5.14, cannot bring a mapping into memory with faults as errors"
    assert (choice.layout.mode, choice.measure) == ("read", False)
    assert choice.layout.why == (AUTO[kind][1] if AUTO[kind][0] == "read" else told)


def test_one_file_on_the_network_decides_for_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    written(tmp_path / "model", {"a": filled("F32", 100)}, {"b": filled("F32", 100)}).close()
    (tmp_path / "remote").mkdir()
    (tmp_path / "model/1.safetensors").rename(tmp_path / "remote/blob")
    (tmp_path / "model/1.safetensors").symlink_to(tmp_path / "remote/blob")
    remote = tmp_path.resolve() / "remote"
    table = f"27 1 8:1 / / rw - ext4 x rw\n28 27 0:9 / {remote} rw - nfs server:/x rw"
    monkeypatch.setattr(filesystems, "_mount_table", lambda: table)
    checkpoint = open_checkpoint(tmp_path / "model")

    choice = choose_layout(checkpoint, "auto", None)
    checkpoint.close()

    why = f"{remote} is nfs, a network file system"
    assert (choice.layout.mode, choice.layout.why, choice.measure) == ("read", why, False)


def test_an_index_that_names_no_file_is_still_planned(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    checkpoint = open_checkpoint(tmp_path)

    choice = choose_layout(checkpoint, "auto", None)

    assert (choice.layout.read_bytes, choice.layout.slab_bytes, choice.measure) == (0, 0, False)


def clock(*seconds: float) -> Callable[[], float]:
    """Return a clock that shows these times, one after the other."""
    times = iter(seconds)
    return lambda: next(times)


@pytest.fixture
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Checkpoint]:
    """Two files of about 0.1 and 4 MiB, of which 1 MiB is probed."""
    monkeypatch.setattr(choosing, "PROBE", MIB)
    made = written(tmp_path / "large", {"a": filled("U8", 100_000)}, {"b": filled("F32", MIB), "n": filled("I64", 9)})
    yield made
    made.close()


@pytest.mark.parametrize(
    ("mapped_s", "read_s", "mode", "told"),
    [
        (4.0, 1.0, "read", "262.1 kB/s mapped, 1.0 MB/s read"),
        (2.001, 1.0, "read", None),
        (2.0, 1.0, "map", "524.3 kB/s mapped, 1.0 MB/s read"),
        (0.25, 1.0, "map", "4.2 MB/s mapped, 1.0 MB/s read"),
        (1.0, 0.0, "read", None),
        (0.0, 0.0, "map", None),
    ],
)
def test_a_mapping_that_is_slower_than_half_of_reading_is_given_up_and_the_figures_are_told(
    large: Checkpoint, mapped_s: float, read_s: float, mode: str, told: str | None
) -> None:
    before = plan_layout(large, "map", "why", None)

    after = probe_mapping(large, before, None, clock(10, 10 + mapped_s, 50, 50 + read_s))

    assert after == plan_layout(large, "map" if mode == "map" else "read", after.why, None)
    assert after.why.startswith("why; measured: ")
    assert after.why.endswith(told or "read")


def test_a_cast_stays_planned_whatever_is_measured(large: Checkpoint) -> None:
    before = plan_layout(large, "map", "why", "BF16")

    for times, mode in (((0, 9, 9, 10), "read"), ((0, 1, 1, 10), "map")):
        after = probe_mapping(large, before, "BF16", clock(*times))
        assert (after.mode, after.places["b"].dtype) == (mode, "BF16")


def test_measuring_with_the_real_clock_ends_in_a_layout(large: Checkpoint) -> None:
    after = probe_mapping(large, plan_layout(large, "map", "why", None), None)

    assert after.why.count("/s") == 2
    assert after in (plan_layout(large, "map", after.why, None), plan_layout(large, "read", after.why, None))


def test_where_nothing_is_mapped_nothing_is_measured(large: Checkpoint) -> None:
    before = plan_layout(large, "read", "why", None)

    assert probe_mapping(large, before, None, clock()) is before


@pytest.mark.parametrize("code", [errno.EFAULT, errno.EINVAL, errno.EIO])
def test_a_mapping_that_cannot_be_populated_is_given_up(
    large: Checkpoint, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setattr(choosing, "populate", lambda *_: code)

    assert probe_mapping(large, plan_layout(large, "map", "", None), None, clock(0, 0, 0, 9)).mode == "read"


@pytest.mark.parametrize("left", [0, 1, 5000, 2 * MIB - 1])
def test_a_file_that_was_truncated_is_an_error_with_its_name_and_where_it_ends(large: Checkpoint, left: int) -> None:
    file = large.files[1]
    os.truncate(file.path, left)

    with pytest.raises(CheckpointError, match=rf"{file.path} (ends at byte {left},|cannot be mapped)"):
        probe_mapping(large, plan_layout(large, "map", "", None), None)


@pytest.mark.parametrize("shape", [(0,), (1,), (3,)])
def test_the_smallest_files_can_be_measured(tmp_path: Path, shape: Sequence[int]) -> None:
    checkpoint = written(tmp_path, {"a": filled("U8", *shape)})

    after = probe_mapping(checkpoint, plan_layout(checkpoint, "map", "", None), None)
    checkpoint.close()

    assert after.mode in {"map", "read"}


def test_measuring_leaves_no_file_open(large: Checkpoint) -> None:
    layout = plan_layout(large, "map", "", "BF16")
    before = sorted(path.name for path in Path("/proc/self/fd").iterdir())

    probe_mapping(large, layout, "BF16")

    assert sorted(path.name for path in Path("/proc/self/fd").iterdir()) == before
