"""The sha256 that files must have come from a list in the form of sha256sum, or from a snapshot's links."""

import hashlib
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from app.checkpoints import Checkpoint, CheckpointFile
from app.errors import CheckpointError, SettingsError
from app.weights.digests import expected_digests

A, B = "a" * 64, "0123456789abcdef" * 4
ONE, TWO = "one.safetensors", "two.safetensors"


def checkpoint(directory: Path, *names: str) -> Checkpoint:
    files = tuple(CheckpointFile(directory / name, -1, 8, (0, 0, 8, 0)) for name in names)
    return Checkpoint(directory, "safetensors", files, {})


# the list → digests of one and two
LISTS: dict[str, tuple[str, tuple[str, str]]] = {
    "text marker": (f"{A}  {ONE}\n{B}  {TWO}\n", (A, B)),
    "binary marker": (f"{A} *{ONE}\n{B} *{TWO}\n", (A, B)),
    "any order, no last newline": (f"{B}  {TWO}\n{A}  {ONE}", (A, B)),
    "paths": (f"{A}  ./{ONE}\n{B}  /models/tiny/{TWO}\n", (A, B)),
    "comments and empty lines": (f"# by hand\n\n{A}  {ONE}\n   \n#{B}  x\n{B}  {TWO}\n", (A, B)),
    "capital letters": (f"{A.upper()}  {ONE}\n{B.upper()}  {TWO}\n", (A, B)),
    "more files than needed": (f"{A}  {ONE}\n{B}  {TWO}\n{A}  config.json\n", (A, B)),
    "the same line twice": (f"{A}  {ONE}\n{A.upper()} *x/{ONE}\n{B}  {TWO}\n", (A, B)),
    "lines as Windows ends them": (f"{A}  {ONE}\r\n{B}  {TWO}\r\n", (A, B)),
}


@pytest.mark.parametrize(("text", "digests"), LISTS.values(), ids=LISTS)
def test_a_list_gives_every_file_its_digest(tmp_path: Path, text: str, digests: tuple[str, str]) -> None:
    (tmp_path / "sums").write_bytes(text.encode())

    found = expected_digests(str(tmp_path / "sums"), checkpoint(tmp_path, ONE, TWO))

    assert found == dict(zip((ONE, TWO), digests, strict=True))


def test_a_name_with_spaces_is_a_name(tmp_path: Path) -> None:
    (tmp_path / "sums").write_text(f"{A}  my  model *.safetensors\n")

    assert expected_digests(str(tmp_path / "sums"), checkpoint(tmp_path, "my  model *.safetensors")) == {
        "my  model *.safetensors": A
    }


@pytest.mark.parametrize("marker", ["--text", "--binary"])
def test_what_sha256sum_writes_is_read(tmp_path: Path, marker: str) -> None:
    (tmp_path / ONE).write_bytes(b"weights")
    made = subprocess.run(["sha256sum", marker, tmp_path / ONE], capture_output=True, check=True)
    (tmp_path / "sums").write_bytes(made.stdout)

    found = expected_digests(str(tmp_path / "sums"), checkpoint(tmp_path, ONE))

    assert found == {ONE: hashlib.sha256(b"weights").hexdigest()}


def test_nothing_is_expected_where_nothing_was_asked_for(tmp_path: Path) -> None:
    assert expected_digests(None, checkpoint(tmp_path, ONE)) == {}


@pytest.mark.parametrize(
    ("text", "number"),
    [
        (f"{A}  {ONE}\n{A[:63]}  {TWO}\n", 2),
        (f"{A} {ONE}\n", 1),
        (f"{A}\n", 1),
        (f"{A}  \n", 1),
        (f"SHA256 ({ONE}) = {A}\n", 1),
        (f"\n{'g' * 64}  {ONE}\n", 2),
        (f"  {A}  {ONE}\n", 1),
    ],
)
def test_a_line_of_another_form_is_refused_with_its_number(tmp_path: Path, text: str, number: int) -> None:
    sums = tmp_path / "sums"
    sums.write_text(text)

    with pytest.raises(SettingsError) as caught:
        expected_digests(str(sums), checkpoint(tmp_path, ONE))

    assert str(caught.value).startswith(f"{sums} line {number} is not `<sha256>  <name>` as sha256sum writes it: ")


def test_two_digests_for_the_name_of_a_file_are_refused(tmp_path: Path) -> None:
    sums = tmp_path / "sums"
    sums.write_text(f"{A}  a/{ONE}\n{B}  b/{ONE}\n{A}  {TWO}\n")

    with pytest.raises(SettingsError) as caught:
        expected_digests(str(sums), checkpoint(tmp_path, TWO, ONE))

    assert str(caught.value) == (f"model.sha256 = '{sums}' gives {ONE} several sha256; list the checkpoint's alone")


@pytest.mark.parametrize("other", [TWO, "config.json", "README.md"])
def test_two_digests_for_a_name_that_is_none_of_the_checkpoints_files_do_no_harm(tmp_path: Path, other: str) -> None:
    sums = tmp_path / "sums"
    sums.write_text(f"{A}  a/{other}\n{B}  b/{other}\n{B}  {ONE}\n")

    assert expected_digests(str(sums), checkpoint(tmp_path, ONE)) == {ONE: B}


def test_files_that_the_list_lacks_are_named(tmp_path: Path) -> None:
    sums = tmp_path / "sums"
    sums.write_text(f"{A}  {ONE}\n")

    with pytest.raises(CheckpointError) as caught:
        expected_digests(str(sums), checkpoint(tmp_path, "three.bin", ONE, TWO))

    assert str(caught.value) == (
        f"{tmp_path}: no sha256 is known for three.bin, {TWO} ({sums} does not list it); complete or unset model.sha256"
    )


@pytest.mark.parametrize(
    "make", [lambda path: None, lambda path: path.mkdir(), lambda path: path.write_bytes(b"\xff\xfe\x80")]
)
def test_a_list_that_cannot_be_read_is_a_mistake_of_the_configuration(
    tmp_path: Path, make: Callable[[Path], object]
) -> None:
    make(tmp_path / "sums")

    with pytest.raises(SettingsError) as caught:
        expected_digests(str(tmp_path / "sums"), checkpoint(tmp_path, ONE))

    assert str(caught.value).startswith(f"model.sha256 = '{tmp_path}/sums' cannot be read: ")


def snapshot(root: Path, **contents: bytes) -> Path:
    """Lay files out as the cache of huggingface_hub does: links to blobs that are named by their sha256."""
    blobs, made = root / "models--x--y" / "blobs", root / "models--x--y" / "snapshots" / "0123abcd"
    blobs.mkdir(parents=True)
    made.mkdir(parents=True)
    for name, data in contents.items():
        digest = hashlib.sha256(data).hexdigest()
        (blobs / digest).write_bytes(data)
        (made / f"{name}.safetensors").symlink_to(f"../../blobs/{digest}")
    return made


def test_a_snapshot_names_every_file_by_its_digest(tmp_path: Path) -> None:
    made = snapshot(tmp_path, one=b"1", two=b"2")

    assert expected_digests("snapshot", checkpoint(made, ONE, TWO)) == {
        ONE: hashlib.sha256(b"1").hexdigest(),
        TWO: hashlib.sha256(b"2").hexdigest(),
    }


def test_a_snapshot_that_is_reached_through_a_link_is_a_snapshot(tmp_path: Path) -> None:
    (tmp_path / "model").symlink_to(snapshot(tmp_path, one=b"1"))

    assert expected_digests("snapshot", checkpoint(tmp_path / "model", ONE)) == {ONE: hashlib.sha256(b"1").hexdigest()}


@pytest.mark.parametrize("target", ["blob", "da39a3ee5e6b4b0d3255bfef95601890afd80709", A[:63], A.upper()])
def test_a_file_that_is_no_link_to_a_digest_has_none(tmp_path: Path, target: str) -> None:
    made = snapshot(tmp_path, one=b"1")
    (tmp_path / target).write_bytes(b"2")
    (made / TWO).symlink_to(tmp_path / target)

    with pytest.raises(CheckpointError) as caught:
        expected_digests("snapshot", checkpoint(made, ONE, TWO))

    assert str(caught.value) == (
        f"{made}: no sha256 is known for {TWO} (its link does not name one); complete or unset model.sha256"
    )


def test_a_copied_file_in_a_snapshot_has_none(tmp_path: Path) -> None:
    (tmp_path / ONE).write_bytes(b"1")

    with pytest.raises(
        CheckpointError, match=r"no sha256 is known for one\.safetensors \(its link does not name one\)"
    ):
        expected_digests("snapshot", checkpoint(tmp_path, ONE))
