"""Whoever attacks an artifact is turned away with a reason of its own, and nothing of theirs is run."""

import ctypes
import hashlib
import json
import os
import random
import shutil
import socket
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app import keys, signing
from app.artifacts import Artifact, Layer, Missed, Restored
from app.artifacts.seal import seal, sign, verify
from app.artifacts.store import Store
from app.artifacts.trust import UNCHECKED, UNSIGNED, Trust
from app.artifacts.writers import Writers
from app.errors import ArtifactError
from app.identity import ArtifactIdentity

IDENTITY = ArtifactIdentity({"torch": "2.13.0"})
OTHER = ArtifactIdentity({"torch": "2.14.1"})
CONTENT = {"packages": [{"library": "code.so"}], "factory_files": {}}
DATA = {"constants.safetensors": b"values", "deep/table.json": b"{}"}
NOWHERE = Path("/nowhere")
EMPTY = hashlib.sha256(b"").hexdigest()

# What dlopen runs by itself, before anybody calls anything.
CANARY = """
#include <stdio.h>
#include <stdlib.h>
__attribute__((constructor)) static void sing(void) { fclose(fopen(getenv("CANARY"), "w")); }
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("canary")
    (directory / "canary.c").write_text(CANARY)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", "code.so", "canary.c"], cwd=directory, check=True)
    return directory / "code.so"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("keys") / "builder"
    keys.make_pair(out)
    return out


@pytest.fixture
def trust(pair: Path) -> Trust:
    return trusting(pair, required=True)


def trusting(pair: Path, required: bool) -> Trust:
    public = keys.read_public(keys.public_file(pair))
    return Trust({keys.key_id(public): public}, required)


@pytest.fixture
def place(tmp_path: Path, library: Path, pair: Path) -> Path:
    """A signed artifact in its place in a store."""
    return make(tmp_path / "store" / IDENTITY.key(), library, pair)


def make(directory: Path, library: Path, pair: Path | None, identity: ArtifactIdentity = IDENTITY) -> Path:
    directory.mkdir(parents=True)
    shutil.copy(library, directory / "code.so")
    for name, data in DATA.items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_bytes(data)
    seal(directory, identity, CONTENT)
    if pair:
        sign(directory, keys.read_private(pair))
    return directory


@pytest.fixture
def canary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CANARY", str(tmp_path / "sung"))
    return tmp_path / "sung"


def start(place: Path, trust: Trust) -> Restored | Missed:
    """Look for the artifact as a start does, and load its code where a start would."""
    found = Store(place.parent, trust).find(IDENTITY, NOWHERE)
    if isinstance(found, Restored):
        for package in found.artifact.content["packages"]:
            ctypes.CDLL(str(found.artifact.path / package["library"]))
    return found


def test_what_is_whole_and_signed_is_restored_and_its_code_runs(place: Path, trust: Trust, canary: Path) -> None:
    found = start(place, trust)

    assert isinstance(found, Restored)
    assert found.layers == (Layer("sealed-artifact", "hit", f"signed by key {next(iter(trust.public_keys))}"),)
    assert canary.exists(), "the canary must be able to sing, else its silence proves nothing"


Attack = Callable[[Path, Path], object]


def flip(name: str) -> Attack:
    def attack(place: Path, pair: Path) -> None:
        data = bytearray((place / name).read_bytes())
        data[len(data) // 2] ^= 1
        (place / name).write_bytes(data)

    return attack


def without(name: str) -> Attack:
    return lambda place, pair: (place / name).unlink()


def with_file(name: str, data: bytes = b"") -> Attack:
    return lambda place, pair: (place / name).write_bytes(data)


def replaced(name: str, put: Callable[[Path], object]) -> Attack:
    def attack(place: Path, pair: Path) -> None:
        shutil.move(place / name, place.parent / "moved")
        put(place / name)

    return attack


def linked(name: str) -> Attack:
    return replaced(name, lambda path: path.symlink_to(path.parents[len(Path(name).parts)] / "moved"))


def listen(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        directory = os.open(path.parent, os.O_RDONLY)
        one.bind(f"/proc/self/fd/{directory}/{path.name}")  # a socket's path is a hundred bytes at most
        os.close(directory)


def directory_linked(place: Path, pair: Path) -> None:
    (place / "deep").rename(place.parent / "moved")
    (place / "deep").symlink_to(place.parent / "moved")


def artifact_linked(place: Path, pair: Path) -> None:
    place.rename(place.parent / "moved")
    place.symlink_to(place.parent / "moved")


def hard_linked(place: Path, pair: Path) -> None:
    os.link(place / "code.so", place.parent / "another-name")


def sparse(place: Path, pair: Path) -> None:
    os.truncate(place / "code.so", 1 << 42)


def nested(place: Path, pair: Path) -> None:
    (place / "/".join("d" * 20)).mkdir(parents=True)


def signed_by_another(place: Path, pair: Path) -> None:
    other = place.parent.parent / "other"
    keys.make_pair(other)
    sign(place, keys.read_private(other))


def signature(**changes: Any) -> Attack:
    def attack(place: Path, pair: Path) -> None:
        found = json.loads((place / "manifest.sig").read_bytes())
        (place / "manifest.sig").write_text(json.dumps(found | changes, indent=1) + "\n")

    return attack


def signed_manifest(edit: Callable[[dict[str, Any]], object]) -> Attack:
    """Return the attack of somebody who has the builder's key, or got the builder to sign nonsense."""

    def attack(place: Path, pair: Path) -> None:
        from app.artifacts.trust import write_signature

        manifest = json.loads((place / "manifest.json").read_bytes())
        edit(manifest)
        content = {name: value for name, value in manifest.items() if name in CONTENT}
        manifest["content_sha256"] = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
        text = json.dumps(manifest).encode()
        (place / "manifest.json").write_bytes(text)
        write_signature(place, text, keys.read_private(pair))

    return attack


def lists(path: Any, size: Any = 0, digest: Any = EMPTY) -> Attack:
    return signed_manifest(lambda m: m["files"].append({"path": path, "size": size, "sha256": digest}))


def another_identity(place: Path, pair: Path) -> None:
    shutil.copy(place / "code.so", place.parent / "code")
    shutil.rmtree(place)
    make(place, place.parent / "code", pair, OTHER)


DOES_NOT_HOLD = "manifest.sig does not hold: the manifest or the signature is not what key {key} has signed"
SIZE = "{size}"
# attack → how, the reason that is told
ATTACKS: dict[str, tuple[Attack, str]] = {
    "manifest flipped": (flip("manifest.json"), DOES_NOT_HOLD),
    "manifest with one more space": (
        lambda place, pair: (place / "manifest.json").write_bytes((place / "manifest.json").read_bytes() + b" "),
        DOES_NOT_HOLD,
    ),
    "library flipped": (flip("code.so"), "code.so is not what was sealed: its sha256 differs"),
    "constants flipped": (
        flip("constants.safetensors"),
        "constants.safetensors is not what was sealed: its sha256 differs",
    ),
    "signature missing": (without("manifest.sig"), "manifest.sig is missing, and a signature is required"),
    "signature empty": (
        with_file("manifest.sig"),
        "manifest.sig cannot be read: JSONDecodeError: Expecting value: line 1 column 1 (char 0)",
    ),
    "signature is a list": (
        with_file("manifest.sig", b"[]"),
        "manifest.sig cannot be read: TypeError: list indices must be integers or slices, not str",
    ),
    "signature without end": (
        with_file("manifest.sig", b"[" * 5000),
        "manifest.sig cannot be read: ValueError: manifest.sig is not a file of at most 4096 bytes",
    ),
    "signature is a pipe": (
        replaced("manifest.sig", os.mkfifo),
        "manifest.sig cannot be read: ValueError: manifest.sig is not a file of at most 4096 bytes",
    ),
    "signature is a link": (
        linked("manifest.sig"),
        "manifest.sig cannot be read: OSError: [Errno 40] Too many levels of symbolic links: 'manifest.sig'",
    ),
    "signature of nothing": (signature(signature=""), DOES_NOT_HOLD),
    "signature of another manifest": (signature(signature="A" * 86 + "=="), DOES_NOT_HOLD),
    "unknown algorithm": (
        signature(algorithm="none"),
        "manifest.sig is made with none, this version knows ed25519",
    ),
    "unknown key": (
        signed_by_another,
        "manifest.sig is by the unknown key {other}; trusted are {key}",
    ),
    "key named with control characters": (
        signature(key_id="\n\x1b[2J"),
        "manifest.sig is by the unknown key \\n\\x1b[2J; trusted are {key}",
    ),
    "manifest missing": (
        without("manifest.json"),
        "manifest.json cannot be read: FileNotFoundError: [Errno 2] No such file or directory: 'manifest.json'",
    ),
    "manifest is a link": (
        linked("manifest.json"),
        "manifest.json cannot be read: OSError: [Errno 40] Too many levels of symbolic links: 'manifest.json'",
    ),
    "manifest is a pipe": (
        replaced("manifest.json", os.mkfifo),
        "manifest.json cannot be read: ValueError: manifest.json is not a file of at most 67108864 bytes",
    ),
    "file added": (with_file("extra.so"), "extra.so is not in the manifest"),
    "file added with a name for the terminal": (with_file("\x1b[2J"), "\\x1b[2J is not in the manifest"),
    "pipe added": (lambda place, pair: os.mkfifo(place / "extra"), "extra is not in the manifest"),
    "file missing": (without("code.so"), "code.so is missing"),
    "library is a link": (linked("code.so"), "code.so is a symbolic link, not a regular file"),
    "library is a pipe": (replaced("code.so", os.mkfifo), "code.so is a pipe, not a regular file"),
    "library is a socket": (replaced("code.so", listen), "code.so is a socket, not a regular file"),
    "library is a directory": (replaced("code.so", os.mkdir), "code.so is missing"),
    "library has a second name": (hard_linked, "code.so has 2 hard links: it can be changed by another name"),
    "library is a sparse giant": (sparse, f"code.so has {1 << 42} bytes, sealed were {SIZE}"),
    "directory is a link": (directory_linked, "deep is not in the manifest"),
    "artifact is a link": (
        artifact_linked,
        "manifest.json cannot be read: NotADirectoryError: [Errno 20] Not a directory: '{place}'",
    ),
    "directories without end": (nested, "the files cannot be read: directories lie more than 16 deep"),
    "another identity, signed": (another_identity, "manifest.json is of another identity: torch 2.14.1 → 2.13.0"),
    "older format, signed": (
        signed_manifest(lambda manifest: manifest.update(format=0)),
        "manifest.json has format 0, this version reads 1",
    ),
    "later format, signed": (
        signed_manifest(lambda manifest: manifest.update(format=2)),
        "manifest.json has format 2, this version reads 1",
    ),
    "wrong digest, signed": (
        signed_manifest(lambda manifest: manifest.update(digest=OTHER.digest)),
        "manifest.json is not what was sealed: the sha256 of its content differs",
    ),
    "library outside, signed": (
        signed_manifest(lambda manifest: manifest.update(packages=[{"library": "/tmp/code.so"}])),  # noqa: S108
        "manifest.json would load /tmp/code.so, which it does not list",
    ),
    "library is no name, signed": (
        signed_manifest(lambda manifest: manifest.update(packages=[{"library": 5}])),
        "manifest.json would load 5, which it does not list",
    ),
    "listed above": (lists("../code.so"), "manifest.json lists ../code.so, which is no path inside the artifact"),
    "listed above, from below": (
        lists("deep/../../code.so"),
        "manifest.json lists deep/../../code.so, which is no path inside the artifact",
    ),
    "listed absolute": (lists("/etc/passwd"), "manifest.json lists /etc/passwd, which is no path inside the artifact"),
    "listed by another way": (
        lists("./code.so"),
        "manifest.json lists ./code.so, which is no path inside the artifact",
    ),
    "listed nothing": (lists(""), "manifest.json lists , which is no path inside the artifact"),
    "listed with a zero byte": (
        lists("a\0b"),
        "manifest.json lists a\\x00b, which is no path inside the artifact",
    ),
    "listed twice": (lists("code.so"), "manifest.json lists code.so twice"),
    "manifest listed": (
        lists("manifest.json"),
        "manifest.json lists manifest.json, which is not part of the payload",
    ),
    "listed and not there": (lists("gone"), "gone is missing"),
    "listed with a negative size": (
        lists("x", -1),
        "manifest.json lists 'x' without a name, a size and a sha256",
    ),
    "listed with a size that is none": (
        lists("x", True),
        "manifest.json lists 'x' without a name, a size and a sha256",
    ),
    "listed larger than the disk": (
        lists("x", 1 << 62),
        f"manifest.json lists {SIZE} bytes, at most {256 << 30} are read",
    ),
}


@pytest.mark.parametrize(("attack", "reason"), ATTACKS.values(), ids=ATTACKS)
def test_an_attack_is_rejected_with_its_own_reason_and_nothing_of_it_is_run(
    place: Path, pair: Path, trust: Trust, canary: Path, attack: Attack, reason: str
) -> None:
    size = (place / "code.so").stat().st_size
    if "bytes, at most" in reason:
        size += sum(map(len, DATA.values())) + (1 << 62)
    attack(place, pair)
    other = place.parent.parent / "other.pub"
    told = reason.format(
        key=next(iter(trust.public_keys)),
        other=keys.key_id(keys.read_public(other)) if other.exists() else "",
        size=size,
        place=place,
    )

    found = start(place, trust)

    assert found == Missed(IDENTITY, f"rejected artifact: {told}", (Layer("sealed-artifact", "rejected", told),))
    assert not canary.exists()


def test_every_single_bit_of_the_signature_counts(place: Path, trust: Trust) -> None:
    file = place / "manifest.sig"
    good = file.read_bytes()
    for bit in range(len(good) * 8):
        damaged = bytearray(good)
        damaged[bit // 8] ^= 1 << bit % 8
        file.write_bytes(damaged)
        assert isinstance(verify(place, IDENTITY, trust), str), f"bit {bit} was not missed"
    file.write_bytes(good)
    assert isinstance(verify(place, IDENTITY, trust), Artifact)


@pytest.mark.parametrize("name", ["manifest.json", "code.so", *DATA])
def test_a_flipped_bit_anywhere_in_any_file_is_found(place: Path, trust: Trust, name: str) -> None:
    good = (place / name).read_bytes()
    chosen = random.Random(name)
    for bit in chosen.sample(range(len(good) * 8), min(200, len(good) * 8)):
        damaged = bytearray(good)
        damaged[bit // 8] ^= 1 << bit % 8
        (place / name).write_bytes(damaged)
        assert isinstance(verify(place, IDENTITY, trust), str), f"bit {bit} was not missed"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes devices")
def test_a_device_in_place_of_the_library_is_not_opened(place: Path, trust: Trust) -> None:
    (place / "code.so").unlink()
    try:
        os.mknod(place / "code.so", stat.S_IFCHR | 0o600, os.makedev(1, 5))
    except PermissionError:
        pytest.skip("this container may not make devices")

    assert verify(place, IDENTITY, trust) == "code.so is a device, not a regular file"


@pytest.mark.parametrize(
    ("required", "attack", "told"),
    [
        (False, None, "signed by key {key}"),
        (False, without("manifest.sig"), UNSIGNED),
        (True, None, "signed by key {key}"),
    ],
)
def test_what_is_accepted_tells_by_whom_it_is_signed(
    place: Path, pair: Path, required: bool, attack: Attack | None, told: str
) -> None:
    trust = trusting(pair, required)
    if attack:
        attack(place, pair)

    found = verify(place, IDENTITY, trust)

    assert isinstance(found, Artifact)
    assert found.told == told.format(key=next(iter(trust.public_keys)))


def test_a_signature_that_nothing_checks_is_told_and_not_believed(place: Path, pair: Path) -> None:
    (key,) = trusting(pair, required=False).public_keys

    found = verify(place, IDENTITY, Trust(writers=None))

    assert isinstance(found, Artifact)
    assert found.told == f"{UNCHECKED}; it names key {key}"


def test_a_bad_signature_is_rejected_even_where_none_is_required(place: Path, pair: Path) -> None:
    flip("manifest.sig")(place, pair)

    assert isinstance(verify(place, IDENTITY, trusting(pair, required=False)), str)


def test_a_signature_that_is_required_without_any_key_rejects_everything(place: Path) -> None:
    assert str(verify(place, IDENTITY, Trust(required=True))).endswith("; trusted are none")


def test_one_of_several_keys_is_enough_so_that_keys_can_be_changed(place: Path, tmp_path: Path, trust: Trust) -> None:
    keys.make_pair(tmp_path / "next")
    following = keys.read_public(tmp_path / "next.pub")
    both = Trust({keys.key_id(following): following, **trust.public_keys}, required=True)

    assert isinstance(verify(place, IDENTITY, both), Artifact)


def test_what_is_damaged_is_not_signed(place: Path, pair: Path) -> None:
    flip("code.so")(place, pair)
    (place / "manifest.sig").unlink()

    with pytest.raises(ArtifactError) as caught:
        sign(place, keys.read_private(pair))

    assert str(caught.value) == f"{place} is not signed: code.so is not what was sealed: its sha256 differs"
    assert not (place / "manifest.sig").exists()


def test_signing_leaves_nothing_but_the_signature(place: Path, pair: Path) -> None:
    before = {path.name for path in place.iterdir()}

    sign(place, keys.read_private(pair))

    assert {path.name for path in place.iterdir()} == before
    assert [path.name for path in place.parent.iterdir()] == [place.name]


def test_the_verdict_of_the_command_names_key_identity_and_size(place: Path, pair: Path) -> None:
    public = keys.public_file(pair)
    verdict = signing.verify(place, [public])

    size = (place / "code.so").stat().st_size + sum(map(len, DATA.values()))
    assert verdict == {
        "path": str(place),
        "ok": True,
        "problem": "",
        "identity": IDENTITY.digest,
        "signature": f"signed by key {keys.key_id(keys.read_public(public))}",
        "files": 3,
        "bytes": size,
    }
    (place / "manifest.sig").unlink()
    assert signing.verify(place, [public]) == {
        "path": str(place),
        "ok": False,
        "problem": "manifest.sig is missing, and a signature is required",
    }


ME, MY_GROUP = os.geteuid(), os.getegid()
STRANGER = 4321


def status(mode: int, uid: int = ME, gid: int = MY_GROUP) -> os.stat_result:
    return os.stat_result((mode, 0, 0, 1, uid, gid, 0, 0, 0, 0))


@pytest.mark.parametrize(
    ("found", "names", "problem"),
    [
        (status(0o700), [], None),
        (status(0o755), [], None),
        (status(0o755, uid=0), [], None),
        (status(0o755, uid=STRANGER), ["anyone"], None),
        (status(0o755, uid=STRANGER), ["uid:4321"], None),
        (
            status(0o755, uid=STRANGER),
            ["gid:4321"],
            "x belongs to uid 4321; chown it, or name uid:4321 in compile.trusted_writers",
        ),
        (
            status(0o777),
            ["uid:4321", "gid:4321"],
            "x is writable by anyone (mode 0777); chmod go-w it, or name anyone in compile.trusted_writers",
        ),
        (status(0o777), ["anyone"], None),
        (status(0o2775, gid=STRANGER), ["gid:4321"], None),
        (
            status(0o2775, gid=STRANGER),
            ["uid:4321"],
            "x is writable by group 4321 (mode 2775); chmod g-w it, or name gid:4321 in compile.trusted_writers",
        ),
    ],
)
def test_who_else_may_write_is_told_with_the_remedy(
    found: os.stat_result, names: list[str], problem: str | None
) -> None:
    assert Writers(frozenset(names)).why_not("x", found) == problem


# what is open to others, below the directory that holds the store → mode, whether it is accepted
OPENED: list[tuple[str, int, bool]] = [
    ("store", 0o777, False),
    ("store", 0o1777, False),
    ("store", 0o755, True),
    (f"store/{IDENTITY.key()}", 0o777, False),
    (f"store/{IDENTITY.key()}/deep", 0o777, False),
    (f"store/{IDENTITY.key()}/code.so", 0o666, False),
    (f"store/{IDENTITY.key()}/manifest.json", 0o646, False),
    (f"store/{IDENTITY.key()}/manifest.sig", 0o646, False),
    (".", 0o777, False),
    (".", 0o1777, True),
]


@pytest.mark.parametrize(("opened", "mode", "accepted"), OPENED)
def test_what_others_may_write_is_refused_though_it_is_signed_unless_they_are_named(
    place: Path, trust: Trust, canary: Path, opened: str, mode: int, accepted: bool
) -> None:
    path = place.parent.parent / opened
    path.chmod(mode)

    found = start(place, trust)

    assert isinstance(found, Restored) is accepted
    assert canary.exists() is accepted
    if isinstance(found, Missed):
        assert f"is writable by anyone (mode {mode:04o})" in found.why
        assert found.layers[0].result == "rejected"
    everybody = Trust(trust.public_keys, required=True, writers=Writers(frozenset({"anyone"})))
    assert isinstance(start(place, everybody), Restored)


def test_nothing_is_put_into_a_store_that_others_may_write(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    store.path.mkdir()
    store.path.chmod(0o777)

    with pytest.raises(ArtifactError) as caught, store.workspace():
        pass

    assert str(caught.value).startswith(f"compile.artifacts is refused: {store.path} is writable by anyone (mode 0777)")
    assert list(store.path.iterdir()) == []


@pytest.mark.parametrize("store", ["store", "deeper/store"])
def test_a_store_that_is_not_made_yet_is_refused_where_others_could_exchange_it(tmp_path: Path, store: str) -> None:
    tmp_path.chmod(0o777)

    refused = Store(tmp_path / store).refused()

    assert refused is not None
    assert refused.startswith(f"compile.artifacts is refused: {tmp_path} is writable by anyone (mode 0777)")
    assert Store(tmp_path / store, Trust(writers=Writers(frozenset({"anyone"})))).refused() is None


def test_a_store_that_is_a_circle_of_links_is_refused(tmp_path: Path) -> None:
    (tmp_path / "store").symlink_to(tmp_path / "store")

    assert str(Store(tmp_path / "store").refused()).startswith(
        f"compile.artifacts is refused: {tmp_path / 'store'} cannot be examined: "
    )


def test_a_link_to_the_store_is_judged_by_where_it_leads(place: Path, trust: Trust, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(place.parent)
    assert isinstance(Store(tmp_path / "link", trust).find(IDENTITY, NOWHERE), Restored)

    place.parent.chmod(0o777)

    assert Store(tmp_path / "link", trust).refused() is not None


def test_directories_that_are_made_are_private_whatever_the_umask(tmp_path: Path) -> None:
    store = Store(tmp_path / "volume" / "store")
    before = os.umask(0)
    try:
        with store.workspace() as workspace:
            made = [tmp_path / "volume", store.path, workspace]
            assert [stat.S_IMODE(path.stat().st_mode) for path in made] == [0o700] * 3
    finally:
        os.umask(before)


def test_a_sealed_artifact_is_writable_by_its_owner_alone_whatever_the_umask(
    tmp_path: Path, library: Path, pair: Path
) -> None:
    before = os.umask(0)
    try:
        place = make(tmp_path / "store" / IDENTITY.key(), library, pair)
    finally:
        os.umask(before)

    modes = {stat.S_IMODE(path.stat().st_mode) for path in [place, *place.rglob("*")]}
    assert modes == {0o700, 0o644}
