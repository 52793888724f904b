"""Requests of many clients at once on a real server: run together, answered as alone, refused and given up in order."""

import json
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.e2e import models
from tests.e2e.conftest import JSON, Start, configuration, save
from tests.e2e.harness import Server, outputs

Array = NDArray[Any]


def counter(server: Server, series: str) -> float:
    text = server.get("/metrics")[1].decode()
    found = re.search(rf"^{re.escape(series)} (\S+)$", text, re.MULTILINE)
    assert found, series
    return float(found[1])


def answers(server: Server, model: str, requests: list[Array], clients: int = 16) -> list[Array]:
    def one(x: Array) -> Array:
        status, body = server.infer(model, {"x": x})
        assert status == 200, body
        found: Array = outputs(body)
        return found

    with ThreadPoolExecutor(clients) as pool:
        return list(pool.map(one, requests))


def requests_of(count: int) -> list[Array]:
    random = np.random.default_rng(7)
    return [random.standard_normal((int(random.integers(1, 5)), 16)).astype(np.float32) for _ in range(count)]


def test_answers_do_not_depend_on_company(start: Start, tiny: JSON) -> None:
    server = start(tiny)
    server.wait()
    assert server.status()["batching"] == [{"path": "forward", "company": "any", "why": ""}]
    requests = requests_of(200)
    torch.manual_seed(0)  # as the checkpoint was made
    module = models.Tiny()
    before = counter(server, "warmgate_batch_size_count")
    together = answers(server, "tiny", requests)
    runs = counter(server, "warmgate_batch_size_count") - before
    assert runs < 200, "no two requests ran together, so nothing was shown"
    for x, found in zip(requests, together, strict=True):
        assert np.allclose(found, module(torch.from_numpy(x)).detach(), rtol=1e-4, atol=1e-5)
    assert server.status()["late_compiles"] == 0


def test_a_model_whose_rows_depend_on_each_other_runs_each_request_alone(start: Start, tmp_path: Path) -> None:
    save(models.Centering(), tmp_path / "model.safetensors")
    config = configuration("Centering", tmp_path / "model.safetensors", tmp_path / "store", compile={"engine": "eager"})
    server = start(config)
    server.wait()
    row = server.status()["batching"][0]
    assert row["company"] == "none"
    assert row["why"].startswith("row 0 of batch=2 answers otherwise when alone: output y differs")
    requests = requests_of(60)
    for one, two in zip(answers(server, "Centering", requests, 1), answers(server, "Centering", requests), strict=True):
        assert np.allclose(one, two, rtol=1e-4, atol=1e-5)


def test_a_request_that_fails_costs_no_other_its_answer_and_its_content_is_in_no_log(
    start: Start, tmp_path: Path
) -> None:
    save(models.Telling(), tmp_path / "model.safetensors")
    config = configuration("Telling", tmp_path / "model.safetensors", tmp_path / "store", compile={"engine": "eager"})
    server = start(config)
    server.wait()
    requests = requests_of(40)
    for number in range(0, 40, 8):
        requests[number][:] = 12345
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda x: server.infer("Telling", {"x": x}), requests))
    assert [number for number, (status, _) in enumerate(found) if status != 200] == [0, 8, 16, 24, 32]
    assert found[0] == (500, {"error": "the inference failed: ValueError; the log has the details"})
    failed = [event for event in server.events() if event["event"] == "inference failed"]
    assert len(failed) == 5
    assert failed[0]["error"] == "ValueError"
    assert re.search(r"tests/e2e/models\.py:\d+ forward$", failed[0]["frames"][-1])
    assert "12345" not in server.text()


@pytest.fixture
def slow(start: Start, tmp_path: Path) -> Server:
    """A server whose runs of a full bucket take a quarter of a second."""
    save(models.Tiny(), tmp_path / "model.safetensors")
    config = configuration(
        "Sleeping",
        tmp_path / "model.safetensors",
        tmp_path / "store",
        compile={"engine": "eager"},
        serving={"max_queue_items": 12, "timeout_s": 20},
    )
    server = start(config)
    server.wait()
    return server


def test_what_is_refused_expired_or_given_up_never_runs_and_probes_answer_meanwhile(slow: Server) -> None:
    body = json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [8, 16], "data": [0.5] * 128}]}).encode()
    runs = counter(slow, "warmgate_batch_size_count")
    threads = [threading.Thread(target=slow.post, args=("/v2/models/Sleeping/infer", body)) for _ in range(2)]
    for thread in threads:
        thread.start()
    wait_for(slow, "warmgate_queue_items", 2)
    hurried = json.dumps({**json.loads(body), "parameters": {"timeout": 1000}}).encode()
    status, told = slow.post("/v2/models/Sleeping/infer", hurried)
    assert (status, json.loads(told)["reason"]) == (504, "deadline")
    with socket.create_connection(("127.0.0.1", slow.port)) as client:
        head = f"POST /v2/models/Sleeping/infer HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        client.sendall(head.encode() + body)
        wait_for(slow, "warmgate_queue_items", 3)
    wait_for(slow, 'warmgate_rejected_total{reason="disconnected"}', 1)
    assert slow.get("/healthz")[0] == 200
    for thread in threads:
        thread.join()
    assert counter(slow, "warmgate_batch_size_count") - runs == 2
    assert counter(slow, 'warmgate_rejected_total{reason="deadline"}') == 1


def test_more_than_may_wait_is_refused_at_once_and_what_was_admitted_is_answered(slow: Server) -> None:
    row = {"x": np.full((8, 16), 0.5, np.float32)}
    with ThreadPoolExecutor(24) as pool:
        asked = [pool.submit(slow.infer, "Sleeping", row) for _ in range(24)]
        found = [one.result() for one in asked]
    refused = [body for status, body in found if status == 503]
    assert [status for status, _ in found].count(200) == 12
    assert len(refused) == 12
    assert {body["reason"] for body in refused} == {"queue_full"}


def wait_for(server: Server, series: str, value: float) -> None:
    until = time.monotonic() + 10
    while counter(server, series) < value:
        assert time.monotonic() < until, f"{series} did not come to {value}"
        time.sleep(0.01)
