"""A replica of its own process, and chats sent to its data port."""

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
from trimtab_protocol.rest import HEADER_LENGTH, decode_response, encode_request
from trimtab_training.lmm_digits.chat_samples import Chat

START_SECONDS: Final = 120.0
DRAWING_SECONDS: Final = 600.0
"""To start where billions of random weights are drawn."""

WEIGHTS: Final = Path("pipelines/lmm-digits/weights")
_MESSAGES = {"name": "messages", "datatype": "BYTES"}
_OPTIONS = {"name": "options", "datatype": "BYTES", "optional": True}
_IMAGES = {"name": "images", "datatype": "BYTES", "shape": [-1], "optional": True}
_ANSWER = [
    {"name": "text", "datatype": "BYTES"},
    {"name": "finish_reason", "datatype": "BYTES"},
    {"name": "usage", "datatype": "INT64", "shape": [5]},
]


def whole(name: str, **parameters: int) -> ModelSpec:
    """The trained model of that name, whole in one replica."""
    return _spec(name, "lmm-digits", str((WEIGHTS / f"{name}.safetensors").resolve()), parameters)


def published(name: str, kept: Placement, **parameters: int) -> ModelSpec:
    """The published model of that name, weights random, whole in one replica."""
    return _spec(name, name, "random://?seed=1", parameters | {"device": kept.device, "dtype": kept.dtype})


def _spec(name: str, family: str, storage: str, parameters: Mapping[str, int | str]) -> ModelSpec:
    return ModelSpec.model_validate(
        {
            "name": name,
            "family": f"{family}/colocated",
            "parameters": dict(parameters),
            "storageUri": storage,
            "inputs": [_MESSAGES, _OPTIONS, _IMAGES],
            "outputs": _ANSWER,
            "operatingPoints": [{"name": "full", "accuracy": 0.9}],
            "accuracy": 0.9,
        }
    )


@dataclass(frozen=True, slots=True)
class Replica:
    """A running replica, and how to ask it."""

    process: psutil.Process
    port: int
    session: aiohttp.ClientSession

    @property
    def resident_bytes(self) -> int:
        """What it holds of main memory."""
        return int(self.process.memory_info().rss)

    def post(self, request: InferRequest, action: str) -> Any:
        """Send a request; a context that ends closes its connection where the answer is not read to its end."""
        buffers, length = encode_request(request)
        url = f"http://127.0.0.1:{self.port}/v2/models/{request.model_name}/{action}"
        return self.session.post(url, data=b"".join(buffers), headers={HEADER_LENGTH: str(length)})

    async def answer(self, request: InferRequest) -> str:
        """The whole answer's text."""
        async with self.post(request, "infer") as answer:
            content = await answer.read()
            if answer.status != 200:
                raise RuntimeError(f"{answer.status}: {content[:300]!r}")
            return str(decode_response(content, answer.headers.get(HEADER_LENGTH)).outputs[0].array[0].decode())

    async def events(self, request: InferRequest) -> AsyncGenerator[Mapping[str, Any], None]:
        """A stream's events."""
        async with self.post(request, "generate_stream") as answer:
            async for line in answer.content:
                if line.startswith(b"data: "):
                    yield json.loads(line.removeprefix(b"data: "))

    async def pending(self, model: str) -> dict[str, int]:
        """What is in flight, but for the number of slots."""
        async with self.session.get(f"http://127.0.0.1:{self.port}/v2/models/{model}/pending") as answer:
            told: dict[str, int] = await answer.json(content_type=None)
            return {name: count for name, count in told.items() if name != "slots"}

    async def counter(self, name: str, model: str) -> float:
        """A counter of its metrics."""
        async with self.session.get(f"http://127.0.0.1:{self.port}/metrics") as answer:
            lines = (await answer.text()).splitlines()
        return float(next(line for line in lines if line.startswith(f'{name}{{model="{model}"}}')).split()[-1])


@asynccontextmanager
async def started(*specs: ModelSpec, within_seconds: float = START_SECONDS) -> AsyncIterator[Replica]:
    """Start a replica of some models; it ends with the context."""
    with tempfile.TemporaryDirectory(prefix="trimtab-chats-") as folder:
        write_models(specs, Path(folder))
        process = await asyncio.create_subprocess_exec(
            *command_tied_to_parent("trimtab_model_servers", folder), stdout=asyncio.subprocess.PIPE
        )
        try:
            if process.stdout is None:
                raise RuntimeError("a replica without an output")
            line = await asyncio.wait_for(process.stdout.readline(), within_seconds)
            connector = aiohttp.TCPConnector(limit=0)
            async with aiohttp.ClientSession(connector=connector) as session:
                yield Replica(psutil.Process(process.pid), int(json.loads(line)["data_port"]), session)
        finally:
            process.terminate()
            await process.wait()


def request_of(chat: Chat, model: str, **options: Any) -> InferRequest:
    """A chat as a replica takes it."""
    tensors = [Tensor("messages", "BYTES", _bytes((chat.messages,)))]
    if options:
        tensors.append(Tensor("options", "BYTES", _bytes((json.dumps(options).encode(),))))
    if chat.images:
        tensors.append(Tensor("images", "BYTES", _bytes(chat.images)[None]))
    return InferRequest(model, tuple(tensors), parameters={"binary_data_output": True})


def _bytes(elements: tuple[bytes, ...]) -> Any:
    array = np.empty(len(elements), dtype=object)
    array[:] = elements
    return array
