"""Warm-up covers the promise, stays within its budget and leaves no trace."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file

from app import configure
from app.commands import run_part
from app.errors import ResourceError
from app.stages import STARTUP
from app.stages.warm_buckets import WarmEngine
from app.weights import LoadedModel
from tests.e2e import models
from tests.e2e.conftest import JSON, Start, configuration, save
from tests.e2e.harness import outputs

TRACES = ("torch's random state", "numpy's random state", "python's random state", "the default dtype")


def config(directory: Path, model: type[torch.nn.Module], **sections: Any) -> JSON:
    torch.manual_seed(1)
    save(model(), directory / "model.safetensors")
    name = model.__name__.lower()
    return configuration(
        name, directory / "model.safetensors", directory / "store", compile={"engine": "eager"}, **sections
    )


def warm(directory: Path, given: JSON) -> dict[Any, Any]:
    """Run the start-up graph in this process until every bucket is warm."""
    file = directory / "config.yaml"
    file.write_text(yaml.safe_dump(given))
    return dict(run_part(STARTUP.until(WarmEngine), configure.load(file), lambda _: None).values)


def test_runs_leave_nothing_behind_and_what_they_changed_is_told(tmp_path: Path) -> None:
    given = config(tmp_path, models.Tallying)
    before = torch.get_rng_state(), np.random.get_state(), random.getstate(), torch.get_default_dtype()

    values = warm(tmp_path, given)

    assert torch.equal(torch.get_rng_state(), before[0])
    assert repr(np.random.get_state()) == repr(before[1])
    assert random.getstate() == before[2]
    assert torch.get_default_dtype() == before[3]
    buffers = dict(values[LoadedModel].module.named_buffers())
    assert buffers["calls"].item() == 0
    assert torch.equal(buffers["last"], torch.zeros(1))
    assert values[WarmEngine].restored == ("calls", "last", *TRACES)


def test_a_model_whose_state_no_answer_depends_on_is_served_and_its_state_is_told(start: Start, tmp_path: Path) -> None:
    server = start(config(tmp_path, models.Tallying))
    server.wait()
    assert server.status()["restored_state"] == ["calls", "last", *TRACES]
    assert server.infer("tallying", {"x": np.zeros((3, 16), np.float32)})[0] == 200


@pytest.mark.parametrize("source", ["file", "zeros"])
def test_buckets_are_warmed_and_proven_with_the_given_samples(start: Start, tmp_path: Path, source: str) -> None:
    rows = np.arange(48, dtype=np.float32).reshape(3, 16)
    np.savez(tmp_path / "samples.npz", x=rows)
    samples = str(tmp_path / "samples.npz") if source == "file" else source
    given = config(tmp_path, models.Tiny, warmup={"samples": samples})

    values = warm(tmp_path, given)

    wanted = np.stack([rows[n % 3] for n in range(8)]) if source == "file" else np.zeros((8, 16), np.float32)
    assert np.array_equal(values[WarmEngine].inputs["batch=8"]["x"], wanted)
    assert [row.state for row in values[WarmEngine].rows] == ["warm", "warm"]
    assert all(row.peak_bytes is not None and row.kept_bytes is not None for row in values[WarmEngine].rows)


def test_samples_that_are_none_end_the_start_before_anything_is_read(start: Start, tmp_path: Path) -> None:
    given = config(tmp_path, models.Tiny, warmup={"samples": str(tmp_path / "nowhere.npz")})
    server = start(given)
    assert server.exit_code() == 2
    assert "warmup.samples" in server.text()


class Heavy(models.Tiny):
    """Takes a mebibyte for each row, for the length of a run."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heavy = x.new_ones(len(x), 1 << 18)
        return super().forward(x) * heavy.mean(dim=1, keepdim=True)


def heavy() -> torch.nn.Module:
    return Heavy()


@pytest.mark.parametrize("required", [True, False])
def test_a_bucket_that_needs_more_memory_than_the_budget_is_not_promised(
    start: Start, tmp_path: Path, required: bool
) -> None:
    buckets = [{"batch": 8}, {"batch": 64, "required": required}]
    given = config(tmp_path, Heavy, warmup={"buckets": buckets, "budget_bytes": 32 << 20})
    given["model"]["factory"] = "tests.e2e.test_warmup:heavy"
    given["dimensions"]["batch"] = {"min": 1, "max": 64, "buckets": [8]}
    if required:
        with pytest.raises(ResourceError, match=r"required bucket batch=64 .* needs about \d+ bytes, as batch=8 took"):
            warm(tmp_path, given)
        return
    server = start(given)
    server.wait()
    report = server.status()
    small, large = report["buckets"]
    assert (small["state"], large["state"]) == ("warm", "skipped")
    assert "warmup.budget_bytes = 33554432; raise it" in large["why"]
    assert [(row["shapes"], row["served"]) for row in report["coverage"]] == [
        ("batch=8", "exact"),
        ("within batch=8", "dynamic"),
        ("beyond, within batch=64", "uncovered"),
    ]


def test_the_module_itself_serves_what_no_bucket_covers_where_the_policy_says_so(
    start: Start, tiny_config: JSON
) -> None:
    tiny_config["uncovered"] = "eager"
    server = start(tiny_config)
    server.wait()
    report = server.status()
    assert (report["artifacts"]["engine"], report["artifacts"]["outcome"]) == ("aot", "restored")
    assert {row["shapes"]: (row["served"], row["by"], row["engine"]) for row in report["coverage"]} == {
        "batch=2": ("exact", "batch=2", "aot"),
        "batch=8": ("exact", "batch=8", "aot"),
        "within batch=8": ("dynamic", "the smallest that holds it", "aot"),
        "beyond, within batch=16": ("uncovered", "policy eager", "eager"),
    }
    module = models.Tiny()
    module.load_state_dict(load_file(tiny_config["model"]["checkpoint"]))
    for rows, uncovered in ((8, 0), (5, 0), (12, 1), (16, 2)):
        x = torch.linspace(-1, 1, rows * 16).reshape(rows, 16)
        status, body = server.infer("tiny", {"x": x.numpy()})
        assert status == 200
        assert np.array_equal(outputs(body), module(x).detach().numpy()) or rows <= 8
        assert np.abs(outputs(body) - module(x).detach().numpy()).max() < 1e-6
        metrics = server.get("/metrics")[1].decode()
        assert f'warmgate_uncovered_requests_total{{policy="eager"}} {uncovered}.0' in metrics
    assert server.status()["late_compiles"] == 0


def test_listed_buckets_are_warmed_in_the_order_of_the_list(tmp_path: Path) -> None:
    given = config(tmp_path, models.Tiny, warmup={"buckets": [{"batch": 8}, {"batch": 2}, {"batch": 4}]})
    assert [row.name for row in warm(tmp_path, given)[WarmEngine].rows] == ["batch=8", "batch=2", "batch=4"]
