"""Which engine a model lands on, and that it answers as the module does."""

import json
import os
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from app.artifacts.seal import seal
from app.identity import ArtifactIdentity
from tests.e2e import models
from tests.e2e.conftest import JSON, Start, configuration, save
from tests.e2e.harness import Server, command, outputs


def spread(*shape: int) -> torch.Tensor:
    return torch.linspace(-1, 1, int(np.prod(shape))).reshape(shape)


def answers(module: torch.nn.Module, x: torch.Tensor) -> Any:
    with torch.no_grad():
        return module(x).numpy()


COMPILERS = ("g++", "c++", "gcc", "cc", "clang++", "clang")


@pytest.fixture
def no_compiler(tmp_path: Path) -> tuple[dict[str, str], Path]:
    """A search path on which every compiler notes that it was called, and fails."""
    directory, calls = tmp_path / "bin", tmp_path / "calls"
    directory.mkdir()
    for name in COMPILERS:
        (directory / name).write_text(f'#!/bin/sh\necho "$0 $*" >> {calls}\nexit 1\n')
        (directory / name).chmod(0o755)
    return {"PATH": f"{directory}:{os.environ['PATH']}"}, calls


def layers(report: JSON) -> dict[str, tuple[str, int]]:
    return {layer["name"]: (layer["result"], layer["count"]) for layer in report["artifacts"]["layers"]}


def test_a_model_that_cannot_be_exported_is_compiled_otherwise_and_restored_without_a_compiler(
    start: Start, tmp_path: Path, no_compiler: tuple[dict[str, str], Path]
) -> None:
    torch.manual_seed(1)
    module = models.Branching()
    save(module, tmp_path / "model.safetensors")
    config = configuration("branching", tmp_path / "model.safetensors", tmp_path / "store")
    environment, calls = no_compiler
    for outcome, env in (("rebuilt", None), ("restored", environment)):
        server = start(config, env=env)
        server.wait()
        report = server.status()
        assert (report["artifacts"]["engine"], report["artifacts"]["outcome"]) == ("jit", outcome)
        assert report["artifacts"]["why"].startswith("the aot engine could not be built: ")
        assert "data-dependent" in report["artifacts"]["why"].lower()
        assert report["weights"]["rebuilt_buffers"] == ["offsets"]
        assert report["late_compiles"] == 0
        found = layers(report)
        # Two buckets, a graph before and one after the branch; all is there before this process runs anything.
        assert (found["fx-graph"], found["aotautograd"], found["dynamo"]) == (("hit", 4), ("hit", 4), ("bypass", 4))
        assert found["cpp-objects"][0] == "hit"
        assert found["device-graph"] == ("bypass", 0)
        for rows in (1, 2, 5):
            status, body = server.infer("branching", {"x": spread(rows, 16).numpy()})
            assert status == 200
            assert np.abs(outputs(body) - answers(module, spread(rows, 16))).max() < 1e-6
        assert server.status()["late_compiles"] == 0
        if outcome == "rebuilt":
            compiles_late(server)
        assert server.stop() == 0
    assert not calls.exists(), calls.read_text()


def compiles_late(server: Server) -> None:
    """Ask for the branch that warm-up has not taken: it is served, seen, and explained."""
    status, _ = server.infer("branching", {"x": np.full((2, 16), -1e9, np.float32)})
    assert status == 200
    assert server.status()["late_compiles"] >= 1
    assert server.get("/healthz")[0] == 200
    status, text, _ = server.get("/readyz/late-compile")
    assert status == 503
    assert re.search(r"compilation\(s\) after ready, the last for x \[2, 16\]\n", text.decode() + "\n"), text
    assert "forward" not in text.decode(), "a guard may name what was computed from a request; probes are public"
    (told,) = (event["event"] for event in server.events() if "compiled after ready" in str(event.get("event")))
    assert re.search(r"compiled after ready for x \[2, 16\]: .*forward", told), told


@pytest.mark.parametrize(
    ("model", "engine", "reason"),
    [
        pytest.param(models.Gathering, "aot", "", marks=pytest.mark.slow),
        pytest.param(models.Breaking, "jit", "the aot engine could not be built: .*numpy", marks=pytest.mark.slow),
        pytest.param(
            models.Foreign,
            "jit",
            r"the aot engine could not be built: .*custom operators \(warmgate_tests::doubled",
            marks=pytest.mark.slow,
        ),
        (models.Stateful, "eager", "aot .* keep state beside their tensors .*; the jit .* keep state beside"),
    ],
)
def test_each_model_lands_on_the_best_engine_that_can_run_it_and_is_told_why_not_on_a_better_one(
    start: Start, tmp_path: Path, model: type[models.Tiny], engine: str, reason: str
) -> None:
    torch.manual_seed(1)
    module = model()
    if isinstance(module, models.Stateful):
        module.factor = 3.0
    save(module, tmp_path / "model.safetensors")
    config = configuration(model.__name__.lower(), tmp_path / "model.safetensors", tmp_path / "store")
    server = start(config)
    server.wait()

    report = server.status()["artifacts"]
    assert report["engine"] == engine
    assert re.search(reason, report["why"]), report["why"]
    status, body = server.infer(config["model"]["name"], {"x": spread(5, 16).numpy()})
    assert status == 200
    assert np.abs(outputs(body) - answers(module, spread(5, 16))).max() < 1e-6


@pytest.mark.slow
def test_a_restored_cache_that_lacks_an_object_is_no_restored_one(start: Start, tmp_path: Path) -> None:
    torch.manual_seed(1)
    save(models.Tiny(), tmp_path / "model.safetensors")
    config = configuration(
        "tiny", tmp_path / "model.safetensors", tmp_path / "store", compile={"engine": "jit", "artifacts": ""}
    )
    config["compile"]["artifacts"] = str(tmp_path / "store")
    assert build(config, tmp_path).returncode == 0
    (artifact,) = (path for path in (tmp_path / "store").iterdir() if (path / "manifest.json").exists())
    unseal(artifact, "*.so")
    server = start(config)
    server.wait()
    report = server.status()
    assert report["artifacts"]["outcome"] == "rebuilt"
    assert layers(report)["cpp-objects"][0] == "miss"


def build(config: JSON, directory: Path) -> Any:
    (directory / "build.yaml").write_text(json.dumps(config))
    return command("build", "--config", str(directory / "build.yaml"))


def unseal(artifact: Path, pattern: str) -> None:
    """Take files out of an artifact and seal it again, as whoever may write to the store could."""
    manifest = json.loads((artifact / "manifest.json").read_text())
    gone = {str(path.relative_to(artifact)) for path in artifact.rglob(pattern)}
    assert gone
    for name in gone:
        (artifact / name).unlink()
    content = {
        k: v for k, v in manifest.items() if k not in {"format", "digest", "identity", "files", "content_sha256"}
    }
    (artifact / "manifest.json").unlink()
    seal(artifact, ArtifactIdentity(manifest["identity"]), content)


@pytest.mark.parametrize("engine", ["auto", "aot"])
def test_code_that_is_restored_calls_no_compiler_and_imports_none(
    start: Start, tiny_config: JSON, no_compiler: tuple[dict[str, str], Path], engine: str
) -> None:
    tiny_config["compile"]["engine"] = engine
    environment, calls = no_compiler
    server = start(tiny_config, env=environment)
    server.wait()
    report = server.status()
    assert report["artifacts"]["outcome"] == "restored"
    assert {result for name, (result, _) in layers(report).items() if name != "sealed-artifact"} == {"bypass"}
    maps = Path(f"/proc/{server.process.pid}/maps").read_text()
    assert "libtorch_cpu" in maps
    assert not calls.exists()


def test_the_eager_engine_serves_when_it_is_asked_for(start: Start, tiny_config: JSON) -> None:
    tiny_config["compile"]["engine"] = "eager"
    server = start(tiny_config)
    server.wait()
    report = server.status()
    assert (report["artifacts"]["engine"], report["artifacts"]["outcome"]) == ("eager", "none")
    assert [(b["state"], b["proof"], b["max_error"]) for b in report["buckets"]] == [("warm", "reference", 0.0)] * 2


@pytest.mark.slow
def test_tied_weights_whose_file_holds_one_name_are_served_by_compiled_code(start: Start, tmp_path: Path) -> None:
    torch.manual_seed(2)
    module = models.Tied()
    save(module, tmp_path / "model.safetensors")
    config = configuration(
        "tied",
        tmp_path / "model.safetensors",
        tmp_path / "store",
        inputs=[{"name": "ids", "datatype": "INT64", "shape": ["batch", "length"], "low": 0, "high": 32}],
        outputs=[{"name": "scores", "datatype": "FP32", "shape": ["batch", 32]}],
        dimensions={"length": {"min": 2, "max": 8, "buckets": [4]}},
    )
    server = start(config)
    server.wait()
    report = server.status()
    assert report["artifacts"]["engine"] == "aot", report["artifacts"]["why"]
    assert report["weights"]["ties"] == [["embed.weight", "head.weight"]]
    ids = torch.arange(15).reshape(3, 5)
    status, body = server.infer("tied", {"ids": ids.numpy()})
    assert status == 200
    assert np.abs(outputs(body) - answers(module, ids)).max() < 1e-6


@pytest.mark.slow
def test_an_operator_without_a_c_interface_runs_by_torchs_own_runner(start: Start, tmp_path: Path) -> None:
    torch.manual_seed(3)
    module = models.Eigen()
    save(module, tmp_path / "model.safetensors")
    config = configuration(
        "eigen",
        tmp_path / "model.safetensors",
        tmp_path / "store",
        inputs=[{"name": "x", "datatype": "FP32", "shape": ["batch", 4]}],
    )
    for outcome in ("rebuilt", "restored"):
        server = start(config)
        server.wait()
        artifacts = server.status()["artifacts"]
        assert (artifacts["engine"], artifacts["outcome"]) == ("aot", outcome), artifacts["why"]
        status, body = server.infer("eigen", {"x": spread(3, 4).numpy()})
        assert status == 200
        assert np.abs(outputs(body) - answers(module, spread(3, 4))).max() < 1e-5
        assert server.stop() == 0


@pytest.mark.slow
def test_bfloat16_is_compiled_proven_and_recalled_as_it_is(start: Start, tmp_path: Path) -> None:
    save(models.Precise(), tmp_path / "model.safetensors")
    brief = {"datatype": "BF16", "shape": ["batch", 16]}
    config = configuration(
        "precise",
        tmp_path / "model.safetensors",
        tmp_path / "store",
        inputs=[],
        outputs=[],
        paths={"brief": {"inputs": [{"name": "x", "pad": 0, **brief}], "outputs": [{"name": "b", **brief}]}},
    )
    x = spread(3, 16).bfloat16()
    rows = [{"name": "x", **brief, "shape": [3, 16], "data": x.float().ravel().tolist()}]
    for outcome, proof in (("rebuilt", "reference"), ("restored", "golden")):
        server = start(config)
        server.wait()
        report = server.status()
        assert (report["artifacts"]["engine"], report["artifacts"]["outcome"]) == ("aot", outcome)
        assert {bucket["proof"] for bucket in report["buckets"]} == {proof}
        status, body = server.post("/v2/models/precise/infer", json.dumps({"inputs": rows}).encode())
        assert status == 200, body
        assert np.array_equal(outputs(json.loads(body)), (x / 2).float().numpy())
        assert server.stop() == 0


@pytest.fixture(scope="module")
def by_bucket(tmp_path_factory: pytest.TempPathFactory) -> JSON:
    """A model compiled for its buckets alone, so that other shapes fall under the policy."""
    directory = tmp_path_factory.mktemp("by-bucket")
    torch.manual_seed(4)
    save(models.Tiny(), directory / "model.safetensors")
    return configuration("tiny", directory / "model.safetensors", directory / "store", compile={"specialize": "bucket"})


@pytest.mark.slow
def test_shapes_between_static_buckets_are_padded_and_sliced_back(start: Start, by_bucket: JSON) -> None:
    torch.manual_seed(4)
    module = models.Tiny()
    server = start(by_bucket)
    server.wait()
    for rows in (1, 2, 5, 8):
        status, body = server.infer("tiny", {"x": spread(rows, 16).numpy()})
        assert status == 200
        assert body["outputs"][0]["shape"] == [rows, 4]
        assert np.abs(outputs(body) - answers(module, spread(rows, 16))).max() < 1e-6
    metrics = server.get("/metrics")[1].decode()
    assert 'warmgate_uncovered_requests_total{policy="pad"} 2.0' in metrics
    status, body = server.infer("tiny", {"x": spread(9, 16).numpy()})
    assert (status, body["error"]) == (400, "shape batch=9 is not covered; nearest covered: batch=8 or batch=2")


@pytest.mark.slow
def test_shapes_between_static_buckets_are_refused_when_the_policy_is_reject(start: Start, by_bucket: JSON) -> None:
    server = start({**by_bucket, "uncovered": "reject"})
    server.wait()
    assert server.infer("tiny", {"x": spread(8, 16).numpy()})[0] == 200
    status, body = server.infer("tiny", {"x": spread(5, 16).numpy()})
    assert status == 400
    assert body == {
        "error": "shape batch=5 is not covered; nearest covered: batch=8 or batch=2",
        "reason": "uncovered",
    }
    metrics = server.get("/metrics")[1].decode()
    assert 'warmgate_uncovered_requests_total{policy="reject"} 1.0' in metrics
    assert 'warmgate_rejected_total{reason="uncovered"} 1.0' in metrics


@pytest.mark.slow
def test_the_module_serves_until_its_code_is_built_and_no_request_is_lost(start: Start, tmp_path: Path) -> None:
    torch.manual_seed(5)
    module = models.Tiny()
    save(module, tmp_path / "model.safetensors")
    config = configuration(
        "tiny", tmp_path / "model.safetensors", tmp_path / "store", compile={"on_miss": "eager_then_swap"}
    )
    server = start(config)
    server.wait()
    early = server.status()["artifacts"]
    assert (early["engine"], early["outcome"]) == ("eager", "none")
    assert "compile.on_miss is eager_then_swap" in early["why"]
    wanted, asked = answers(module, spread(3, 16)), 0
    until = time.monotonic() + 180
    while (report := server.status())["artifacts"]["engine"] == "eager":
        status, body = server.infer("tiny", {"x": spread(3, 16).numpy()})
        assert status == 200
        assert np.abs(outputs(body) - wanted).max() < 1e-6
        asked += 1
        assert time.monotonic() < until, server.text()[-3000:]
    assert asked > 20
    assert (report["artifacts"]["engine"], report["artifacts"]["outcome"]) == ("aot", "rebuilt")
    assert report["ready"] is True
    assert {(bucket["state"], bucket["proof"]) for bucket in report["buckets"]} == {("warm", "reference")}
    assert report["late_compiles"] == 0
    assert 'engine="aot"' in server.get("/metrics")[1].decode()
    status, body = server.infer("tiny", {"x": spread(3, 16).numpy()})
    assert np.abs(outputs(body) - wanted).max() < 1e-6
    assert server.stop() == 0
    again = start(config)
    again.wait()
    report = again.status()
    assert (report["artifacts"]["engine"], report["artifacts"]["outcome"]) == ("aot", "restored")
    assert {bucket["proof"] for bucket in report["buckets"]} == {"golden"}


@pytest.mark.slow
def test_code_that_answers_otherwise_is_never_swapped_in(start: Start, tmp_path: Path) -> None:
    torch.manual_seed(6)
    save(models.Unequal(), tmp_path / "model.safetensors")
    config = configuration(
        "unequal", tmp_path / "model.safetensors", tmp_path / "store", compile={"on_miss": "eager_then_swap"}
    )
    server = start(config)
    server.wait()
    until = time.monotonic() + 180
    while "could not be swapped in" not in (why := server.status()["artifacts"]["why"]):
        assert time.monotonic() < until, why
        time.sleep(0.2)
    assert "output y differs from the reference" in why
    assert server.status()["artifacts"]["engine"] == "eager"
    assert server.get("/readyz")[0] == 200
    assert server.infer("unequal", {"x": spread(3, 16).numpy()})[0] == 200


def test_a_server_that_leaves_while_it_builds_leaves_nothing_behind(start: Start, tmp_path: Path) -> None:
    torch.manual_seed(5)
    save(models.Tiny(), tmp_path / "model.safetensors")
    config = configuration(
        "tiny", tmp_path / "model.safetensors", tmp_path / "store", compile={"on_miss": "eager_then_swap"}
    )
    server = start(config)
    server.wait()
    until = time.monotonic() + 60
    while not list((tmp_path / "store").glob(".building-*")):
        assert time.monotonic() < until
        time.sleep(0.05)
    assert server.stop() == 0
    assert list((tmp_path / "store").glob(".building-*")) == []
