"""Which file system holds a file, and whether it is known to be local, is read from the kernel's table of mounts."""

from pathlib import Path

import pytest

from app.weights import filesystems
from app.weights.filesystems import LOCAL, NETWORK, FileSystem, Reach, farthest, file_system, file_systems

PROC = "22 27 0:20 / /proc rw,nosuid,nodev shared:5 - proc proc rw"
ROOT = "27 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw,errors=remount-ro"
DATA = "40 27 8:2 / /data rw shared:2 - xfs /dev/sdb rw"
DEEP = "41 40 0:45 /export/models /data/models rw,relatime - nfs4 server:/models rw,vers=4.2"
HIDDEN = "42 40 0:46 / /data rw - tmpfs tmpfs rw,size=1024k"
SPACE = r"43 27 0:47 / /with\040space\011tab\134slash rw - fuse.gcsfuse gcsfuse rw"
NO_OPTIONAL = "44 27 0:48 / /plain rw - btrfs /dev/sdc rw"
MANY_OPTIONAL = "45 27 0:49 / /many rw shared:9 master:2 propagate_from:1 unbindable - zfs pool/many rw"
POD = "900 800 0:99 / / rw,relatime master:300 - overlay overlay rw,lowerdir=/a:/b - /c,upperdir=/d"


@pytest.mark.parametrize(
    ("path", "rows", "found"),
    [
        ("/models/x", (PROC, ROOT), FileSystem("ext4", "/")),
        ("/data/x", (ROOT, DATA), FileSystem("xfs", "/data")),
        ("/data", (ROOT, DATA), FileSystem("xfs", "/data")),
        ("/database/x", (ROOT, DATA), FileSystem("ext4", "/")),
        ("/data/models/x", (ROOT, DATA, DEEP), FileSystem("nfs4", "/data/models")),
        ("/data/models/x", (DEEP, DATA, ROOT), FileSystem("nfs4", "/data/models")),
        ("/data/models2", (ROOT, DATA, DEEP), FileSystem("xfs", "/data")),
        ("/data/x", (ROOT, DATA, HIDDEN), FileSystem("tmpfs", "/data")),
        ("/with space\ttab\\slash/x", (ROOT, SPACE), FileSystem("fuse.gcsfuse", "/with space\ttab\\slash")),
        ("/plain/x", (ROOT, NO_OPTIONAL), FileSystem("btrfs", "/plain")),
        ("/many/x", (ROOT, MANY_OPTIONAL), FileSystem("zfs", "/many")),
        ("/any", (ROOT, POD), FileSystem("overlay", "/")),
        ("/any", (), FileSystem("unknown", "/")),
        ("/any", ("", "nonsense", "1 2 3 - ", "1 2 3 4 - ext4 x rw"), FileSystem("unknown", "/")),
    ],
)
def test_the_file_system_is_that_of_the_longest_mount_point_and_its_last_mount(
    path: str, rows: tuple[str, ...], found: FileSystem
) -> None:
    assert file_system(Path(path), "\n".join(rows)) == found


def test_an_overmounted_tree_hides_the_mounts_below_it() -> None:
    assert file_system(Path("/data/models/x"), "\n".join((ROOT, DATA, DEEP, HIDDEN))) == FileSystem("tmpfs", "/data")


def test_a_path_with_bytes_beyond_ascii_is_found() -> None:
    row = "43 27 0:47 / /modèle rw - nfs server:/x rw"

    assert file_system(Path("/modèle/x"), f"{ROOT}\n{row}") == FileSystem("nfs", "/modèle")


def test_a_link_counts_where_it_leads(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "there")
    real = tmp_path.resolve()
    rows = f"{ROOT}\n40 27 8:2 / {real}/there rw - nfs4 x rw\n41 27 8:3 / {real}/link rw - xfs x rw"

    assert file_system(tmp_path / "link" / "x", rows).type == "nfs4"


@pytest.mark.parametrize(
    ("kind", "reach"),
    [
        *((kind, Reach.LOCAL) for kind in ("ext4", "xfs", "btrfs", "overlay", "tmpfs", "zfs", "squashfs")),
        *((kind, Reach.NETWORK) for kind in ("nfs", "nfs4", "cifs", "smb3", "lustre", "9p", "virtiofs", "fuse.sshfs")),
        *((kind, Reach.UNKNOWN) for kind in ("fuse", "fuseblk", "fuse.rclone", "unknown", "", "EXT4", "somethingfs")),
    ],
)
def test_local_and_network_types_are_listed_and_all_others_unknown(kind: str, reach: Reach) -> None:
    assert FileSystem(kind, "/").reach is reach


def test_no_type_is_both_local_and_remote() -> None:
    assert not LOCAL & NETWORK


@pytest.mark.parametrize(
    ("paths", "found"),
    [
        (("/a", "/b"), "ext4"),
        (("/a", "/odd/x"), "fuse.rclone"),
        (("/odd/x", "/data/models/x", "/a"), "nfs4"),
        (("/data/models/x", "/odd/x"), "nfs4"),
        (("/odd/x", "/data/x"), "fuse.rclone"),
    ],
)
def test_of_several_files_the_farthest_decides(
    monkeypatch: pytest.MonkeyPatch, paths: tuple[str, ...], found: str
) -> None:
    table = "\n".join((ROOT, DATA, DEEP, "50 27 0:50 / /odd rw - fuse.rclone remote: rw"))
    monkeypatch.setattr(filesystems, "_mount_table", lambda: table)

    assert farthest(file_systems(Path(path) for path in paths)).type == found


def test_the_real_table_knows_this_directory(tmp_path: Path) -> None:
    found = file_system(tmp_path)

    assert found.type != "unknown"
    assert tmp_path.resolve().is_relative_to(found.mount_point)
    assert found == farthest(file_systems([tmp_path]))
