"""Conversion between MLServer's message objects and the protocol's.

MLServer passes plain tensors as lists of Python numbers. To avoid that, a client sends each tensor as one BYTES
element, its raw little-endian numbers, with the real datatype and shape as the input's parameters `datatype` and
`shape` ("1,3,224,224"); with the request's parameter `raw_output` true, the response has the same form.
"""

from collections.abc import Mapping
from typing import Any

from mlserver import types

from trimtab_protocol import InferRequest, InferResponse, Parameter, ProtocolError, RequestedOutput, Tensor
from trimtab_protocol.extensions import COMPUTE_SECONDS
from trimtab_protocol.tensors import BYTES, decode_raw, encode_raw, from_values, to_values

RAW_OUTPUT = "raw_output"


def wants_raw(payload: types.InferenceRequest) -> bool:
    """Whether the response has packed tensors; ProtocolError over REST, because JSON has no bytes."""
    parameters = payload.parameters
    if not _parameters(parameters).get(RAW_OUTPUT):
        return False
    if "host" in (parameters.headers or {}):  # a header of HTTP/1.1 only
        raise ProtocolError(
            f"parameter {RAW_OUTPUT!r} needs gRPC, since JSON holds no bytes; use the data port's binary tensors"
        )
    return True


def from_mlserver(name: str, payload: types.InferenceRequest) -> InferRequest:
    """Convert a request; raises ProtocolError naming an invalid input."""
    return InferRequest(
        model_name=name,
        id=payload.id or "",
        inputs=tuple(_tensor(entry) for entry in payload.inputs),
        parameters=_parameters(payload.parameters),
        requested_outputs=tuple(RequestedOutput(output.name) for output in payload.outputs or ()),
    )


def to_mlserver(response: InferResponse, *, raw: bool) -> types.InferenceResponse:
    """Convert a response; `raw` packs each tensor into one BYTES element.

    `compute_microseconds` duplicates `compute_seconds`, because MLServer's gRPC parameters have no fractions.
    """
    seconds = float(response.parameters[COMPUTE_SECONDS])
    parameters = {**response.parameters, "compute_microseconds": round(seconds * 1e6)}
    return types.InferenceResponse(
        model_name=response.model_name,
        id=response.id,
        parameters=types.Parameters(**parameters),
        outputs=[_raw_output(output) if raw else _plain_output(output) for output in response.outputs],
    )


def _tensor(entry: types.RequestInput) -> Tensor:
    datatype = getattr(entry.datatype, "value", entry.datatype)
    data = getattr(entry.data, "root", entry.data)
    parameters = _parameters(entry.parameters)
    if datatype == BYTES and "datatype" in parameters:
        return _packed(entry.name, data, parameters)
    return from_values(entry.name, datatype, entry.shape, data)


def _packed(name: str, data: list[Any], parameters: Mapping[str, Any]) -> Tensor:
    if len(data) != 1 or not isinstance(data[0], bytes):
        raise ProtocolError(f"tensor {name!r}: a packed tensor is one BYTES element, not {len(data)}")
    sizes = parameters.get("shape", "")
    try:
        shape = [int(size) for size in (sizes if isinstance(sizes, list) else str(sizes).strip("[]").split(","))]
    except ValueError as error:
        raise ProtocolError(f"tensor {name!r}: parameter 'shape' is {sizes!r}; write it like 1,3,224,224") from error
    return decode_raw(name, parameters["datatype"], shape, data[0])


def _plain_output(tensor: Tensor) -> types.ResponseOutput:
    return types.ResponseOutput(
        name=tensor.name, datatype=tensor.datatype, shape=list(tensor.shape), data=to_values(tensor)
    )


def _raw_output(tensor: Tensor) -> types.ResponseOutput:
    return types.ResponseOutput(
        name=tensor.name,
        datatype=BYTES,
        shape=[1],
        data=[bytes(encode_raw(tensor))],
        parameters=types.Parameters(datatype=tensor.datatype, shape=",".join(map(str, tensor.shape))),
    )


def _parameters(parameters: types.Parameters | None) -> dict[str, Parameter]:
    """The parameters without MLServer's own (headers, content type)."""
    return {} if parameters is None else dict(parameters.model_extra or {})
