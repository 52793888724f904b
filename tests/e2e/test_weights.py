"""Checkpoints of every format through a real server: what is served, what is said about it, and what is refused."""

import hashlib
import json
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.e2e import models
from tests.e2e.conftest import JSON, Start, configuration
from tests.e2e.harness import Server, command, outputs

MIB = 1 << 20
X = torch.linspace(-1, 1, 32).reshape(2, 16)


def tiny_model() -> nn.Module:
    torch.manual_seed(3)
    return models.Tiny().eval()


def expected(module: nn.Module) -> np.ndarray[Any, Any]:
    with torch.no_grad():
        return module(X).float().numpy()


def eager(checkpoint: Path, tmp_path: Path, model: str = "tiny", **sections: Any) -> JSON:
    return configuration(model, checkpoint, tmp_path / "store", compile={"engine": "eager"}, **sections)


def answer(server: Server, model: str = "tiny") -> np.ndarray[Any, Any]:
    status, body = server.infer(model, {"x": X.numpy()})
    assert status == 200, body
    return outputs(body)


def fatal(server: Server) -> JSON:
    return next(event for event in server.events() if event["event"] == "fatal")


def write_safetensors(state: dict[str, Tensor], path: Path) -> Path:
    save_file(state, path / "model.safetensors")
    return path


def write_shards(state: dict[str, Tensor], path: Path) -> Path:
    weight_map = {}
    for number, name in enumerate(state):
        shard = f"model-{number}.safetensors"
        save_file({name: state[name]}, path / shard)
        weight_map[name] = shard
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return path


def write_snapshot(state: dict[str, Tensor], path: Path) -> Path:
    """A directory of links to files that are named by their sha256, as the hub's cache keeps them."""
    (path / "blobs").mkdir()
    (path / "snapshots/main").mkdir(parents=True)
    save_file(state, path / "new")
    digest = hashlib.sha256((path / "new").read_bytes()).hexdigest()
    (path / "new").rename(path / "blobs" / digest)
    (path / "snapshots/main/model.safetensors").symlink_to(f"../../blobs/{digest}")
    return path / "snapshots/main"


def write_torch(state: dict[str, Tensor], path: Path) -> Path:
    torch.save(state, path / "pytorch_model.bin")
    return path


def write_distributed(state: dict[str, Tensor], path: Path) -> Path:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.save(state, checkpoint_id=path / "step", no_dist=True)
    return path / "step"


# The small form runs each format once; what is left to the whole proof differs in the way of reading alone.
WAYS = [
    (write_shards, "map"),
    (write_snapshot, "read"),
    (write_torch, "map"),
    (write_distributed, "read"),
    pytest.param(write_safetensors, "map", marks=pytest.mark.slow),
    pytest.param(write_safetensors, "read", marks=pytest.mark.slow),
    pytest.param(write_shards, "read", marks=pytest.mark.slow),
    pytest.param(write_snapshot, "map", marks=pytest.mark.slow),
    pytest.param(write_torch, "read", marks=pytest.mark.slow),
    pytest.param(write_distributed, "map", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("write", "reading"), WAYS)
def test_a_model_is_served_from_every_format_in_both_ways_of_reading(
    start: Start, tmp_path: Path, write: Any, reading: str
) -> None:
    module = tiny_model()
    path = write(module.state_dict(), tmp_path)
    config = eager(path, tmp_path)
    config["model"] |= {"reading": reading, "trust_pickle": write is write_distributed}
    server = start(config)
    server.wait()
    assert np.array_equal(answer(server), expected(module))
    weights = server.status()["weights"]
    assert weights["mode"] == reading
    assert weights["why"] == f"model.reading is {reading}"
    assert weights["format"] == {write_torch: "torch", write_distributed: "dcp"}.get(write, "safetensors")
    assert weights["bytes_read"] >= sum(t.nbytes for t in module.state_dict().values())


def test_a_distributed_checkpoint_is_refused_without_trust_and_the_message_says_why(
    start: Start, tmp_path: Path
) -> None:
    server = start(eager(write_distributed(tiny_model().state_dict(), tmp_path), tmp_path))
    assert server.exit_code() == 3
    assert "model.trust_pickle: true" in fatal(server)["message"]
    assert "pickle" in fatal(server)["message"]


@pytest.mark.slow
def test_compiled_code_runs_on_cast_weights_that_it_was_built_for(start: Start, tmp_path: Path) -> None:
    module = tiny_model()
    path = write_safetensors(module.to(torch.bfloat16).state_dict(), tmp_path)
    config = configuration("tiny", path, tmp_path / "store")
    config["model"]["dtype"] = "float32"
    server = start(config)
    server.wait()
    report = server.status()
    assert report["artifacts"]["engine"] == "aot", report["artifacts"]["why"]
    assert {row["name"] for row in report["weights"]["cast"]} == set(module.state_dict())
    assert {(row["from"], row["to"]) for row in report["weights"]["cast"]} == {("BF16", "F32")}
    assert all(bucket["proof"] == "reference" for bucket in report["buckets"])
    assert np.allclose(answer(server), expected(module.float()), atol=1e-5)
    assert server.stop() == 0
    again = start(config)
    again.wait()
    assert {bucket["proof"] for bucket in again.status()["buckets"]} == {"golden"}


def peak_bytes(server: Server, name: str) -> int:
    rows = Path(f"/proc/{server.process.pid}/status").read_text().splitlines()
    return next(int(row.split()[1]) for row in rows if row.startswith(name)) * 1024


def test_a_cast_keeps_to_the_staging_limit(start: Start, tmp_path: Path) -> None:
    """A table of 64 MiB is cast to 32 MiB with 8 MiB of staging; the rest is what a process without weights takes."""
    path = tmp_path / "big"
    path.mkdir()
    limit = 8 * MIB
    state = {"table.weight": torch.rand(1 << 19, 32), "last.weight": torch.rand(4, 32), "last.bias": torch.rand(4)}
    assert state["table.weight"].nbytes == 64 * MIB
    save_file(state, path / "model.safetensors")
    save_file({**state, "table.weight": torch.rand(8, 32)}, tmp_path / "small.safetensors")
    peaks = {}
    for rows, checkpoint in ((1 << 19, path), (8, tmp_path / "small.safetensors")):
        config = eager(
            checkpoint,
            tmp_path,
            "table",
            inputs=[{"name": "ids", "datatype": "INT64", "shape": ["batch", 3], "low": 0, "high": 8}],
            memory={"staging_bytes": limit},
        )
        config["model"] |= {"dtype": "bfloat16", "kwargs": {"rows": rows}}
        server = start(config)
        server.wait()
        memory = {row["name"]: row for row in server.status()["memory"]}
        shared = memory["host_shared"]["measured_bytes"]
        peaks[rows] = peak_bytes(server, "VmHWM") - peak_bytes(server, "RssFile")
        assert memory["staging"]["planned_bytes"] <= limit
        assert memory["staging"]["peak_bytes"] <= limit
        assert shared >= memory["anonymous_copies"]["measured_bytes"] >= rows * 32 * 2
        server.stop()
    constant = 16 * MIB
    assert peaks[1 << 19] - peaks[8] <= 32 * MIB + limit + constant


def test_weights_that_do_not_fit_are_refused_before_anything_is_read(start: Start, tmp_path: Path) -> None:
    path = write_safetensors(tiny_model().state_dict(), tmp_path)
    server = start(eager(path, tmp_path, memory={"host_limit_bytes": 1000}))
    assert server.exit_code() == 4
    message = fatal(server)["message"]
    for part in ("does not fit into memory", "1000 of memory.host_limit_bytes", "mapped", "raise the memory limit"):
        assert part in message


@pytest.mark.parametrize("kind", ["list", "snapshot"])
def test_a_wrong_sha256_ends_the_start_and_names_the_file(start: Start, tmp_path: Path, kind: str) -> None:
    path = write_snapshot(tiny_model().state_dict(), tmp_path)
    file = path / "model.safetensors"
    config = eager(path, tmp_path)
    config["model"]["sha256"] = "snapshot"
    if kind == "list":
        (tmp_path / "sums").write_text(f"{file.resolve().name}  model.safetensors\n")
        config["model"]["sha256"] = str(tmp_path / "sums")
    server = start(config)
    server.wait()
    assert server.status()["weights"]["verified"] == {"model.safetensors": file.resolve().name}
    server.stop()
    with file.resolve().open("r+b") as damaged:
        damaged.seek(-1, os.SEEK_END)
        damaged.write(b"\x01")
    server = start(config)
    assert server.exit_code() == 3
    assert f"{file} has sha256" in fatal(server)["message"]


@pytest.mark.parametrize("change", ["truncated", "overwritten"])
def test_a_file_that_changes_between_reading_and_ready_ends_the_start_by_its_name(
    start: Start, tmp_path: Path, change: str
) -> None:
    path = write_safetensors(tiny_model().state_dict(), tmp_path)
    config = eager(path, tmp_path, "late")
    server = start(config)
    server.wait_for_stage("read-weights", "done")
    with (path / "model.safetensors").open("r+b") as file:
        if change == "truncated":
            file.truncate(0)
        else:
            file.write(b"\xff")
    assert server.exit_code() == 3
    assert f"{path / 'model.safetensors'} was changed in place" in fatal(server)["message"]


@pytest.mark.slow
def test_tensors_that_show_weights_under_other_names_show_the_loaded_ones(start: Start, tmp_path: Path) -> None:
    module = models.Showing().eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
    path = write_safetensors(module.state_dict(), tmp_path)
    server = start(configuration("showing", path, tmp_path / "store"))
    server.wait()
    artifacts = server.status()["artifacts"]
    assert artifacts["engine"] == "jit"
    assert "part look(s) into weights" in artifacts["why"]
    assert np.allclose(answer(server, "showing"), expected(module), atol=1e-6)


def test_a_file_that_is_overwritten_after_ready_ends_readiness(start: Start, tmp_path: Path) -> None:
    path = write_safetensors(tiny_model().state_dict(), tmp_path)
    server = start(eager(path, tmp_path))
    server.wait()
    with (path / "model.safetensors").open("r+b") as changed:
        changed.seek(-4, os.SEEK_END)
        changed.write(b"\0\0\0\0")
    server.wait("/readyz", 503)
    body = server.get("/readyz")[1]
    assert b"[-]read-weights failed" in body
    assert b"changed in place" in body
    assert server.status()["phase"] == "degraded"


def test_a_checkpoint_that_is_published_anew_by_renaming_leaves_the_running_server_alone(
    start: Start, tmp_path: Path
) -> None:
    module = tiny_model()
    path = write_safetensors(module.state_dict(), tmp_path)
    server = start(eager(path, tmp_path))
    server.wait()
    save_file({n: t + 1 for n, t in module.state_dict().items()}, tmp_path / "next")
    (tmp_path / "next").replace(path / "model.safetensors")
    assert server.get("/readyz")[0] == 200
    assert np.array_equal(answer(server), expected(module))


def test_a_checkpoint_that_comes_later_is_waited_for(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "late"
    config = eager(path, tmp_path)
    config["model"]["wait_s"] = 60
    server = start(config)
    server.wait_for_stage("open-checkpoint", "running")
    server.wait("/healthz")
    assert b"waiting for" in server.get("/readyz")[1]
    path.mkdir()
    write_safetensors(tiny_model().state_dict(), tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "model")
    shutil.copy(tmp_path / "model", path / "model.safetensors.part")
    (path / "model.safetensors.part").rename(path / "model.safetensors")
    server.wait()


def test_inspect_lists_tensors_and_repack_aligns_them_bit_for_bit(tmp_path: Path) -> None:
    state = {
        "odd": torch.arange(3, dtype=torch.uint8),
        "half": torch.rand(5, 3).to(torch.float16),
        "whole": torch.rand(64, 16),
        "scalar": torch.tensor(7),
        "empty": torch.zeros(0, 4),
    }
    source = tmp_path / "source.safetensors"
    save_file(state, source, metadata={"format": "pt"})
    done = command("inspect", str(source), "--json")
    assert done.returncode == 0, done.stderr
    rows = {row["name"]: row for row in json.loads(done.stdout)["tensors"]}
    assert {n: (r["dtype"], r["shape"], r["bytes"]) for n, r in rows.items()} == {
        "odd": ("U8", [3], 3),
        "half": ("F16", [5, 3], 30),
        "whole": ("F32", [64, 16], 4096),
        "scalar": ("I64", [], 8),
        "empty": ("F32", [0, 4], 0),
    }
    packed = tmp_path / "packed.safetensors"
    assert command("inspect", str(source), "--repack", str(packed)).returncode == 0
    found = load_file(packed)
    for name, tensor in state.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
    with safe_open(packed, "pt") as opened:
        assert opened.metadata()["format"] == "pt"
    rows = {r["name"]: r for r in json.loads(command("inspect", str(packed), "--json").stdout)["tensors"]}
    assert rows.keys() == state.keys()
    assert all(row["alignment"] >= 64 for row in rows.values() if row["bytes"])
    text = command("inspect", str(packed))
    assert "half" in text.stdout
    assert "5 x 3" in text.stdout


def test_inspect_tells_everything_that_is_wrong_with_exit_code_3(tmp_path: Path) -> None:
    path = write_shards(tiny_model().state_dict(), tmp_path)
    (path / "model-0.safetensors").unlink()
    with (path / "model-1.safetensors").open("ab") as longer:
        longer.write(b"123")
    done = command("inspect", str(path))
    assert done.returncode == 3
    assert "2 problem(s)" in done.stdout
    assert "model-0.safetensors cannot be opened: No such file or directory" in done.stdout
    assert "model-1.safetensors" in done.stdout
    assert "with bytes that no tensor owns" in done.stdout
    assert "second.weight" in done.stdout, "what is right is listed too"


def test_two_formats_in_one_directory_are_refused_with_a_list(tmp_path: Path) -> None:
    write_safetensors(tiny_model().state_dict(), tmp_path)
    write_torch(tiny_model().state_dict(), tmp_path)
    done = command("inspect", str(tmp_path))
    assert done.returncode == 3
    assert "safetensors: model.safetensors; torch: pytorch_model.bin" in done.stderr
    assert command("inspect", str(tmp_path / "pytorch_model.bin")).returncode == 0
