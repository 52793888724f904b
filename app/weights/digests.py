"""The sha256 that files must have: a list in the form of `sha256sum`, or what a Hugging Face snapshot is named by."""

import re
from collections.abc import Mapping
from pathlib import Path

from app.checkpoints import Checkpoint
from app.errors import CheckpointError, SettingsError

SNAPSHOT = "snapshot"
_LINE = re.compile(r"\\?(?P<digest>[0-9a-fA-F]{64}) [ *](?P<name>.+)")
_DIGEST = re.compile(r"[0-9a-f]{64}")


def expected_digests(source: str | None, checkpoint: Checkpoint) -> dict[str, str]:
    """Return file name → sha256 for every file of a checkpoint; empty where none were asked for.

    `source`: a file in the form of `sha256sum`, or `snapshot` for a Hugging Face snapshot directory, where each file is
    a link to one that is named by its sha256. Raises SettingsError, or CheckpointError where a file has no digest.
    """
    if source is None:
        return {}
    known = _snapshot(checkpoint) if source == SNAPSHOT else _listed(Path(source))
    lacking = sorted(file.path.name for file in checkpoint.files if file.path.name not in known)
    if lacking:
        where = "its link does not name one" if source == SNAPSHOT else f"{source} does not list it"
        raise CheckpointError(
            f"{checkpoint.path}: no sha256 is known for {', '.join(lacking)} ({where}); complete or unset model.sha256"
        )
    wanted = {file.path.name: known[file.path.name] for file in checkpoint.files}
    # A list of a whole tree may have one name in several directories.
    if several := sorted(name for name, digests in wanted.items() if len(digests) > 1):
        raise SettingsError(f"model.sha256 = {source!r} gives {several[0]} several sha256; list the checkpoint's alone")
    return {name: digest for name, (digest,) in wanted.items()}


def _listed(file: Path) -> Mapping[str, frozenset[str]]:
    try:
        rows = file.read_text().splitlines()
    except (OSError, ValueError) as error:
        raise SettingsError(
            f"model.sha256 = {str(file)!r} cannot be read: {error}; it names a list made by sha256sum, or is `snapshot`"
        ) from error
    found: dict[str, frozenset[str]] = {}
    for number, row in enumerate(rows, 1):
        if not row.strip() or row.startswith("#"):
            continue
        if (match := _LINE.fullmatch(row)) is None:
            raise SettingsError(f"{file} line {number} is not `<sha256>  <name>` as sha256sum writes it: {row[:80]!r}")
        name, digest = Path(match["name"]).name, match["digest"].lower()
        found[name] = found.get(name, frozenset()) | {digest}
    return found


def _snapshot(checkpoint: Checkpoint) -> Mapping[str, frozenset[str]]:
    names = {file.path.name: file.path.resolve().name for file in checkpoint.files}
    return {name: frozenset({target}) for name, target in names.items() if _DIGEST.fullmatch(target)}
