"""Asks a pipeline by KServe's SDK; runs in the SDK's own environment, which knows nothing of Trimtab.

One object of JSON on stdin: protocol, base_url, address, model, ca, headers, patience_seconds, question. On stdout one
line of JSON: live, ready, numbers.
"""

import asyncio
import json
import ssl
import sys
from typing import Any

import numpy as np
from kserve import InferenceGRPCClient, InferenceRESTClient, InferInput, InferRequest, RESTConfig


def question(order: dict[str, Any], *, raw: bool) -> Any:
    """The question as the SDK's own request."""
    entry = InferInput(name="x", shape=[1, len(order["question"])], datatype="FP32")
    entry.set_data_from_numpy(np.array([order["question"]], np.float32), binary_data=raw)
    return InferRequest(model_name=order["model"], infer_inputs=[entry])


async def over_rest(order: dict[str, Any]) -> dict[str, Any]:
    """Ask over REST."""
    trusted = ssl.create_default_context(cafile=order["ca"]) if order["ca"] else True
    config = RESTConfig(protocol="v2", retries=0, timeout=order["patience_seconds"], verify=trusted)
    client = InferenceRESTClient(config)
    base_url, headers = order["base_url"], order["headers"]
    try:
        live = await client.is_server_live(base_url, headers=headers)
        ready = await client.is_model_ready(base_url, order["model"], headers=headers)
        answer = await client.infer(
            base_url, question(order, raw=False), model_name=order["model"], headers=headers or None
        )
    finally:
        await client.close()
    return {"live": live, "ready": ready, "numbers": answer.outputs[0].as_numpy().ravel().tolist()}


async def over_grpc(order: dict[str, Any]) -> dict[str, Any]:
    """Ask over gRPC."""
    client = InferenceGRPCClient(
        order["address"],
        use_ssl=order["ca"] is not None,
        root_certificates=order["ca"],
        timeout=order["patience_seconds"],
        retries=0,
    )
    headers = list(order["headers"].items())
    try:
        live = await client.is_server_live(headers=headers)
        ready = await client.is_model_ready(order["model"], headers=headers)
        answer = await client.infer(question(order, raw=True), headers=headers)
    finally:
        await client.close()
    return {"live": live, "ready": ready, "numbers": answer.outputs[0].as_numpy().ravel().tolist()}


def main() -> None:
    """Read the order, ask, print the answer."""
    order = json.load(sys.stdin)
    ask = {"rest": over_rest, "grpc": over_grpc}[order["protocol"]]
    print(json.dumps(asyncio.run(ask(order))))


if __name__ == "__main__":
    main()
