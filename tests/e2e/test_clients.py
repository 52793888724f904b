"""Clients that exist, unchanged, against a real server: what they send by themselves and what they make of answers."""

import asyncio
import gzip
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import tritonclient.http
import tritonclient.http.aio
from open_inference.openapi.client import OpenInferenceClient
from open_inference.openapi.core.api_error import ApiError
from open_inference.openapi.errors import BadRequestError
from open_inference.openapi.types import InferenceRequest, RequestInput, TensorData
from tritonclient.utils import InferenceServerException

from app.servable import BFLOAT16
from tests.e2e import models
from tests.e2e.conftest import JSON, configuration, save
from tests.e2e.harness import ROOT, Server

ROWS = 300  # enough for answers that are worth compressing
X = np.linspace(-1, 1, ROWS * 16, dtype=np.float32).reshape(ROWS, 16)


def method(output: str, datatype: str) -> JSON:
    return {
        "inputs": [{"name": "x", "datatype": datatype, "shape": ["batch", 16], "pad": 0}],
        "outputs": [{"name": output, "datatype": datatype, "shape": ["batch", 16]}],
        "buckets": [{"batch": 2}],
    }


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("clients")
    save(module(), directory / "model.safetensors")
    config = configuration(
        "precise",
        directory / "model.safetensors",
        directory / "store",
        paths={"halve": method("h", "FP16"), "brief": method("b", "BF16")},
        dimensions={"batch": {"min": 1, "max": 512, "buckets": [2, 8]}},
        compile={"engine": "eager"},
    )
    config["model"]["name"] = "tiny"
    with Server(directory, config) as running:
        running.wait()
        yield running


def module() -> models.Precise:
    torch.manual_seed(0)
    return models.Precise()


def forward(x: Any) -> Any:
    with torch.no_grad():
        return module()(torch.from_numpy(x)).numpy()


@pytest.fixture
def triton(server: Server) -> Iterator[Any]:
    with tritonclient.http.InferenceServerClient(f"127.0.0.1:{server.port}") as client:
        yield client


def tensor(array: Any = X, binary: bool = True, datatype: str = "FP32", name: str = "x") -> Any:
    made = tritonclient.http.InferInput(name, list(array.shape), datatype)
    return made.set_data_from_numpy(array, binary_data=binary)


def test_tritonclient_understands_health_and_metadata(triton: Any) -> None:
    assert (triton.is_server_live(), triton.is_server_ready(), triton.is_model_ready("tiny")) == (True, True, True)
    assert not triton.is_model_ready("other")
    assert triton.get_server_metadata()["extensions"] == [
        "binary_tensor_data",
        "model_configuration",
        "model_repository",
        "statistics",
    ]
    assert triton.get_model_metadata("tiny", "1")["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 16]}]
    assert triton.get_model_repository_index() == [{"name": "tiny", "version": "1", "state": "READY", "reason": ""}]


def test_tritonclient_reads_the_configuration_that_load_tools_need(triton: Any) -> None:
    assert triton.get_model_config("tiny") == {
        "name": "tiny",
        "platform": "pytorch_safetensors",
        "backend": "pytorch",
        "max_batch_size": 512,
        "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [16]}],
        "output": [{"name": "y", "data_type": "TYPE_FP32", "dims": [4]}],
        "dynamic_batching": {"max_queue_delay_microseconds": 2000},
    }


@pytest.mark.parametrize("model", ["tiny", ""])
def test_statistics_count_items_and_requests_as_load_tools_read_them(triton: Any, model: str) -> None:
    def counted() -> JSON:
        (row,) = triton.get_inference_statistics(model)["model_stats"]
        found: JSON = row
        return found

    before = counted()
    triton.infer("tiny", [tensor()])
    with pytest.raises(InferenceServerException):
        triton.infer("tiny", [tensor(name="other")])
    after = counted()

    def more(*path: str) -> int:
        one, two = before, after
        for name in path:
            one, two = one[name], two[name]
        return int(two) - int(one)  # type: ignore[call-overload]

    assert (more("inference_count"), more("execution_count")) == (ROWS, 1)
    parts = ("success", "queue", "compute_input", "compute_infer", "compute_output")
    assert [more("inference_stats", part, "count") for part in (*parts, "fail")] == [1, 1, 1, 1, 1, 1]
    assert more("inference_stats", "success", "ns") > more("inference_stats", "compute_infer", "ns") > 0
    assert after["last_inference"] >= before["last_inference"]


@pytest.mark.parametrize("asked_raw", [True, False, None], ids=["raw out", "json out", "nothing asked"])
@pytest.mark.parametrize("binary", [True, False], ids=["raw in", "json in"])
def test_tritonclient_gets_the_models_answer_in_every_form(triton: Any, binary: bool, asked_raw: bool | None) -> None:
    outputs = None if asked_raw is None else [tritonclient.http.InferRequestedOutput("y", binary_data=asked_raw)]

    found = triton.infer("tiny", [tensor(binary=binary)], outputs=outputs, request_id="a-1")

    np.testing.assert_allclose(found.as_numpy("y"), forward(X), rtol=1e-5, atol=1e-6)
    assert (found.get_response()["id"], found.get_response()["model_name"]) == ("a-1", "tiny")
    assert ("data" in found.get_output("y")) == (asked_raw is False)


@pytest.mark.parametrize("answer", [None, "gzip", "deflate"])
@pytest.mark.parametrize("request_coding", [None, "gzip", "deflate"])
def test_tritonclient_compresses_both_ways(triton: Any, request_coding: str | None, answer: str | None) -> None:
    found = triton.infer(
        "tiny",
        [tensor()],
        request_compression_algorithm=request_coding,
        response_compression_algorithm=answer,
    )

    np.testing.assert_allclose(found.as_numpy("y"), forward(X), rtol=1e-5, atol=1e-6)


def test_an_answer_is_compressed_where_it_is_asked_for_and_only_there(server: Server) -> None:
    row = {"name": "x", "datatype": "FP32", "shape": list(X.shape), "data": X.ravel().tolist()}
    body = json.dumps({"inputs": [row]}).encode()

    async def answers() -> list[tuple[str | None, bytes]]:
        import httpx

        found = []
        async with httpx.AsyncClient() as client:
            for accepted in ("gzip", "gzip, deflate, br"):
                url = f"http://127.0.0.1:{server.port}/v2/models/tiny/infer"
                async with client.stream("POST", url, content=body, headers={"Accept-Encoding": accepted}) as answer:
                    raw = b"".join([part async for part in answer.aiter_raw()])
                    assert int(answer.headers["content-length"]) == len(raw)
                    found.append((answer.headers.get("content-encoding"), raw))
        return found

    (coding, small), (none, plain) = asyncio.run(answers())

    assert (coding, none, gzip.decompress(small)) == ("gzip", None, plain)
    assert len(small) < len(plain)


def test_half_precision_is_exact_and_bfloat16_as_the_model_makes_it(triton: Any) -> None:
    half = X[:2].astype(np.float16)
    found = triton.infer("tiny", [tensor(half, datatype="FP16")], parameters={"path": "halve"})
    np.testing.assert_array_equal(found.as_numpy("h"), half * np.float16(0.5))

    brief = X[:2].astype(BFLOAT16)
    found = triton.infer("tiny", [tensor(brief, datatype="BF16")], parameters={"path": "brief"})
    np.testing.assert_array_equal(found.as_numpy("b"), brief * BFLOAT16.type(0.5))


def test_values_that_are_no_numbers_come_back_raw_and_are_an_error_in_json(triton: Any) -> None:
    x = np.full((1, 16), np.nan, np.float32)

    assert np.isnan(triton.infer("tiny", [tensor(x)]).as_numpy("y")).all()
    with pytest.raises(InferenceServerException, match='with the parameter "binary_data": true') as caught:
        triton.infer("tiny", [tensor(x)], outputs=[tritonclient.http.InferRequestedOutput("y", binary_data=False)])
    assert caught.value.status() == "500"


@pytest.mark.parametrize(
    ("model", "inputs", "options", "status", "text"),
    [
        ("tiny", [tensor(name="z")], {}, "400", "input x is missing; the model takes x"),
        ("tiny", [tensor(X[:, :3])], {}, "400", "input x has shape [300, 3], expected ['batch', 16]"),
        ("other", [tensor()], {}, "404", "unknown model other; this server has tiny"),
        ("tiny", [tensor()], {"sequence_id": 4}, "501", "sequences are not supported"),
        ("tiny", [tensor()], {"timeout": 1}, "504", "not started within 1e-06 s"),
    ],
)
def test_the_text_of_an_error_reaches_tritonclients_user(
    triton: Any, model: str, inputs: list[Any], options: JSON, status: str, text: str
) -> None:
    with pytest.raises(InferenceServerException) as caught:
        triton.infer(model, inputs, **options)

    assert caught.value.status() == status
    assert text in caught.value.message()


def test_tritonclients_asyncio_form_works_as_well(server: Server) -> None:
    async def ask() -> list[Any]:
        async with tritonclient.http.aio.InferenceServerClient(f"127.0.0.1:{server.port}") as client:
            assert await client.is_server_ready()
            assert await client.is_model_ready("tiny")
            found = [
                await client.infer("tiny", [tensor(binary=binary)], **options)
                for binary in (True, False)
                for options in (
                    {},
                    {"request_compression_algorithm": "gzip", "response_compression_algorithm": "deflate"},
                )
            ]
            with pytest.raises(InferenceServerException, match="unknown model other"):
                await client.infer("other", [tensor()])
            return found

    answers = asyncio.run(ask())

    assert len(answers) == 4
    for found in answers:
        np.testing.assert_allclose(found.as_numpy("y"), forward(X), rtol=1e-5, atol=1e-6)


def test_the_generated_client_of_the_protocol_understands_answers_and_errors(server: Server) -> None:
    import httpx

    with httpx.Client() as connection:
        client = OpenInferenceClient(base_url=f"http://127.0.0.1:{server.port}", httpx_client=connection)
        client.check_server_liveness()
        client.check_server_readiness()
        client.check_model_version_readiness("tiny", "1")
        assert client.read_model_metadata("tiny").outputs[0].name == "y"

        def asked(name: str) -> InferenceRequest:
            values = TensorData(__root__=X[:2].ravel().tolist())
            row = RequestInput(name=name, datatype="FP32", shape=[2, 16], data=values)
            return InferenceRequest(id="g", inputs=[row])

        found = client.model_infer("tiny", request=asked("x"))
        with pytest.raises(ApiError) as unknown:
            client.model_infer("other", request=asked("x"))
        with pytest.raises(BadRequestError) as wrong:
            client.model_infer("tiny", request=asked("z"))

    np.testing.assert_allclose(found.outputs[0].data.__root__, forward(X[:2]).ravel(), rtol=1e-5, atol=1e-6)
    assert found.id == "g"
    assert (unknown.value.status_code, unknown.value.body) == (
        404,
        {"error": "unknown model other; this server has tiny"},
    )
    assert "input x is missing" in wrong.value.body["error"]


def test_the_readmes_raw_request_works_as_it_is_pasted(server: Server, tmp_path: Path) -> None:
    section = (ROOT / "README.md").read_text().partition("## Tensors")[2]
    found = re.search(r"```sh\n(.*?)```", section, re.DOTALL)
    assert found
    (tmp_path / "x.bin").write_bytes(X[:1].tobytes())
    pasted = (
        found[1]
        .replace("localhost:8080", f"127.0.0.1:{server.port}")
        .replace("curl ", "curl --silent --dump-header head ")
    )

    subprocess.run(["bash", "-euc", pasted], cwd=tmp_path, check=True)

    (length,) = re.findall(r"(?i)inference-header-content-length: (\d+)", (tmp_path / "head").read_text())
    values = np.frombuffer((tmp_path / "answer").read_bytes()[int(length) :], np.float32)
    np.testing.assert_allclose(values, forward(X[:1]).ravel(), rtol=1e-5, atol=1e-6)
