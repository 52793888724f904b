"""A read-only file system that shows a directory and misbehaves as it is told: `MOUNT SOURCE MODE`.

Modes: `plain`; `error`, an I/O error in the second half of every file; `slow`, the first half of every file, where a
mapping is measured, waits a while; `gone` ends the process in the second half, and with it the file system.
"""

import errno
import os
import sys
import time
from pathlib import Path
from typing import Any

import mfusepy


class Faulty(mfusepy.Operations):  # type: ignore[misc]
    use_ns = True

    def __init__(self, source: Path, mode: str) -> None:
        self.source, self.mode = source, mode

    def _real(self, path: str) -> Path:
        return self.source / path.lstrip("/")

    def getattr(self, path: str, info: Any = None) -> dict[str, Any]:
        del info
        try:
            found = self._real(path).stat()
        except OSError as error:
            raise mfusepy.FuseOSError(error.errno or errno.EIO) from None
        row = {name: getattr(found, name) for name in ("st_mode", "st_size", "st_nlink", "st_uid", "st_gid", "st_ino")}
        return {**row, **{f"st_{kind}time": getattr(found, f"st_{kind}time_ns") for kind in "amc"}}

    def readdir(self, path: str, info: Any) -> list[str]:
        del info
        return [".", "..", *(entry.name for entry in self._real(path).iterdir())]

    def open(self, path: str, info: Any) -> int:
        info.fh = os.open(self._real(path), os.O_RDONLY)
        # No page cache between: what is read is asked for here.
        info.direct_io = self.mode == "slow"
        return 0

    def read(self, path: str, size: int, offset: int, info: Any) -> bytes:
        half = self._real(path).stat().st_size // 2
        if offset >= half and self.mode == "error":
            raise mfusepy.FuseOSError(errno.EIO)
        if offset >= half and self.mode == "gone":
            os._exit(1)
        if self.mode == "slow" and offset < half:
            time.sleep(0.02)
        return os.pread(info.fh, size, offset)

    def release(self, path: str, info: Any) -> int:
        os.close(info.fh)
        return 0


if __name__ == "__main__":
    mount, source, mode = sys.argv[1:]
    mfusepy.FUSE(Faulty(Path(source), mode), mount, foreground=True, ro=True, raw_fi=True, nothreads=True)
