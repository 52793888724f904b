"""The host processor."""

import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import torch

from app.settings import DeviceSettings


class Cpu:
    """Threads and instruction set of the processor this process may use."""

    plugin = True
    kind = "cpu"

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._rows = _cpuinfo()

    @classmethod
    def acquire(cls, settings: DeviceSettings) -> Self:
        """Set the number of threads, on this thread, for every operator that follows."""
        threads = settings.threads or available_processors()
        torch.set_num_threads(threads)
        return cls(threads)

    @property
    def name(self) -> str:
        """The processor's model name."""
        return self._rows.get("model name") or platform.machine()

    @property
    def threads(self) -> int:
        """Threads of one operator."""
        return self._threads

    def fingerprint(self) -> Mapping[str, Any]:
        """Architecture, instruction set and threads: generated code holds the vector width as a number."""
        flags = self._rows.get("flags") or self._rows.get("Features") or ""
        return {
            "kind": self.kind,
            "architecture": platform.machine(),
            "capability": torch.backends.cpu.get_cpu_capability(),
            "flags": " ".join(sorted(flags.split())),
            "threads": self._threads,
        }


def available_processors() -> int:
    """Return the processors that the affinity mask and the cgroup's quota leave to this process, at least one."""
    allowed = len(os.sched_getaffinity(0))
    quota = _quota()
    return max(1, min(allowed, round(quota))) if quota else allowed


def _quota() -> float | None:
    """Return the cgroup's processors: `cpu.max` (version 2) or the CFS quota and period (version 1)."""
    root = Path("/sys/fs/cgroup")
    try:
        quota, period = (root / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota = (root / "cpu/cpu.cfs_quota_us").read_text().strip()
            period = (root / "cpu/cpu.cfs_period_us").read_text().strip()
        except OSError:
            return None
    return int(quota) / int(period) if quota not in {"max", "-1"} else None


def _cpuinfo() -> dict[str, str]:
    """Return the rows of the first processor."""
    try:
        first = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.split(":", 1) for line in first.splitlines() if ":" in line)
    return {name.strip(): value.strip() for name, value in pairs}
