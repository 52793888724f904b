"""Key files: made once, private, and refused by name where they are not what they should be."""

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization as form
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from app import keys
from app.artifacts.opening import store_of_this_process, why_not_kept
from app.contradictions import contradictions
from app.errors import SettingsError
from app.settings import Compile, Settings

REMEDY = "give a key file made by keygen"


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    keys.make_pair(tmp_path / "key")
    return tmp_path / "key"


def test_a_pair_belongs_together_and_only_its_owner_reads_the_private_half(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        identifier = keys.make_pair(tmp_path / "key")
    finally:
        os.umask(before)

    private, public = keys.read_private(tmp_path / "key"), keys.read_public(tmp_path / "key.pub")
    assert private.public_key() == public
    assert identifier == keys.key_id(public)
    assert len(identifier) == 16
    assert [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("key", "key.pub")] == [0o600, 0o644]
    assert (tmp_path / "key").read_bytes().startswith(b"-----BEGIN PRIVATE KEY-----\n")
    assert (tmp_path / "key.pub").read_bytes().startswith(b"-----BEGIN PUBLIC KEY-----\n")


@pytest.mark.parametrize("name", ["key", "key.pub"])
def test_a_key_that_is_there_is_not_overwritten(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")

    with pytest.raises(SettingsError) as caught:
        keys.make_pair(tmp_path / "key")

    assert str(caught.value) == f"{tmp_path / name} exists already and is not overwritten; choose another name"
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == "mine"


def elliptic(private: bool) -> bytes:
    key = ec.generate_private_key(ec.SECP256R1())
    if not private:
        return key.public_key().public_bytes(form.Encoding.PEM, form.PublicFormat.SubjectPublicKeyInfo)
    return key.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption())


def locked() -> bytes:
    key = ed25519.Ed25519PrivateKey.generate()
    return key.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.BestAvailableEncryption(b"secret"))


SPOILT: list[tuple[Callable[[Path], Any], str, str]] = [
    (keys.read_private, "unlink", "{file} cannot be read: No such file or directory; " + REMEDY),
    (keys.read_public, "unlink", "{file} cannot be read: No such file or directory; " + REMEDY),
    (keys.read_private, "", "{file} is not a private key in PEM without a password; " + REMEDY),
    (keys.read_public, "", "{file} is not a public key in PEM without a password; " + REMEDY),
    (keys.read_private, locked().decode(), "{file} is not a private key in PEM without a password; " + REMEDY),
    (
        keys.read_private,
        elliptic(private=True).decode(),
        "{file} holds ECPrivateKey, expected an Ed25519 private key; make one with keygen",
    ),
    (
        keys.read_public,
        elliptic(private=False).decode(),
        "{file} holds ECPublicKey, expected an Ed25519 public key; give OUT.pub of keygen",
    ),
    (keys.read_public, locked().decode(), "{file} is not a public key in PEM without a password; " + REMEDY),
    (keys.read_private, "x" * 65537, "{file} is not a file of at most 65536 bytes; " + REMEDY),
]


@pytest.mark.parametrize(("read", "content", "told"), SPOILT)
def test_a_file_that_is_no_key_is_refused_by_its_name(
    tmp_path: Path, read: Callable[[Path], Any], content: str, told: str
) -> None:
    file = tmp_path / "key"
    if content != "unlink":
        file.write_text(content)
        file.chmod(0o600)

    with pytest.raises(SettingsError) as caught:
        read(file)

    assert str(caught.value) == told.format(file=file)


@pytest.mark.parametrize(
    ("name", "mode", "accepted"),
    [
        ("key", 0o600, True),
        ("key", 0o400, True),
        ("key", 0o440, True),
        ("key", 0o644, False),
        ("key", 0o660, False),
        ("key.pub", 0o644, True),
        ("key.pub", 0o664, False),
        ("key.pub", 0o646, False),
    ],
)
def test_a_key_that_is_open_to_others_is_refused(pair: Path, name: str, mode: int, accepted: bool) -> None:
    file = pair.with_name(name)
    file.chmod(mode)
    read = keys.read_private if name == "key" else keys.read_public

    try:
        read(file)
        told = ""
    except SettingsError as error:
        told = str(error)

    assert (told == "") is accepted
    assert accepted or f"is open to others (mode {mode:04o})" in told


def settings(**compiling: Any) -> Settings:
    return Settings(
        model={"name": "m", "factory": "a:b", "checkpoint": "/m"},
        inputs=[{"name": "x", "datatype": "FP32", "shape": [1]}],
        outputs=[{"name": "y", "datatype": "FP32", "shape": [1]}],
        compile=compiling,
    )


def test_keys_that_belong_together_are_no_contradiction(pair: Path) -> None:
    public = [keys.public_file(pair)]

    assert contradictions(settings(require_signature=True, public_keys=public, signing_key=pair)) == []
    assert contradictions(settings(require_signature=True, public_keys=public)) == []
    assert contradictions(settings(signing_key=pair)) == []


def test_a_signing_key_whose_signatures_would_be_rejected_is_a_contradiction(pair: Path, tmp_path: Path) -> None:
    other = keys.make_pair(tmp_path / "other")
    own = keys.key_id(keys.read_public(keys.public_file(pair)))

    assert contradictions(settings(public_keys=[tmp_path / "other.pub"], signing_key=pair)) == [
        f"compile.signing_key = '{pair}': is key {own}, which is not among compile.public_keys ({other}), "
        "so what it signs would be rejected"
    ]


def test_every_key_that_cannot_be_used_is_told(pair: Path, tmp_path: Path) -> None:
    found = contradictions(settings(public_keys=[tmp_path / "a", keys.public_file(pair), pair], signing_key="/b"))

    assert [problem.partition(":")[0] for problem in found] == [
        f"compile.public_keys.0 = '{tmp_path / 'a'}'",
        f"compile.public_keys.2 = '{pair}'",
        "compile.signing_key = '/b'",
    ]


def test_what_cannot_be_signed_or_is_open_to_others_is_not_kept(pair: Path, tmp_path: Path) -> None:
    public = [keys.public_file(pair)]
    store = tmp_path / "store"
    unsigned = "compile.require_signature is true and there is no compile.signing_key to sign it with"

    assert why_not_kept(Compile(artifacts=store)) is None
    assert why_not_kept(Compile(artifacts=store, public_keys=public)) is None
    assert why_not_kept(Compile(artifacts=store, require_signature=True, public_keys=public)) == unsigned
    everything = Compile(artifacts=store, require_signature=True, public_keys=public, signing_key=pair)
    assert why_not_kept(everything) is None
    store.mkdir()
    store.chmod(0o777)
    assert str(why_not_kept(everything)).startswith(f"compile.artifacts is refused: {store} is writable by anyone")


def test_the_store_of_one_process_is_private_and_no_other_process_gets_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    left, young = tmp_path / "warmgate-alone-left", tmp_path / "warmgate-alone-young"
    left.mkdir()
    young.mkdir()
    os.utime(left, (0, 0))

    one, two = store_of_this_process(), store_of_this_process()

    assert one.path != two.path
    assert stat.S_IMODE(one.path.stat().st_mode) == 0o700
    assert not left.exists()
    assert young.exists()
