"""Clients and requests of chat models on the data port."""

import io
import json
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import numpy as np
from PIL import Image as Pillow

from trimtab_pipelines.model_spec import ModelSpec
from trimtab_pipelines.processes.child_process import ReplicaPorts
from trimtab_protocol import InferRequest, InferResponse, Tensor
from trimtab_protocol.rest import HEADER_LENGTH, decode_response, encode_request

WIDTH = 128
MESSAGES = {"name": "messages", "datatype": "BYTES", "shape": []}
OPTIONS = {"name": "options", "datatype": "BYTES", "shape": [], "optional": True}
IMAGES = {"name": "images", "datatype": "BYTES", "shape": [-1], "optional": True}
REFERENCES = {"name": "references", "datatype": "BYTES", "shape": [], "optional": True}
EMBEDDINGS = {"name": "embeddings", "datatype": "FP32", "shape": [-1, WIDTH]}
IMAGE_ROWS = {"name": "image_rows", "datatype": "INT64", "shape": [-1]}
DIGESTS = {"name": "image_digests", "datatype": "BYTES", "shape": [-1]}
ANSWER = [
    {"name": "text", "datatype": "BYTES"},
    {"name": "finish_reason", "datatype": "BYTES"},
    {"name": "usage", "datatype": "INT64", "shape": [5]},
]
CHAT_IMAGES = {"name": "chat_images", "datatype": "INT64", "shape": [2], "optional": True}
STORED = {"name": "references", "datatype": "BYTES", "shape": []}
_EMBEDDING_INPUTS = [one | {"optional": True} for one in (EMBEDDINGS, IMAGE_ROWS, DIGESTS)]
_TENSORS = {
    "colocated": ([MESSAGES, OPTIONS, IMAGES], ANSWER),
    "text": ([MESSAGES, OPTIONS, REFERENCES, *_EMBEDDING_INPUTS], ANSWER),
    "encode": ([IMAGES, OPTIONS], [EMBEDDINGS, IMAGE_ROWS, DIGESTS]),
    "keep": ([IMAGES, OPTIONS, CHAT_IMAGES], [STORED]),
}


def a_chat_spec(part: str, name: str = "", **changes: Any) -> ModelSpec:
    """A stage of the lmm-digits model with random weights."""
    inputs, outputs = _TENSORS[part]
    written = {
        "name": name or part,
        "family": f"lmm-digits/{'encode' if part == 'keep' else part}",
        "storageUri": "random://?seed=1",
        "inputs": inputs,
        "outputs": outputs,
        "maxBatchSize": 8,
        "operatingPoints": [{"name": "full", "accuracy": 0.9}],
        "accuracy": 0.9,
    }
    return ModelSpec.model_validate(written | changes)


def a_page(seed: int = 0, side: int = 96) -> bytes:
    """A PNG file of noise."""
    file = io.BytesIO()
    Pillow.fromarray(np.random.default_rng(seed).integers(256, size=(side, side), dtype=np.uint8)).save(file, "PNG")
    return file.getvalue()


def texts(name: str, *rows: bytes) -> Tensor:
    """A BYTES tensor with one element per row."""
    array = np.empty(len(rows), dtype=object)
    array[:] = rows
    return Tensor(name, "BYTES", array)


def rows_of_files(*images: bytes) -> Tensor:
    return Tensor("images", "BYTES", files(*images).array.reshape(-1, 1))


def files(*images: bytes) -> Tensor:
    array = np.empty((1, len(images)), dtype=object)
    array[0, :] = images
    return Tensor("images", "BYTES", array)


def messages(text: str, images: int = 0) -> bytes:
    content = [*({"type": "image"} for _ in range(images)), {"type": "text", "text": text}]
    return json.dumps([{"role": "user", "content": content}]).encode()


def a_chat(model: str, text: str, *images: bytes, extra: tuple[Tensor, ...] = (), **options: Any) -> InferRequest:
    tensors = [texts("messages", messages(text, len(images))), *extra]
    if options:
        tensors.append(texts("options", json.dumps(options).encode()))
    if images:
        tensors.append(files(*images))
    return InferRequest(model, tuple(tensors), parameters={"binary_data_output": True})


@dataclass(slots=True)
class StreamResult:
    """The response of a stream."""

    status: int
    events: list[dict[str, Any]] = field(default_factory=list)
    error: dict[str, Any] | None = None

    @property
    def text(self) -> str:
        return "".join(event["text"] for event in self.events)


class ChatClient:
    """Client of one replica's data port."""

    def __init__(self, session: aiohttp.ClientSession, ports: ReplicaPorts) -> None:
        self._session = session
        self.url = f"http://127.0.0.1:{ports.data_port}/v2/models"

    def post(self, request: InferRequest, action: str) -> Any:
        buffers, length = encode_request(request)
        return self._session.post(
            f"{self.url}/{request.model_name}/{action}",
            data=io.BytesIO(b"".join(buffers)),
            headers={HEADER_LENGTH: str(length)},
        )

    async def infer(self, request: InferRequest) -> InferResponse:
        async with self.post(request, "infer") as answer:
            content = await answer.read()
            assert answer.status == 200, content
            return decode_response(content, answer.headers.get(HEADER_LENGTH))

    async def refused(self, request: InferRequest, action: str = "infer") -> tuple[int, str]:
        async with self.post(request, action) as answer:
            return answer.status, (await answer.json(content_type=None)).get("error", "")

    async def stream(self, request: InferRequest) -> StreamResult:
        async with self.post(request, "generate_stream") as answer:
            heard = StreamResult(answer.status)
            failed = False
            async for line in answer.content:
                if line.startswith(b"event: error"):
                    failed = True
                elif line.startswith(b"data: "):
                    event = json.loads(line.removeprefix(b"data: "))
                    if failed:
                        heard.error = event
                    else:
                        heard.events.append(event)
            return heard

    async def count(self, request: InferRequest) -> Any:
        async with self.post(request, "count") as answer:
            return await answer.json()

    async def post_json(self, path: str, body: Any) -> Any:
        async with self._session.post(f"{self.url}/{path}", json=body) as answer:
            return await answer.json(content_type=None)

    async def encoded_images(self, model: str) -> int:
        async with self._session.get(self.url.removesuffix("/v2/models") + "/metrics") as answer:
            lines = (await answer.text()).splitlines()
        return next(int(float(line.split()[-1])) for line in lines if f'_encoded_images_total{{model="{model}"' in line)

    async def get(self, path: str) -> Any:
        async with self._session.get(f"{self.url}/{path}") as answer:
            return await answer.json(content_type=None)


def text_of(response: InferResponse) -> list[str]:
    return [text.decode() for text in response.outputs[0].array]
