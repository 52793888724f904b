"""Methods of the module that are served beside its forward: compiled, warmed, proven and asked for by name."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.e2e import models
from tests.e2e.conftest import JSON, Start, configuration, save
from tests.e2e.harness import outputs

X = {"name": "x", "datatype": "FP32", "shape": ["batch", 16], "pad": 0}
PATHS = {
    "encode": {
        "inputs": [X],
        "outputs": [{"name": "hidden", "datatype": "FP32", "shape": ["batch", 16]}],
        "buckets": [{"batch": 4}],
    },
    "compare": {
        "inputs": [{**X, "name": "left"}, {"name": "right", "datatype": "FP32", "shape": ["other", 16], "pad": 0}],
        "outputs": [{"name": "score", "datatype": "FP32", "shape": ["batch", "other"]}],
        "buckets": [{"batch": 2, "other": 3}, {"batch": 8, "other": 5, "required": False}],
    },
}
BUCKETS = ["batch=2", "batch=8", "encode:batch=4", "compare:batch=2,other=3", "compare:batch=8,other=5"]


def config(directory: Path, **sections: Any) -> JSON:
    torch.manual_seed(3)
    save(models.Paired(), directory / "model.safetensors")
    paths = sections.pop("paths", PATHS)
    made = configuration("paired", directory / "model.safetensors", directory / "store", paths=paths, **sections)
    made["dimensions"]["other"] = {"min": 1, "max": 8, "buckets": [3, 5]}
    return made


def module(directory: Path) -> models.Paired:
    torch.manual_seed(3)
    return models.Paired()


def rows(count: int, seed: int) -> Any:
    return np.random.default_rng(seed).normal(size=(count, 16)).astype(np.float32)


def test_a_method_is_compiled_beside_the_forward_and_both_keep_the_numbers_in_their_code(
    start: Start, tmp_path: Path
) -> None:
    wanted, given = module(tmp_path), config(tmp_path, compile={"engine": "aot"}, paths={"encode": PATHS["encode"]})
    del given["dimensions"]["other"]
    server = start(given)
    server.wait()
    assert [(row["name"], row["state"]) for row in server.status()["buckets"]] == [
        (name, "warm") for name in BUCKETS[:3]
    ]
    x = rows(3, 1)
    with torch.no_grad():
        expected = {"forward": wanted(torch.from_numpy(x)), "encode": wanted.encode(torch.from_numpy(x))}
    for path, answer in expected.items():
        status, body = server.infer("paired", {"x": x}, parameters={"path": path})
        assert status == 200, body
        assert np.abs(outputs(body) - answer.numpy()).max() < 1e-5


@pytest.mark.parametrize(
    "compile_",
    [
        pytest.param({"engine": "aot"}, marks=pytest.mark.slow),
        {"engine": "eager"},
        pytest.param({"engine": "aot", "specialize": "bucket"}, marks=pytest.mark.slow),
        pytest.param({"engine": "jit"}, marks=pytest.mark.slow),
    ],
    ids=lambda section: "-".join(section.values()),
)
def test_every_path_is_warmed_proven_and_answers_as_the_method_does(
    start: Start, tmp_path: Path, compile_: JSON
) -> None:
    wanted, given = module(tmp_path), config(tmp_path, compile=compile_)
    for outcome in ("rebuilt", "restored") if compile_["engine"] != "eager" else ("none",):
        server = start(given)
        server.wait()
        report = server.status()
        assert report["artifacts"]["outcome"] == outcome
        assert [(row["name"], row["state"]) for row in report["buckets"]] == [(name, "warm") for name in BUCKETS]
        assert all(row["proof"] != "none" and row["max_error"] < 1e-5 for row in report["buckets"])
        answers_are_the_methods(server, wanted)
        covered = [row["shapes"] for row in report["coverage"]]
        assert covered[:3] == ["batch=2", "batch=8", "within batch=8"]
        assert {"encode:batch=4", "within encode:batch=4", "beyond, within compare:batch=16,other=8"} < set(covered)
        assert server.status()["late_compiles"] == 0
        assert server.stop() == 0


def answers_are_the_methods(server: Any, wanted: models.Paired) -> None:
    one, two = rows(3, 1), rows(2, 2)
    with torch.no_grad():
        left, right = torch.from_numpy(one), torch.from_numpy(two)
        expected = {
            "forward": ({"x": one}, wanted(left)),
            "encode": ({"x": one}, wanted.encode(left)),
            "compare": ({"left": one, "right": two}, wanted.compare(left, right)),
        }
    for path, (inputs, answer) in expected.items():
        status, body = server.infer("paired", inputs, parameters={"path": path})
        assert status == 200, body
        assert np.abs(outputs(body) - answer.numpy()).max() < 1e-5
    assert np.array_equal(outputs(server.infer("paired", {"x": one})[1]).shape, (3, 4)), "forward is the first path"


def test_requests_name_a_path_and_its_own_inputs_and_the_metadata_tells_them(start: Start, tmp_path: Path) -> None:
    server = start(config(tmp_path, compile={"engine": "eager"}))
    server.wait()

    status, body = server.infer("paired", {"x": rows(1, 0)}, parameters={"path": "decode"})
    assert (status, body["error"]) == (400, "unknown path 'decode'; the model has forward, encode, compare")
    status, body = server.infer("paired", {"x": rows(1, 0)}, parameters={"path": "compare"})
    assert (status, body["error"]) == (400, "input left is missing; the model takes left, right")
    status, body = server.infer("paired", {"x": rows(1, 0)}, parameters={"path": "encode"}, outputs=[{"name": "y"}])
    assert (status, body["error"]) == (400, "unknown output 'y'; the model gives hidden")
    status, body = server.infer("paired", {"x": rows(16, 0)}, parameters={"path": "encode"})
    assert status == 200, "beyond the buckets, within the range: the module runs it"

    status, told, _ = server.get("/v2/models/paired")
    assert b'"paths"' in told
    assert b'"name":"score","datatype":"FP32","shape":[-1,-1]' in told


def test_a_method_that_the_module_lacks_is_named_with_those_it_has(start: Start, tmp_path: Path) -> None:
    given = config(tmp_path, compile={"engine": "eager"})
    given["paths"]["encoed"] = given["paths"].pop("encode")
    server = start(given)
    assert server.exit_code() == 2
    assert (
        "paths.encoed: Paired, which model.factory tests.e2e.models:paired makes, has no such method; "
        "it has forward, encode, compare" in server.text()
    )


def test_a_model_may_be_served_without_its_forward(start: Start, tmp_path: Path) -> None:
    given = config(tmp_path, compile={"engine": "eager"})
    del given["inputs"], given["outputs"]
    server = start(given)
    server.wait()
    status, body = server.infer("paired", {"x": rows(3, 1)})
    assert (status, outputs(body).shape) == (200, (3, 16))
