"""Files of Ed25519 keys: made, read and refused by name. `cryptography` is imported where a key is used at all."""

import hashlib
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.errors import SettingsError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

# A key is 200 bytes; what is larger is another file.
LARGEST = 64 << 10
# The group may read a private key: a secret mounted for an fsGroup is 0440 and cannot be narrower.
_TOO_OPEN = {"private": stat.S_IWGRP | stat.S_IRWXO, "public": stat.S_IWGRP | stat.S_IWOTH}


def make_pair(out: Path) -> str:
    """Write a new private key (0600) and, beside it, `OUT.pub`; return the key's id.

    Raises SettingsError where one of the files exists: a key that signed something is not replaced by accident.
    """
    from cryptography.hazmat.primitives import serialization as form
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    private = Ed25519PrivateKey.generate()
    public = private.public_key()
    _write(out, private.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption()), 0o600)
    pem = public.public_bytes(form.Encoding.PEM, form.PublicFormat.SubjectPublicKeyInfo)
    try:
        _write(public_file(out), pem, 0o644)
    except SettingsError:
        out.unlink()  # half a pair is none
        raise
    return key_id(public)


def public_file(private: Path) -> Path:
    """Return where the public half of a key pair lies."""
    return private.with_name(f"{private.name}.pub")


def _write(path: Path, data: bytes, mode: int) -> None:
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, mode)
    except FileExistsError:
        raise SettingsError(f"{path} exists already and is not overwritten; choose another name") from None
    except OSError as error:
        raise SettingsError(f"{path} cannot be written: {error.strerror}; choose a writable directory") from error
    with os.fdopen(fd, "wb") as file:
        os.fchmod(fd, mode)
        file.write(data)
        file.flush()
        os.fsync(fd)


def read_private(path: Path) -> "Ed25519PrivateKey":
    """Read a private key; raises SettingsError that names the file and what is wrong with it."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    data = _read(path, "private")
    key = _parse(path, "private", lambda: load_pem_private_key(data, password=None))
    if not isinstance(key, Ed25519PrivateKey):
        raise SettingsError(f"{path} holds {type(key).__name__}, expected an Ed25519 private key; make one with keygen")
    return key


def read_public(path: Path) -> "Ed25519PublicKey":
    """Read a public key; raises SettingsError that names the file and what is wrong with it."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    data = _read(path, "public")
    key = _parse(path, "public", lambda: load_pem_public_key(data))
    if not isinstance(key, Ed25519PublicKey):
        raise SettingsError(
            f"{path} holds {type(key).__name__}, expected an Ed25519 public key; give OUT.pub of keygen"
        )
    return key


def key_id(public: "Ed25519PublicKey") -> str:
    """Return the short name of a key: the first 16 hexadecimal digits of the sha256 of its 32 bytes."""
    return hashlib.sha256(public.public_bytes_raw()).hexdigest()[:16]


def _read(path: Path, kind: str) -> bytes:
    """Return the content; Kubernetes mounts secrets as links, so links are followed."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(fd, "rb") as file:
            status = os.fstat(fd)
            mode = stat.S_IMODE(status.st_mode)
            if not stat.S_ISREG(status.st_mode) or status.st_size > LARGEST:
                raise SettingsError(f"{path} is not a file of at most {LARGEST} bytes; give a key file made by keygen")
            if mode & _TOO_OPEN[kind]:
                remedy = "chmod 0600 it (in a pod: defaultMode 0400)" if kind == "private" else "chmod go-w it"
                raise SettingsError(f"{path}, a {kind} key, is open to others (mode {mode:04o}); {remedy}")
            return file.read()
    except OSError as error:
        raise SettingsError(f"{path} cannot be read: {error.strerror}; give a key file made by keygen") from error


def _parse(path: Path, kind: str, load: Callable[[], Any]) -> Any:
    from cryptography.exceptions import UnsupportedAlgorithm

    try:
        return load()
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        remedy = "give a key file made by keygen"
        raise SettingsError(f"{path} is not a {kind} key in PEM without a password; {remedy}") from error
