"""y = x + 1 as one would write it for a plain MLServer."""

import time

from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceRequest, InferenceResponse


class PlusOne(MLModel):  # type: ignore[misc]  # MLServer is untyped
    """Adds one to its first input."""

    async def load(self) -> bool:
        """Nothing to load."""
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        """Add one, after a delay that is the same whatever the batch."""
        x = NumpyCodec.decode_input(payload.inputs[0])
        given = self._settings.parameters
        if delay_seconds := ((given and given.extra) or {}).get("delay_seconds"):
            time.sleep(delay_seconds)  # noqa: ASYNC251 - as a model would compute
        return InferenceResponse(model_name=self.name, outputs=[NumpyCodec.encode_output("y", x + 1)])
