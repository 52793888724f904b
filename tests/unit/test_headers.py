"""A copy of a checkpoint without its data says so, opens as the original does, and is never served."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.artifacts.collect import _described
from app.checkpoints import Checkpoint, open_checkpoint
from app.errors import CheckpointError, ResourceError, SettingsError
from app.headers import copy_headers
from app.settings import Settings
from app.stages.read_weights import read_weights
from tests.unit.written import Tensors, filled, written

SHARDS: tuple[Tensors, ...] = (
    {"a": filled("F32", 1000, 300), "empty": filled("F32", 0, 3)},
    {"b": filled("BF16", 64, 2), "scalar": filled("F64"), "four": filled("F4", 3, 8)},
)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Iterator[Checkpoint]:
    made = written(tmp_path / "model", *SHARDS)
    (tmp_path / "model" / "config.json").write_text('{"layers": 2}')
    (tmp_path / "model" / "vocab.txt").write_text("a\nb\n")
    yield made
    made.close()


def test_the_copy_has_the_same_tensors_and_no_data(checkpoint: Checkpoint, tmp_path: Path) -> None:
    told = copy_headers(checkpoint, tmp_path / "deep" / "copy")
    copy = open_checkpoint(tmp_path / "deep" / "copy")
    copy.close()

    assert {n: _described(e) for n, e in copy.tensors.items()} == {
        n: _described(e) for n, e in checkpoint.tensors.items()
    }
    assert {path.name for path in (tmp_path / "deep" / "copy").iterdir()} == {
        "0.safetensors", "1.safetensors", "model.safetensors.index.json", "config.json", "vocab.txt",
    }  # fmt: skip
    assert told["bytes_on_disk"] < 100_000
    assert told["bytes"] > 1_200_000
    assert copy.headers_only
    assert copy.notes[-1] == "headers only, no data: for `build` and `check`, never served"
    assert not checkpoint.headers_only
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["copy"]


def test_a_single_file_brings_only_json_from_beside_it(checkpoint: Checkpoint, tmp_path: Path) -> None:
    (tmp_path / "model" / "model.safetensors.index.json").unlink()
    one = open_checkpoint(tmp_path / "model" / "0.safetensors")

    copy_headers(one, tmp_path / "copy")
    one.close()

    assert sorted(path.name for path in (tmp_path / "copy").iterdir()) == ["0.safetensors", "config.json"]


def test_metadata_of_the_file_is_kept(tmp_path: Path) -> None:
    made = written(tmp_path / "model", {"a": filled("F32", 2)})
    made.close()
    file = tmp_path / "model" / "0.safetensors"
    data = file.read_bytes()
    header = {"__metadata__": {"format": "pt"}, **json.loads(data[8:-8])}
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[-8:])
    made = open_checkpoint(tmp_path / "model")

    copy_headers(made, tmp_path / "copy")
    made.close()
    copied = (tmp_path / "copy" / "0.safetensors").read_bytes()

    assert json.loads(copied[8:-8])["__metadata__"] == {"format": "pt", "warmgate.headers_only": "true"}
    assert copied[-8:] == bytes(8)


def test_a_copy_is_never_served(checkpoint: Checkpoint, tmp_path: Path) -> None:
    copy_headers(checkpoint, tmp_path / "copy")
    copy = open_checkpoint(tmp_path / "copy")
    copy.close()
    settings = Settings(
        model={"name": "m", "factory": "a:b", "checkpoint": str(tmp_path / "copy")},
        inputs=[{"name": "x", "datatype": "FP32", "shape": [1]}],
        outputs=[{"name": "y", "datatype": "FP32", "shape": [1]}],
    )

    with pytest.raises(CheckpointError) as caught:
        read_weights.run(settings, copy, None, None)

    assert str(caught.value) == f"{tmp_path / 'copy'} has headers only, for `build`; name the whole checkpoint"


def test_a_directory_that_is_there_is_not_touched(checkpoint: Checkpoint, tmp_path: Path) -> None:
    (tmp_path / "copy").mkdir()

    with pytest.raises(SettingsError, match="copy exists; name a directory that is to be made"):
        copy_headers(checkpoint, tmp_path / "copy")


def test_a_place_that_cannot_be_written_is_told(checkpoint: Checkpoint, tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(ResourceError, match="cannot be written: "):
        copy_headers(checkpoint, tmp_path / "file" / "copy")
