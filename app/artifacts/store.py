"""The directory of sealed artifacts: find by identity, publish by rename, set aside what is damaged."""

import contextlib
import errno
import os
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from app.artifacts import Artifact, Layer, Missed, Restored, inputs
from app.artifacts.lease import every
from app.artifacts.seal import MANIFEST, read_manifest, sync, verify
from app.artifacts.trust import Trust
from app.artifacts.writers import make_private
from app.errors import ArtifactError
from app.identity import ArtifactIdentity

BUILDING = ".building-"
REJECTED = ".rejected-"
USED = ".used"
DISCARDED = ".discarded-"
# A workspace is touched while its process lives; one that was not for this long is a killed process's.
ABANDONED_S = 3600
_TOUCH_S = 60
_USED_S = 86400
_KEPT = 3
_LOOKS = 5


class Store:
    """Artifacts under one directory, one subdirectory for each identity."""

    def __init__(self, path: Path, trust: Trust = Trust()) -> None:  # noqa: B008 - immutable
        self.path = path
        self.trust = trust

    def find(self, identity: ArtifactIdentity, checkpoint: Path) -> Restored | Missed:
        """Return the verified artifact of this identity, or why there is none and how the nearest one differs.

        Changes nothing: what is damaged is set aside by whoever has something better to put in its place.
        """
        if refused := self.refused():
            return Missed(identity, refused, (Layer("sealed-artifact", "rejected", refused),))
        directory = self.path.resolve() / identity.key()
        found: Artifact | str | None = None
        for _ in range(_LOOKS):
            before = _state(directory)
            found = _verified(directory, identity, self.trust) if before else None
            # Another process may have replaced or removed it in the middle: then half of each was seen.
            if isinstance(found, Artifact) or _state(directory) == before:
                break
        if found is None:
            nearest = min(self._differences(identity), key=len, default=())
            more = f" (and {len(nearest) - 1} more)" if len(nearest) > 1 else ""
            why = f"the nearest differs: {nearest[0]}{more}" if nearest else f"nothing stored in {self.path}"
            return Missed(identity, why, (Layer("sealed-artifact", "miss", why),), nearest)
        if isinstance(found, str):
            return Missed(identity, f"rejected artifact: {found}", (Layer("sealed-artifact", "rejected", found),))
        if stale := tuple(inputs.changed(found.content["factory_files"], checkpoint)):
            return Missed(identity, stale[0], (Layer("sealed-artifact", "rejected", stale[0]),), stale)
        return Restored(found, (Layer("sealed-artifact", "hit", found.told),))

    def refused(self) -> str | None:
        """Return why nothing is taken from this directory and nothing put there: others may write to it."""
        problem = self.trust.writers and self.trust.writers.why_not_store(self.path)
        return f"compile.artifacts is refused: {problem}" if problem else None

    def state(self, identity: ArtifactIdentity) -> tuple[int, int] | None:
        """Return a value that changes when another artifact is in the place of this identity; None where none is."""
        return _state(self.path / identity.key())

    def _differences(self, identity: ArtifactIdentity) -> Iterator[tuple[str, ...]]:
        """Yield how each stored artifact differs, told as stored → wanted."""
        for manifest in self.path.glob(f"*/{MANIFEST}"):
            if manifest.parent.name.startswith("."):
                continue
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
                yield ArtifactIdentity(read_manifest(manifest.parent)["identity"]).differences(identity)

    def mark_used(self, identity: ArtifactIdentity) -> None:
        """Note for `build --prune` that the artifact is in use: once a day, and not where the store is read-only."""
        stamp = self.path / f"{identity.key()}{USED}"
        with contextlib.suppress(OSError):
            if not stamp.exists() or abs(time.time() - stamp.stat().st_mtime) > _USED_S:
                stamp.touch()

    def set_aside(self, identity: ArtifactIdentity) -> None:
        """Move an unusable artifact out of the way, keep the newest few, forget the answers proven with it."""
        directory = self.path / identity.key()
        with contextlib.suppress(OSError):
            directory.rename(self.path / f"{REJECTED}{directory.name[:12]}-{time.time_ns()}")
        self.discard(Artifact(directory, identity, {}).golden_directory)
        for old in sorted(self.path.glob(f"{REJECTED}*"), key=lambda path: path.name.rpartition("-")[2])[:-_KEPT]:
            shutil.rmtree(old, ignore_errors=True)

    def discard(self, path: Path) -> None:
        """Remove a directory or file so that nobody sees half of it: it is out of sight first."""
        hidden = self.path / f"{DISCARDED}{secrets.token_hex(8)}"
        with contextlib.suppress(OSError):
            path.rename(hidden)
            if hidden.is_dir() and not hidden.is_symlink():
                shutil.rmtree(hidden, ignore_errors=True)
            else:
                hidden.unlink()

    def unwritable(self, error: OSError) -> ArtifactError:
        """Return the error that names the setting."""
        return ArtifactError(
            f"compile.artifacts = {self.path} cannot be written: {error.strerror}; give a writable directory"
        )

    @contextlib.contextmanager
    def workspace(self) -> Iterator[Path]:
        """Give a private directory on the store's file system; whatever is left of it is removed."""
        try:
            make_private(self.path)
            if refused := self.refused():
                raise ArtifactError(refused)
            directory = Path(tempfile.mkdtemp(prefix=BUILDING, dir=self.path))
            self._forget_old_workspaces(now=directory.stat().st_mtime)
        except OSError as error:
            raise self.unwritable(error) from error
        try:
            with every(_TOUCH_S, lambda: os.utime(directory)):
                yield directory
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    def _forget_old_workspaces(self, now: float) -> None:
        """Remove what killed processes have left; `now` is the file system's own clock, other hosts' may differ."""
        for left in self.path.glob(f"{BUILDING}*"):
            with contextlib.suppress(OSError):
                if now - left.stat().st_mtime > ABANDONED_S:
                    shutil.rmtree(left, ignore_errors=True)

    def publish(self, directory: Path, identity: ArtifactIdentity) -> Artifact:
        """Move a sealed directory to its place at once; another process's artifact of the same identity is kept."""
        target = self.path.resolve() / identity.key()
        try:
            directory.rename(target)
        except OSError as error:
            # Another pod may have published the same identity meanwhile: theirs is as good, and readers have it. And
            # a file server whose answer was lost is asked again, and says that what it has renamed is not there.
            done = error.errno == errno.ENOENT and target.is_dir() and not directory.exists()
            if error.errno not in {errno.EEXIST, errno.ENOTEMPTY} and not done:
                raise
        sync(self.path)
        found = verify(target, identity, self.trust)
        if isinstance(found, str):
            raise ArtifactError(f"the artifact just published at {target} is damaged: {found}; check the disk")
        return found


def _state(directory: Path) -> tuple[int, int] | None:
    """Return what tells one directory of this name from the next, whose number may be the same; None: none is there."""
    try:
        status = directory.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return (status.st_ino, status.st_ctime_ns) if stat.S_ISDIR(status.st_mode) else None


def _verified(directory: Path, identity: ArtifactIdentity, trust: Trust) -> Artifact | str:
    try:
        return verify(directory, identity, trust)
    except OSError as error:
        return f"{error.filename or directory} cannot be read: {error.strerror}"
