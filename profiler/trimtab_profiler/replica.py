"""Replica under measurement: a model server process with loaded models, driven over its data port."""

import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from trimtab_model_servers.families.registry import modules_to_preload
from trimtab_model_servers.server.settings import write_model_folder
from trimtab_pipelines.errors import OperationFailed
from trimtab_pipelines.processes.child_process import ChildProcess, InputRejected, ReplicaPorts, StartError, start_error
from trimtab_pipelines.processes.forked_process import start_forked
from trimtab_pipelines.spec import InferencePipeline
from trimtab_pipelines.stages import Stage
from trimtab_protocol import InferRequest, InferResponse, ProtocolError, Tensor, rest
from trimtab_protocol.chat.internal_wire import TENANTS, dump_tenants
from trimtab_protocol.extensions import OPERATING_POINT
from trimtab_protocol.http_client import ConnectionLost, HttpConnection, request_head

HOST = "127.0.0.1"
START_SECONDS = 300.0
STOP_SECONDS = 10.0
_MAX_MESSAGE_BYTES = 1500
CLIENT_ERRORS = {400, 413, 422}


class ProfileError(OperationFailed):
    """Variant that cannot be measured."""


class BatchRejected(ProfileError):
    """Batch that a replica rejects as invalid, such as a prompt that is too long."""


class Replica:
    """Model server of one stage, for sequential use; `model` is its name for all variants, if it has its own."""

    pid: int | None = None
    """Of its process; None of a user's server."""

    def __init__(self, connection: HttpConnection, host: str, model: str | None = None) -> None:
        self._connection = connection
        self._host = host
        self._model = model

    async def infer(
        self, variant: str, operating_point: str, inputs: tuple[Tensor, ...], tenant: str = ""
    ) -> InferResponse:
        """Serve one batch; raise BatchRejected if it is invalid, ProfileError if the replica failed or exited."""
        parameters: dict[str, bool | str] = {OPERATING_POINT: operating_point, "binary_data_output": True}
        if tenant:
            parameters[TENANTS] = dump_tenants([tenant] * len(inputs[0].array))
        model = self._model or variant
        request = InferRequest(model, inputs, parameters=parameters)
        buffers, header_length = rest.encode_request(request)
        headers = {rest.HEADER_LENGTH: str(header_length), "Content-Type": rest.BINARY_CONTENT_TYPE}
        size = sum(memoryview(buffer).nbytes for buffer in buffers)
        head = request_head("POST", f"/v2/models/{model}/infer", self._host, headers, size)
        try:
            reply = await self._connection.exchange(head, buffers)
            if reply.status == 200:
                return rest.decode_response(reply.body, reply.headers.get(rest.HEADER_LENGTH.lower()))
        except (ConnectionLost, ProtocolError) as error:
            raise ProfileError(f"variant {variant}: {error}") from error
        message = bytes(reply.body[:_MAX_MESSAGE_BYTES]).decode(errors="replace")
        kind = BatchRejected if reply.status in CLIENT_ERRORS else ProfileError
        raise kind(f"variant {variant}, operating point {operating_point}: {reply.status} {message}")


@asynccontextmanager
async def running_replica(
    pipeline: InferencePipeline, pipeline_folder: Path, stage: str, variants: Sequence[str], threads: int
) -> AsyncIterator[Replica]:
    """Run a replica with `threads` cores for the block; raise ProfileError if it is not ready in five minutes."""
    with tempfile.TemporaryDirectory(prefix="trimtab-profile-") as name:
        folder, process_name = Path(name), f"replica of stage {stage}"
        write_model_folder(pipeline, pipeline_folder, stage, variants, folder / "models", threads)
        process = await start_forked(
            "trimtab_model_servers",
            [str(folder / "models")],
            folder / "log",
            process_name,
            imports=modules_to_preload(pipeline),
        )
        try:
            connection = await _connect(process)
            try:
                replica = Replica(connection, HOST)
                replica.pid = process.pid
                yield replica
            finally:
                connection.close()
                await connection.closed
        finally:
            await process.stop(STOP_SECONDS)


async def check_models(pipeline: InferencePipeline, pipeline_folder: Path, stages: Sequence[Stage]) -> None:
    """Load the models of all stages, one after the other; raise InputRejected for the first that is invalid."""
    with tempfile.TemporaryDirectory(prefix="trimtab-check-") as name:
        folder = Path(name)
        for stage in stages:
            variants = [variant.name for variant in stage.variants if variant.container is None]
            if variants:
                write_model_folder(pipeline, pipeline_folder, stage.name, variants, folder / "models" / stage.name, 1.0)
        arguments, log = ["--check", str(folder / "models")], folder / "log"
        imports = modules_to_preload(pipeline)
        process = await start_forked(
            "trimtab_model_servers", arguments, log, "the check", imports=imports, is_read=False
        )
        try:
            code = await process.wait()
        finally:
            await process.stop(STOP_SECONDS)
        if code:
            raise start_error(code, log, f"{process.name} stopped with exit code {code}")


async def _connect(process: ChildProcess) -> HttpConnection:
    try:
        ports = await process.read_ready_line(ReplicaPorts, START_SECONDS)
        return await HttpConnection.open(HOST, ports.data_port)
    except InputRejected:
        raise
    except StartError as error:
        raise ProfileError(str(error)) from error
    except ConnectionLost as error:
        raise ProfileError(f"{process.name} cannot be reached: {error}") from error
