"""Devices: one file each behind one small protocol that answers questions, so nobody asks which device it is."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, Self

from app.settings import DeviceSettings


class Device(Protocol):
    """The device that computes; made and used on the device lane only."""

    plugin: bool
    kind: str

    @classmethod
    def acquire(cls, settings: DeviceSettings) -> Self:
        """Take the device; raises ResourceError that names what is missing and the remedy."""

    @property
    def name(self) -> str:
        """What people call it."""

    @property
    def threads(self) -> int:
        """Threads that one operator may use on the host."""

    def fingerprint(self) -> Mapping[str, Any]:
        """Return everything about the device that compiled code depends on, as fields of an identity."""


@dataclass(frozen=True, slots=True)
class AcquiredDevice:
    """A device that is ours."""

    device: Device
    fingerprint: Mapping[str, Any]
