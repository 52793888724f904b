"""The contract of the seam: every format that is found by its file keeps it, and a new one is tested without a test."""

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from app import plugins
from app.checkpoints import CheckpointFormat, open_checkpoint, scan_checkpoint
from app.errors import CheckpointError
from app.progress import Progress
from app.weights.install import stored_tensors
from app.weights.layout import Mode, plan_layout
from app.weights.plan import ModelTable, ModelTensor, WeightsPlan
from app.weights.reading import read_resident

State = dict[str, torch.Tensor]
STATE: State = {
    "layer.weight": torch.arange(24.0).reshape(4, 6),
    "layer.bias": torch.tensor([0.5, -1.0, float("nan"), 3.0], dtype=torch.bfloat16),
    "count": torch.tensor(7),
    "flags": torch.tensor([True, False, True]),
    "nothing": torch.zeros(0, 3),
}


def write_distributed(state: State, path: Path) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.save(dict(state), checkpoint_id=path, no_dist=True)


# A format without a way to write it here fails the first test.
WRITERS: dict[str, Callable[[State, Path], object]] = {
    "safetensors": lambda state, path: save_file(state, path / "model.safetensors"),
    "torch_zip": lambda state, path: torch.save(state, path / "pytorch_model.bin"),
    "dcp": write_distributed,
}
FORMATS = plugins.names("app.checkpoints")


def test_every_format_is_held_to_this_contract() -> None:
    assert set(FORMATS) == set(WRITERS)


@pytest.fixture(params=FORMATS)
def name(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture
def stored(name: str, tmp_path: Path) -> Path:
    path = tmp_path / "stored"
    path.mkdir()
    WRITERS[name](STATE, path)
    return path


def test_it_is_found_by_its_files_and_by_no_other(name: str, stored: Path, tmp_path: Path) -> None:
    for other in FORMATS:
        form = plugins.load("app.checkpoints", other, CheckpointFormat)
        assert bool(form.files(stored)) == (other == name)
        (tmp_path / "empty").mkdir(exist_ok=True)
        assert form.files(tmp_path / "empty") == ()


def test_names_dtypes_and_shapes_are_those_that_were_saved(stored: Path) -> None:
    checkpoint = open_checkpoint(stored, trust_pickle=True)
    checkpoint.close()
    assert checkpoint.table() == [
        ["count", "I64", []],
        ["flags", "BOOL", [3]],
        ["layer.bias", "BF16", [4]],
        ["layer.weight", "F32", [4, 6]],
        ["nothing", "F32", [0, 3]],
    ]


@pytest.mark.parametrize("mode", ["map", "read"])
def test_values_are_bit_for_bit_those_that_were_saved(stored: Path, mode: Mode) -> None:
    checkpoint = open_checkpoint(stored, trust_pickle=True)
    resident = read_resident(checkpoint, plan_layout(checkpoint, mode, "", None), Progress(), 1 << 20, {})
    rows = tuple(
        ModelTensor(n, checkpoint.tensors[n].dtype, tuple(t.shape), t.stride(), True, t.nbytes)
        for n, t in STATE.items()
    )
    plan = WeightsPlan({name: name for name in STATE}, (), {}, {}, ())
    found, _ = stored_tensors(ModelTable(rows, ()), checkpoint, resident.memory, plan)
    checkpoint.close()
    for name, tensor in STATE.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert found[name].contiguous().reshape(-1).view(torch.uint8).tolist() == (
            tensor.reshape(-1).view(torch.uint8).tolist()
        )


def test_a_file_cut_anywhere_is_refused_with_its_name(stored: Path) -> None:
    largest = max((file for file in stored.iterdir() if file.is_file()), key=lambda file: file.stat().st_size)
    data = largest.read_bytes()
    for size in (0, 1, len(data) // 3, len(data) // 2, len(data) - 1):
        largest.write_bytes(data[:size])
        with pytest.raises(CheckpointError) as caught:
            open_checkpoint(stored, trust_pickle=True)
        assert largest.name in str(caught.value), size


def test_what_is_wrong_is_told_and_what_is_right_is_still_there_to_be_shown(stored: Path) -> None:
    scan = scan_checkpoint(stored, trust_pickle=True)
    scan.close()
    assert scan.problems == []
    assert set(scan.tensors) == set(STATE)


def test_together_with_another_format_it_is_refused_with_a_list_of_both(name: str, stored: Path) -> None:
    other = next(one for one in FORMATS if one != name)
    WRITERS[other](STATE, stored)
    with pytest.raises(CheckpointError, match="holds checkpoints of 2 formats"):
        open_checkpoint(stored, trust_pickle=True)
