"""The identity of a compile artifact: equal keys mean reusable, and a difference is told in words."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Fields = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ArtifactIdentity:
    """Everything that compiled code depends on; values of weights are not among it unless the code embeds them."""

    fields: Fields

    def key(self) -> str:
        """Return the hexadecimal sha256 of the canonical form; equal exactly when the artifact may be reused."""
        canonical = json.dumps(self.fields, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        return hashlib.sha256(canonical.encode()).hexdigest()

    @property
    def digest(self) -> str:
        """The key as shown to people and machines."""
        return f"sha256:{self.key()}"

    def differences(self, other: "ArtifactIdentity") -> tuple[str, ...]:
        """Say field by field how this identity differs from another: `torch 2.13.0 → 2.14.1`."""
        mine, theirs = dict(_flat(self.fields)), dict(_flat(other.fields))
        names = [*mine, *(name for name in theirs if name not in mine)]
        return tuple(
            f"{name} {_short(mine.get(name))} → {_short(theirs.get(name))}"
            for name in names
            if _canonical(mine.get(name, ...)) != _canonical(theirs.get(name, ...))
        )


def _flat(fields: Fields, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in fields.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _canonical(value: Any) -> str:
    """Return what the key is made of; an absent field is nothing that JSON knows."""
    return "" if value is ... else json.dumps(value, sort_keys=True)


def _short(value: Any) -> str:
    if value is None:
        return "nothing"
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:40]}…{hashlib.sha256(text.encode()).hexdigest()[:8]}"
