"""Seal a directory: its manifest lists every file with size and sha256; verify it before anything is loaded."""

import hashlib
import json
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from app.artifacts import CONSTANTS, Artifact
from app.identity import ArtifactIdentity

MANIFEST = "manifest.json"
FORMAT = 1
MANIFEST_LIMIT = 64 << 20
_OWN_FIELDS = frozenset({"format", "digest", "identity", "files", "content_sha256"})


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
        sync(path)


def verify(directory: Path, identity: ArtifactIdentity) -> Artifact | str:
    """Return the artifact, or what is wrong with it; reads every byte that will be loaded."""
    try:
        manifest = read_manifest(directory)
        recorded = ArtifactIdentity(dict(manifest["identity"]))
        listed = {row["path"]: (row["size"], row["sha256"]) for row in manifest["files"]}
        content = {name: value for name, value in manifest.items() if name not in _OWN_FIELDS}
        libraries = [package["library"] for package in content["packages"]]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        return f"{MANIFEST} cannot be read: {type(error).__name__}: {error}"
    if manifest.get("format") != FORMAT:
        return f"{MANIFEST} has format {manifest.get('format')}, this version reads {FORMAT}"
    if recorded.key() != identity.key():
        return f"{MANIFEST} is of another identity: {'; '.join(recorded.differences(identity)[:3])}"
    if manifest["content_sha256"] != _content_digest(content):
        return f"{MANIFEST} is not what was sealed: the sha256 of its content differs"
    if unlisted := sorted({*libraries, CONSTANTS} - listed.keys()):
        return f"{MANIFEST} would load {unlisted[0]}, which it does not list"
    problem = next(_wrong_files(directory, listed), None)
    return problem or Artifact(directory, recorded, manifest)


def read_manifest(directory: Path) -> dict[str, Any]:
    """Read a manifest that may be anything: a link, a pipe, a gigabyte; raises OSError or ValueError."""
    fd = os.open(directory / MANIFEST, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_size > MANIFEST_LIMIT:
            raise ValueError(f"{MANIFEST} is not a file of at most {MANIFEST_LIMIT} bytes")
        found = json.loads(file.read())
    if not isinstance(found, dict):
        raise ValueError(f"{MANIFEST} is not an object")
    return found


def _content_digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _wrong_files(directory: Path, listed: Mapping[str, tuple[int, str]]) -> Iterator[str]:
    present = {
        str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_symlink() or not path.is_dir()
    } - {MANIFEST}
    for name in sorted(present ^ listed.keys()):
        yield f"{name} is {'missing' if name in listed else 'not in the manifest'}"
    for name, (size, digest) in listed.items():
        path = directory / name
        if path.is_symlink() or not path.is_file():
            yield f"{name} is not a regular file"
        elif path.stat().st_size != size:
            yield f"{name} has {path.stat().st_size} bytes, sealed were {size}"
        elif sha256(path) != digest:
            yield f"{name} is not what was sealed: its sha256 differs"


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
