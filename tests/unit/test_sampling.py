"""Inputs for warm-up come from a file, are zero, or are random: always the declared type, shape and range."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from app.buckets import Bucket
from app.errors import SettingsError
from app.paths import ModelPath
from app.samples import sample_inputs
from app.sampling import sampler
from app.servable import TensorSpec

SPECS = [
    TensorSpec("ids", "INT64", ("batch", "sequence"), low=5, high=9),
    TensorSpec("scale", "FP32", ("batch", 2), low=-1, high=1),
]
GOOD = {"ids": np.array([[5, 6, 7], [8, 5, 6]]), "scale": np.array([[0.5, 1.0]], np.float32)}


def path(*inputs: TensorSpec, name: str = "forward") -> ModelPath:
    return ModelPath(name, inputs, (), (), ())


def bucket(batch: int, sequence: int, path: str = "forward") -> Bucket:
    return Bucket((("batch", batch), ("sequence", sequence)), path=path)


def written(file: Path, **arrays: np.ndarray) -> str:
    if file.suffix == ".npz":
        np.savez(file, **arrays)
    else:
        save_file(arrays, file)
    return str(file)


@pytest.mark.parametrize("name", ["samples.npz", "samples.safetensors"])
def test_a_file_is_cut_to_a_bucket_and_begins_again_where_it_has_less(tmp_path: Path, name: str) -> None:
    made = sampler(written(tmp_path / name, **GOOD), [path(*SPECS)])(bucket(3, 2))

    assert list(made) == ["ids", "scale"]
    assert made["ids"].tolist() == [[5, 6], [8, 5], [5, 6]]
    assert made["scale"].tolist() == [[0.5, 1.0]] * 3
    assert [array.dtype for array in made.values()] == [np.int64, np.float32]
    assert all(array.flags.c_contiguous for array in made.values())


def test_zeros_stay_within_the_declared_range() -> None:
    specs = [*SPECS, TensorSpec("below", "INT32", (1,), high=0), TensorSpec("any", "FP16", ())]
    made = sampler("zeros", [path(*specs)])(bucket(1, 2))
    assert made["ids"].tolist() == [[5, 5]], "token 0 is out of range here"
    assert made["scale"].tolist() == [[0.0, 0.0]]
    assert made["below"].tolist() == [-1]
    assert made["any"].shape == ()


def test_without_a_source_inputs_are_random() -> None:
    one = bucket(2, 3)
    made, wanted = sampler(None, [path(*SPECS)])(one), sample_inputs(SPECS, dict(one.sizes), one.name)
    assert all(np.array_equal(made[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize(
    ("arrays", "problem"),
    [
        ({"ids": GOOD["ids"]}, "input scale is missing"),
        ({**GOOD, "ids": GOOD["ids"].astype(np.int32)}, "input ids is int32, declared is INT64"),
        ({**GOOD, "ids": GOOD["ids"][0]}, "input ids has shape [3], declared is ['batch', 'sequence']"),
        ({**GOOD, "ids": GOOD["ids"][:0]}, "input ids has shape [0, 3], declared is ['batch', 'sequence']"),
        ({**GOOD, "scale": np.ones((1, 3), np.float32)}, "input scale has shape [1, 3], declared is ['batch', 2]"),
        ({**GOOD, "ids": GOOD["ids"] - 1}, "input ids has the value 4, its low is 5"),
        ({**GOOD, "ids": GOOD["ids"] + 1}, "input ids has the value 9, its high is 9"),
        ({**GOOD, "scale": GOOD["scale"] * 2}, "input scale has the value 2.0, its high is 1"),
        ({**GOOD, "scale": GOOD["scale"] * np.nan}, "input scale has values that are not finite"),
    ],
)
def test_a_file_that_does_not_hold_the_inputs_is_refused_by_name(
    tmp_path: Path, arrays: dict[str, np.ndarray], problem: str
) -> None:
    with pytest.raises(SettingsError) as caught:
        sampler(written(tmp_path / "samples.npz", **arrays), [path(*SPECS)])
    assert problem in str(caught.value)


@pytest.mark.parametrize("name", ["samples.npz", "samples.safetensors"])
@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 no archive", b"\xff" * 100])
def test_a_file_that_is_none_is_refused(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SettingsError, match="cannot be read"):
        sampler(str(tmp_path / name), [path(*SPECS)])
    with pytest.raises(SettingsError, match="cannot be read"):
        sampler(str(tmp_path / "nowhere.npz"), [path(*SPECS)])


def test_a_file_with_pickles_is_never_unpickled(tmp_path: Path) -> None:
    file = tmp_path / "samples.npz"
    np.savez(file, ids=np.array([{"a": 1}], dtype=object), scale=GOOD["scale"])
    with pytest.raises(SettingsError, match="cannot be read"):
        sampler(str(file), [path(*SPECS)])
