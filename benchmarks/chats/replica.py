"""Client of a model-server replica that runs in a child process."""

import asyncio
import json
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp
import numpy as np
import psutil

from trimtab_model_servers.families.hf_vlm.parts import Placement
from trimtab_model_servers.server.settings import write_models
from trimtab_pipelines.model_spec import ModelSpec
from trimtab_pipelines.processes.parent_death import command_tied_to_parent
from trimtab_protocol import InferRequest, Tensor
from trimtab_protocol.chat.internal_wire import TENANTS, dump_tenants
from trimtab_protocol.rest import HEADER_LENGTH, decode_response, encode_request
from trimtab_training.lmm_digits.questions import Chat

START_SECONDS: Final = 120.0
RANDOM_WEIGHTS_START_SECONDS: Final = 600.0
"""Startup timeout of a model with billions of random weights."""

WEIGHTS: Final = Path("pipelines/lmm-digits/weights")
_MESSAGES = {"name": "messages", "datatype": "BYTES"}
_OPTIONS = {"name": "options", "datatype": "BYTES", "optional": True}
_IMAGES = {"name": "images", "datatype": "BYTES", "shape": [-1], "optional": True}
_OUTPUTS = [
    {"name": "text", "datatype": "BYTES"},
    {"name": "finish_reason", "datatype": "BYTES"},
    {"name": "usage", "datatype": "INT64", "shape": [5]},
]


def trained_model(name: str, **parameters: int) -> ModelSpec:
    """Return the spec of a colocated model of pipelines/lmm-digits."""
    return _spec(name, "lmm-digits", str((WEIGHTS / f"{name}.safetensors").resolve()), parameters)


def published_model(name: str, placement: Placement, **parameters: int) -> ModelSpec:
    """Return the spec of a colocated published model with random weights."""
    return _spec(name, name, "random://?seed=1", parameters | {"device": placement.device, "dtype": placement.dtype})


def _spec(name: str, family: str, storage: str, parameters: Mapping[str, int | str]) -> ModelSpec:
    return ModelSpec.model_validate(
        {
            "name": name,
            "family": f"{family}/colocated",
            "parameters": dict(parameters),
            "storageUri": storage,
            "inputs": [_MESSAGES, _OPTIONS, _IMAGES],
            "outputs": _OUTPUTS,
            "operatingPoints": [{"name": "full", "accuracy": 0.9}],
            "accuracy": 0.9,
        }
    )


@dataclass(frozen=True, slots=True)
class Replica:
    """A running replica and its HTTP client."""

    process: psutil.Process
    port: int
    session: aiohttp.ClientSession

    @property
    def resident_bytes(self) -> int:
        return int(self.process.memory_info().rss)

    def post(self, request: InferRequest, action: str) -> Any:
        """Send a request; leaving the context before the end of the response closes the connection."""
        buffers, length = encode_request(request)
        url = f"http://127.0.0.1:{self.port}/v2/models/{request.model_name}/{action}"
        return self.session.post(url, data=b"".join(buffers), headers={HEADER_LENGTH: str(length)})

    async def generate(self, request: InferRequest) -> str:
        """Return the generated text."""
        async with self.post(request, "infer") as response:
            content = await response.read()
            if response.status != 200:
                raise RuntimeError(f"{response.status}: {content[:300]!r}")
            return str(decode_response(content, response.headers.get(HEADER_LENGTH)).outputs[0].array[0].decode())

    async def events(self, request: InferRequest) -> AsyncGenerator[Mapping[str, Any], None]:
        """Yield the events of a streamed response."""
        async with self.post(request, "generate_stream") as response:
            async for line in response.content:
                if line.startswith(b"data: "):
                    yield json.loads(line.removeprefix(b"data: "))

    async def pending(self, model: str) -> dict[str, int]:
        """Return the counts of work in progress by kind."""
        async with self.session.get(f"http://127.0.0.1:{self.port}/v2/models/{model}/pending") as response:
            counts: dict[str, int] = await response.json(content_type=None)
            return {name: count for name, count in counts.items() if name != "slots"}

    async def counter(self, name: str, model: str) -> float:
        async with self.session.get(f"http://127.0.0.1:{self.port}/metrics") as response:
            lines = (await response.text()).splitlines()
        return float(next(line for line in lines if line.startswith(f'{name}{{model="{model}"}}')).split()[-1])


@asynccontextmanager
async def start_replica(spec: ModelSpec, timeout_seconds: float) -> AsyncIterator[Replica]:
    """Run a replica of one model while the context lasts."""
    with tempfile.TemporaryDirectory(prefix="trimtab-chats-") as folder:
        write_models([spec], Path(folder))
        process = await asyncio.create_subprocess_exec(
            *command_tied_to_parent("trimtab_model_servers", folder), stdout=asyncio.subprocess.PIPE
        )
        try:
            if process.stdout is None:
                raise RuntimeError("the replica has no standard output")
            line = await asyncio.wait_for(process.stdout.readline(), timeout_seconds)
            connector = aiohttp.TCPConnector(limit=0)
            async with aiohttp.ClientSession(connector=connector) as session:
                yield Replica(psutil.Process(process.pid), int(json.loads(line)["data_port"]), session)
        finally:
            process.terminate()
            await process.wait()


def request_of(chat: Chat, model: str, tenant: str = "benchmark", **options: Any) -> InferRequest:
    """Return the inference request of a chat; by default all are of one tenant."""
    tensors = [Tensor("messages", "BYTES", _bytes((chat.messages,)))]
    if options:
        tensors.append(Tensor("options", "BYTES", _bytes((json.dumps(options).encode(),))))
    if chat.images:
        tensors.append(Tensor("images", "BYTES", _bytes(chat.images)[None]))
    parameters: dict[str, bool | str] = {"binary_data_output": True, TENANTS: dump_tenants([tenant])}
    return InferRequest(model, tuple(tensors), parameters=parameters)


def _bytes(elements: tuple[bytes, ...]) -> Any:
    array = np.empty(len(elements), dtype=object)
    array[:] = elements
    return array
