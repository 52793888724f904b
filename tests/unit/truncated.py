"""Run by test_reading in a process of its own: files that are truncated while they are read must not kill it."""

import os
import sys
from pathlib import Path

from app.errors import CheckpointError
from app.progress import Progress
from app.weights import reading, segments
from app.weights.layout import plan_layout
from app.weights.reading import read_resident
from tests.unit.written import filled, written

SIZES = (70_001, 5, 90_000)


class Truncating(Progress):
    """Truncates a file once it is mapped and before the first byte is read, or at a later sign of progress."""

    def __init__(self, path: Path, left: int, after: int) -> None:
        super().__init__()
        self._path, self._left, self._after, self._count = path, left, after, 0

    def check(self) -> None:
        if self._count == self._after:
            os.truncate(self._path, self._left)
        self._count += 1
        super().check()


def small_steps() -> None:
    segments.STEP = 1 << 13
    reading.CALL = reading.SCRATCH = 1 << 12


def main() -> None:
    mode, verify, directory = sys.argv[1], sys.argv[2] == "verify", Path(sys.argv[3])
    small_steps()
    for after in (0, 1, 3, 11):
        for left in (0, 100, 4096, 50_000, -5000, -1):
            place = directory / f"{after}-{left}"
            shards = [{str(salt): filled("U8", size, salt=salt)} for salt, size in enumerate(SIZES)]
            checkpoint = written(place, *shards)
            file = checkpoint.files[2]
            digests = {one.path.name: "0" * 64 for one in checkpoint.files} if verify else {}
            progress = Truncating(file.path, left % file.size, after)
            layout = plan_layout(checkpoint, "map" if mode == "map" else "read", "", None)
            try:
                read_resident(checkpoint, layout, progress, 1 << 12, digests)
                print("read")  # noqa: T201 - the outcome
            except CheckpointError as error:
                named = str(file.path) in str(error) or (verify and "model.sha256 says" in str(error))
                print("refused" if named else str(error))  # noqa: T201
            checkpoint.close()


if __name__ == "__main__":
    main()
