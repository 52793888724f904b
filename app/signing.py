"""What the commands `keygen`, `sign` and `verify` do."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from app import keys
from app.artifacts.seal import sign as sign_sealed
from app.artifacts.seal import verify as verify_sealed
from app.artifacts.trust import Trust


def keygen(out: Path) -> dict[str, Any]:
    """Make a key pair; raises SettingsError where a file exists or cannot be written."""
    identifier = keys.make_pair(out)
    return {"private_key": str(out), "public_key": str(keys.public_file(out)), "key_id": identifier}


def sign(artifact: Path, key: Path) -> dict[str, Any]:
    """Sign an artifact; raises SettingsError for the key, ArtifactError for the artifact."""
    return {"path": str(artifact), "key_id": sign_sealed(artifact, keys.read_private(key))}


def verify(artifact: Path, public_keys: Sequence[Path]) -> dict[str, Any]:
    """Return the verdict on an artifact's signature, files and hashes; who may write to it is not asked.

    Raises SettingsError for a key that cannot be used.
    """
    found = {keys.key_id(key): key for key in map(keys.read_public, public_keys)}
    verdict = verify_sealed(artifact, None, Trust(found, required=True, writers=None))
    if isinstance(verdict, str):
        return {"path": str(artifact), "ok": False, "problem": verdict}
    rows = verdict.content["files"]
    return {
        "path": str(artifact),
        "ok": True,
        "problem": "",
        "identity": verdict.identity.digest,
        "signature": verdict.told,
        "files": len(rows),
        "bytes": sum(row["size"] for row in rows),
    }
