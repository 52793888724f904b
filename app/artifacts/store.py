"""The directory of sealed artifacts: find by identity, publish by rename, set aside what is damaged."""

import contextlib
import errno
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from app.artifacts import Artifact, Layer, Missed, Restored, inputs
from app.artifacts.seal import MANIFEST, read_manifest, sync, verify
from app.artifacts.trust import Trust
from app.artifacts.writers import make_private
from app.errors import ArtifactError
from app.identity import ArtifactIdentity

_BUILDING = ".building-"
_REJECTED = ".rejected-"
_ABANDONED_S = 86400
_KEPT = 3


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
        if not directory.is_dir():
            nearest = min(self._differences(identity), key=len, default=())
            more = f" (and {len(nearest) - 1} more)" if len(nearest) > 1 else ""
            why = f"the nearest differs: {nearest[0]}{more}" if nearest else f"nothing stored in {self.path}"
            return Missed(identity, why, (Layer("sealed-artifact", "miss", why),), nearest)
        found = verify(directory, identity, self.trust)
        if isinstance(found, str):
            return Missed(identity, f"rejected artifact: {found}", (Layer("sealed-artifact", "rejected", found),))
        if stale := tuple(inputs.changed(found.content["factory_files"], checkpoint)):
            return Missed(identity, stale[0], (Layer("sealed-artifact", "rejected", stale[0]),), stale)
        return Restored(found, (Layer("sealed-artifact", "hit", found.told),))

    def refused(self) -> str | None:
        """Return why nothing is taken from this directory and nothing put there: others may write to it."""
        problem = self.trust.writers and self.trust.writers.why_not_store(self.path)
        return f"compile.artifacts is refused: {problem}" if problem else None

    def _differences(self, identity: ArtifactIdentity) -> Iterator[tuple[str, ...]]:
        """Yield how each stored artifact differs, told as stored → wanted."""
        for manifest in self.path.glob(f"*/{MANIFEST}"):
            if manifest.parent.name.startswith("."):
                continue
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
                yield ArtifactIdentity(read_manifest(manifest.parent)["identity"]).differences(identity)

    def set_aside(self, identity: ArtifactIdentity) -> None:
        """Move an unusable artifact out of the way, keep the newest few, forget the answers proven with it."""
        directory = self.path / identity.key()
        with contextlib.suppress(OSError):
            directory.rename(self.path / f"{_REJECTED}{directory.name[:12]}-{time.time_ns()}")
        shutil.rmtree(Artifact(directory, identity, {}).golden_directory, ignore_errors=True)
        for old in sorted(self.path.glob(f"{_REJECTED}*"), key=lambda path: path.name.rpartition("-")[2])[:-_KEPT]:
            shutil.rmtree(old, ignore_errors=True)

    @contextlib.contextmanager
    def workspace(self) -> Iterator[Path]:
        """Give a private directory on the store's file system; whatever is left of it is removed."""
        try:
            make_private(self.path)
            if refused := self.refused():
                raise ArtifactError(refused)
            self._forget_old_workspaces()
            directory = Path(tempfile.mkdtemp(prefix=_BUILDING, dir=self.path))
        except OSError as error:
            raise ArtifactError(
                f"compile.artifacts = {self.path} cannot be written: {error.strerror}; give a writable directory"
            ) from error
        try:
            yield directory
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    def _forget_old_workspaces(self) -> None:
        """Remove what a process that was killed has left; a day is longer than any build may take."""
        for left in self.path.glob(f"{_BUILDING}*"):
            with contextlib.suppress(OSError):
                if time.time() - left.stat().st_mtime > _ABANDONED_S:
                    shutil.rmtree(left, ignore_errors=True)

    def publish(self, directory: Path, identity: ArtifactIdentity) -> Artifact:
        """Move a sealed directory to its place at once; another process's artifact of the same identity is kept."""
        target = self.path.resolve() / identity.key()
        try:
            directory.rename(target)
        except OSError as error:
            # Another pod may have published the same identity meanwhile: theirs is as good, and readers have it.
            if error.errno not in {errno.EEXIST, errno.ENOTEMPTY}:
                raise
        sync(self.path)
        found = verify(target, identity, self.trust)
        if isinstance(found, str):
            raise ArtifactError(f"the artifact just published at {target} is damaged: {found}; check the disk")
        return found
