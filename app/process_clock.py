"""The time of this process."""

import os
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path


class ProcessClock:
    """Seconds since this process was started by the kernel, so that imports before the first line count too."""

    def __init__(self) -> None:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        self._zero = time.monotonic() - (time.clock_gettime(time.CLOCK_BOOTTIME) - started)

    def __call__(self) -> float:
        """Return the age of the process in seconds."""
        return time.monotonic() - self._zero

    @property
    def started_at(self) -> datetime:
        """The moment the process started."""
        return datetime.now(UTC) - timedelta(seconds=self())
