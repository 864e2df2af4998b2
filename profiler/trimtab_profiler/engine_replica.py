"""`EngineReplica`: a third-party server under measurement, sent the requests that routers send."""

import asyncio
import os
import secrets
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import aiohttp
import numpy as np

from trimtab_pipelines.engines import ENGINES, UNKNOWN_ENGINE
from trimtab_pipelines.errors import backoff
from trimtab_pipelines.processes.child_process import StartError
from trimtab_pipelines.processes.engine_process import EngineProcess
from trimtab_pipelines.spec import InferencePipeline
from trimtab_pipelines.stages import Stage
from trimtab_pipelines.variants import Container
from trimtab_profiler.replica import CLIENT_ERRORS, STOP_SECONDS, BatchRejected, ProfileError, Replica
from trimtab_protocol import InferResponse, ProtocolError, Tensor
from trimtab_protocol.chat.internal_wire import Event, LastChunk, StreamFailure, outputs_from_responses
from trimtab_protocol.chat.openai_backend import COMPLETIONS, ChunkParser, completion_request
from trimtab_protocol.http_client import HttpConnection
from trimtab_protocol.rest import JSON_CONTENT_TYPE
from trimtab_protocol.sanitize import printable
from trimtab_protocol.sse import SseParser
from trimtab_protocol.tensors import Array

START_SECONDS = 1800.0
"""Time to download and load a model."""
CONNECT_SECONDS = 30.0
BATCH_SECONDS = 600.0
MAX_ERROR_BYTES = 1500


class EngineReplica(Replica):
    """A running engine with OpenAI's API."""

    def __init__(self, session: aiohttp.ClientSession, url: str, container: Container, stage: Stage) -> None:
        self._session = session
        self._url = url
        self._model = container.model_name
        self._kind = ENGINES.get(container.engine or "", UNKNOWN_ENGINE)
        self._processor_kwargs = stage.processor_kwargs
        self._datatypes = {output.name: output.datatype for output in stage.outputs}

    async def infer(
        self, variant: str, operating_point: str, inputs: tuple[Tensor, ...], tenant: str = ""
    ) -> InferResponse:
        """Serve concurrent chats; raise BatchRejected for an invalid one, ProfileError if the engine fails."""
        rows = [{t.name: t.array[row : row + 1] for t in inputs} for row in range(len(inputs[0].array))]
        point = variant, operating_point
        try:
            parts = await asyncio.gather(*(self._generate(point, row, tenant) for row in rows))
        except (aiohttp.ClientError, OSError, TimeoutError, ProtocolError) as error:
            raise ProfileError(f"variant {variant}, operating point {operating_point}: {error!r}") from error
        outputs = [
            Tensor(name, datatype, np.concatenate([part[name] for part in parts]))
            for name, datatype in self._datatypes.items()
        ]
        return InferResponse(model_name=variant, outputs=tuple(outputs))

    async def _generate(self, point: tuple[str, str], row: Mapping[str, Array], tenant: str) -> Mapping[str, Array]:
        variant, options = point[0], self._processor_kwargs.get(point, {})
        model, salt = self._model or variant, tenant or "profile"
        body = completion_request(model, row, cache_salt=salt, kind=self._kind, processor_kwargs=options)
        headers = {"Content-Type": JSON_CONTENT_TYPE, "x-request-id": secrets.token_hex(8)}
        async with self._session.post(self._url + COMPLETIONS, data=body, headers=headers) as response:
            if response.status != 200:
                message = (await response.content.read(MAX_ERROR_BYTES)).decode(errors="replace")
                raise _error(variant, response.status, message)
            texts = []
            async for event in _events(response):
                if isinstance(event, StreamFailure):
                    raise _error(variant, event.code, event.message)
                texts.append(event.text)
                if isinstance(event, LastChunk):
                    return outputs_from_responses([("".join(texts), event)])
        raise ProfileError(f"variant {variant}: the response ended without a last chunk")


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[Event]:
    stream, parser = SseParser(), ChunkParser(images=True)
    async for data in response.content.iter_any():
        for kind, content in stream.feed(data):
            for event in parser.read(kind, content):
                yield event
    for event in parser.end():
        yield event


def _error(variant: str, status: int, message: str) -> ProfileError:
    kind = BatchRejected if status in CLIENT_ERRORS else ProfileError
    return kind(f"variant {variant}: {status} {printable(message)}")


def with_container_endpoints(pipeline: InferencePipeline, url: str) -> InferencePipeline:
    """A pipeline whose containers are at an address, in which {port} is a container's. Raises ValidationError."""
    document = pipeline.model_dump(mode="json", by_alias=True)
    for variant in [variant for stage in document["spec"]["stages"] for variant in stage["variants"]]:
        if container := variant.get("container"):
            container["endpoints"] = [url.replace("{port}", str(container["port"]))]
    return InferencePipeline.model_validate(document)


@asynccontextmanager
async def running_engine(stage: Stage, variant: str, folder: Path) -> AsyncIterator[Replica]:
    """Start a variant's container in a folder, or use its first endpoint; raise ProfileError if it does not serve."""
    container = stage.variant(variant).container
    if container is None:
        raise ProfileError(f"variant {variant} has no container")
    if container.endpoints:
        async with _connected(stage, container, container.endpoints[0]) as replica:
            yield replica
        return
    with tempfile.TemporaryDirectory(prefix="trimtab-profile-") as logs:
        process = await EngineProcess.start_command(container, folder, Path(logs) / "log", f"variant {variant}")
        try:
            await process.ready(container.ready_path, START_SECONDS)
            async with _connected(stage, container, f"http://{process.address}") as replica:
                yield replica
        except StartError as error:
            raise ProfileError(str(error)) from error
        finally:
            await process.stop(STOP_SECONDS)


def _connected(stage: Stage, container: Container, url: str) -> AbstractAsyncContextManager[Replica]:
    return _engine(stage, container, url) if container.serves_chats else _tensor_server(container, url)


@asynccontextmanager
async def _engine(stage: Stage, container: Container, url: str) -> AsyncIterator[Replica]:
    key = os.environ.get(container.api_key_env or "", "")
    timeout = aiohttp.ClientTimeout(total=BATCH_SECONDS)
    connector, headers = aiohttp.TCPConnector(limit=0), {"Authorization": f"Bearer {key}"} if key else {}
    async with aiohttp.ClientSession(connector=connector, headers=headers, timeout=timeout) as session:
        await _wait_until_ready(session, url + container.ready_path)
        yield EngineReplica(session, url, container, stage)


async def _wait_until_ready(session: aiohttp.ClientSession, url: str) -> None:
    reason = ""
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            for pause_seconds in backoff(0.05, 1.0):
                try:
                    async with session.get(url, allow_redirects=False) as response:
                        if response.status == 200:
                            return
                        reason = f"status {response.status}"
                except (aiohttp.ClientError, OSError) as error:
                    reason = str(error)
                await asyncio.sleep(pause_seconds)
    except TimeoutError as error:
        raise ProfileError(f"{url} is not ready: {reason}") from error


@asynccontextmanager
async def _tensor_server(container: Container, url: str) -> AsyncIterator[Replica]:
    host, _, port = url.partition("://")[2].partition(":")
    connection = await HttpConnection.open(host, int(port))
    try:
        yield Replica(connection, host, container.model_name)
    finally:
        connection.close()
        await connection.closed
