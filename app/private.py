"""A directory of this user's own on local disk, for what must be neither shared nor read by others."""

import os
import stat
import tempfile
from pathlib import Path

from app.errors import ArtifactError


def private_directory() -> Path:
    """Return it, the same path in every process of a user; raises ArtifactError where others can write to it."""
    base = Path(tempfile.gettempdir()) / f"warmgate-{os.getuid()}"
    try:
        base.mkdir(mode=0o700, exist_ok=True)
        status = base.lstat()
    except OSError as error:
        raise ArtifactError(f"{base} cannot be made: {error.strerror}; set TMPDIR to a writable directory") from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise ArtifactError(f"{base} is not a directory that only this user can write to; remove it, or set TMPDIR")
    return base
