"""KServe's own client against a real server; `make clients` makes the environment that it needs for itself."""

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.e2e import models
from tests.e2e.conftest import JSON, configuration, save
from tests.e2e.harness import ROOT, Server
from tests.e2e.test_protocol import X

PYTHON = ROOT / ".cache/kserve/bin/python"
HALVE = {
    "inputs": [{"name": "x", "datatype": "FP16", "shape": ["batch", 16], "pad": 0}],
    "outputs": [{"name": "h", "datatype": "FP16", "shape": ["batch", 16]}],
    "buckets": [{"batch": 2}],
}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> JSON:
    """What the client tells of one server, asked for once."""
    assert PYTHON.exists(), "make clients makes the environment of KServe's client"
    directory = tmp_path_factory.mktemp("kserve")
    save(model(), directory / "model.safetensors")
    config = configuration(
        "halving",
        directory / "model.safetensors",
        directory / "store",
        paths={"halve": HALVE},
        compile={"engine": "eager"},
    )
    config["model"]["name"] = "served"
    with Server(directory, config) as server:
        server.wait()
        client = Path(__file__).with_name("kserve_client.py")
        done = subprocess.run(
            [PYTHON, client, f"http://127.0.0.1:{server.port}"], capture_output=True, text=True, check=False
        )
    assert done.returncode == 0, done.stderr
    found: JSON = json.loads(done.stdout)
    return found


def model() -> models.Halving:
    torch.manual_seed(0)
    return models.Halving()


def forward() -> Any:
    with torch.no_grad():
        return model()(torch.from_numpy(X)).numpy()


def test_health_is_understood(told: JSON) -> None:
    asked = ("live", "ready", "model ready", "other model ready")
    assert [told[name] for name in asked] == [True, True, True, False]


@pytest.mark.parametrize(
    ("name", "content_type"),
    [
        ("json", "application/json"),
        ("binary", "application/json"),
        ("both binary", "application/octet-stream"),
    ],
)
def test_tensors_as_json_and_raw_get_the_same_answer(told: JSON, name: str, content_type: str) -> None:
    found = told[name]
    assert "error" not in found, found
    assert (found["model"], found["output"], found["datatype"], found["type"]) == ("served", "y", "FP32", content_type)
    np.testing.assert_allclose(np.array(found["values"], np.float32), forward(), rtol=1e-6)


def test_the_id_comes_back(told: JSON) -> None:
    assert told["json"]["id"] == "a-1"


def test_half_precision_goes_both_ways_raw(told: JSON) -> None:
    found = told["half"]
    assert "error" not in found, found
    assert (found["output"], found["datatype"]) == ("h", "FP16")
    np.testing.assert_array_equal(np.array(found["values"], np.float16), X.astype(np.float16) * np.float16(0.5))


@pytest.mark.parametrize(
    ("name", "status", "text"),
    [
        ("wrong input", 400, "input x is missing; the model takes x"),
        ("wrong model", 404, "unknown model other; this server has served"),
    ],
)
def test_the_text_of_an_error_reaches_its_user(told: JSON, name: str, status: int, text: str) -> None:
    assert told[name]["status"] == status
    assert text in told[name]["error"]
