"""Which store a configuration reads from, and where it may keep what it builds."""

import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from app import keys
from app.artifacts.seal import sign
from app.artifacts.store import Store
from app.artifacts.trust import Trust
from app.settings import Compile

_ALONE = "warmgate-alone-"
_ABANDONED_S = 86400


def open_store(settings: Compile) -> Store:
    """Return the configured store; raises SettingsError for a key file that cannot be used."""
    return Store(settings.artifacts, Trust.configured(settings))


def why_not_kept(settings: Compile) -> str | None:
    """Return why this process may not put what it builds into the store, or None.

    Others could exchange it before it is loaded, or the next start would reject it for want of a signature.
    """
    if settings.require_signature and settings.signing_key is None:
        return "compile.require_signature is true and there is no compile.signing_key to sign it with"
    return open_store(settings).refused()


def store_of_this_process() -> Store:
    """Return a private store that no other start reads: what is built there serves this process alone."""
    place = Path(tempfile.gettempdir())
    for left in place.glob(f"{_ALONE}*"):
        with suppress(OSError):
            # Code that is loaded stays mapped when its file is gone.
            if time.time() - left.stat().st_mtime > _ABANDONED_S:
                shutil.rmtree(left)
    return Store(Path(tempfile.mkdtemp(prefix=_ALONE)))


def sign_built(payload: Path, settings: Compile) -> None:
    """Sign what was built, where there is a key; raises ArtifactError or SettingsError."""
    if settings.signing_key is not None:
        sign(payload, keys.read_private(settings.signing_key))
