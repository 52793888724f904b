"""Memory limits and use come from the kernel's books, in either version of its control groups."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from app.ledger import OBJECTS, WHOLES, Books, Row

MIB = 1 << 20
# 1000 MiB, of which 400 are in use.
MEMINFO = f"MemTotal:       {1000 * 1024} kB\nMemFree:        {5 * 1024} kB\nMemAvailable:   {600 * 1024} kB\n"
V1_NO_LIMIT = 9223372036854771712
MACHINE = ("the machine", 1000 * MIB, 400 * MIB)


def books(root: Path, cgroup: str, files: Mapping[str, str], meminfo: str = MEMINFO) -> Books:
    """Write the kernel's files below a directory; paths in `files` are below sys/fs/cgroup."""
    written = {"proc/meminfo": meminfo, "proc/self/cgroup": cgroup}
    written |= {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    for name, text in written.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return Books(root)


def stat(anon: int, shmem: int = 0) -> str:
    """Return memory.stat of version 2; the page cache and mapped files count for nothing."""
    return f"anon {anon * MIB}\nfile {800 * MIB}\nkernel 5\nshmem {shmem * MIB}\nfile_mapped {700 * MIB}\n"


def v1_stat(total_rss: int, total_shmem: int = 0) -> str:
    return (
        f"cache {800 * MIB}\nrss {MIB}\nshmem {MIB}\nmapped_file 7\nhierarchical_memory_limit 9\n"
        f"total_cache {800 * MIB}\ntotal_rss {total_rss * MIB}\ntotal_shmem {total_shmem * MIB}\n"
    )


# what the machine looks like → /proc/self/cgroup, files below /sys/fs/cgroup, where the limit is, limit and use in MiB
ROOMS: dict[str, tuple[str, dict[str, str], str, int, int]] = {
    "no control groups at all": ("", {}, "the machine", 1000, 400),
    "version 2, one limit": (
        "0::/pod\n",
        {"pod/memory.max": f"{300 * MIB}\n", "pod/memory.stat": stat(20, 5)},
        "cgroup {root}/sys/fs/cgroup/pod",
        300,
        25,
    ),
    "version 2, no limit": (
        "0::/pod\n",
        {"pod/memory.max": "max\n", "pod/memory.stat": stat(20)},
        "the machine",
        1000,
        400,
    ),
    "version 2, a limit above the machine's memory with little in use": (
        "0::/pod\n",
        {"pod/memory.max": f"{2000 * MIB}\n", "pod/memory.stat": stat(20)},
        "the machine",
        1000,
        400,
    ),
    "version 2, the group above is tighter": (
        "0::/pod/container\n",
        {
            "pod/memory.max": f"{200 * MIB}\n",
            "pod/memory.stat": stat(150),
            "pod/container/memory.max": f"{300 * MIB}\n",
            "pod/container/memory.stat": stat(20),
        },
        "cgroup {root}/sys/fs/cgroup/pod",
        200,
        150,
    ),
    "version 2, the larger limit has less left": (
        "0::/pod/container\n",
        {
            "pod/memory.max": f"{500 * MIB}\n",
            "pod/memory.stat": stat(450),
            "pod/container/memory.max": f"{100 * MIB}\n",
            "pod/container/memory.stat": stat(0, 20),
        },
        "cgroup {root}/sys/fs/cgroup/pod",
        500,
        450,
    ),
    "version 2, only the group far above has a limit": (
        "0::/slice/pod/container\n",
        {
            "slice/memory.max": f"{100 * MIB}\n",
            "slice/memory.stat": stat(90),
            "slice/pod/memory.max": "max\n",
            "slice/pod/memory.stat": stat(80),
            "slice/pod/container/memory.max": "max\n",
            "slice/pod/container/memory.stat": stat(70),
        },
        "cgroup {root}/sys/fs/cgroup/slice",
        100,
        90,
    ),
    "version 2, inside a container the mount is the group": (
        "0::/\n",
        {"memory.max": f"{100 * MIB}\n", "memory.stat": stat(10)},
        "cgroup {root}/sys/fs/cgroup",
        100,
        10,
    ),
    "version 2, the path is the host's and does not exist below the mount": (
        "0::/kubepods.slice/pod1234.slice/cri-containerd-5678.scope\n",
        {"memory.max": f"{100 * MIB}\n", "memory.stat": stat(10)},
        "cgroup {root}/sys/fs/cgroup",
        100,
        10,
    ),
    "version 2, the path leads out of the container's own tree": (
        "0::/../../other\n",
        {"memory.max": f"{100 * MIB}\n", "memory.stat": stat(10)},
        "cgroup {root}/sys/fs/cgroup",
        100,
        10,
    ),
    "version 1": (
        "5:cpu,cpuacct:/x\n4:memory:/pod\n0::/\n",
        {"memory/pod/memory.limit_in_bytes": f"{300 * MIB}\n", "memory/pod/memory.stat": v1_stat(30, 7)},
        "cgroup {root}/sys/fs/cgroup/memory/pod",
        300,
        37,
    ),
    "version 1, several controllers in one hierarchy": (
        "4:blkio,memory:/pod\n",
        {"memory/pod/memory.limit_in_bytes": f"{300 * MIB}\n", "memory/pod/memory.stat": v1_stat(30)},
        "cgroup {root}/sys/fs/cgroup/memory/pod",
        300,
        30,
    ),
    "version 1, no limit is a large number": (
        "4:memory:/pod\n",
        {"memory/pod/memory.limit_in_bytes": f"{V1_NO_LIMIT}\n", "memory/pod/memory.stat": v1_stat(30)},
        "the machine",
        1000,
        400,
    ),
    "version 1, inside a container": (
        "4:memory:/docker/0123456789ab\n",
        {"memory/memory.limit_in_bytes": f"{300 * MIB}\n", "memory/memory.stat": v1_stat(30)},
        "cgroup {root}/sys/fs/cgroup/memory",
        300,
        30,
    ),
    "a controller whose name only contains the word": (
        "4:memoryless:/pod\n",
        {"memory/pod/memory.limit_in_bytes": f"{MIB}\n", "memory/pod/memory.stat": v1_stat(0)},
        "the machine",
        1000,
        400,
    ),
    "a limit that is exceeded already": (
        "0::/pod\n",
        {"pod/memory.max": f"{10 * MIB}\n", "pod/memory.stat": stat(20)},
        "cgroup {root}/sys/fs/cgroup/pod",
        10,
        20,
    ),
    "a limit of nothing": (
        "0::/pod\n",
        {"pod/memory.max": "0\n", "pod/memory.stat": stat(0)},
        "cgroup {root}/sys/fs/cgroup/pod",
        0,
        0,
    ),
    "lines that nobody knows": (
        "nonsense\n0::/pod\n",
        {"pod/memory.max": f"{100 * MIB}\n", "pod/memory.stat": f"odd line here\nx\nanon {5 * MIB}\nshmem many\n"},
        "cgroup {root}/sys/fs/cgroup/pod",
        100,
        5,
    ),
}


@pytest.mark.parametrize(("cgroup", "files", "where", "limit", "used"), ROOMS.values(), ids=ROOMS)
def test_the_room_is_that_of_the_limit_with_the_least_left(
    tmp_path: Path, cgroup: str, files: dict[str, str], where: str, limit: int, used: int
) -> None:
    room = books(tmp_path, cgroup, files).room()

    assert (room.where, room.limit_bytes // MIB, room.used_bytes // MIB) == (where.format(root=tmp_path), limit, used)
    assert room.free_bytes == (limit - used) * MIB


def test_a_machine_that_says_nothing_limits_nothing(tmp_path: Path) -> None:
    room = Books(tmp_path).room()

    assert (room.where, room.used_bytes) == ("the machine", 0)
    assert room.free_bytes > 1 << 50


# what is charged → /proc/self/cgroup, files, the row
CHARGES: dict[str, tuple[str, dict[str, str], Row]] = {
    "version 2": (
        "0::/pod\n",
        {"pod/memory.stat": stat(1), "pod/memory.current": "5000\n", "pod/memory.peak": "7000\n"},
        Row("cgroup", None, 5000, 7000),
    ),
    "version 2 on a kernel that keeps no peak": (
        "0::/pod\n",
        {"pod/memory.stat": stat(1), "pod/memory.current": "5000\n"},
        Row("cgroup", None, 5000, None),
    ),
    "version 2, the nearest group counts": (
        "0::/pod/container\n",
        {
            "pod/memory.stat": stat(1),
            "pod/memory.current": "9000\n",
            "pod/container/memory.stat": stat(1),
            "pod/container/memory.current": "5000\n",
            "pod/container/memory.peak": "6000\n",
        },
        Row("cgroup", None, 5000, 6000),
    ),
    "version 2, the nearest group has no memory controller": (
        "0::/pod/container\n",
        {"pod/memory.stat": stat(1), "pod/memory.current": "9000\n", "pod/container/cpu.stat": ""},
        Row("cgroup", None, 9000, None),
    ),
    "version 1": (
        "4:memory:/pod\n",
        {
            "memory/pod/memory.stat": v1_stat(1),
            "memory/pod/memory.usage_in_bytes": "5000\n",
            "memory/pod/memory.max_usage_in_bytes": "7000\n",
        },
        Row("cgroup", None, 5000, 7000),
    ),
    "the root group of version 2 keeps no charge": ("0::/\n", {"memory.stat": stat(1)}, Row("cgroup")),
    "no control groups": ("", {}, Row("cgroup")),
}


@pytest.mark.parametrize(("cgroup", "files", "row"), CHARGES.values(), ids=CHARGES)
def test_the_charge_of_the_nearest_group_is_told_with_its_largest_value(
    tmp_path: Path, cgroup: str, files: dict[str, str], row: Row
) -> None:
    assert books(tmp_path, cgroup, files).cgroup_row() == row


def test_the_process_tells_its_memory_by_kind_from_its_own_status(tmp_path: Path) -> None:
    made = books(tmp_path, "", {})
    (tmp_path / "proc/self/status").write_text(
        "Name:\tpython\nVmHWM:\t      90 kB\nVmRSS:\t      60 kB\nRssAnon:\t      10 kB\nRssFile:\t      20 kB\n"
        "RssShmem:\t      30 kB\nThreads:\t3\n"
    )

    assert made.process_rows() == (
        Row("host_anonymous", None, 10 * 1024),
        Row("host_file_backed", None, 20 * 1024),
        Row("host_shared", None, 30 * 1024),
        Row("host_resident", None, 60 * 1024, 90 * 1024),
    )


def test_this_machine_has_room_and_this_process_a_size() -> None:
    real = Books()
    room, rows = real.room(), {row.name: row for row in (*real.process_rows(), real.cgroup_row())}
    total = next(
        int(line.split()[1]) * 1024
        for line in Path("/proc/meminfo").read_text().splitlines()
        if line.startswith("MemTotal:")
    )
    parts = [rows[name].measured_bytes or 0 for name in ("host_anonymous", "host_file_backed", "host_shared")]

    assert room.used_bytes > 0
    assert 0 < room.limit_bytes <= total
    assert tuple(rows) == WHOLES
    assert parts[0] > MIB
    assert sum(parts) == rows["host_resident"].measured_bytes
    assert (rows["host_resident"].peak_bytes or 0) >= sum(parts)


def test_no_object_is_named_twice() -> None:
    assert len({*OBJECTS, *WHOLES}) == len(OBJECTS) + len(WHOLES)
