"""What ends a start-up, what does not, and what is said about it: exit codes, messages, nothing left behind."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from tests.e2e import models
from tests.e2e.conftest import JSON, Start, configuration, save
from tests.e2e.harness import ROOT, Server, command, environment, outputs

X = {"x": torch.zeros(2, 16).numpy()}


def processes(group: int) -> list[str]:
    """Return the command lines of all processes in a process group's session."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(fields[3]) == group and fields[0] != "Z":
                    found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
            except OSError:
                continue
    return found


def wait_for_child(server: Server) -> None:
    server.wait_for_stage("build-artifact", "running")
    until = time.monotonic() + 30
    while not any("app.child build" in line for line in processes(server.process.pid)):
        assert time.monotonic() < until, server.text()
        time.sleep(0.01)


def checkpoint(directory: Path, change: dict[str, Any] | None = None, drop: tuple[str, ...] = ()) -> Path:
    state = {n: t.clone() for n, t in models.Tiny().state_dict().items() if n not in drop}
    state.update(change or {})
    directory.mkdir(exist_ok=True)
    save_file(state, directory / "model.safetensors")
    return directory / "model.safetensors"


def fatal(server: Server) -> JSON:
    return next(event for event in server.events() if event["event"] == "fatal")


def test_a_checkpoint_that_does_not_fit_is_one_error_that_lists_every_difference_with_both_sides(
    start: Start, tiny_config: JSON, tmp_path: Path
) -> None:
    change = {
        "second.bias": torch.zeros(5),
        "first.bias": torch.zeros(16, dtype=torch.float16),
        "surplus": torch.zeros(2),
    }
    tiny_config["model"]["checkpoint"] = str(checkpoint(tmp_path / "bad", change, drop=("first.weight",)))
    tiny_config["compile"]["engine"] = "eager"
    server = start(tiny_config)
    assert server.exit_code() == 3
    message = fatal(server)["message"]
    assert "does not fit the model: 4 problem(s)" in message
    assert "missing: first.weight F32[16, 16] is in the model, not in the checkpoint" in message
    assert "unexpected: surplus F32[2] is in model.safetensors" in message
    assert "shape: second.bias is [4] in the model, [5] in model.safetensors" in message
    assert "dtype: first.bias is F32 in the model, F16 in model.safetensors" in message


def test_a_checkpoint_that_does_not_fit_ends_the_build_as_well(start: Start, tiny_config: JSON, tmp_path: Path) -> None:
    tiny_config["model"]["checkpoint"] = str(checkpoint(tmp_path / "bad", drop=("first.weight",)))
    tiny_config["compile"]["artifacts"] = str(tmp_path / "store")
    server = start(tiny_config)
    assert server.exit_code() == 3
    assert fatal(server)["stage"] == "compute-reference"
    assert list((tmp_path / "store").iterdir()) == []


def test_a_truncated_shard_is_found_before_anything_is_loaded(start: Start, tiny_config: JSON, tmp_path: Path) -> None:
    state = models.Tiny().state_dict()
    shards = {"model-1.safetensors": ["first.weight", "first.bias"]}
    shards["model-2.safetensors"] = [name for name in state if name not in shards["model-1.safetensors"]]
    for shard, names in shards.items():
        save_file({name: state[name].clone() for name in names}, tmp_path / shard)
    index = {"weight_map": {name: shard for shard, names in shards.items() for name in names}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    tiny_config["model"]["checkpoint"] = str(tmp_path)

    server = start(tiny_config)
    server.wait()
    assert server.infer("tiny", X)[0] == 200
    assert server.stop() == 0

    whole = (tmp_path / "model-2.safetensors").read_bytes()
    (tmp_path / "model-2.safetensors").write_bytes(whole[:-4])
    server = start(tiny_config)
    assert server.exit_code() == 3
    assert f"{len(whole) - 4} bytes, its header describes {len(whole)}: truncated" in fatal(server)["message"]


def test_a_factory_that_hangs_is_a_stall_with_stacks_and_exit_code_7(start: Start, tmp_path: Path) -> None:
    file = checkpoint(tmp_path / "weights")
    config = configuration("sleeping", file, tmp_path / "store", startup={"stall_timeout_s": 3})
    config["compile"]["engine"] = "eager"
    server = start(config)
    assert server.exit_code() == 7
    assert "stage build-skeleton made no progress for 3 s" in fatal(server)["message"]
    assert 'File "' in server.text()
    assert "in sleeping" in server.text()


def test_a_child_that_hangs_is_a_stall_too_and_is_not_left_behind(start: Start, tmp_path: Path) -> None:
    file = checkpoint(tmp_path / "weights")
    config = configuration("sleeping", file, tmp_path / "store", startup={"stall_timeout_s": 4})
    server = start(config)
    assert server.exit_code() == 7
    assert processes(server.process.pid) == []
    assert list((tmp_path / "store").iterdir()) == []


def test_sigterm_during_the_build_ends_with_0_and_leaves_no_process_and_no_file(
    start: Start, tiny_config: JSON, tmp_path: Path
) -> None:
    tiny_config["compile"]["artifacts"] = str(tmp_path / "store")
    server = start(tiny_config)
    wait_for_child(server)
    assert server.stop() == 0
    assert processes(server.process.pid) == []
    assert list((tmp_path / "store").iterdir()) == []


def test_sigterm_while_torch_is_imported_ends_with_0(start: Start, tiny_config: JSON) -> None:
    server = start(tiny_config)
    server.wait_for_stage("import-runtime", "running")
    assert server.stop() == 0


def test_sigterm_before_anything_is_imported_ends_with_0(start: Start, tiny_config: JSON) -> None:
    server = start(tiny_config)
    until = time.monotonic() + 10
    # Bit 14 of SigCgt: a handler for SIGTERM is installed.
    while time.monotonic() < until and not _catches_sigterm(server.process.pid):
        pass
    assert server.stop() == 0


def _catches_sigterm(process: int) -> bool:
    rows = Path(f"/proc/{process}/status").read_text().splitlines()
    caught = next(int(row.split()[1], 16) for row in rows if row.startswith("SigCgt"))
    return bool(caught >> (signal.SIGTERM - 1) & 1)


def test_a_killed_server_takes_its_builder_along(start: Start, tiny_config: JSON, tmp_path: Path) -> None:
    tiny_config["compile"]["artifacts"] = str(tmp_path / "store")
    server = start(tiny_config)
    wait_for_child(server)
    os.kill(server.process.pid, signal.SIGKILL)
    server.process.wait()
    until = time.monotonic() + 30
    while any("app.child" in line for line in processes(server.process.pid)) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any("app.child" in line for line in processes(server.process.pid))


def test_a_failed_start_that_may_stay_answers_503_with_the_reason(start: Start, tmp_path: Path) -> None:
    file = checkpoint(tmp_path / "weights")
    config = configuration("raising", file, tmp_path / "store", startup={"on_failure": "stay"})
    config["compile"]["engine"] = "eager"
    server = start(config)
    server.wait_for_stage("build-skeleton", "failed")
    status, body, _ = server.get("/readyz")
    assert status == 503
    assert b"model.factory tests.e2e.models:raising raised RuntimeError: no such configuration" in body
    assert server.get("/healthz")[0] == 503
    report = server.status()
    assert report["phase"] == "failed"
    assert (report["error"]["stage"], report["error"]["exit_code"]) == ("build-skeleton", 2)
    assert server.infer("raising", X)[0] == 503
    assert server.stop() == 0


def test_the_fatal_error_is_one_line_in_the_log_and_in_the_termination_log(
    start: Start, tiny_config: JSON, tmp_path: Path
) -> None:
    told = tmp_path / "termination-log"
    told.touch()
    tiny_config["startup"]["termination_log"] = str(told)
    tiny_config["model"]["checkpoint"] = "/nowhere"
    server = start(tiny_config)
    assert server.exit_code() == 3
    line = yaml.safe_load(told.read_text())
    assert line["message"] == "/nowhere does not exist; model.checkpoint names a directory or a file"
    assert {name: fatal(server)[name] for name in line} == line


def test_a_port_in_use_is_a_resource_that_is_missing(tiny_config: JSON, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        file.write_text(yaml.safe_dump({**tiny_config, "http": {"host": "127.0.0.1", "port": port}}))
        done = command("serve", "--config", str(file))
    assert done.returncode == 4
    assert f"127.0.0.1:{port} cannot be listened on: Address already in use" in done.stderr


@pytest.mark.parametrize("name", ["serve", "build", "check"])
def test_a_wrong_configuration_is_exit_code_2_with_every_problem(name: str, tiny_config: JSON, tmp_path: Path) -> None:
    tiny_config["model"]["naem"] = 1
    tiny_config["warmup"] = {"calls": 1}
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(tiny_config))
    done = command(name, "--config", str(file))
    assert done.returncode == 2
    assert "model.naem is no field; did you mean name?" in done.stderr
    assert "warmup.calls = 1: " in done.stderr


def test_a_damaged_artifact_is_rejected_set_aside_and_rebuilt(start: Start, tiny_config: JSON, tmp_path: Path) -> None:
    store = tmp_path / "store"
    shutil.copytree(tiny_config["compile"]["artifacts"], store)
    tiny_config["compile"]["artifacts"] = str(store)
    library = next(store.glob("*/model-0.so"))
    damaged = bytearray(library.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    library.write_bytes(damaged)
    server = start(tiny_config)
    server.wait()
    artifacts = server.status()["artifacts"]
    assert artifacts["outcome"] == "rebuilt"
    assert artifacts["layers"][0] == {
        "name": "sealed-artifact",
        "result": "rejected",
        "why": "model-0.so is not what was sealed: its sha256 differs",
        "count": 1,
    }
    assert len(list(store.glob(".rejected-*"))) == 1
    assert server.infer("tiny", X)[0] == 200
    assert server.stop() == 0

    server = start(tiny_config)
    server.wait()
    assert server.status()["artifacts"]["outcome"] == "restored"


@pytest.mark.slow
def test_a_damaged_record_of_answers_is_not_believed_against_the_module(
    start: Start, tiny_config: JSON, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    shutil.copytree(tiny_config["compile"]["artifacts"], store)
    tiny_config["compile"]["artifacts"] = str(store)
    server = start(tiny_config)
    server.wait()
    server.stop()
    records = list(store.glob("*.golden/*.safetensors"))
    assert records
    for record in records:
        save_file({name: tensor + 1 for name, tensor in load_file(record).items()}, record)
    server = start(tiny_config)
    server.wait()
    assert {bucket["proof"] for bucket in server.status()["buckets"]} == {"reference"}


def test_answers_that_differ_from_the_module_never_become_ready(start: Start, tmp_path: Path) -> None:
    config = configuration("unequal", checkpoint(tmp_path / "weights"), tmp_path / "store")
    server = start(config)
    assert server.exit_code() == 6
    message = fatal(server)["message"]
    assert message.startswith("bucket batch=2 is not proven: output y differs from the reference by up to 1,")


def test_without_a_compiler_auto_serves_eager_and_says_why(start: Start, tiny_config: JSON, tmp_path: Path) -> None:
    empty = tmp_path / "bin"
    empty.mkdir()
    tiny_config["compile"]["artifacts"] = str(tmp_path / "store")
    server = start(tiny_config, env={"PATH": str(empty)})
    server.wait()
    artifacts = server.status()["artifacts"]
    assert (artifacts["engine"], artifacts["outcome"]) == ("eager", "none")
    assert artifacts["why"] == "; ".join(
        f"the {engine} engine could not be built: no C++ compiler on this machine (g++): "
        f"restore a built artifact, or install one"
        for engine in ("aot", "jit")
    )
    assert server.infer("tiny", X)[0] == 200


def test_without_a_compiler_a_demanded_artifact_ends_the_start(start: Start, tiny_config: JSON, tmp_path: Path) -> None:
    empty = tmp_path / "bin"
    empty.mkdir()
    tiny_config["compile"] = {"artifacts": str(tmp_path / "store"), "engine": "aot"}
    server = start(tiny_config, env={"PATH": str(empty)})
    assert server.exit_code() == 5
    assert "no C++ compiler on this machine" in fatal(server)["message"]


def test_an_artifact_directory_that_cannot_be_written_is_told(start: Start, tiny_config: JSON, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    tiny_config["compile"] = {"artifacts": str(tmp_path / "file" / "store"), "engine": "aot"}
    server = start(tiny_config)
    assert server.exit_code() == 5
    assert "cannot be written: Not a directory; give a writable directory" in fatal(server)["message"]


def test_a_spent_budget_ends_the_start_with_the_bucket(start: Start, tiny_config: JSON) -> None:
    tiny_config["warmup"] = {"budget_s": 1e-9}
    server = start(tiny_config)
    assert server.exit_code() == 6
    assert "required bucket batch=2 could not be warmed: warmup.budget_s = 1e-09 was spent" in fatal(server)["message"]


def test_outputs_that_are_not_what_is_declared_end_the_start(start: Start, tiny_config: JSON) -> None:
    tiny_config["outputs"][0]["shape"] = ["batch", 5]
    tiny_config["compile"]["engine"] = "eager"
    server = start(tiny_config)
    assert server.exit_code() == 6
    assert "output y of forward is float32[2, 4], configured is FP32 [2, 5]" in fatal(server)["message"]


def test_a_port_answers_while_the_server_starts_and_the_tiny_answer_is_right(start: Start, tiny_config: JSON) -> None:
    server = start(tiny_config)
    server.wait()
    model = models.Tiny()
    model.load_state_dict(load_file(tiny_config["model"]["checkpoint"]))
    x = torch.linspace(-1, 1, 5 * 16).reshape(5, 16)
    status, body = server.infer("tiny", {"x": x.numpy()})
    assert status == 200
    assert abs(outputs(body) - model(x).detach().numpy()).max() < 1e-6


def test_saved_checkpoints_hold_tied_tensors_once(tmp_path: Path) -> None:
    save(models.Tied(), tmp_path / "model.safetensors")
    assert set(load_file(tmp_path / "model.safetensors")) == {"embed.weight"}


COUNTING = (
    "bucket batch=2 is not proven: output y differs from the reference by up to .* the engine and the module "
    "disagree; the forward changes scale, on which its answers may depend"
)


@pytest.mark.parametrize(
    ("model", "engine", "message"),
    [
        ("counting", "eager", COUNTING),
        pytest.param("counting", "auto", COUNTING, marks=pytest.mark.slow),
        ("infinite", "eager", "bucket batch=2 is not proven: output y has values that are not finite"),
    ],
)
def test_a_model_whose_answers_cannot_be_promised_ends_the_start(
    start: Start, tmp_path: Path, model: str, engine: str, message: str
) -> None:
    config = configuration(model, checkpoint(tmp_path / "weights"), tmp_path / "store", compile={"engine": engine})
    server = start(config)
    assert server.exit_code() == 6
    assert re.fullmatch(message, fatal(server)["message"])


@pytest.mark.slow
def test_a_file_that_the_arguments_name_belongs_to_the_identity(
    start: Start, tiny_config: JSON, tmp_path: Path
) -> None:
    file = tmp_path / "width"
    file.write_text("16")
    tiny_config["model"] |= {"factory": "tests.e2e.models:from_file", "kwargs": {"file": str(file)}}
    tiny_config["compile"]["artifacts"] = str(tmp_path / "store")
    server = start(tiny_config)
    server.wait()
    assert server.status()["artifacts"]["outcome"] == "rebuilt"
    server.stop()
    file.write_text("16 ")
    tiny_config["compile"]["on_miss"] = "fail"
    server = start(tiny_config)
    assert server.exit_code() == 5
    assert f"file {file} changed" in fatal(server)["message"]


def test_a_console_whose_reader_is_gone_does_not_decide_over_the_start(tiny_config: JSON, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    config.write_text(yaml.safe_dump({**tiny_config, "http": {"host": "127.0.0.1", "port": port}}))
    reader, writer = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-m", "app", "serve", "--config", str(config), "--log-format", "text"],
        cwd=ROOT,
        env=environment(),
        stdout=writer,
        stderr=subprocess.DEVNULL,
    )
    os.close(writer)
    os.close(reader)
    try:
        until = time.monotonic() + 60
        while not _ready(port):
            assert process.poll() is None, process.returncode
            assert time.monotonic() < until
            time.sleep(0.05)
    finally:
        process.terminate()
        assert process.wait(30) == 0


def _ready(port: int) -> bool:
    try:
        return Server.send(urllib.request.Request(f"http://127.0.0.1:{port}/readyz"))[0] == 200
    except OSError:
        return False


def test_build_is_stopped_by_sigterm_without_leaving_anything(tiny_config: JSON, tmp_path: Path) -> None:
    tiny_config["compile"]["artifacts"] = str(tmp_path / "store")
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(tiny_config))
    process = subprocess.Popen(
        [sys.executable, "-m", "app", "build", "--config", str(config)],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    until = time.monotonic() + 60
    while not any("app.child build" in line for line in processes(process.pid)):
        assert time.monotonic() < until
        time.sleep(0.02)
    process.terminate()
    assert process.wait(30) == 143
    assert processes(process.pid) == []
    assert list((tmp_path / "store").iterdir()) == []


def test_a_build_that_needs_more_memory_than_it_may_is_told_and_its_output_is_kept(
    start: Start, tiny_config: JSON, tmp_path: Path
) -> None:
    tiny_config["compile"] |= {"artifacts": str(tmp_path / "store"), "build_memory_bytes": 40_000_000, "engine": "aot"}
    server = start(tiny_config, env={"TMPDIR": str(tmp_path)})
    assert server.exit_code() == 5
    assert "compile.build_memory_bytes allows each process 40.0 MB" in fatal(server)["message"]
    (kept,) = (tmp_path / f"warmgate-{os.getuid()}").glob("build-*.log")
    assert str(kept) in server.text()
    assert kept.stat().st_size > 0
    assert kept.stat().st_mode & 0o077 == 0 or kept.parent.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("signals", [1, 2])
def test_a_forward_that_hangs_keeps_no_server_from_leaving_and_what_waits_is_answered(
    start: Start, tmp_path: Path, signals: int
) -> None:
    config = configuration("tiny", checkpoint(tmp_path / "weights"), tmp_path / "store", compile={"engine": "eager"})
    config["model"]["factory"] = "tests.e2e.models:Hanging"
    server = start(config, drain_delay_s=1 if signals == 1 else 60, drain_timeout_s=1)
    server.wait()
    answers: list[tuple[int, str]] = []

    def ask(value: float) -> None:
        status, told = server.infer("tiny", {"x": np.full((1, 16), value, np.float32)})
        answers.append((status, told["reason"]))

    asking = [threading.Thread(target=ask, args=(value,)) for value in (12345.0, 0.0, 0.0)]
    for one in asking:
        one.start()
        time.sleep(0.1)
    for _ in range(signals):
        server.signal()
        time.sleep(0.2)
    assert server.exit_code(10) == 0
    for one in asking:
        one.join(10)
    assert answers == [(503, "draining")] * 3
    assert "Traceback" not in server.text()
