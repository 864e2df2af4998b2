"""MLServer's message objects and ours, each made into the other.

Plain tensors arrive from MLServer as lists of Python numbers. A caller that wants to spare both sides that sends each
tensor as one BYTES element, its raw little-endian numbers, with its real datatype and shape as the input's parameters
`datatype` and `shape` ("1,3,224,224"); with the request's parameter `raw_output` true the answer comes alike.
"""

from collections.abc import Mapping
from typing import Any

from mlserver import types

from trimtab_protocol import InferRequest, InferResponse, Parameter, ProtocolError, RequestedOutput, Tensor
from trimtab_protocol.extensions import COMPUTE_SECONDS
from trimtab_protocol.tensors import BYTES, decode_raw, encode_raw, from_values, to_values

RAW_OUTPUT = "raw_output"


def wants_raw(payload: types.InferenceRequest) -> bool:
    """Whether the answer's tensors go as packed bytes; ProtocolError where they came over REST, whose JSON has none."""
    parameters = payload.parameters
    if not _parameters(parameters).get(RAW_OUTPUT):
        return False
    if "host" in (parameters.headers or {}):  # only HTTP/1.1 has this header
        raise ProtocolError(
            f"parameter {RAW_OUTPUT!r} needs gRPC, since JSON holds no bytes; use the data port's binary tensors"
        )
    return True


def request_of(name: str, payload: types.InferenceRequest) -> InferRequest:
    """Read MLServer's request. Raises ProtocolError naming the input whose numbers do not fit."""
    return InferRequest(
        model_name=name,
        id=payload.id or "",
        inputs=tuple(_tensor(entry) for entry in payload.inputs),
        parameters=_parameters(payload.parameters),
        requested_outputs=tuple(RequestedOutput(output.name) for output in payload.outputs or ()),
    )


def response_of(answer: InferResponse, *, raw: bool) -> types.InferenceResponse:
    """Write MLServer's answer; `raw` packs each tensor into one BYTES element.

    `compute_microseconds` stands beside `compute_seconds`, since MLServer's gRPC side has no fractions in parameters.
    """
    seconds = float(answer.parameters[COMPUTE_SECONDS])
    parameters = {**answer.parameters, "compute_microseconds": round(seconds * 1e6)}
    return types.InferenceResponse(
        model_name=answer.model_name,
        id=answer.id,
        parameters=types.Parameters(**parameters),
        outputs=[_raw_output(output) if raw else _plain_output(output) for output in answer.outputs],
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
        raise ProtocolError(f"tensor {name!r}: a packed tensor is one BYTES element, but {len(data)} came")
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
    """MLServer's own entries (the transport's headers, a content type) are left out."""
    return {} if parameters is None else dict(parameters.model_extra or {})
