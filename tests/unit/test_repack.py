"""Repacking writes a whole file under a name that was free, or nothing at all."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from app import repack as module
from app.checkpoints import Checkpoint, open_checkpoint
from app.errors import CheckpointError, ResourceError, SettingsError
from app.repack import repack
from tests.unit.written import Tensors, filled, written

SHARDS: tuple[Tensors, ...] = (
    {"odd": filled("U8", 3), "a": filled("F32", 100), "empty": filled("F32", 0, 3)},
    {"b": filled("BF16", 64, 2), "scalar": filled("F64"), "four": filled("F4", 3, 8)},
)
TENSORS = {name: tensor for shard in SHARDS for name, tensor in shard.items()}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Iterator[Checkpoint]:
    made = written(tmp_path / "model", *SHARDS)
    yield made
    made.close()


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize(
    ("out", "target"),
    [
        ("new", "new/model.safetensors"),
        ("a/b/new", "a/b/new/model.safetensors"),
        ("x.safetensors", "x.safetensors"),
        ("new/x.safetensors", "new/x.safetensors"),
        ("there", "there/model.safetensors"),
    ],
)
def test_the_new_file_holds_the_same_tensors_each_of_them_aligned(
    checkpoint: Checkpoint, tmp_path: Path, out: str, target: str
) -> None:
    (tmp_path / "there").mkdir()

    told = repack(checkpoint, tmp_path / out)
    found = open_checkpoint(tmp_path / target)
    found.close()

    assert told["path"] == str(tmp_path / target)
    assert told["bytes"] == (tmp_path / target).stat().st_size
    content = (tmp_path / target).read_bytes()
    assert {
        name: (entry.dtype, entry.shape, content[entry.offset : entry.offset + entry.nbytes])
        for name, entry in found.tensors.items()
    } == TENSORS
    assert {entry.offset % 64 for entry in found.tensors.values()} == {0}
    assert names((tmp_path / target).parent).count((tmp_path / target).name) == 1
    assert not [name for name in names((tmp_path / target).parent) if name.startswith(".")]


@pytest.mark.parametrize("out", ["model", "model/new.safetensors", "model/../model", "linked", "linked/x.safetensors"])
def test_a_target_among_the_files_it_is_made_of_is_refused(checkpoint: Checkpoint, tmp_path: Path, out: str) -> None:
    (tmp_path / "linked").symlink_to(tmp_path / "model")
    before = names(tmp_path / "model")

    with pytest.raises(SettingsError, match=r"would lie among the files it is made of, which would then be no check"):
        repack(checkpoint, tmp_path / out)

    assert names(tmp_path / "model") == before


@pytest.mark.parametrize("out", ["there", "there/model.safetensors"])
def test_a_file_that_exists_is_not_replaced(checkpoint: Checkpoint, tmp_path: Path, out: str) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there/model.safetensors").write_bytes(b"mine")

    with pytest.raises(SettingsError, match=r"there/model\.safetensors exists; name another file, or remove it first"):
        repack(checkpoint, tmp_path / out)

    assert (tmp_path / "there/model.safetensors").read_bytes() == b"mine"


@pytest.mark.parametrize("out", ["notes", "new.bin", "new.safetensors.gz", "a/new.pt"])
def test_a_name_that_is_neither_a_directory_nor_of_the_format_is_refused(
    checkpoint: Checkpoint, tmp_path: Path, out: str
) -> None:
    (tmp_path / "notes").write_bytes(b"mine")
    before = names(tmp_path)

    with pytest.raises(SettingsError) as caught:
        repack(checkpoint, tmp_path / out)

    told = f"{tmp_path / out} is neither a directory nor a name that ends with .safetensors"
    assert str(caught.value) == told
    assert names(tmp_path) == before
    assert (tmp_path / "notes").read_bytes() == b"mine"


def test_another_format_is_refused(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path, "torch", (), {})

    with pytest.raises(CheckpointError, match="is of the format torch; only safetensors is repacked"):
        repack(checkpoint, tmp_path / "new")

    assert names(tmp_path) == []


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_full_disk_leaves_nothing_behind(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def fail(fd: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fail)

    with pytest.raises(ResourceError) as caught:
        repack(checkpoint, tmp_path / "new")

    told = f"{tmp_path}/new/model.safetensors cannot be written: {os.strerror(code)}; is the disk full?"
    assert str(caught.value) == told
    assert names(tmp_path / "new") == []


@pytest.mark.parametrize("left", [0, 200])
def test_a_source_that_is_truncated_leaves_nothing_behind(checkpoint: Checkpoint, tmp_path: Path, left: int) -> None:
    path = checkpoint.files[1].path
    os.truncate(path, left)
    with pytest.raises(CheckpointError, match=rf"{path} "):
        write_only(checkpoint, tmp_path / "new")

    assert names(tmp_path / "new") == []


def write_only(checkpoint: Checkpoint, out: Path) -> None:
    """Write without reading the metadata again, which a truncated file has not got either."""
    out.mkdir()
    module._write(checkpoint, b"header", list(module._arrange(checkpoint)), out / "model.safetensors")


def test_a_source_that_changes_meanwhile_leaves_nothing_behind(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, fsync = checkpoint.files[1].path, os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (os.utime(path, ns=(1, 1)), fsync(fd))[1])

    with pytest.raises(CheckpointError) as caught:
        repack(checkpoint, tmp_path / "new")

    assert str(caught.value) == f"{path} was changed in place after it was opened; nothing was written"
    assert names(tmp_path / "new") == []
