"""Seal a directory: its manifest lists every file with size and sha256; verify it before anything is loaded."""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.artifacts import CONSTANTS, Artifact
from app.artifacts.files import LARGEST_TOTAL, SealedFiles
from app.artifacts.trust import SIGNATURE, SIGNATURE_LIMIT, Accepted, Trust, check_signature, write_signature
from app.artifacts.writers import PRIVATE
from app.errors import ArtifactError, printable
from app.identity import ArtifactIdentity

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

MANIFEST = "manifest.json"
FORMAT = 1
MANIFEST_LIMIT = 64 << 20
_OWN_FIELDS = frozenset({"format", "digest", "identity", "files", "content_sha256"})
_OWN_FILES = frozenset({MANIFEST, SIGNATURE})
_ANY = Trust(writers=None)


def seal(directory: Path, identity: ArtifactIdentity, content: Mapping[str, Any]) -> None:
    """Write the manifest and force everything to disk; afterwards the directory is only ever read."""
    files = [
        {"path": str(path.relative_to(directory)), "size": path.stat().st_size, "sha256": sha256(path)}
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    ]
    manifest = {
        "format": FORMAT,
        "digest": identity.digest,
        "identity": identity.fields,
        "files": files,
        "content_sha256": _content_digest(content),
        **content,
    }
    (directory / MANIFEST).write_text(json.dumps(manifest, indent=1))
    for path in [*directory.rglob("*"), directory]:
        path.chmod(PRIVATE if path.is_dir() else 0o644)
        sync(path)


def sign(directory: Path, key: "Ed25519PrivateKey") -> str:
    """Sign an artifact that is whole, over the bytes of the manifest that were verified; return the key's id.

    Raises ArtifactError where it is damaged or the signature cannot be written.
    """
    try:
        with SealedFiles.open(directory, None) as files:
            manifest = files.read(MANIFEST, MANIFEST_LIMIT)
            found = _verified(directory, files, manifest, None)
        if isinstance(found, str):
            raise ArtifactError(f"{directory} is not signed: {found}")
        return write_signature(directory, manifest, key)
    except (OSError, ValueError) as error:
        raise ArtifactError(f"{directory} cannot be signed: {error}; give a sealed artifact, writable") from error


def verify(directory: Path, identity: ArtifactIdentity | None, trust: Trust = _ANY) -> Artifact | str:
    """Return the artifact, or what is wrong with it; reads every byte that will be loaded.

    The signature comes first, over the very bytes of the manifest that are parsed after it. `identity` None: whatever
    identity the manifest has.
    """
    try:
        with SealedFiles.open(directory, trust.writers) as files:
            if problem := files.why_not_directory():
                return problem
            manifest = files.read(MANIFEST, MANIFEST_LIMIT)
            signed = _check_signature(files, manifest, trust)
            if isinstance(signed, str):
                return signed
            return _verified(directory, files, manifest, identity, signed.told)
    except (OSError, ValueError) as error:
        return f"{MANIFEST} cannot be read: {type(error).__name__}: {error}"


def _check_signature(files: SealedFiles, manifest: bytes, trust: Trust) -> Accepted | str:
    signature = None
    try:
        signature = files.read(SIGNATURE, SIGNATURE_LIMIT)
    except FileNotFoundError:
        pass  # unsigned: whether that is enough is for the policy to say
    except (OSError, ValueError) as error:
        return f"{SIGNATURE} cannot be read: {type(error).__name__}: {error}"
    return check_signature(manifest, signature, trust)


@dataclass(frozen=True, slots=True)
class _Manifest:
    """A manifest that could be parsed; nothing it says has been compared with anything yet."""

    fields: Mapping[str, Any]
    identity: ArtifactIdentity
    rows: tuple[tuple[Any, Any, Any], ...]
    loaded: frozenset[str]
    intact: bool


def _verified(
    directory: Path, files: SealedFiles, text: bytes, identity: ArtifactIdentity | None, told: str = ""
) -> Artifact | str:
    """Return the artifact whose manifest reads `text`, or what is wrong with it."""
    try:
        fields = _parsed(text)
        if fields.get("format") != FORMAT:
            return f"{MANIFEST} has format {fields.get('format')}, this version reads {FORMAT}"
        manifest = _interpreted(fields)
        problem = next(_problems(manifest, identity or manifest.identity, files), None)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        return f"{MANIFEST} cannot be read: {type(error).__name__}: {error}"
    return printable(problem) if problem else Artifact(directory, manifest.identity, fields, told)


def _interpreted(fields: dict[str, Any]) -> _Manifest:
    recorded = ArtifactIdentity(dict(fields["identity"]))
    content = {name: value for name, value in fields.items() if name not in _OWN_FIELDS}
    return _Manifest(
        fields,
        recorded,
        tuple((row["path"], row["size"], row["sha256"]) for row in fields["files"]),
        frozenset({CONSTANTS, *(package["library"] for package in content["packages"])}),
        fields["digest"] == recorded.digest and fields["content_sha256"] == _content_digest(content),
    )


def _problems(manifest: _Manifest, identity: ArtifactIdentity, files: SealedFiles) -> Iterator[str]:
    """Yield what is wrong, the cheap and general first; each check may rely on those before it."""
    if manifest.identity.key() != identity.key():
        yield f"{MANIFEST} is of another identity: {'; '.join(manifest.identity.differences(identity)[:3])}"
    if not manifest.intact:
        yield f"{MANIFEST} is not what was sealed: the sha256 of its content differs"
    yield from (f"{MANIFEST} {problem}" for problem in _wrong_rows(manifest.rows))
    if unlisted := sorted(map(str, manifest.loaded - {name for name, _, _ in manifest.rows})):
        yield f"{MANIFEST} would load {unlisted[0]}, which it does not list"
    try:
        yield from _wrong_files(files, manifest.rows)
    except (OSError, ValueError) as error:
        yield f"the files cannot be read: {error}"


def read_manifest(directory: Path) -> dict[str, Any]:
    """Read a manifest that may be anything: a link, a pipe, a gigabyte; raises OSError or ValueError."""
    with SealedFiles.open(directory, None) as files:
        return _parsed(files.read(MANIFEST, MANIFEST_LIMIT))


def _parsed(text: bytes) -> dict[str, Any]:
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError(f"{MANIFEST} is not an object")
    return found


def _content_digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _wrong_rows(rows: Sequence[tuple[Any, Any, Any]]) -> Iterator[str]:
    """Yield what no sealed list of files says; names are hostile until they have passed."""
    seen: set[str] = set()
    total = 0
    for name, size, digest in rows:
        if not isinstance(name, str) or not isinstance(digest, str) or type(size) is not int or size < 0:
            yield f"lists {name!r} without a name, a size and a sha256"
            return
        if name.startswith("/") or not {"", ".", ".."}.isdisjoint(name.split("/")) or "\0" in name:
            yield f"lists {name}, which is no path inside the artifact"
        if name in _OWN_FILES:
            yield f"lists {name}, which is not part of the payload"
        if name in seen:
            yield f"lists {name} twice"
        seen.add(name)
        total += size
    if total > LARGEST_TOTAL:
        yield f"lists {total} bytes, at most {LARGEST_TOTAL} are read"


def _wrong_files(files: SealedFiles, rows: Sequence[tuple[str, int, str]]) -> Iterator[str]:
    listed = {name for name, _, _ in rows}
    for name in sorted((set(files.names()) - _OWN_FILES) ^ listed):
        yield f"{name} is {'missing' if name in listed else 'not in the manifest'}"
    for name, size, digest in rows:
        if problem := files.why_not(name, size, digest):
            yield problem


def sha256(path: Path) -> str:
    """Return the hexadecimal sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Force a file or directory to disk."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
