"""A start may wait for whoever brings the checkpoint, but never longer than it was told."""

import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from app.errors import CheckpointError
from app.progress import Progress, Stopped
from app.settings import Settings
from app.stages.open_checkpoint import open_checkpoint
from tests.unit.written import filled, written


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
