"""Libraries that speak the Open Inference Protocol: NVIDIA's tritonclient, KServe's SDK, and gRPC in Node.js."""

import ssl
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.grpc.aio
import tritonclient.http
import tritonclient.http.aio

from tests.conformance.installed import install, run_script
from tests.conformance.target import (
    PATIENCE_SECONDS,
    ROW,
    TIMEOUT_MICROSECONDS,
    Target,
    check,
    grpc_request,
    write_protoset,
)
from trimtab_protocol.grpc_messages import SERVICE

pytestmark = pytest.mark.conformance


def triton_client(module: Any, target: Target) -> Any:
    """A client of one of tritonclient's four modules."""
    if "grpc" in module.__name__:
        security = {"ssl": True, "root_certificates": str(target.ca)} if target.ca else {}
        return module.InferenceServerClient(target.grpc, **security)
    if module is tritonclient.http.aio:
        trusted = ssl.create_default_context(cafile=target.ca) if target.ca else None
        return module.InferenceServerClient(target.rest, ssl=target.ca is not None, ssl_context=trusted)
    security = {"ssl": True, "ssl_options": {"ca_certs": str(target.ca)}} if target.ca else {}
    return module.InferenceServerClient(target.rest, network_timeout=PATIENCE_SECONDS, **security)


def triton_input(module: Any) -> Any:
    tensor = module.InferInput("x", [1, len(ROW)], "FP32")
    tensor.set_data_from_numpy(np.array([ROW], np.float32))
    return tensor


def check_metadata(metadata: Any) -> None:
    inputs = metadata["inputs"] if isinstance(metadata, dict) else metadata.inputs
    assert [entry["name"] if isinstance(entry, dict) else entry.name for entry in inputs] == ["x"]


@pytest.mark.parametrize("module", [tritonclient.http, tritonclient.grpc], ids=["http", "grpc"])
def test_tritonclient(target: Target, module: Any) -> None:
    sent = {"headers": dict(target.headers)}
    with triton_client(module, target) as client:
        assert client.is_server_live(**sent)
        assert client.is_server_ready(**sent)
        assert client.is_model_ready(target.model, **sent)
        check_metadata(client.get_model_metadata(target.model, **sent))
        response = client.infer(target.model, [triton_input(module)], timeout=TIMEOUT_MICROSECONDS, **sent)
        check(response.as_numpy("y"))


@pytest.mark.parametrize("module", [tritonclient.http.aio, tritonclient.grpc.aio], ids=["http", "grpc"])
async def test_tritonclient_aio(target: Target, module: Any) -> None:
    sent = {"headers": dict(target.headers)}
    async with triton_client(module, target) as client:
        assert await client.is_server_live(**sent)
        assert await client.is_server_ready(**sent)
        assert await client.is_model_ready(target.model, **sent)
        check_metadata(await client.get_model_metadata(target.model, **sent))
        response = await client.infer(target.model, [triton_input(module)], timeout=TIMEOUT_MICROSECONDS, **sent)
        check(response.as_numpy("y"))


@pytest.mark.parametrize("protocol", ["rest", "grpc"])
def test_kserve_sdk(target: Target, protocol: str) -> None:
    response = run_script("kserve_client.py", "kserve", target, protocol=protocol, row=ROW)

    assert response["live"]
    assert response["ready"]
    check(response["numbers"])


def test_node_grpc(target: Target, tmp_path: Path) -> None:
    order = {"modules": str(install("node")), "descriptors": write_protoset(tmp_path), "service": SERVICE}
    response = run_script("node_client.cjs", "node", target, **order, request=grpc_request(target.model))

    assert response["live"] is True
    assert response["unknown_model"] == "NOT_FOUND"
    check(response["numbers"])
