"""API keys from a file that may change while the server runs: secrets are rotated, servers are not restarted for it."""

import hmac
from collections.abc import Callable
from pathlib import Path

from starlette.datastructures import Headers

from app.errors import SettingsError
from app.logs import log
from app.servable import Rejected

# How often the file is looked at, at most.
LOOK_S = 1.0

Stamp = tuple[int, int, int]


def open_to_all(headers: Headers) -> None:
    """Ask for no key."""
    del headers


def key_check(file: Path | None, clock: Callable[[], float]) -> Callable[[Headers], None]:
    """Return a check of headers that asks for a key in `file`; probes, metrics and status never use it.

    Raises SettingsError at once when the file cannot be read or holds no key.
    """
    return open_to_all if file is None else ApiKeys(file, clock).check


class ApiKeys:
    """The keys of a file, one a line, so that an old one and its successor hold together; compared as bytes.

    What the file turns into when it can no longer be read does not count: the last good keys stay, and that is told.
    """

    def __init__(self, file: Path, clock: Callable[[], float]) -> None:
        self._file, self._clock = file, clock
        self._looked_s = clock()
        self._stamp = self._found()
        try:
            self._keys = _read(file)
        except (OSError, ValueError) as error:
            raise SettingsError(f"http.api_key_file = {file} {_why(error)}") from error

    def check(self, headers: Headers) -> None:
        """Raise Rejected (401) unless the headers hold one of the keys."""
        if self._clock() - self._looked_s >= LOOK_S:
            self._look()
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        given = headers.get("x-api-key", bearer.strip() if scheme.lower() == "bearer" else "").encode("latin-1")
        # All keys are compared, so that the time says nothing about which of them was nearly right.
        if not sum(hmac.compare_digest(given, key) for key in self._keys):
            raise Rejected(401, "this server wants an API key: Authorization: Bearer … or X-API-Key")

    def _look(self) -> None:
        self._looked_s = self._clock()
        stamp = self._found()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._keys = _read(self._file)
        except (OSError, ValueError) as error:
            log.error("the API keys stay as they were", file=str(self._file), why=_why(error))
        else:
            log.info("the API keys were read again", file=str(self._file), keys=len(self._keys))

    def _found(self) -> Stamp | None:
        try:
            found = self._file.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino


def _read(file: Path) -> tuple[bytes, ...]:
    keys = tuple(line.strip() for line in file.read_bytes().splitlines() if line.strip())
    if not keys:
        raise ValueError("is empty")
    return keys


def _why(error: OSError | ValueError) -> str:
    return f"cannot be read: {error.strerror}" if isinstance(error, OSError) else str(error)
