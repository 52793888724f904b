"""Memory limits and use come from the kernel's books, in either version of its control groups."""

from pathlib import Path

import pytest

from app import ledger

MACHINE_BYTES = next(
    int(line.split()[1]) * 1024
    for line in Path("/proc/meminfo").read_text().splitlines()
    if line.startswith("MemTotal")
)
LIMIT = MACHINE_BYTES // 2
V1_NO_LIMIT = 9223372036854771712


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(ledger, "_CGROUP", tmp_path)
    (tmp_path / "memory").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("name", "text", "limit"),
    [
        ("memory.max", f"{LIMIT}\n", LIMIT),
        ("memory.max", "max\n", MACHINE_BYTES),
        ("memory.max", "", MACHINE_BYTES),
        ("memory.max", f"{MACHINE_BYTES * 2}\n", MACHINE_BYTES),
        ("memory/memory.limit_in_bytes", f"{LIMIT}\n", LIMIT),
        ("memory/memory.limit_in_bytes", f"{V1_NO_LIMIT}\n", MACHINE_BYTES),
        ("memory/memory.limit_in_bytes", "-1\n", MACHINE_BYTES),
        ("elsewhere", "", MACHINE_BYTES),
    ],
)
def test_the_limit_is_the_smaller_of_the_groups_and_the_machines(group: Path, name: str, text: str, limit: int) -> None:
    (group / name).write_text(text)

    assert ledger.host_limit_bytes() == limit


V2_STAT = "anon 1000\nfile 99999\nkernel 5\nshmem 20\nfile_mapped 7\n"
V1_STAT = "cache 99999\nrss 400\nshmem 7\nhierarchical_memory_limit 9\ntotal_cache 99999\ntotal_rss 3000\n"


@pytest.mark.parametrize(
    ("name", "text", "used"),
    [
        ("memory.stat", V2_STAT, 1020),
        ("memory.stat", "anon 1000\n", 1000),
        ("memory.stat", "odd line here\nanon 5\n", 5),
        ("memory/memory.stat", V1_STAT, 3000),
    ],
)
def test_used_is_what_the_group_cannot_reclaim(group: Path, name: str, text: str, used: int) -> None:
    (group / name).write_text(text)

    assert ledger.host_used_bytes() == used


def test_version_two_is_asked_first(group: Path) -> None:
    (group / "memory.stat").write_text(V2_STAT)
    (group / "memory" / "memory.stat").write_text(V1_STAT)

    assert ledger.host_used_bytes() == 1020


def test_without_a_group_the_machine_says_what_is_used(group: Path) -> None:
    del group

    assert 0 < ledger.host_used_bytes() < MACHINE_BYTES


def test_the_process_tells_anonymous_file_backed_and_resident_memory() -> None:
    rows = {row.name: row for row in ledger.process_rows()}
    resident = rows["host_resident"]

    assert list(rows) == ["host_anonymous", "host_file_backed", "host_resident"]
    assert [row.planned_bytes for row in rows.values()] == [None, None, None]
    assert 0 < (rows["host_anonymous"].measured_bytes or 0) < (resident.measured_bytes or 0)
    assert (resident.peak_bytes or 0) > 0
