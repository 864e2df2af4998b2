"""`TorchRuntime`: the MLServer runtime, which loads models and answers MLServer's own REST and gRPC ports.

Under plain `mlserver start FOLDER` it also opens the data port, if the environment variable TRIMTAB_DATA_PORT is set.
"""

import asyncio
import os

import grpc
import mlserver.grpc.utils
from mlserver import MLModel, ModelSettings, types
from mlserver.errors import MLServerError
from pydantic import ValidationError

from trimtab_model_servers.errors import ModelError, RefusalError, first_problem
from trimtab_model_servers.server.data_port import DataPort
from trimtab_model_servers.server.hosted_model import HostedModel, load
from trimtab_model_servers.server.interfaces import ServedModel, ServesChats
from trimtab_model_servers.server.mlserver_messages import from_mlserver, to_mlserver, wants_raw
from trimtab_model_servers.server.model_registry import process_registry
from trimtab_pipelines.model_spec import ModelSpec
from trimtab_protocol import ProtocolError

DATA_PORT_VARIABLE = "TRIMTAB_DATA_PORT"

# MLServer's gRPC port maps every other code to UNKNOWN.
mlserver.grpc.utils.STATUS_CODE_MAPPING.update(
    {413: grpc.StatusCode.RESOURCE_EXHAUSTED, 429: grpc.StatusCode.RESOURCE_EXHAUSTED, 503: grpc.StatusCode.UNAVAILABLE}
)


class TorchRuntime(MLModel):  # type: ignore[misc]  # MLServer ships no types
    """One variant in MLServer."""

    _model: ServedModel | None = None
    _task_watcher: "asyncio.Task[None] | None" = None

    async def load(self) -> bool:
        """Load the model and warm it up; raises ModelError if its settings or weights are invalid."""
        process = process_registry()
        process.expected.add(self.name)
        try:
            spec = spec_of(self.settings)
            self._model = await process.worker.run(lambda: load(spec, process.worker, process.tls))
            if isinstance(self._model, HostedModel):
                watcher = self._model.watch_tasks(process.worker)
                self._task_watcher = asyncio.create_task(watcher, name=f"tasks of {self.name}")
            process.add_model(self.name, self._model)
        except Exception as error:
            reason = str(error) if isinstance(error, ModelError) else f"{type(error).__name__}: {error}"
            process.record_load_failure(self.name, reason)
            raise
        port = os.environ.get(DATA_PORT_VARIABLE)
        if port is not None and not process.has_data_port:
            process.has_data_port = True
            await DataPort(process).start(os.environ.get("MLSERVER_HOST", "127.0.0.1"), int(port))
        return True

    async def predict(self, payload: types.InferenceRequest) -> types.InferenceResponse:
        process = process_registry()
        try:
            raw = wants_raw(payload)
            request = from_mlserver(self.name, payload)
            response = await process.model(self.name).infer(request, process.worker)
            return to_mlserver(response, raw=raw)
        except ProtocolError as error:
            raise MLServerError(str(error), 400) from error
        except RefusalError as error:
            raise MLServerError(str(error), error.status_code) from error

    async def metadata(self) -> types.MetadataModelResponse:
        """MLServer's metadata with the model's facts under `parameters`."""
        metadata = await super().metadata()
        model = process_registry().models.get(self.name)
        if model is not None:
            metadata.parameters = types.Parameters(**model.facts())
        return metadata

    async def unload(self) -> bool:
        """Remove the model, unless a newer one of its name has replaced it."""
        process = process_registry()
        if process.models.get(self.name) is self._model:
            process.expected.discard(self.name)
            process.models.pop(self.name, None)
        if self._task_watcher is not None:
            self._task_watcher.cancel()
        if isinstance(self._model, ServesChats):
            await self._model.close()
        return True


def spec_of(settings: ModelSettings) -> ModelSpec:
    """The variant in the settings of MLServer; raises ModelError if there is none."""
    parameters = settings.parameters
    extra = parameters.extra if parameters is not None else None
    if not extra:
        raise ModelError("parameters.extra is missing from its model-settings.json; write_model_folder writes it")
    try:
        return ModelSpec.model_validate(extra)
    except ValidationError as error:
        raise ModelError(f"model-settings.json: parameters.extra.{first_problem(error)}") from error
