"""The main job on the real model: cold start, answers, warm restart, drain. The tests build on one artifact."""

import json
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from transformers import AutoModel

from tests.e2e.conftest import JSON, Start
from tests.e2e.harness import ROOT, Server, command, load, outputs

SHAPES = [(1, 32), (8, 32), (8, 128), (1, 2), (3, 77), (5, 19), (2, 256), (32, 31), (7, 100), (1, 255)]
INPUTS = {"input_ids": np.ones((1, 32), np.int64), "attention_mask": np.ones((1, 32), np.int64)}


class Probing(threading.Thread):
    """Asks one path every 10 ms and keeps what came back; a refused connection is None."""

    def __init__(self, server: Server, path: str) -> None:
        super().__init__(daemon=True)
        self.server, self.path = server, path
        self.codes: list[int | None] = []
        self.over = threading.Event()

    def run(self) -> None:
        while not self.over.wait(0.01):
            try:
                self.codes.append(self.server.get(self.path)[0])
            except OSError:
                self.codes.append(None)


@pytest.fixture(scope="module")
def reference() -> Any:
    """The model's own library on the same weights, with the pooling of its model card."""
    torch.manual_seed(0)
    return AutoModel.from_pretrained(ROOT / ".venv/model").eval()


def expected(model: Any, ids: torch.Tensor, mask: torch.Tensor) -> Any:
    with torch.no_grad():
        hidden = model(input_ids=ids, attention_mask=mask).last_hidden_state
    kept = mask.unsqueeze(-1).float()
    return F.normalize((hidden * kept).sum(1) / kept.sum(1), dim=-1).numpy()


def test_a_cold_start_refuses_nothing_after_bind_says_what_is_missing_and_then_answers_as_the_library_does(
    start: Start, minilm_config: JSON, reference: Any
) -> None:
    server = start(minilm_config)
    probing = Probing(server, "/healthz")
    probing.start()
    server.wait("/healthz")

    status, body, headers = server.get("/readyz")
    assert status == 503
    assert int(headers["Retry-After"]) >= 1
    assert b"[-]startup failed: " in body
    assert body.endswith(b"readyz check failed\n")
    status, refused = server.infer("minilm", INPUTS)
    assert (status, refused["reason"]) == (503, "not_ready")
    assert refused["error"].startswith("starting: ")

    server.wait()
    probing.over.set()
    probing.join()
    first = next(i for i, code in enumerate(probing.codes) if code is not None)
    assert set(probing.codes[first:]) == {200}

    report = server.status()
    assert (report["phase"], report["ready"]) == ("ready", True)
    assert (report["artifacts"]["engine"], report["artifacts"]["outcome"]) == ("aot", "rebuilt")
    assert report["weights"]["rebuilt_buffers"] == ["embeddings.position_ids", "embeddings.token_type_ids"]
    assert report["weights"]["waived"] == {"unexpected": ["embeddings.position_ids"]}
    assert [(b["state"], b["proof"]) for b in report["buckets"]] == [("warm", "reference")] * 4
    assert "build-artifact" in report["critical_path"]
    gains = {row["stage"]: row["at_most_sooner_s"] for row in report["critical"]}
    assert list(gains) == report["critical_path"]
    assert 0 < gains["build-artifact"] < report["time_to_ready_s"]
    assert report["weights"]["cached_ratio"] is not None
    warmup = report["budgets"]["warmup"]
    assert 0 < warmup["used_s"] < warmup["planned_s"] == 300

    for number, (rows, length) in enumerate(SHAPES):
        generator = torch.Generator().manual_seed(number)
        ids = torch.randint(1, 30000, (rows, length), generator=generator)
        mask = torch.ones(rows, length, dtype=torch.int64)
        if rows > 1:
            mask[-1, length // 2 :] = 0
        status, body = server.infer("minilm", {"input_ids": ids.numpy(), "attention_mask": mask.numpy()})
        assert status == 200, body
        assert np.abs(outputs(body) - expected(reference, ids, mask)).max() < 1e-5
    assert server.stop() == 0


def test_a_second_start_hits_runs_no_compiler_and_imports_neither_dynamo_nor_inductor_nor_the_models_library(
    start: Start, minilm_config: JSON, tmp_path: Path
) -> None:
    calls = tmp_path / "calls"
    shims = tmp_path / "bin"
    shims.mkdir()
    for name in ("g++", "gcc", "c++", "cc", "clang", "clang++"):
        (shims / name).write_text(f"#!/bin/sh\necho {name} >> {calls}\nexit 1\n")
        (shims / name).chmod(0o755)
    server = start(minilm_config, env={"PATH": f"{shims}:/usr/bin:/bin", "PYTHONPROFILEIMPORTTIME": "1"})
    server.wait()
    report = server.status()
    assert report["artifacts"]["outcome"] == "restored"
    artifact, *caches = report["artifacts"]["layers"]
    assert (artifact["name"], artifact["result"], artifact["count"]) == ("sealed-artifact", "hit", 1)
    assert {(cache["result"], cache["count"]) for cache in caches} == {("bypass", 0)}
    assert [(b["state"], b["proof"]) for b in report["buckets"]] == [("warm", "golden")] * 4
    assert {s["name"]: s["state"] for s in report["stages"] if s["state"] != "done"} == {
        "build-artifact": "skipped",
        "build-skeleton": "skipped",
        "compute-reference": "skipped",
    }
    assert not calls.exists()
    imported = {line.rpartition("|")[2].strip() for line in server.text().splitlines() if "import time:" in line}
    assert "torch" in imported
    assert not {m for m in imported if m.split(".")[0] == "transformers"}
    assert not {"torch._dynamo", "torch._inductor"} & imported
    assert server.stop() == 0


def test_a_changed_option_misses_and_says_which_field_differs(start: Start, minilm_config: JSON) -> None:
    minilm_config["dimensions"]["sequence"]["max"] = 200
    minilm_config["compile"]["on_miss"] = "fail"
    server = start(minilm_config)
    assert server.exit_code() == 5
    fatal = server.events()[-1]
    assert (fatal["event"], fatal["kind"], fatal["stage"]) == ("fatal", "ArtifactError", "build-artifact")
    assert "the nearest differs: dimension sequence 2..256 → 2..200" in fatal["message"]


def test_new_weights_hit_the_same_artifact_and_are_proven_against_their_own_reference(
    start: Start, minilm_config: JSON, tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    state = load_file(ROOT / ".venv/model/model.safetensors")
    state["encoder.layer.0.output.dense.weight"] = state["encoder.layer.0.output.dense.weight"] * 1.01
    save_file(state, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((ROOT / ".venv/model/config.json").read_bytes())
    minilm_config["model"]["checkpoint"] = str(tmp_path)
    server = start(minilm_config)
    server.wait()
    report = server.status()
    assert report["artifacts"]["outcome"] == "restored"
    assert {bucket["proof"] for bucket in report["buckets"]} == {"reference"}
    assert server.stop() == 0


def test_sigterm_under_load_turns_readiness_off_at_once_and_fails_no_request(start: Start, minilm_config: JSON) -> None:
    server = start(minilm_config)
    server.wait()
    with load(server, "minilm", INPUTS) as failures:
        time.sleep(0.5)
        server.signal()
        signalled = time.monotonic()
        server.wait("/readyz", 503)
        assert server.get("/healthz")[0] == 200
        assert server.get("/v2/health/ready")[0] == 503
        assert server.status()["phase"] == "draining"
        time.sleep(max(0.0, signalled + 0.8 - time.monotonic()))
    assert [failure for failure in failures if failure[0] < signalled + 0.8] == []
    assert server.exit_code() == 0


def test_the_report_file_renders_and_compares(minilm_config: JSON) -> None:
    file = minilm_config["report"]["file"]
    shown = command("report", file)
    assert shown.returncode == 0
    assert "minilm 1: ready after" in shown.stdout
    assert "* warm-buckets" in shown.stdout
    assert "ready would have come sooner by" in shown.stdout
    assert "was in the file cache before" in shown.stdout
    assert "budgets: warm-up used" in shown.stdout
    compared = command("report", file, file)
    assert any(line.startswith("ready") and line.endswith("1.00x") for line in compared.stdout.splitlines())
    assert compared.stdout.startswith("preparation (time to ready)\nready at the same time")


def test_the_pasted_curl_line_answers(start: Start, minilm_config: JSON) -> None:
    server = start(minilm_config)
    server.wait()
    line = next(event["then"] for event in server.events() if event["event"] == "listening")
    answer = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True)
    assert json.loads(answer.stdout)["outputs"][0]["shape"] == [1, 384]
    assert server.stop() == 0
