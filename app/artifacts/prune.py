"""Garbage collection of a store: what nobody uses goes, what is in use, in the making or new stays."""

import contextlib
import json
import re
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from app.artifacts.flight import FAILED
from app.artifacts.lease import LEASE
from app.artifacts.seal import MANIFEST, read_manifest
from app.artifacts.store import ABANDONED_S, BUILDING, DISCARDED, REJECTED, USED, Store
from app.identity import ArtifactIdentity

HOUR_S = 3600.0
DAY_S = 24 * HOUR_S
_KEY = re.compile(r"[0-9a-f]{64}")
_BESIDE = re.compile(rf"([0-9a-f]{{64}})(\.golden|{re.escape(USED)})")
# Hidden names of this program → what they are, and how long they must not have changed.
_LEFTOVERS = {
    BUILDING: ("abandoned build", ABANDONED_S),
    REJECTED: ("rejected artifact", DAY_S),
    DISCARDED: ("interrupted removal", -HOUR_S),  # condemned already, whoever began it
    LEASE: ("expired lease", HOUR_S),
    FAILED: ("failed build's reason", DAY_S),
    ".clock-": ("interrupted prune", HOUR_S),
}


@dataclass(frozen=True, slots=True)
class Rules:
    """What is kept beside what this configuration uses: the `newest` of each model, and what was used lately."""

    newest: int = 2
    unused_days: float = 30.0


@dataclass(frozen=True, slots=True)
class Removed:
    """One thing that was removed, and why."""

    name: str
    bytes: int
    why: str


@dataclass(frozen=True, slots=True)
class _Stored:
    key: str
    model: str
    published_s: float
    used_s: float


def prune(store: Store, identity: ArtifactIdentity, rules: Rules) -> dict[str, Any]:
    """Remove what the rules do not keep, and return it; raises ArtifactError where the store cannot be written.

    Never removes the artifact of `identity`, one published within the last hour, what another process is building,
    nor anything whose name is not of this program. All times are the file system's.
    """
    if not store.path.is_dir():
        return {"removed": [], "freed_bytes": 0, "kept": 0}
    now = _now(store)
    stored = [_stored(path) for path in _entries(store) if _KEY.fullmatch(path.name) and path.is_dir()]
    removed = [
        _remove(store, store.path / one.key, why)
        for one in stored
        if (why := _unused(one, stored, identity, rules, now))
    ]
    removed += [_remove(store, path, why) for path, why in _leftovers(store, now)]
    gone = [one for one in removed if one]
    return {
        "removed": [asdict(one) for one in gone],
        "freed_bytes": sum(one.bytes for one in gone),
        "kept": sum(1 for path in _entries(store) if _KEY.fullmatch(path.name)),
    }


def _now(store: Store) -> float:
    """Return the file system's time: on a shared volume that is not this host's."""
    try:
        with tempfile.NamedTemporaryFile(prefix=".clock-", dir=store.path) as file:
            return Path(file.name).stat().st_mtime
    except OSError as error:
        raise store.unwritable(error) from error


def _entries(store: Store) -> list[Path]:
    return sorted(store.path.iterdir())


def _stored(path: Path) -> _Stored:
    published = max(_changed(path), _modified(path / MANIFEST))
    return _Stored(path.name, _model(path), published, max(published, _modified(path.with_name(path.name + USED))))


def _model(path: Path) -> str:
    """Return what tells models apart: who makes them, of what, and their tensors; versions and machines do not."""
    try:
        fields = read_manifest(path)["identity"]
        made = [fields["model"]["factory"], fields["model"]["kwargs"], fields["tensors"]]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return ""
    return json.dumps(made, sort_keys=True)


def _unused(one: _Stored, stored: list[_Stored], identity: ArtifactIdentity, rules: Rules, now: float) -> str:
    """Return why an artifact may go, or nothing where it is kept."""
    if one.key == identity.key() or now - one.published_s < HOUR_S:
        return ""
    siblings = sorted((s for s in stored if s.model == one.model), key=lambda s: s.used_s, reverse=True)
    if one.model and one in siblings[: rules.newest]:
        return ""
    days = (now - one.used_s) / DAY_S
    return f"not used for {days:.0f} days" if days > rules.unused_days else ""


def _leftovers(store: Store, now: float) -> Iterator[tuple[Path, str]]:
    """Yield what killed processes left behind, and what belongs to artifacts that are gone."""
    for path in _entries(store):
        for prefix, (what, age_s) in _LEFTOVERS.items():
            if path.name.startswith(prefix) and now - _last_change(path, prefix) > age_s:
                yield path, what
        beside = _BESIDE.fullmatch(path.name)
        if beside and not (store.path / beside[1]).exists() and now - _changed(path) > HOUR_S:
            yield path, "its artifact is gone"
        if beside and path.is_dir():
            yield from ((f, "interrupted write") for f in path.glob(".writing-*") if now - _modified(f) > HOUR_S)


def _last_change(path: Path, prefix: str) -> float:
    """Return when anything happened to it: builds and leases are touched while they live, the others renamed."""
    if prefix == LEASE:  # the last of a chain is renewed, and found by the ones before it
        first = path.name[: len(LEASE) + 64]
        return max(_modified(one) for one in path.parent.glob(f"{first}*"))
    return _modified(path) if prefix == BUILDING else _changed(path)


def _remove(store: Store, path: Path, why: str) -> Removed | None:
    size = sum(one.lstat().st_size for one in [path, *path.rglob("*")] if not one.is_dir()) if path.exists() else 0
    store.discard(path)
    return None if path.exists() else Removed(str(path.relative_to(store.path)), size, why)


def _modified(path: Path) -> float:
    with contextlib.suppress(OSError):
        return path.lstat().st_mtime
    return 0.0


def _changed(path: Path) -> float:
    """Return when the name or anything else about it changed: a copy may keep the time of its original."""
    with contextlib.suppress(OSError):
        return max(path.lstat().st_ctime, path.lstat().st_mtime)
    return 0.0
