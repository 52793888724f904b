"""Who else could write where artifacts lie: what has been verified must not be exchanged before it is loaded.

Hashes and signatures hold for the moment they are computed. Between that and `dlopen` only permissions protect the
bytes, so directories and files that others can write are refused, up to the root of the file system.
"""

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PRIVATE = 0o700


@dataclass(frozen=True, slots=True)
class Writers:
    """Who may write to a store beside root and this process: `uid:N`, `gid:N` or `anyone`."""

    names: frozenset[str] = frozenset()

    def why_not(self, what: str, status: os.stat_result) -> str | None:
        """Return who else could write a file or directory, with the remedy, or None."""
        if "anyone" in self.names:
            return None
        if status.st_uid not in {0, os.geteuid()} and f"uid:{status.st_uid}" not in self.names:
            return f"{what} belongs to uid {status.st_uid}; {_remedy(f'uid:{status.st_uid}', 'chown')}"
        mode = stat.S_IMODE(status.st_mode)
        if mode & stat.S_IWOTH:
            return f"{what} is writable by anyone (mode {mode:04o}); {_remedy('anyone', 'chmod go-w')}"
        if mode & stat.S_IWGRP and f"gid:{status.st_gid}" not in self.names:
            who = f"gid:{status.st_gid}"
            return f"{what} is writable by group {status.st_gid} (mode {mode:04o}); {_remedy(who, 'chmod g-w')}"
        return None

    def why_not_store(self, store: Path) -> str | None:
        """Return what makes a store unsafe: the directory itself, or one above it, also where it is not made yet."""
        try:
            place = store.resolve()
            if not place.exists():
                return next(self._above(place), None)
            if not os.access(place, os.R_OK | os.X_OK):
                return f"{place} may not be read by uid {os.geteuid()}; chown it, or chmod -R a+rX it"
            return self.why_not(str(place), place.stat()) or next(self._above(place), None)
        except (OSError, RuntimeError) as error:
            return f"{store} cannot be examined: {error}; give a directory that this process may open"

    def _above(self, place: Path) -> Iterator[str]:
        """Yield the directories above in which others could put another directory in the place of this one."""
        for directory in filter(Path.is_dir, place.parents):
            status = directory.stat()
            if status.st_mode & stat.S_ISVTX and status.st_uid in {0, os.geteuid()}:
                continue  # as /tmp: only the owner renames
            if _own_group(status) and not status.st_mode & stat.S_IWOTH:
                continue
            if problem := self.why_not(str(directory), status):
                yield problem


def _own_group(status: os.stat_result) -> bool:
    """Tell a directory of the user's own private group: the rule where the umask is 0002."""
    return status.st_uid == os.geteuid() == os.getegid() == status.st_gid


def _remedy(name: str, command: str) -> str:
    return f"{command} it, or name {name} in compile.trusted_writers"


def make_private(directory: Path) -> None:
    """Make a directory and those above it that are not there, each 0700; raises OSError."""
    if not directory.parent.exists():
        make_private(directory.parent)
    directory.mkdir(mode=PRIVATE, exist_ok=True)
