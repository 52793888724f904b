"""Artifacts are sealed once and verified before anything in them is loaded; what is damaged never comes back."""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.artifacts import Artifact, Layer, Missed, Restored, golden, inputs
from app.artifacts.seal import seal, sha256, verify
from app.artifacts.store import Store
from app.errors import ArtifactError
from app.identity import ArtifactIdentity

IDENTITY = ArtifactIdentity({"torch": "2.13.0", "device": {"kind": "cpu", "threads": 2}})
OTHER = ArtifactIdentity({"torch": "2.14.1", "device": {"kind": "cpu", "threads": 2}})
CONTENT = {"packages": [{"library": "code.so"}], "factory_files": {}, "built_s": 1.5}
NOWHERE = Path("/nowhere")
FILES = {"code.so": b"compiled code", "constants.safetensors": b"values", "deep/table.json": b"{}", "empty": b""}


def fill(directory: Path, identity: ArtifactIdentity = IDENTITY, **files: bytes) -> Path:
    for name, data in ({"constants.safetensors": b"values"} | files if files else FILES).items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(data)
    seal(directory, identity, CONTENT)
    return directory


def publish(store: Store, identity: ArtifactIdentity = IDENTITY, **files: bytes) -> Artifact:
    with store.workspace() as workspace:
        payload = workspace / "payload"
        payload.mkdir()
        return store.publish(fill(payload, identity, **files), identity)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def test_a_sealed_directory_verifies_and_gives_back_what_it_was_sealed_with(tmp_path: Path) -> None:
    found = verify(fill(tmp_path), IDENTITY)

    assert isinstance(found, Artifact)
    assert (found.path, found.identity) == (tmp_path, IDENTITY)
    assert {name: found.content[name] for name in CONTENT} == CONTENT


def test_the_manifest_lists_identity_and_every_file_with_size_and_sha256(tmp_path: Path) -> None:
    fill(tmp_path)

    assert json.loads((tmp_path / "manifest.json").read_bytes()) == {
        "format": 1,
        "digest": IDENTITY.digest,
        "identity": IDENTITY.fields,
        "files": [
            {"path": name, "size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            for name, data in FILES.items()
        ],
        "content_sha256": hashlib.sha256(json.dumps(CONTENT, sort_keys=True).encode()).hexdigest(),
        **CONTENT,
    }


def edit(**changes: Any) -> Callable[[Path], object]:
    """Return a damage that replaces fields of the manifest; `...` removes one."""

    def damage(directory: Path) -> None:
        found = json.loads((directory / "manifest.json").read_bytes()) | changes
        kept = {name: value for name, value in found.items() if value is not ...}
        (directory / "manifest.json").write_text(json.dumps(kept))

    return damage


def flip(name: str) -> Callable[[Path], object]:
    return lambda directory: (directory / name).write_bytes(bytes([FILES[name][0] ^ 1]) + FILES[name][1:])


def write(name: str, data: bytes) -> Callable[[Path], object]:
    return lambda directory: (directory / name).write_bytes(data)


def remove(name: str) -> Callable[[Path], object]:
    return lambda directory: (directory / name).unlink()


def link(name: str, target: str) -> Callable[[Path], object]:
    def damage(directory: Path) -> None:
        (directory / name).unlink(missing_ok=True)
        (directory / name).symlink_to(target)

    return damage


def link_to_the_same_content(directory: Path) -> None:
    copy = directory.parent / "copy.so"
    copy.write_bytes(FILES["code.so"])
    link("code.so", str(copy))(directory)


def directory_in_place_of_the_file(directory: Path) -> None:
    (directory / "code.so").unlink()
    (directory / "code.so").mkdir()


def pipe_in_place_of_the_manifest(directory: Path) -> None:
    (directory / "manifest.json").unlink()
    os.mkfifo(directory / "manifest.json")


def manifest_moved_and_linked(directory: Path) -> None:
    (directory / "manifest.json").rename(directory.parent / "moved.json")
    (directory / "manifest.json").symlink_to(directory.parent / "moved.json")


# what happened to the sealed directory → how, the reason that is told
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "flipped bit": (flip("code.so"), "code.so is not what was sealed: its sha256 differs"),
    "flipped bit below": (flip("deep/table.json"), "deep/table.json is not what was sealed: its sha256 differs"),
    "file cut": (write("code.so", b"compiled cod"), "code.so has 12 bytes, sealed were 13"),
    "file grown": (write("empty", b"x"), "empty has 1 bytes, sealed were 0"),
    "file missing": (remove("code.so"), "code.so is missing"),
    "empty file missing": (remove("empty"), "empty is missing"),
    "file added": (write("extra.so", b""), "extra.so is not in the manifest"),
    "file added below": (write("deep/extra", b""), "deep/extra is not in the manifest"),
    "hidden file added": (write(".hidden", b""), ".hidden is not in the manifest"),
    "link in place of a file": (link_to_the_same_content, "code.so is a symbolic link, not a regular file"),
    "dangling link": (link("code.so", "nowhere"), "code.so is a symbolic link, not a regular file"),
    "link added": (link("extra", "code.so"), "extra is not in the manifest"),
    "link to a directory added": (link("extra", "deep"), "extra is not in the manifest"),
    "directory in place of a file": (directory_in_place_of_the_file, "code.so is missing"),
    "manifest missing": (
        remove("manifest.json"),
        "manifest.json cannot be read: FileNotFoundError: [Errno 2] No such file or directory: 'manifest.json'",
    ),
    "manifest empty": (
        write("manifest.json", b""),
        "manifest.json cannot be read: JSONDecodeError: Expecting value: line 1 column 1 (char 0)",
    ),
    "manifest is a list": (
        write("manifest.json", b"[]"),
        "manifest.json cannot be read: ValueError: manifest.json is not an object",
    ),
    "manifest without identity": (edit(identity=...), "manifest.json cannot be read: KeyError: 'identity'"),
    "manifest without files": (edit(files=...), "manifest.json cannot be read: KeyError: 'files'"),
    "manifest with a nameless file": (
        edit(files=[{"size": 1, "sha256": ""}]),
        "manifest.json cannot be read: KeyError: 'path'",
    ),
    "manifest of a later format": (edit(format=2), "manifest.json has format 2, this version reads 1"),
    "manifest of no format": (edit(format=...), "manifest.json has format None, this version reads 1"),
    "other identity": (
        edit(identity=OTHER.fields),
        "manifest.json is of another identity: torch 2.14.1 → 2.13.0",
    ),
    "file listed that is outside": (
        edit(files=[{"path": "../outside", "size": 0, "sha256": hashlib.sha256(b"").hexdigest()}]),
        "manifest.json lists ../outside, which is no path inside the artifact",
    ),
    "content changed": (
        edit(packages=[{"library": "/elsewhere/code.so"}]),
        "manifest.json is not what was sealed: the sha256 of its content differs",
    ),
    "manifest is a pipe": (
        pipe_in_place_of_the_manifest,
        "manifest.json cannot be read: ValueError: manifest.json is not a file of at most 67108864 bytes",
    ),
    "manifest is a link": (
        manifest_moved_and_linked,
        "manifest.json cannot be read: OSError: [Errno 40] Too many levels of symbolic links: 'manifest.json'",
    ),
    "manifest without end": (
        write("manifest.json", b"[" * 100_000),
        "manifest.json cannot be read: RecursionError: maximum recursion depth exceeded while decoding a JSON array "
        "from a unicode string",
    ),
}


@pytest.mark.parametrize(("damage", "reason"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_directory_does_not_verify(tmp_path: Path, damage: Callable[[Path], object], reason: str) -> None:
    directory = tmp_path / "artifact"
    directory.mkdir()
    damage(fill(directory))

    assert verify(directory, IDENTITY) == reason.format(path=directory)


@pytest.mark.parametrize("identity", [5, "cpu", None, ["torch"]])
def test_a_manifest_whose_identity_is_no_mapping_does_not_verify(tmp_path: Path, identity: Any) -> None:
    edit(identity=identity)(fill(tmp_path))

    assert isinstance(verify(tmp_path, IDENTITY), str)


@pytest.mark.parametrize(("damage", "reason"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_artifact_is_rejected_and_set_aside_so_that_a_new_one_can_be_published(
    store: Store, damage: Callable[[Path], object], reason: str
) -> None:
    place = publish(store).path
    damage(place)
    told = reason.format(path=place)

    found = store.find(IDENTITY, NOWHERE)

    assert found == Missed(IDENTITY, f"rejected artifact: {told}", (Layer("sealed-artifact", "rejected", told),))
    assert place.is_dir(), "looking must change nothing"
    store.set_aside(IDENTITY)
    assert [path.name.startswith(f".rejected-{IDENTITY.key()[:12]}-") for path in store.path.glob(".*")] == [True]
    assert publish(store).path == place
    assert isinstance(store.find(IDENTITY, NOWHERE), Restored)


def test_a_published_artifact_is_found_with_one_hit(store: Store) -> None:
    published = publish(store)

    assert published.path == store.path / IDENTITY.key()
    assert store.find(IDENTITY, NOWHERE) == Restored(published, (Layer("sealed-artifact", "hit"),))


def test_publishing_leaves_nothing_but_the_artifact(store: Store) -> None:
    publish(store)

    assert [path.name for path in store.path.iterdir()] == [IDENTITY.key()]


def test_the_first_artifact_of_an_identity_is_kept(store: Store) -> None:
    publish(store, **{"code.so": b"first"})

    second = publish(store, **{"code.so": b"second"})

    assert (second.path / "code.so").read_bytes() == b"first"
    assert [path.name for path in store.path.iterdir()] == [IDENTITY.key()]


def test_publishing_what_is_damaged_is_an_error_that_names_the_place(store: Store) -> None:
    with store.workspace() as workspace:
        payload = workspace / "payload"
        payload.mkdir()
        fill(payload)
        (payload / "code.so").write_bytes(b"compiled c0de")
        with pytest.raises(ArtifactError) as caught:
            store.publish(payload, IDENTITY)

    assert str(caught.value) == (
        f"the artifact just published at {store.path / IDENTITY.key()} is damaged: "
        "code.so is not what was sealed: its sha256 differs; check the disk"
    )


def test_an_artifact_in_the_making_is_never_found_nor_told_as_the_nearest(store: Store) -> None:
    with store.workspace() as workspace:
        fill(workspace)

        found = [store.find(identity, NOWHERE) for identity in (IDENTITY, OTHER)]

        assert workspace.name.startswith(".building-")
        assert [isinstance(one, Missed) and one.why for one in found] == [f"nothing stored in {store.path}"] * 2


def test_the_workspace_is_on_the_stores_file_system_and_goes_away_even_after_an_error(store: Store) -> None:
    def build() -> None:
        with store.workspace() as workspace:
            parents.append(workspace.parent)
            (workspace / "half").write_text("half")
            raise RuntimeError("the build failed")

    parents: list[Path] = []

    with pytest.raises(RuntimeError, match=r"^the build failed$"):
        build()

    assert (parents, list(store.path.iterdir())) == ([store.path], [])


@pytest.mark.parametrize("exists", [False, True])
def test_an_empty_store_misses(store: Store, exists: bool) -> None:
    if exists:
        store.path.mkdir()
    why = f"nothing stored in {store.path}"

    assert store.find(IDENTITY, NOWHERE) == Missed(IDENTITY, why, (Layer("sealed-artifact", "miss", why),))


def test_a_miss_tells_how_the_nearest_artifact_differs_as_stored_and_wanted(store: Store) -> None:
    for fields in (
        {"torch": "2.12.0", "device": {"kind": "cpu", "threads": 8}},
        {"torch": "2.13.0", "device": {"kind": "cpu", "threads": 4}},
        {"torch": "2.12.0", "device": {"kind": "npu", "threads": 8}},
    ):
        publish(store, ArtifactIdentity(fields))

    found = store.find(IDENTITY, NOWHERE)

    assert found == Missed(
        IDENTITY,
        "the nearest differs: threads 4 → 2",
        (Layer("sealed-artifact", "miss", "the nearest differs: threads 4 → 2"),),
        ("threads 4 → 2",),
    )


def test_a_neighbour_with_an_unreadable_manifest_is_no_nearest(store: Store) -> None:
    publish(store, OTHER)
    for number, text in enumerate(["", "[]", "{}", '{"identity": 5}']):
        (store.path / f"odd{number}").mkdir()
        (store.path / f"odd{number}" / "manifest.json").write_text(text)

    found = store.find(IDENTITY, NOWHERE)

    assert isinstance(found, Missed)
    assert found.differences == ("torch 2.14.1 → 2.13.0",)


def test_a_store_that_cannot_be_written_is_an_error_that_names_the_setting(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    store = Store(tmp_path / "file" / "store")

    with pytest.raises(ArtifactError) as caught, store.workspace():
        pass

    assert str(caught.value) == (
        f"compile.artifacts = {store.path} cannot be written: Not a directory; give a writable directory"
    )
    assert caught.value.exit_code == 5


def test_sha256_is_that_of_the_content(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"abc")

    assert sha256(tmp_path / "x") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


ANSWERS = {
    "batch=1#0a": {"out": np.array([[1.5, -0.0]], np.float32), "count": np.array([3], np.int64)},
    "batch=8#0b": {"out": np.zeros((0, 2), np.float16)},
}


def plain(found: golden.Golden) -> dict[str, Any]:
    return {
        case: {name: (array.dtype.name, array.shape, array.tobytes()) for name, array in outputs.items()}
        for case, outputs in found.items()
    }


def test_answers_are_read_as_they_were_written(tmp_path: Path) -> None:
    golden.write(tmp_path / "answers.safetensors", ANSWERS)

    assert plain(golden.read(tmp_path / "answers.safetensors")) == plain(ANSWERS)
    assert [path.name for path in tmp_path.iterdir()] == ["answers.safetensors"]


def test_an_answer_without_dimensions_stays_without(tmp_path: Path) -> None:
    golden.write(tmp_path / "x", {"case": {"loss": np.array(0.5)}})

    assert golden.read(tmp_path / "x")["case"]["loss"].shape == ()


def test_answers_that_are_not_contiguous_are_written_by_their_values(tmp_path: Path) -> None:
    turned = np.arange(6, dtype=np.float32).reshape(2, 3).T
    golden.write(tmp_path / "x", {"case": {"out": turned}})

    assert golden.read(tmp_path / "x")["case"]["out"].tolist() == turned.tolist()


def test_answers_are_kept_beside_the_artifact_for_one_set_of_weights(store: Store) -> None:
    artifact = publish(store)

    golden.keep(artifact, "w1", ANSWERS)
    golden.keep(artifact, "w1", ANSWERS)

    assert plain(golden.recall(artifact, "w1")) == plain(ANSWERS)
    assert golden.recall(artifact, "w2") == {}
    assert isinstance(store.find(IDENTITY, NOWHERE), Restored)


def test_another_start_replaces_the_record(store: Store) -> None:
    artifact = publish(store)
    golden.keep(artifact, "w1", ANSWERS)

    golden.keep(artifact, "w1", {"batch=1#0a": {"out": np.ones(1)}})

    assert plain(golden.recall(artifact, "w1")) == {
        "batch=1#0a": {"out": ("float64", (1,), np.ones(1).tobytes())},
    }


@pytest.mark.parametrize(
    "spoil",
    [
        lambda file: file.write_bytes(b""),
        lambda file: file.write_bytes(b"\xff" * 100),
        lambda file: os.truncate(file, file.stat().st_size - 1),
        lambda file: file.write_bytes(file.read_bytes() + b"x"),
        lambda file: file.unlink(),
        lambda file: (file.unlink(), file.mkdir()),
    ],
    ids=["empty", "noise", "truncated", "surplus", "gone", "directory"],
)
def test_a_record_that_is_not_whole_reads_as_none(tmp_path: Path, spoil: Callable[[Path], object]) -> None:
    file = tmp_path / "answers.safetensors"
    golden.write(file, ANSWERS)
    spoil(file)

    assert golden.read(file) == {}


def test_answers_that_cannot_be_written_leave_the_record_of_before(tmp_path: Path) -> None:
    golden.write(tmp_path / "x", ANSWERS)

    with pytest.raises(OSError, match="Is a directory"):
        golden.write(tmp_path, ANSWERS)

    assert plain(golden.read(tmp_path / "x")) == plain(ANSWERS)


INPUTS = {"ids": np.array([[1, 2]]), "mask": np.array([[1, 1]])}


@pytest.mark.parametrize(
    ("bucket", "inputs"),
    [
        ("batch=2", INPUTS),
        ("batch=1", {**INPUTS, "ids": np.array([[1, 3]])}),
        ("batch=1", {**INPUTS, "ids": np.array([[1, 2]], np.int32)}),
        ("batch=1", {**INPUTS, "ids": np.array([[1], [2]])}),
        ("batch=1", {"ids": INPUTS["ids"]}),
        ("batch=1", {"ids": INPUTS["ids"], "type": INPUTS["mask"]}),
        ("batch=1", {"ids": INPUTS["mask"], "mask": INPUTS["ids"]}),
    ],
    ids=["bucket", "value", "dtype", "shape", "fewer", "name", "swapped"],
)
def test_other_inputs_are_another_case(bucket: str, inputs: dict[str, Any]) -> None:
    assert golden.case(bucket, inputs) != golden.case("batch=1", INPUTS)


def test_equal_inputs_are_the_same_case_however_they_lie_in_memory() -> None:
    turned = {name: np.asfortranarray(array) for name, array in INPUTS.items()}
    copies = {name: array.repeat(2, axis=0)[::2] for name, array in INPUTS.items()}

    assert {golden.case("batch=1", one) for one in (INPUTS, turned, copies)} == {golden.case("batch=1", INPUTS)}
    assert golden.case("batch=1", INPUTS).startswith("batch=1#")


def test_what_a_killed_build_left_a_day_ago_is_removed_and_a_younger_one_is_not(tmp_path: Path) -> None:
    store = Store(tmp_path)
    old, young = tmp_path / ".building-old", tmp_path / ".building-young"
    for left in (old, young):
        left.mkdir()
        (left / "file").touch()
    os.utime(old, (0, 0))
    with store.workspace():
        assert not old.exists()
        assert young.exists()


def test_a_file_that_the_factory_reads_and_that_has_changed_is_a_miss_with_its_name(
    store: Store, tmp_path: Path
) -> None:
    checkpoint, elsewhere = tmp_path / "checkpoint", tmp_path / "settings.json"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text("{}")
    elsewhere.write_text("1")
    with inputs.recording(checkpoint) as recorded:
        (checkpoint / "config.json").read_text()
        elsewhere.read_text()
    files = {name: digest for name, digest in recorded.items() if name in {"checkpoint:config.json", str(elsewhere)}}
    assert len(files) == 2
    with store.workspace() as workspace:
        payload = workspace / "payload"
        payload.mkdir()
        for name, data in FILES.items():
            (payload / name).parent.mkdir(parents=True, exist_ok=True)
            (payload / name).write_bytes(data)
        seal(payload, IDENTITY, {**CONTENT, "factory_files": files})
        store.publish(payload, IDENTITY)
    assert isinstance(store.find(IDENTITY, checkpoint), Restored)

    elsewhere.write_text("2")
    found = store.find(IDENTITY, checkpoint)
    assert isinstance(found, Missed)
    assert found.why == f"{elsewhere}, which the factory reads, has changed"
    elsewhere.unlink()
    found = store.find(IDENTITY, checkpoint)
    assert isinstance(found, Missed)
    assert found.why == f"{elsewhere}, which the factory reads, is not here"


def test_only_the_newest_rejected_artifacts_are_kept_and_their_answers_are_forgotten(store: Store) -> None:
    for _ in range(5):
        artifact = publish(store)
        golden.keep(artifact, "w", ANSWERS)
        store.set_aside(IDENTITY)
    assert len(list(store.path.glob(".rejected-*"))) == 3
    assert [path.name for path in store.path.iterdir() if not path.name.startswith(".rejected-")] == []
