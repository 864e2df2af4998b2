"""A real replica to measure: the very process that serves, with models loaded and warmed, driven by its data port."""

import asyncio
import json
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from trimtab_model_servers.settings import write_model_folder
from trimtab_pipelines.spec import InferencePipeline
from trimtab_protocol import InferRequest, InferResponse, ProtocolError, Tensor, rest
from trimtab_protocol.extensions import OPERATING_POINT
from trimtab_protocol.http import ConnectionBroken, HttpConnection, request_head

HOST = "127.0.0.1"
START_SECONDS = 300.0
STOP_SECONDS = 10.0
_SHOWN_LOG_BYTES = 1500


class ProfileError(Exception):
    """A variant that cannot be measured; the message names it and says why."""


class Replica:
    """One model server process of one stage, used by one caller at a time."""

    def __init__(self, connection: HttpConnection, host: str) -> None:
        self._connection = connection
        self._host = host

    async def infer(self, variant: str, operating_point: str, inputs: tuple[Tensor, ...]) -> InferResponse:
        """Serve one batch, over the wire the router uses.

        Raises:
            ProfileError: the replica refused the batch, broke the protocol or died.
        """
        request = InferRequest(
            variant,
            inputs,
            parameters={OPERATING_POINT: operating_point, "binary_data_output": True},
        )
        buffers, header_length = rest.encode_request(request)
        headers = {rest.HEADER_LENGTH: str(header_length), "Content-Type": rest.BINARY_CONTENT_TYPE}
        size = sum(memoryview(buffer).nbytes for buffer in buffers)
        head = request_head("POST", f"/v2/models/{variant}/infer", self._host, headers, size)
        try:
            reply = await self._connection.exchange(head, buffers)
            if reply.status == 200:
                return rest.decode_response(reply.body, reply.headers.get(rest.HEADER_LENGTH.lower()))
        except (ConnectionBroken, ProtocolError) as error:
            raise ProfileError(f"variant {variant}: {error}") from error
        message = bytes(reply.body[:_SHOWN_LOG_BYTES]).decode(errors="replace")
        raise ProfileError(f"variant {variant}, operating point {operating_point}: {reply.status} {message}")


@asynccontextmanager
async def running_replica(
    pipeline: InferencePipeline, pipeline_folder: Path, stage: str, variants: Sequence[str], threads: int
) -> AsyncIterator[Replica]:
    """Start a replica that hosts some variants of a stage with `threads` cores, and stop it at the end of the block.

    Raises:
        ProfileError: it cannot load a variant, or is not ready within five minutes.
    """
    with tempfile.TemporaryDirectory(prefix="trimtab-profile-") as name:
        folder = Path(name)
        write_model_folder(pipeline, pipeline_folder, stage, variants, folder / "models", threads)
        with (folder / "log").open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", "trimtab_model_servers", str(folder / "models")),
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
            )
        try:
            port = await _data_port(process, stage, folder / "log")
            connection = await _connect(port, stage)
            try:
                yield Replica(connection, f"{HOST}:{port}")
            finally:
                connection.close()
                await connection.closed
        finally:
            await _stop(process)


async def _data_port(process: asyncio.subprocess.Process, stage: str, log: Path) -> int:
    """Wait for the line of JSON a replica prints once it is ready."""
    if process.stdout is None:
        raise ProfileError(f"stage {stage}: a replica without standard output cannot tell its port")
    try:
        async with asyncio.timeout(START_SECONDS):
            line = await process.stdout.readline()
    except TimeoutError:
        raise ProfileError(f"stage {stage}: no replica ready within {START_SECONDS:g} s{_tail(log)}") from None
    if not line:
        raise ProfileError(f"stage {stage}: its replica stopped before it was ready{_tail(log)}")
    return int(json.loads(line)["data_port"])


async def _connect(port: int, stage: str) -> HttpConnection:
    try:
        return await HttpConnection.open(HOST, port)
    except ConnectionBroken as error:
        raise ProfileError(f"stage {stage}: its replica cannot be reached: {error}") from error


def _tail(log: Path) -> str:
    """The last thing a replica said: it ends with why it stopped."""
    lines = log.read_bytes()[-_SHOWN_LOG_BYTES:].decode(errors="replace").strip().splitlines()
    return f"; it said: {lines[-1]}" if lines else ""


async def _stop(process: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError):
        process.terminate()
    try:
        async with asyncio.timeout(STOP_SECONDS):
            await process.wait()
    except TimeoutError:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
