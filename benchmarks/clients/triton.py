"""NVIDIA's tritonclient: HTTP and gRPC, each with threads and with asyncio."""

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import tritonclient.grpc
import tritonclient.grpc.aio
import tritonclient.http
import tritonclient.http.aio

from benchmarks.clients.target import PATIENCE_MICROSECONDS, PATIENCE_SECONDS, QUESTION, Target, WrongAnswerError, check

DID = "live, ready, metadata, answered right"


def over_http(target: Target) -> str:
    """Ask by `tritonclient.http`, with binary tensors."""
    secured = {"ssl": True, "ssl_options": {"ca_certs": str(target.ca)}} if target.ca else {}
    with tritonclient.http.InferenceServerClient(target.rest, network_timeout=PATIENCE_SECONDS, **secured) as client:
        return _asked(client, tritonclient.http, target)


def over_grpc(target: Target) -> str:
    """Ask by `tritonclient.grpc`."""
    with tritonclient.grpc.InferenceServerClient(target.grpc, **_grpc_security(target)) as client:
        return _asked(client, tritonclient.grpc, target)


def over_http_aio(target: Target) -> str:
    """Ask by `tritonclient.http.aio`."""

    async def ask() -> str:
        context = ssl.create_default_context(cafile=target.ca) if target.ca else None
        async with tritonclient.http.aio.InferenceServerClient(
            target.rest, ssl=target.ca is not None, ssl_context=context
        ) as client:
            return await _asked_aio(client, tritonclient.http, target)

    return asyncio.run(ask())


def over_grpc_aio(target: Target) -> str:
    """Ask by `tritonclient.grpc.aio`."""

    async def ask() -> str:
        async with tritonclient.grpc.aio.InferenceServerClient(target.grpc, **_grpc_security(target)) as client:
            return await _asked_aio(client, tritonclient.grpc, target)

    return asyncio.run(ask())


def _grpc_security(target: Target) -> dict[str, Any]:
    return {"ssl": True, "root_certificates": str(target.ca)} if target.ca else {}


def _input(module: Any) -> Any:
    entry = module.InferInput("x", [1, len(QUESTION)], "FP32")
    entry.set_data_from_numpy(np.array([QUESTION], np.float32))
    return entry


def _asked(client: Any, module: Any, target: Target) -> str:
    headers = dict(target.headers)
    if not (client.is_server_live(headers=headers) and client.is_server_ready(headers=headers)):
        raise WrongAnswerError("the server says that it is not live and ready")
    if not client.is_model_ready(target.model, headers=headers):
        raise WrongAnswerError(f"{target.model} says that it is not ready")
    _check_metadata(client.get_model_metadata(target.model, headers=headers))
    answer = client.infer(target.model, [_input(module)], timeout=PATIENCE_MICROSECONDS, headers=headers)
    check(answer.as_numpy("y"))
    return DID


async def _asked_aio(client: Any, module: Any, target: Target) -> str:
    headers = dict(target.headers)
    questions: tuple[Callable[[], Awaitable[bool]], ...] = (
        lambda: client.is_server_live(headers=headers),
        lambda: client.is_server_ready(headers=headers),
        lambda: client.is_model_ready(target.model, headers=headers),
    )
    for question in questions:
        if not await question():
            raise WrongAnswerError(f"the server, or {target.model}, says that it is not live and ready")
    _check_metadata(await client.get_model_metadata(target.model, headers=headers))
    answer = await client.infer(target.model, [_input(module)], timeout=PATIENCE_MICROSECONDS, headers=headers)
    check(answer.as_numpy("y"))
    return DID


def _check_metadata(metadata: Any) -> None:
    inputs = metadata["inputs"] if isinstance(metadata, dict) else metadata.inputs
    names = [entry["name"] if isinstance(entry, dict) else entry.name for entry in inputs]
    if names != ["x"]:
        raise WrongAnswerError(f"the metadata names the inputs {names}; right is ['x']")
