"""Seal a directory: its manifest lists every file with size and sha256; verify it before anything is loaded."""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from app.artifacts import Artifact
from app.identity import ArtifactIdentity

MANIFEST = "manifest.json"
FORMAT = 1


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
        **content,
    }
    (directory / MANIFEST).write_text(json.dumps(manifest, indent=1))
    for path in [*directory.rglob("*"), directory]:
        sync(path)


def verify(directory: Path, identity: ArtifactIdentity) -> Artifact | str:
    """Return the artifact, or what is wrong with it; reads every byte that will be loaded."""
    try:
        manifest = json.loads((directory / MANIFEST).read_bytes())
        recorded = ArtifactIdentity(dict(manifest["identity"]))
        listed = {row["path"]: (row["size"], row["sha256"]) for row in manifest["files"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{MANIFEST} cannot be read: {type(error).__name__}: {error}"
    if manifest.get("format") != FORMAT:
        return f"{MANIFEST} has format {manifest.get('format')}, this version reads {FORMAT}"
    if recorded.key() != identity.key():
        return f"{MANIFEST} is of another identity: {'; '.join(recorded.differences(identity)[:3])}"
    problem = next(_wrong_files(directory, listed), None)
    return problem or Artifact(directory, recorded, manifest)


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
