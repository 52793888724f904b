"""A start that cannot fit is refused before anything large is done, with what is needed, what there is, what to do."""

import importlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from app.checkpoints import Checkpoint
from app.errors import CheckpointError, ResourceError
from app.ledger import Books, Row
from app.progress import Progress
from app.settings import Settings
from app.stages.preflight import Preflight, preflight
from app.weights import filesystems
from app.weights.choosing import Choice
from app.weights.layout import plan_layout
from app.weights.reading import THREADS
from tests.unit.written import filled, written

MIB = 1 << 20
MODULE = importlib.import_module("app.stages.preflight")


@pytest.fixture(autouse=True)
def on_a_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every file lie on a disk, wherever tests keep theirs."""
    lies_on(monkeypatch, "ext4")


def lies_on(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(filesystems, "_mount_table", lambda: f"27 1 8:1 / / rw - {kind} x rw")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Iterator[Checkpoint]:
    made = written(tmp_path / "model", {"a": filled("F32", 5 * MIB // 4), "n": filled("I64", 10)})
    yield made
    made.close()


def run(checkpoint: Checkpoint, memory: dict[str, Any] | None = None, **model: Any) -> tuple[Preflight, str]:
    settings = Settings(
        model={"name": "tiny", "factory": "a:b", "checkpoint": checkpoint.path, "reading": "map", **model},
        inputs=[{"name": "x", "datatype": "FP32", "shape": [1]}],
        outputs=[{"name": "y", "datatype": "FP32", "shape": [1]}],
        memory=memory or {},
    )
    progress = Progress()
    return preflight.run(settings, checkpoint, progress), progress.detail


Machine = Callable[..., None]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Let the kernel's books say that a machine or a group has so much memory, and so much in use."""

    def pretend(total: int, used: int, group: tuple[int, int] | None = None, own: tuple[int, int] = (0, 0)) -> None:
        root = tmp_path / "books"
        (root / "proc/self").mkdir(parents=True)
        (root / "sys/fs/cgroup/pod").mkdir(parents=True)
        (root / "proc/meminfo").write_text(f"MemTotal: {total // 1024} kB\nMemAvailable: {(total - used) // 1024} kB\n")
        (root / "proc/self/status").write_text(f"RssAnon: {own[0] // 1024} kB\nRssShmem: {own[1] // 1024} kB\n")
        if group:
            (root / "proc/self/cgroup").write_text("0::/pod\n")
            (root / "sys/fs/cgroup/pod/memory.max").write_text(f"{group[0]}\n")
            (root / "sys/fs/cgroup/pod/memory.stat").write_text(f"anon {group[1]}\nshmem 0\n")
        monkeypatch.setattr(MODULE, "Books", lambda: Books(root))

    return pretend


def test_weights_that_fit_are_planned_and_told(checkpoint: Checkpoint, machine: Machine) -> None:
    machine(1000 * MIB, 400 * MIB)

    plan, told = run(checkpoint)

    assert plan == Preflight(Choice(plan_layout(checkpoint, "map", "model.reading is map", None)), {}, 0)
    assert told == "map: model.reading is map; 5.2 MB of weights, 629.1 MB free of 1.0 GB"


def test_the_real_machine_has_room_for_a_small_model(checkpoint: Checkpoint) -> None:
    assert run(checkpoint)[0].staging_bytes == 0


LARGE = 5 * MIB + 80


@pytest.mark.parametrize(
    ("memory", "model", "parts"),
    [
        ({"reserve_ratio": 0}, {}, (LARGE, 0, 0, 0)),
        ({}, {}, (LARGE, 0, 0, MIB // 10)),
        ({"reserve_ratio": 0}, {"reading": "read"}, (0, 5 * MIB + 80, 24 * MIB, 0)),
        (
            {"reserve_ratio": 0.5, "staging_bytes": 2 * MIB},
            {"dtype": "bfloat16"},
            (80, 5 * MIB // 2, 2 * MIB, MIB // 2),
        ),
    ],
)
def test_weights_that_do_not_fit_are_refused_with_need_limit_use_and_remedy(
    checkpoint: Checkpoint, machine: Machine, memory: dict[str, Any], model: dict[str, Any], parts: tuple[int, ...]
) -> None:
    machine(1000 * MIB, 0)

    with pytest.raises(ResourceError) as caught:
        run(checkpoint, {**memory, "host_limit_bytes": MIB}, **model)

    mapped, copied, staging, reserve = parts
    assert caught.value.exit_code == 4
    assert str(caught.value) == (
        f"{checkpoint.path} does not fit into memory: {sum(parts)} bytes are needed ({mapped} mapped, {copied} copied, "
        f"{staging} staging, {reserve} reserve), {MIB} are free of the {MIB} of memory.host_limit_bytes "
        f"(0 anonymous and shared memory in use; page cache does not count); raise the memory limit, or lower "
        f"memory.reserve_ratio"
    )


@pytest.mark.parametrize(("limit", "fits"), [(LARGE, True), (LARGE - 1, False)])
def test_the_last_byte_counts(checkpoint: Checkpoint, machine: Machine, limit: int, fits: bool) -> None:
    machine(1000 * MIB, 0)
    memory = {"reserve_ratio": 0, "host_limit_bytes": limit}

    if fits:
        run(checkpoint, memory)
    else:
        with pytest.raises(ResourceError, match=f"{LARGE} bytes are needed"):
            run(checkpoint, memory)


def test_a_limit_of_its_own_can_only_lower_that_of_the_machine(checkpoint: Checkpoint, machine: Machine) -> None:
    machine(4 * MIB, 0)

    with pytest.raises(ResourceError, match=rf"of the {4 * MIB} of the machine \("):
        run(checkpoint, {"host_limit_bytes": 1000 * MIB})


def test_what_is_in_use_already_counts(checkpoint: Checkpoint, machine: Machine) -> None:
    machine(1000 * MIB, 996 * MIB)

    with pytest.raises(ResourceError, match=rf"{4 * MIB} are free of the {1000 * MIB} of the machine \({996 * MIB} "):
        run(checkpoint, {"reserve_ratio": 0})


def test_the_limit_of_a_group_is_told_with_its_directory(checkpoint: Checkpoint, machine: Machine) -> None:
    machine(1000 * MIB, 0, (20 * MIB, 16 * MIB))

    with pytest.raises(ResourceError, match=rf"{4 * MIB} are free of the {20 * MIB} of cgroup \S+/sys/fs/cgroup/pod "):
        run(checkpoint, {"reserve_ratio": 0})


def test_a_limit_that_is_exceeded_already_is_refused(checkpoint: Checkpoint, machine: Machine) -> None:
    machine(1000 * MIB, 0, (20 * MIB, 30 * MIB))

    with pytest.raises(ResourceError, match=rf"-{10 * MIB} are free"):
        run(checkpoint, {"reserve_ratio": 0})


# Figures in MiB: the limit of its own, what this process uses (anonymous, shared), use and size of the machine → what
# decides, its limit and what is free of it.
LIMITS: dict[str, tuple[int, tuple[int, int], tuple[int, int], tuple[str, int, int]]] = {
    "its own, of a process that uses nothing": (4, (0, 0), (0, 1000), ("memory.host_limit_bytes", 4, 4)),
    "its own, less what this process uses": (9, (4, 2), (0, 1000), ("memory.host_limit_bytes", 9, 3)),
    "its own, whatever others use": (4, (0, 0), (900, 1000), ("memory.host_limit_bytes", 4, 4)),
    "its own, exceeded already": (9, (8, 2), (0, 1000), ("memory.host_limit_bytes", 9, -1)),
    "the machine, though its limit is higher": (900, (10, 10), (996, 1000), ("the machine", 1000, 4)),
    "the machine, though this process is large": (990, (500, 480), (997, 1000), ("the machine", 1000, 3)),
}


@pytest.mark.parametrize(("limit", "own", "books", "decides"), LIMITS.values(), ids=LIMITS)
def test_the_tighter_of_its_own_limit_and_the_machines_decides(
    checkpoint: Checkpoint,
    machine: Machine,
    limit: int,
    own: tuple[int, int],
    books: tuple[int, int],
    decides: tuple[str, int, int],
) -> None:
    machine(books[1] * MIB, books[0] * MIB, own=(own[0] * MIB, own[1] * MIB))
    where, of, free = decides

    told = re.escape(f", {free * MIB} are free of the {of * MIB} of {where} ({(of - free) * MIB} anonymous and ")
    with pytest.raises(ResourceError, match=told):
        run(checkpoint, {"reserve_ratio": 0, "host_limit_bytes": limit * MIB})


def test_what_others_use_is_not_counted_against_its_own_limit(checkpoint: Checkpoint, machine: Machine) -> None:
    machine(1000 * MIB, 900 * MIB, own=(2 * MIB, 0))

    plan, told = run(checkpoint, {"reserve_ratio": 0, "host_limit_bytes": 8 * MIB})

    assert plan.choice.layout.mapped_bytes == LARGE
    assert told.endswith("6.3 MB free of 8.4 MB")


@pytest.mark.parametrize("kind", ["tmpfs", "ramfs"])
def test_mapping_a_checkpoint_that_lies_in_memory_takes_none(
    checkpoint: Checkpoint, machine: Machine, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    machine(1000 * MIB, 1000 * MIB - 4096)
    lies_on(monkeypatch, kind)

    plan, told = run(checkpoint, {"reserve_ratio": 0})

    assert plan.choice.in_memory
    assert told == "map: model.reading is map; 0 bytes of weights, 4.1 kB free of 1.0 GB"


@pytest.mark.parametrize(
    ("model", "parts"), [({"reading": "read"}, (0, LARGE)), ({"dtype": "bfloat16"}, (0, 5 * MIB // 2))]
)
def test_copying_a_checkpoint_that_lies_in_memory_takes_as_much_as_any_other(
    checkpoint: Checkpoint,
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
    model: dict[str, Any],
    parts: tuple[int, int],
) -> None:
    machine(1000 * MIB, 999 * MIB)
    lies_on(monkeypatch, "tmpfs")

    with pytest.raises(ResourceError, match=rf"\({parts[0]} mapped, {parts[1]} copied, "):
        run(checkpoint, {"reserve_ratio": 0, "staging_bytes": MIB}, **model)


# model → what is mapped of the file as a whole?, resident, copied, staged
ROWS: dict[str, tuple[dict[str, Any], bool, tuple[int, int, int]]] = {
    "mapped": ({}, True, (LARGE, 0, 0)),
    "read": ({"reading": "read"}, False, (0, LARGE, 24 * MIB)),
    "cast": ({"dtype": "bfloat16"}, True, (80, 5 * MIB // 2, THREADS["map"] * 4 * MIB)),
}


@pytest.mark.parametrize(("model", "mapped", "sizes"), ROWS.values(), ids=ROWS)
def test_the_planned_ledger_says_what_is_mapped_copied_and_staged(
    checkpoint: Checkpoint, model: dict[str, Any], mapped: bool, sizes: tuple[int, int, int]
) -> None:
    plan, _ = run(checkpoint, **model)
    whole = checkpoint.files[0].size if mapped else 0

    names = ("checkpoint_mapped", "checkpoint_resident", "anonymous_copies", "staging")
    assert plan.rows(checkpoint, plan.choice.layout) == tuple(
        Row(name, size) for name, size in zip(names, (whole, *sizes), strict=True)
    )


def test_a_file_of_which_little_is_used_is_planned_as_mapped_wholly_and_as_resident_in_part(tmp_path: Path) -> None:
    # Of the first file only a few numbers are used where they lie, the rest is cast; nothing of the second is.
    checkpoint = written(
        tmp_path / "model", {"n": filled("I64", 10), "a": filled("F32", MIB)}, {"b": filled("F32", MIB)}
    )
    plan, _ = run(checkpoint, dtype="float16")
    rows = {row.name: row.planned_bytes for row in plan.rows(checkpoint, plan.choice.layout)}
    checkpoint.close()

    assert rows["checkpoint_mapped"] == checkpoint.files[0].size > 4 * MIB
    assert (rows["checkpoint_resident"], rows["anonymous_copies"]) == (80, 4 * MIB)


def test_the_planned_ledger_is_that_of_the_layout_that_was_chosen_at_last(checkpoint: Checkpoint) -> None:
    plan, _ = run(checkpoint)

    rows = plan.rows(checkpoint, plan_layout(checkpoint, "read", "", None))

    assert [row.planned_bytes for row in rows] == [0, 0, LARGE, 0]


def test_digests_are_looked_up_before_anything_is_read(checkpoint: Checkpoint, tmp_path: Path) -> None:
    (tmp_path / "sums").write_text(f"{'a' * 64}  0.safetensors\n")

    plan, _ = run(checkpoint, {"staging_bytes": 3 * MIB}, sha256=str(tmp_path / "sums"))

    assert plan.digests == {"0.safetensors": "a" * 64}
    assert 0 < plan.staging_bytes <= 3 * MIB
    with pytest.raises(CheckpointError, match=re.escape("no sha256 is known for 0.safetensors")):
        run(checkpoint, sha256="snapshot")
