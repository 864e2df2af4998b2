"""Runtimes of MLServer as families: scikit-learn's, those of other packages, and a user's own subclass of MLModel.

A variant's parameters are the runtime's `parameters.extra`, but for those that MLServer itself knows. Weights may have
any format, pickles among them: a runtime is code that the pipeline's author trusts, and so are the files that it loads.
"""

import asyncio
import inspect
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from http import HTTPStatus
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from trimtab_model_servers.errors import InvalidRow, ModelError
from trimtab_model_servers.families.interfaces import Built
from trimtab_model_servers.families.registry import load_class
from trimtab_model_servers.lean_mlserver import mlserver
from trimtab_model_servers.model_protocol import tensor_metadata
from trimtab_model_servers.weights.source import find_files
from trimtab_pipelines.model_spec import ModelSpec
from trimtab_pipelines.operating_point import OperatingPoint
from trimtab_pipelines.tensors import StageOutput
from trimtab_protocol.tensors import BYTES, DATATYPES, DTYPES, Array, bytes_array

_SETTINGS = frozenset({"content_type", "format", "version"})
"""Parameters that MLServer itself knows."""
_PANDAS = "pd"


@cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """The event loop of all runtimes of the process, which load and compute one at a time."""
    return asyncio.new_event_loop()


@dataclass(frozen=True, slots=True)
class RuntimeNetwork:
    """Calls a loaded runtime, for the outputs that its stage declares."""

    model: Any
    declared: Mapping[str, StageOutput]

    def infer(self, inputs: dict[str, Array], point: OperatingPoint) -> dict[str, Array]:
        """Compute one batch; raises InvalidRow for an error that the runtime blames on the request."""
        del point
        request = mlserver.types.InferenceRequest(
            inputs=[_request_input(name, array) for name, array in inputs.items()],
            outputs=[mlserver.types.RequestOutput(name=name) for name in self.declared],
        )
        try:
            response = _event_loop().run_until_complete(self.model.predict(request))
        except mlserver.errors.MLServerError as error:
            if error.status_code < HTTPStatus.INTERNAL_SERVER_ERROR:
                raise InvalidRow(str(error)) from error
            raise
        return {output.name: _array(output, self.declared.get(output.name)) for output in response.outputs}

    def example(self, name: str) -> bytes:
        """The runtime's own example of a BYTES input, if it has one."""
        own = getattr(self.model, "example", None)
        return bytes(own(name)) if own else b"example"


def build(spec: ModelSpec) -> Built:
    """Construct and load a runtime with the weights and parameters of a variant; raises ModelError. Blocks."""
    loaded, where = load_class(spec.family), f"implementation {spec.family!r}"
    if not (inspect.isclass(loaded) and issubclass(loaded, mlserver.MLModel)):
        raise ModelError(f"{where} is no subclass of mlserver.MLModel; name a torch module as family")
    runtime: Any = loaded
    weights = find_files(spec.storage_uri, spec.digest)
    try:
        model = runtime(_settings(spec, str(weights) if isinstance(weights, Path) else None))
        ready = _event_loop().run_until_complete(model.load())
    except Exception as error:  # a runtime may raise anything
        raise ModelError(f"{where} cannot load {spec.storage_uri}: {type(error).__name__}: {error}") from error
    if not ready:
        raise ModelError(f"{where}: load() of {spec.storage_uri} returned {ready!r}, so it is not ready")
    if spec.parameters.get("content_type") == _PANDAS or "pandas" in sys.modules:
        vars(mlserver.codecs.pandas)["pd"] = import_module("pandas")  # instead of its placeholder
    if find_spec("threadpoolctl"):
        import_module("threadpoolctl").threadpool_limits(spec.threads)  # BLAS and OpenMP, of this thread
    network = RuntimeNetwork(model, {output.name: output for output in spec.outputs})
    return Built(network, "stored" if isinstance(weights, Path) else "none")


def _settings(spec: ModelSpec, uri: str | None) -> Any:
    known = {name: value for name, value in spec.parameters.items() if name in _SETTINGS}
    extra = {name: value for name, value in spec.parameters.items() if name not in _SETTINGS}
    return mlserver.ModelSettings(
        name=spec.name,
        implementation=spec.family,
        inputs=[tensor_metadata(tensor) for tensor in spec.inputs],
        outputs=[tensor_metadata(tensor) for tensor in spec.outputs],
        parameters=mlserver.settings.ModelParameters(uri=uri, extra=extra, **known),
    )


def _request_input(name: str, array: Array) -> Any:
    """An input whose data MLServer's codecs read; numbers are also there as the array that they would decode."""
    is_text = array.dtype.hasobject
    parameters = mlserver.types.Parameters(**({} if is_text else {mlserver.codecs.utils.DecodedParameterName: array}))
    return mlserver.types.RequestInput(
        name=name,
        shape=list(array.shape),
        datatype=DATATYPES[array.dtype],
        data=mlserver.types.TensorData(root=array.ravel().tolist() if is_text else array.ravel()),
        parameters=parameters,
    )


def _array(output: Any, declared: StageOutput | None) -> Array:
    """Decode an output; MLServer's [rows, 1] is one number per row, and numbers are converted within their kind."""
    if output.datatype == BYTES:
        values = getattr(output.data, "root", output.data)
        encoded = [value if isinstance(value, bytes) else str(value).encode() for value in values]
        array = bytes_array(encoded, tuple(output.shape))
    else:
        array = mlserver.codecs.NumpyCodec.decode_output(output)
    if declared is None:
        return array
    if not declared.shape and array.shape[1:] == (1,):
        array = array[:, 0]
    dtype = DTYPES[declared.datatype]
    is_same_kind = not dtype.hasobject and np.can_cast(array.dtype, dtype, "same_kind")
    return np.ascontiguousarray(array.astype(dtype) if is_same_kind else array)
