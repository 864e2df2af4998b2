"""A real replica to measure: the very process that serves, with models loaded and warmed, driven by its data port."""

import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from trimtab_model_servers.settings import write_model_folder
from trimtab_pipelines.errors import OperationFailed
from trimtab_pipelines.processes.child_process import ChildProcess, StartError
from trimtab_pipelines.processes.ready_line import ReplicaPorts
from trimtab_pipelines.spec import InferencePipeline
from trimtab_protocol import InferRequest, InferResponse, ProtocolError, Tensor, rest
from trimtab_protocol.extensions import OPERATING_POINT
from trimtab_protocol.http_client import ConnectionLost, HttpConnection, request_head

HOST = "127.0.0.1"
START_SECONDS = 300.0
STOP_SECONDS = 10.0
_SHOWN_LOG_BYTES = 1500
_MISTAKES = {400, 413, 422}


class ProfileError(OperationFailed):
    """A variant that cannot be measured; the message names it and says why."""


class Refused(ProfileError):
    """A batch that a replica takes for its sender's mistake, such as a prompt that is too long for it."""


class Replica:
    """One model server process of one stage, used by one caller at a time."""

    def __init__(self, connection: HttpConnection, host: str) -> None:
        self._connection = connection
        self._host = host

    async def infer(self, variant: str, operating_point: str, inputs: tuple[Tensor, ...]) -> InferResponse:
        """Serve one batch, over the wire the router uses.

        Raises:
            Refused: the replica takes it for a mistake.
            ProfileError: the replica failed at the batch, broke the protocol or died.
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
        except (ConnectionLost, ProtocolError) as error:
            raise ProfileError(f"variant {variant}: {error}") from error
        message = bytes(reply.body[:_SHOWN_LOG_BYTES]).decode(errors="replace")
        kind = Refused if reply.status in _MISTAKES else ProfileError
        raise kind(f"variant {variant}, operating point {operating_point}: {reply.status} {message}")


@asynccontextmanager
async def running_replica(
    pipeline: InferencePipeline, pipeline_folder: Path, stage: str, variants: Sequence[str], threads: int
) -> AsyncIterator[Replica]:
    """Start a replica that hosts some variants of a stage with `threads` cores, and stop it at the end of the block.

    Raises:
        ProfileError: it cannot load a variant, or is not ready within five minutes.
    """
    with tempfile.TemporaryDirectory(prefix="trimtab-profile-") as name:
        folder, who = Path(name), f"stage {stage}: its replica"
        write_model_folder(pipeline, pipeline_folder, stage, variants, folder / "models", threads)
        process = await ChildProcess.start("trimtab_model_servers", [str(folder / "models")], folder / "log", who)
        try:
            connection = await _connected(process)
            try:
                yield Replica(connection, HOST)
            finally:
                connection.close()
                await connection.closed
        finally:
            await process.stop(STOP_SECONDS)


async def _connected(process: ChildProcess) -> HttpConnection:
    try:
        ports = await process.read_ready_line(ReplicaPorts, START_SECONDS)
        return await HttpConnection.open(HOST, ports.data_port)
    except StartError as error:
        raise ProfileError(str(error)) from error
    except ConnectionLost as error:
        raise ProfileError(f"{process.name} cannot be reached: {error}") from error
