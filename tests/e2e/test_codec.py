"""Raw inputs on a real server, answered in words: a codec that turns outputs back, and codecs that are wrong."""

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.e2e import models
from tests.e2e.conftest import JSON, Start, configuration, save
from tests.e2e.harness import Server, command


def asked(texts: list[str], name: str = "text", **fields: Any) -> bytes:
    row = {"name": name, "datatype": "BYTES", "shape": [len(texts)], "data": texts}
    return json.dumps({"inputs": [row], **fields}).encode()


def numbers(directory: Path, codec: str = "Numbers", **kwargs: Any) -> JSON:
    torch.manual_seed(0)
    save(models.Tiny(), directory / "model.safetensors")
    config = configuration(
        "tiny",
        directory / "model.safetensors",
        directory / "store",
        compile={"engine": "eager"},
        serving={"codec_threads": 1},
    )
    config["model"] |= {"codec": f"tests.e2e.codecs:{codec}", "codec_kwargs": kwargs}
    return config


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("codec")
    with Server(directory, numbers(directory, "Breaking", labels=["a", "b", "c", "ü"])) as running:
        running.wait()
        yield running


def text(row: Any) -> str:
    return " ".join(str(float(one)) for one in row)


X = np.linspace(-3, 3, 80, dtype=np.float32).reshape(5, 16)


def test_an_answer_is_turned_back_for_raw_inputs_and_left_for_tensors(server: Server) -> None:
    status, tensors = server.infer("tiny", {"x": X})
    values = np.array(tensors["outputs"][0]["data"], np.float32).reshape(5, 4)
    coded = json.loads(server.post("/v2/models/tiny/infer", asked([text(row) for row in X], "numbers"))[1])
    only = json.loads(
        server.post("/v2/models/tiny/infer", asked([text(X[0])], "numbers", outputs=[{"name": "score"}]))[1]
    )

    assert (status, [row["name"] for row in tensors["outputs"]]) == (200, ["y"])
    assert [(row["name"], row["datatype"], row["shape"]) for row in coded["outputs"]] == [
        ("label", "BYTES", [5]),
        ("score", "FP32", [5]),
    ]
    assert coded["outputs"][0]["data"] == ["abcü"[one] for one in values.argmax(axis=1)]
    np.testing.assert_allclose(coded["outputs"][1]["data"], values.max(axis=1), rtol=1e-5)
    assert [row["name"] for row in only["outputs"]] == ["score"]


def test_metadata_tells_both_forms(server: Server) -> None:
    found = json.loads(server.get("/v2/models/tiny")[1])

    assert found["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 16]}]
    assert found["codec"]["inputs"] == [{"name": "numbers", "datatype": "BYTES", "shape": [-1]}]
    assert [row["name"] for row in found["codec"]["outputs"]] == ["label", "score"]


@pytest.mark.parametrize(
    ("body", "status", "error"),
    [
        (asked(["1 2 x"], "numbers"), 400, "the codec cannot take the input: could not convert string to float: b'x'"),
        (asked(["1 2"], "numbers"), 400, "input x has shape [1, 2], expected ['batch', 16]"),
        (asked([text(X[0])] * 17, "numbers"), 400, ""),
        (
            asked([text(X[0])], "numbers", outputs=[{"name": "y"}]),
            400,
            "unknown output 'y'; the model gives label, score",
        ),
        (asked([text(X[0])], "other"), 400, "input x is missing; the model takes x"),
        (asked([text(X[0])], "numbers").replace(b"BYTES", b"FP32"), 400, "input numbers: data is not float32"),
        (asked(["break"], "numbers"), 500, "the inference failed: RuntimeError; the log has the details"),
    ],
)
def test_what_a_codec_cannot_take_is_the_clients_mistake_and_costs_nobody_else(
    server: Server, body: bytes, status: int, error: str
) -> None:
    found, told = server.post("/v2/models/tiny/infer", body)

    assert (found, json.loads(told)["error"][: len(error)]) == (status, error)
    assert server.post("/v2/models/tiny/infer", asked([text(X[0])], "numbers"))[0] == 200
    assert "break" not in server.text()


def test_the_time_of_a_codec_stands_in_the_metrics(server: Server) -> None:
    def counted() -> float:
        rows = (line.split(" ") for line in server.get("/metrics")[1].decode().splitlines())
        return next(float(row[1]) for row in rows if row[0] == 'warmgate_request_duration_seconds_count{part="codec"}')

    before = counted()
    server.post("/v2/models/tiny/infer", asked([text(X[0])], "numbers"))
    assert counted() == before + 1


@pytest.mark.parametrize(
    ("codec", "kwargs", "code", "message"),
    [
        ("Fickle", {}, 6, "codec sample 0: encode gives x otherwise the second time"),
        ("Moody", {}, 6, "codec sample 0: decode gives score otherwise the second time"),
        ("Short", {}, 6, "codec sample 0 is refused: input x has shape [1, 3], expected ['batch', 16]"),
        ("Silent", {}, 6, "model.codec has no samples, so nothing of it can be proven"),
        ("Misnamed", {}, 6, "codec sample 0 gives ['text'], the codec's inputs are ['numbers']"),
        ("Lacking", {}, 2, "model.codec tests.e2e.codecs:Lacking lacks encode, samples"),
        ("Missing", {}, 2, "model.codec = 'tests.e2e.codecs:Missing' cannot be imported"),
        ("Numbers", {"labels": 5}, 2, "model.codec tests.e2e.codecs:Numbers raised TypeError: "),
    ],
)
def test_a_codec_that_does_not_do_what_it_says_never_becomes_ready(
    start: Start, tmp_path: Path, codec: str, kwargs: JSON, code: int, message: str
) -> None:
    server = start(numbers(tmp_path, codec, **kwargs))

    assert server.exit_code() == code
    (fatal,) = [event for event in server.events() if event["event"] == "fatal"]
    assert fatal["message"].startswith(message)


@pytest.mark.slow
def test_answers_to_a_codecs_samples_are_the_modules_and_recorded_beside_the_code(start: Start, tmp_path: Path) -> None:
    config = numbers(tmp_path)
    config["compile"]["engine"] = "aot"

    def proven(codec: str) -> tuple[str, bool]:
        config["model"]["codec"] = f"tests.e2e.codecs:{codec}"
        server = start(config)
        server.wait()
        stages = {stage["name"]: stage for stage in server.status()["stages"]}
        server.stop()  # what is to be kept is kept before it leaves
        return stages["compute-reference"]["state"], "the record does not hold" in stages["prove-codec"]["detail"]

    assert proven("Numbers") == ("done", False)
    assert proven("Numbers") == ("skipped", False)
    assert proven("Elsewhere") == ("skipped", True)  # its samples are not in the record
    assert proven("Elsewhere") == ("skipped", False)


def test_the_check_finds_a_codec_that_does_not_work(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(numbers(tmp_path, "Lacking")))

    done = command("check", "--config", str(file))

    assert done.returncode == 2
    assert "model.codec tests.e2e.codecs:Lacking lacks encode, samples" in done.stdout + done.stderr


def test_a_codec_that_hangs_keeps_no_server_from_leaving(start: Start, tmp_path: Path) -> None:
    server = start(numbers(tmp_path, "Breaking"), drain_delay_s=0, drain_timeout_s=1)
    server.wait()
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        body = asked(["hang"], "numbers")
        connection.sendall(
            f"POST /v2/models/tiny/infer HTTP/1.1\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
        )
        assert server.infer("tiny", {"x": X})[0] == 200  # tensors go past it

        server.signal()
        assert server.exit_code(10) == 0
