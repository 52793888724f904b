"""Signatures of artifacts: Ed25519 over the exact bytes of the manifest, which holds the sha256 of everything else."""

import base64
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Self

from app import keys
from app.artifacts.writers import Writers
from app.errors import printable
from app.settings import Compile

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

SIGNATURE = "manifest.sig"
SIGNATURE_LIMIT = 4096
ALGORITHM = "ed25519"
UNSIGNED = "not signed; accepted, since compile.require_signature is false"
UNCHECKED = "a signature is there and no compile.public_keys to check it"


@dataclass(frozen=True, slots=True)
class Trust:
    """What makes an artifact acceptable beside its identity and hashes: keys by id, and who may write to the store.

    Without keys signatures are not looked at; `writers` None: who can write is not asked.
    """

    public_keys: Mapping[str, "Ed25519PublicKey"] = field(default_factory=dict)
    required: bool = False
    writers: Writers | None = field(default_factory=Writers)

    @classmethod
    def configured(cls, settings: Compile) -> Self:
        """Return the policy of a configuration; raises SettingsError for a key file that cannot be used."""
        found = map(keys.read_public, settings.public_keys)
        writers = Writers(frozenset(settings.trusted_writers))
        return cls({keys.key_id(key): key for key in found}, settings.require_signature, writers)


@dataclass(frozen=True, slots=True)
class Accepted:
    """The manifest may be parsed; `told` says by whom it is signed, or that it is not."""

    told: str = ""


def check_signature(manifest: bytes, signature: bytes | None, trust: Trust) -> Accepted | str:
    """Return that the manifest may be parsed, or why not; `signature` is the content of its file, None without one."""
    if not trust.public_keys and not trust.required:
        return Accepted(_named(signature))
    if signature is None:
        return f"{SIGNATURE} is missing, and a signature is required" if trust.required else Accepted(UNSIGNED)
    parsed = _parse(signature)
    if isinstance(parsed, str):
        return parsed
    signer, raw = parsed
    if signer not in trust.public_keys:
        return f"{SIGNATURE} is by the unknown key {signer[:40]}; trusted are {', '.join(trust.public_keys) or 'none'}"
    # One form alone is accepted, so that no byte of the file can change unseen.
    if signature != _document(signer, raw) or not _holds(trust.public_keys[signer], raw, manifest):
        return f"{SIGNATURE} does not hold: the manifest or the signature is not what key {signer} has signed"
    return Accepted(f"signed by key {signer}")


def _named(signature: bytes | None) -> str:
    """Say which key a signature names that nothing checks."""
    parsed = None if signature is None else _parse(signature)
    return f"{UNCHECKED}; it names key {parsed[0][:40]}" if isinstance(parsed, tuple) else ""


def _parse(signature: bytes) -> tuple[str, bytes] | str:
    """Return key id and signature, or why there are none."""
    try:
        found = json.loads(signature)
        algorithm, signer = printable(str(found["algorithm"])), printable(str(found["key_id"]))
        raw = base64.b64decode(found["signature"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        return f"{SIGNATURE} cannot be read: {type(error).__name__}: {error}"
    if algorithm != ALGORITHM:
        return f"{SIGNATURE} is made with {algorithm[:40]}, this version knows {ALGORITHM}"
    return signer, raw


def _holds(key: "Ed25519PublicKey", signature: bytes, manifest: bytes) -> bool:
    from cryptography.exceptions import InvalidSignature

    try:
        key.verify(signature, manifest)
    except InvalidSignature:
        return False
    return True


def _document(signer: str, signature: bytes) -> bytes:
    text = base64.b64encode(signature).decode()
    return json.dumps({"algorithm": ALGORITHM, "key_id": signer, "signature": text}, indent=1).encode() + b"\n"


def write_signature(directory: Path, manifest: bytes, key: "Ed25519PrivateKey") -> str:
    """Sign the bytes of a manifest into its directory, by rename and forced to disk; return the key's id.

    Raises OSError. The file is prepared beside the directory, so that readers never see it half.
    """
    signer = keys.key_id(key.public_key())
    fd, temporary = tempfile.mkstemp(prefix=".signing-", dir=directory.parent)
    try:
        with os.fdopen(fd, "wb") as file:
            os.fchmod(fd, 0o644)
            file.write(_document(signer, key.sign(manifest)))
            file.flush()
            os.fsync(fd)
        Path(temporary).replace(directory / SIGNATURE)
    finally:
        Path(temporary).unlink(missing_ok=True)
    return signer
