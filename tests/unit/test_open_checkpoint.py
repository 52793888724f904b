"""A start may wait for whoever brings the checkpoint, but never longer than it was told."""

import errno
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app.errors import CheckpointError
from app.progress import Progress, Stopped
from app.settings import Settings
from app.stages.open_checkpoint import open_checkpoint
from tests.unit.written import filled, safetensors_bytes, written


def settings(path: Path, wait_s: float) -> Settings:
    tensor: dict[str, Any] = {"datatype": "FP32", "shape": [1]}
    return Settings(
        model={"name": "tiny", "factory": "a:b", "checkpoint": path, "wait_s": wait_s},
        inputs=[{"name": "x", **tensor}],
        outputs=[{"name": "y", **tensor}],
    )


def test_what_is_there_is_opened_at_once_and_described(tmp_path: Path) -> None:
    written(tmp_path / "model", {"a": filled("F32", 250)}, {"b": filled("F32", 250)}).close()
    progress, began = Progress(), time.monotonic()

    found = open_checkpoint.run(settings(tmp_path / "model", 60), progress)
    found.close()

    assert time.monotonic() - began < 30
    assert progress.detail.startswith("safetensors, 2 file(s), 2 tensors, 2.")


def test_what_comes_while_it_is_waited_for_is_opened(tmp_path: Path) -> None:
    written(tmp_path / "elsewhere", {"a": filled("F32", 3)}).close()
    bring = threading.Timer(0.3, shutil.move, (tmp_path / "elsewhere", tmp_path / "model"))
    bring.start()

    found = open_checkpoint.run(settings(tmp_path / "model", 60), Progress())
    bring.join()
    found.close()

    assert list(found.tensors) == ["a"]


class Bringing(Progress):
    """Whoever brings the checkpoint goes on by one step at each sentence that is said while it is waited for."""

    def __init__(self, *steps: Callable[[], object]) -> None:
        super().__init__()
        self.said: list[str] = []
        self._steps = list(steps)

    def say(self, detail: str) -> None:
        super().say(detail)
        self.said.append(detail.partition(" s left: ")[2] or detail)
        if self._steps:
            self._steps.pop(0)()


def write_shard(path: Path, name: str) -> None:
    path.write_bytes(safetensors_bytes({name: filled("F32", 250)}))


def test_a_checkpoint_is_waited_for_until_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "model"
    index = json.dumps({"weight_map": {"a": "0.safetensors", "b": "1.safetensors"}})
    path.mkdir()
    (path / "model.safetensors.index.json").write_text(index)
    progress = Bringing(
        lambda: write_shard(path / "0.safetensors", "a"),
        lambda: (path / "1.safetensors").write_bytes(safetensors_bytes({"b": filled("F32", 250)})[:-1]),
        lambda: write_shard(path / "1.safetensors", "b"),
    )

    found = open_checkpoint.run(settings(path, 60), progress)
    found.close()

    assert sorted(found.tensors) == ["a", "b"]
    assert progress.said[:-1] == [
        f"{path} is not a complete checkpoint: {problems} problem(s)" for problems in (2, 1, 1)
    ]
    assert progress.said[-1].startswith("safetensors, 2 file(s), 2 tensors, 2.")


def test_an_empty_directory_is_waited_for_too(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    progress = Bringing(lambda: write_shard(tmp_path / "model/0.safetensors", "a"))

    found = open_checkpoint.run(settings(tmp_path / "model", 60), progress)
    found.close()

    assert progress.said[0].endswith("found: nothing")
    assert sorted(found.tensors) == ["a"]


def test_a_checkpoint_that_stays_incomplete_is_refused_with_what_it_lacks(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "0.safetensors"}}')
    began, before = time.monotonic(), len(list(Path("/proc/self/fd").iterdir()))

    with pytest.raises(CheckpointError) as caught:
        open_checkpoint.run(settings(tmp_path, 0.6), Progress())

    assert 0.6 <= time.monotonic() - began < 20
    assert [one.rpartition(": ")[0] for one in caught.value.problems] == [f"{tmp_path}/0.safetensors cannot be opened"]
    assert len(list(Path("/proc/self/fd").iterdir())) == before


@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO, errno.ESTALE])
def test_a_path_that_cannot_be_looked_at_is_a_checkpoint_error_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    written(tmp_path / "model", {"a": filled("F32", 3)}).close()
    path, real = tmp_path / "model", Path.stat

    def failing(self: Path, **options: bool) -> os.stat_result:
        if self == path:
            raise OSError(code, os.strerror(code), str(self))
        return real(self, **options)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "stat", failing)
        with pytest.raises(CheckpointError) as caught:
            open_checkpoint.run(settings(path, 0), Progress())

    assert str(caught.value) == (
        f"{path} cannot be read: [Errno {code}] {os.strerror(code)}: '{path}'; check model.checkpoint and its "
        f"permissions"
    )


# Another user may not be allowed to read this program either: all of it is loaded before.
AS_NOBODY = """
import os, sys
from pathlib import Path
from app import plugins
from app.checkpoints import open_checkpoint
from app.errors import CheckpointError
open_checkpoint(Path(sys.argv[1])).close()
names = plugins.names("app.checkpoints")
plugins.names = lambda package: names
if os.geteuid() == 0:
    os.seteuid(65534)
try:
    open_checkpoint(Path(sys.argv[2]))
except CheckpointError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("closed", "named", "told"),
    [
        ("outer", "outer/model", "{named} cannot be read: [Errno 13] Permission denied: '{named}'; check model."),
        ("outer/model", "outer/model", "{named} cannot be read: [Errno 13] Permission denied: '{named}'; check model."),
        ("outer/model/0.safetensors", "outer/model", "{closed} cannot be opened: Permission denied"),
        ("outer/model/0.safetensors", "outer/model/0.safetensors", "{closed} cannot be opened: Permission denied"),
    ],
)
def test_what_this_user_may_not_read_is_a_checkpoint_error(closed: str, named: str, told: str) -> None:
    # Not below the directories of pytest, which nobody else may enter.
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        root.chmod(0o755)
        written(root / "outer/model", {"a": filled("F32", 3)}).close()
        written(root / "open", {"a": filled("F32", 3)}).close()
        (root / closed).chmod(0)
        command = [sys.executable, "-c", AS_NOBODY, str(root / "open"), str(root / named)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        (root / closed).chmod(0o755)

    assert (done.returncode, done.stderr) == (0, "")
    assert told.format(named=root / named, closed=root / closed) in done.stdout


@pytest.mark.parametrize("wait_s", [0, 0.3])
def test_what_does_not_come_in_time_is_refused(tmp_path: Path, wait_s: float) -> None:
    progress, began = Progress(), time.monotonic()

    with pytest.raises(CheckpointError, match="does not exist; model"):
        open_checkpoint.run(settings(tmp_path / "model", wait_s), progress)

    assert wait_s <= time.monotonic() - began < wait_s + 20
    assert bool(progress.detail) is bool(wait_s)


def test_a_start_that_is_stopped_does_not_go_on_waiting(tmp_path: Path) -> None:
    progress = Progress()
    threading.Timer(0.1, progress.stop).start()

    with pytest.raises(Stopped):
        open_checkpoint.run(settings(tmp_path / "model", 60), progress)

    assert progress.detail.startswith(f"waiting for {tmp_path}/model, ")
