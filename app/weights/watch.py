"""Whether mapped files are still what they were when they were read: their pages are the model."""

import threading
import time
from collections.abc import Callable, Sequence

from app.checkpoints import CheckpointFile

# A look costs a system call a file; on a server that hangs it costs a thread, never an answer to a probe.
EVERY_S = 1.0
SILENT_S = 10.0


class FileWatch:
    """Looks at files from a thread of its own and remembers what it saw."""

    def __init__(self, files: Sequence[CheckpointFile], clock: Callable[[], float] = time.monotonic) -> None:
        self._files, self._clock = files, clock
        self._changed: str | None = None
        self._seen = clock()

    def start(self) -> None:
        """Begin to look; without files there is nothing to do."""
        if self._files:
            threading.Thread(target=self._run, name="file-watch", daemon=True).start()

    def _run(self) -> None:
        while self._changed is None:
            self.look()
            time.sleep(EVERY_S)

    def look(self) -> None:
        """Look at every file once."""
        for file in self._files:
            try:
                told = file.changed_in_place()
            except OSError as error:
                told = f"{file.path} is gone: {error.strerror}"
            if told:
                self._changed = told
                return
        self._seen = self._clock()

    def why_not(self) -> str | None:
        """Return what is wrong with the files that the model lies in, or None; never waits."""
        if self._changed:
            return f"{self._changed}; its mapped pages are the model: restart"
        silent = self._clock() - self._seen
        if self._files and silent > SILENT_S:
            return f"the file system of {self._files[0].path} has not answered for {silent:.0f} s"
        return None
