"""What KServe's client makes of a server's answers, told as JSON; run by test_kserve.py in an environment of its own.

It knows nothing of Warmgate: everything here is written as for any server of the protocol.
"""

import asyncio
import json
import sys
from typing import Any

import httpx
import numpy as np
from kserve import InferenceRESTClient, InferInput, InferRequest, RESTConfig
from kserve.protocol.infer_type import RequestedOutput

X = np.linspace(-1, 1, 32, dtype=np.float32).reshape(2, 16)
HALF = X.astype(np.float16)


def request(name: str, array: Any, datatype: str, binary: bool, **options: Any) -> InferRequest:
    tensor = InferInput(name, list(array.shape), datatype)
    tensor.set_data_from_numpy(array, binary_data=binary)
    return InferRequest("served", [tensor], **options)


def raw(name: str) -> list[RequestedOutput]:
    return [RequestedOutput(name, {"binary_data": True})]


async def ask(client: InferenceRESTClient, base: str, asked: InferRequest, model: str = "served") -> Any:
    headers: dict[str, str] = {}
    try:
        found = await client.infer(base, asked, model, response_headers=headers)
    except httpx.HTTPStatusError as error:
        return {"status": error.response.status_code, "error": str(error)}
    output = found.outputs[0]
    return {
        "id": found.id,
        "model": found.model_name,
        "output": output.name,
        "datatype": output.datatype,
        "values": output.as_numpy().tolist(),
        "type": headers["content-type"],
    }


async def main(base: str) -> dict[str, Any]:
    half = {"parameters": {"path": "halve"}}
    async with InferenceRESTClient(RESTConfig(protocol="v2", timeout=30)) as client:
        return {
            "live": await client.is_server_live(base),
            "ready": await client.is_server_ready(base),
            "model ready": await client.is_model_ready(base, "served"),
            "other model ready": await client.is_model_ready(base, "other"),
            "json": await ask(client, base, request("x", X, "FP32", binary=False, request_id="a-1")),
            "binary": await ask(client, base, request("x", X, "FP32", binary=True)),
            "both binary": await ask(client, base, request("x", X, "FP32", binary=True, request_outputs=raw("y"))),
            "half": await ask(client, base, request("x", HALF, "FP16", binary=True, request_outputs=raw("h"), **half)),
            "wrong input": await ask(client, base, request("z", X, "FP32", binary=False)),
            "wrong model": await ask(client, base, request("x", X, "FP32", binary=False), "other"),
        }


if __name__ == "__main__":
    json.dump(asyncio.run(main(sys.argv[1])), sys.stdout)
