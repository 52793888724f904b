"""The identity of a compile artifact: equal keys mean reusable, and a difference is told in words."""

import hashlib
import json
from dataclasses import dataclass

from app.differences import Fields, tell


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
        return tell(self.fields, other.fields)
