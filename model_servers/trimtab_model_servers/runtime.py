"""The MLServer runtime: loads a model, warms it up, and answers MLServer's own REST and gRPC ports.

Started by plain `mlserver start FOLDER` it also opens the process's data port, where the environment variable
TRIMTAB_DATA_PORT names one.
"""

import asyncio
import os

import grpc
import mlserver.grpc.utils
from mlserver import MLModel, types
from mlserver.errors import MLServerError
from pydantic import ValidationError

from trimtab_model_servers.data_port import DataPort
from trimtab_model_servers.errors import ModelError, RefusalError
from trimtab_model_servers.interfaces import CountsTokens, ServedModel
from trimtab_model_servers.loading import load
from trimtab_model_servers.mlserver_messages import request_of, response_of, wants_raw
from trimtab_model_servers.model import HostedModel
from trimtab_model_servers.model_registry import host
from trimtab_pipelines.model_spec import ModelSpec
from trimtab_protocol import ProtocolError

DATA_PORT_VARIABLE = "TRIMTAB_DATA_PORT"

# MLServer's gRPC side calls every code it does not know UNKNOWN.
mlserver.grpc.utils.STATUS_CODE_MAPPING.update(
    {
        413: grpc.StatusCode.RESOURCE_EXHAUSTED,
        429: grpc.StatusCode.RESOURCE_EXHAUSTED,
        503: grpc.StatusCode.UNAVAILABLE,
    }
)


class TorchRuntime(MLModel):  # type: ignore[misc]  # MLServer ships no types
    """One variant in MLServer."""

    _hosted: ServedModel | None = None
    _following: "asyncio.Task[None] | None" = None

    async def load(self) -> bool:
        """Load the weights, check the model against its stage, warm it up.

        Raises:
            ModelError: naming the model and what is wrong with its settings or weights.
        """
        process = host()
        process.expected.add(self.name)
        try:
            spec = _spec(self)
            self._hosted = await process.worker.run(lambda: load(spec, process.worker, process.tls))
            if isinstance(self._hosted, HostedModel):
                following = self._hosted.follow_tasks(process.worker)
                self._following = asyncio.create_task(following, name=f"tasks of {self.name}")
            process.loaded(self.name, self._hosted)
        except Exception as error:
            reason = str(error) if isinstance(error, ModelError) else f"{type(error).__name__}: {error}"
            process.failed(self.name, reason)
            raise
        port = os.environ.get(DATA_PORT_VARIABLE)
        if port is not None and not process.has_data_port:
            process.has_data_port = True
            await DataPort(process).start(os.environ.get("MLSERVER_HOST", "127.0.0.1"), int(port))
        return True

    async def predict(self, payload: types.InferenceRequest) -> types.InferenceResponse:
        """Answer one request of MLServer's; its batch computes off the event loop."""
        process = host()
        try:
            raw = wants_raw(payload)
            answer = await process.model(self.name).infer(request_of(self.name, payload), process.worker)
            return response_of(answer, raw=raw)
        except ProtocolError as error:
            raise MLServerError(str(error), 400) from error
        except RefusalError as error:
            raise MLServerError(str(error), error.status_code) from error

    async def metadata(self) -> types.MetadataModelResponse:
        """MLServer's metadata with our facts under `parameters`."""
        metadata = await super().metadata()
        hosted = host().models.get(self.name)
        if hosted is not None:
            metadata.parameters = types.Parameters(**hosted.facts())
        return metadata

    async def unload(self) -> bool:
        """Forget the model, unless a newer one of its name has taken its place already."""
        process = host()
        if process.models.get(self.name) is self._hosted:
            process.expected.discard(self.name)
            process.models.pop(self.name, None)
        if self._following is not None:
            self._following.cancel()
        if isinstance(self._hosted, CountsTokens):
            await self._hosted.close()
        return True


def _spec(model: MLModel) -> ModelSpec:
    parameters = model.settings.parameters
    extra = parameters.extra if parameters is not None else None
    if not extra:
        raise ModelError("parameters.extra is missing from its model-settings.json; write_model_folder writes it")
    try:
        return ModelSpec.model_validate(extra)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        field = ".".join(map(str, problem["loc"]))
        raise ModelError(f"model-settings.json: parameters.extra.{field}: {problem['msg']}") from error
