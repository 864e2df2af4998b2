"""Requests of KServe's SDK to a pipeline; runs in the SDK's own environment.

It reads one JSON object: protocol, base_url, address, model, ca, headers, timeout_seconds, row. It prints another:
live, ready, numbers.
"""

import asyncio
import json
import ssl
import sys
from typing import Any

import numpy as np
from kserve import InferenceGRPCClient, InferenceRESTClient, InferInput, InferRequest, RESTConfig


def request(order: dict[str, Any], *, binary: bool) -> Any:
    tensor = InferInput(name="x", shape=[1, len(order["row"])], datatype="FP32")
    tensor.set_data_from_numpy(np.array([order["row"]], np.float32), binary_data=binary)
    return InferRequest(model_name=order["model"], infer_inputs=[tensor])


async def ask_rest(order: dict[str, Any]) -> tuple[bool, bool, Any]:
    trusted = ssl.create_default_context(cafile=order["ca"]) if order["ca"] else True
    client = InferenceRESTClient(RESTConfig(protocol="v2", retries=0, timeout=order["timeout_seconds"], verify=trusted))
    url, model, headers = order["base_url"], order["model"], order["headers"]
    try:
        return (
            await client.is_server_live(url, headers=headers),
            await client.is_model_ready(url, model, headers=headers),
            await client.infer(url, request(order, binary=False), model_name=model, headers=headers or None),
        )
    finally:
        await client.close()


async def ask_grpc(order: dict[str, Any]) -> tuple[bool, bool, Any]:
    security = {"use_ssl": order["ca"] is not None, "root_certificates": order["ca"]}
    client = InferenceGRPCClient(order["address"], timeout=order["timeout_seconds"], retries=0, **security)
    headers = list(order["headers"].items())
    try:
        return (
            await client.is_server_live(headers=headers),
            await client.is_model_ready(order["model"], headers=headers),
            await client.infer(request(order, binary=True), headers=headers),
        )
    finally:
        await client.close()


def main() -> None:
    order = json.load(sys.stdin)
    ask = {"rest": ask_rest, "grpc": ask_grpc}[order["protocol"]]
    live, ready, response = asyncio.run(ask(order))
    print(json.dumps({"live": live, "ready": ready, "numbers": response.outputs[0].as_numpy().ravel().tolist()}))


if __name__ == "__main__":
    main()
