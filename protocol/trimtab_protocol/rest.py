"""REST encoding: a JSON header, followed by raw tensors (binary tensor data extension).

`Inference-Header-Content-Length` is the length of the header; an input or output with the parameter `binary_data_size`
has its values behind it, others have `data`. Both directions are implemented, since the router is a server for clients
and a client of model servers. Unknown fields are ignored; a known field of the wrong type is an error.
"""

import gc
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from math import isfinite
from operator import attrgetter, call
from typing import Any, NamedTuple

import orjson

from trimtab_protocol.errors import ProtocolError
from trimtab_protocol.messages import (
    MAX_SHARED_BYTES,
    MAX_SHARED_HEADERS,
    InferRequest,
    InferResponse,
    Parameter,
    Parameters,
    PendingRequest,
    RequestedOutput,
    TensorHeader,
)
from trimtab_protocol.tensors import (
    DTYPES,
    MAX_TENSORS,
    Buffer,
    Tensor,
    checked_shape,
    encode_raw_array,
    from_values,
    is_slow,
    to_values,
    unknown_datatype,
    view_raw,
)

HEADER_LENGTH = "Inference-Header-Content-Length"
BINARY_CONTENT_TYPE = "application/octet-stream"
JSON_CONTENT_TYPE = "application/json"
BINARY_SIZE = "binary_data_size"
_MAX_DIGITS = 15
_PARAMETER_TYPES = (str, int, float)  # a union of types would be built at each use
_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False)
_LONG_JSON_BYTES = 2**16
_NAME = attrgetter("name")
_TYPE_NAMES: Mapping[type, str] = {dict: "an object", list: "a list", str: "a string"}


class _DescribedTensor(NamedTuple):
    """Header of a tensor, the size of its binary data, or its values if it has none."""

    header: TensorHeader
    binary_bytes: int | None
    values: Any


def decode_request(
    model_name: str, body: Buffer, header_length: str | int | None, *, model_version: str = ""
) -> InferRequest:
    """Decode an inference request; tensors share the body's memory. Arguments and errors as `read_request`."""
    return read_request(model_name, body, header_length, model_version=model_version).decode()


def read_request(
    model_name: str, body: Buffer, header_length: str | int | None, *, model_version: str = ""
) -> PendingRequest:
    """Read an inference request up to its tensors' descriptions. Raises ProtocolError if it is not well-formed."""
    text, binary = _split(body, header_length)
    written_bytes = len(text)
    shared = header_length is not None and written_bytes <= MAX_SHARED_BYTES
    request, tensors, inputs = (_shared_header if shared else _read_header)(model_name, model_version, text)
    decoders = _decoders(tensors, binary)
    slow = is_slow(inputs, whole_bytes=binary.nbytes, values_bytes=written_bytes)
    return PendingRequest(request, inputs, slow, written_bytes, decoders, shared)


def _read_header(
    model_name: str, model_version: str, text: bytes
) -> tuple[InferRequest, Sequence[_DescribedTensor], tuple[TensorHeader, ...]]:
    header = _loaded_object(text)
    tensors = _describe_tensors("inputs", header.get("inputs"))
    request = InferRequest(
        model_name=model_name,
        model_version=model_version,
        id=_field(header, "id", str, "the request") or "",
        parameters=_parameters(header, "the request"),
        inputs=(),
        requested_outputs=tuple(_requested_outputs(header)),
    )
    return request, tensors, tuple([tensor.header for tensor in tensors])


_shared_header = lru_cache(MAX_SHARED_HEADERS)(_read_header)  # clients repeat the headers of their requests


def decode_response(body: Buffer, header_length: str | int | None) -> InferResponse:
    """Decode an inference response; tensors share the body's memory. ProtocolError if it is invalid."""
    text, binary = _split(body, header_length)
    header = _loaded_object(text)
    outputs = _describe_tensors("outputs", header.get("outputs"))
    get = header.get
    model_name, version, own_id = get("model_name") or "", get("model_version") or "", get("id") or ""
    if not (isinstance(model_name, str) and isinstance(version, str) and isinstance(own_id, str)):
        raise ProtocolError("the answer: 'model_name', 'model_version' and 'id' must be strings")
    return InferResponse(
        model_name=model_name,
        model_version=version,
        id=own_id,
        parameters=_parameters(header, "the answer"),
        outputs=tuple(map(call, _decoders(outputs, binary))),
    )


def encode_request(request: InferRequest) -> tuple[list[Buffer], int]:
    """Encode a request with every tensor as binary data.

    Returns the body as buffers that share the tensors' memory, and its `Inference-Header-Content-Length`.
    """
    header: dict[str, Any] = _identity(request.id, request.parameters)
    inputs, raw = _encode_tensors(request.inputs, frozenset(tensor.name for tensor in request.inputs))
    header["inputs"] = inputs
    if request.requested_outputs:
        header["outputs"] = [_requested(output) for output in request.requested_outputs]
    return _join(header, raw)


def encode_batch(
    inputs: Sequence[Sequence[Tensor]], parameters: Parameters, request_id: str
) -> tuple[list[Buffer], int]:
    """`encode_request` of tensors that consist of parts along their first dimension, without joining the parts.

    Name, datatype and row shape of a tensor are its first part's.
    """
    entries: list[dict[str, Any]] = []
    buffers: list[Buffer] = []
    for parts in inputs:
        rows = size = 0
        for part in parts:
            raw = encode_raw_array(part.array)
            buffers.append(raw)
            rows += len(part.array)
            size += len(raw)
        first = parts[0]
        entries.append(
            {
                "name": first.name,
                "shape": [rows, *first.array.shape[1:]],
                "datatype": first.datatype,
                "parameters": {BINARY_SIZE: size},
            }
        )
    fields = {**parameters, "binary_data_output": True}
    return _join({"id": request_id, "parameters": fields, "inputs": entries}, buffers)


def encode_json(inputs: Sequence[Tensor], parameters: Parameters, request_id: str = "") -> bytes:
    """Encode a request as JSON, for servers without the binary extension; ProtocolError for other values."""
    entries, _ = _encode_tensors(inputs, frozenset())
    return _encode(_identity(request_id, parameters) | {"inputs": entries})


def encode_response(response: InferResponse, binary: frozenset[str]) -> tuple[list[Buffer], int | None]:
    """Encode a response: its body as buffers that share the tensors' memory, and the length of its header.

    The length is None if the whole body is JSON. `binary` names the outputs sent as binary data (see `binary_outputs`).
    Raises ProtocolError if an output has no JSON form and is not among them.
    """
    header: dict[str, Any] = {"model_name": response.model_name}
    if response.model_version:
        header["model_version"] = response.model_version
    header |= _identity(response.id, response.parameters)
    header["outputs"], raw = _encode_tensors(response.outputs, binary)
    buffers, length = _join(header, raw)
    return buffers, length if raw else None


def binary_outputs(request: InferRequest, outputs: Iterable[Tensor]) -> frozenset[str]:
    """Names of the outputs that a REST client requests as binary data."""
    default = bool(request.parameters.get("binary_data_output", False))
    if not request.requested_outputs:
        return frozenset(map(_NAME, outputs)) if default else frozenset()
    return frozenset(
        [output.name for output in request.requested_outputs if output.parameters.get("binary_data", default)]
    )


def error_body(message: str, request_id: str = "") -> bytes:
    """Error object of the protocol, with the request's id if it has one."""
    return json.dumps({"error": message} | _identity(request_id, {})).encode()


def json_bytes(header_length: str | None, body_bytes: int) -> int:
    """How much of a body is JSON: what the header's length says, all of it where there is none.

    Raises ProtocolError if the length is no number within the body.
    """
    return body_bytes if header_length is None else _checked_length(header_length, body_bytes)


def _split(body: Buffer, header_length: str | int | None) -> tuple[bytes, memoryview]:
    """The JSON header and the binary data."""
    whole = memoryview(body).cast("B")
    length = whole.nbytes if header_length is None else header_length
    if type(length) is not int or not 0 <= length <= whole.nbytes:
        length = _checked_length(length, whole.nbytes)
    return bytes(whole[:length]), whole[length:]


def _loaded_object(text: bytes) -> dict[str, Any]:
    try:
        header = _parsed(text) if len(text) < _LONG_JSON_BYTES else _loaded(text)
    except RecursionError as error:
        raise ProtocolError("the JSON header cannot be read: it is nested too deeply") from error
    except ValueError as error:
        raise ProtocolError(f"the JSON header cannot be read: {error}") from error
    if not isinstance(header, dict):
        raise ProtocolError("the JSON header must be an object")
    return header


def _loaded(text: bytes) -> Any:
    """Parse long JSON without the garbage collector, which would scan its lists repeatedly."""
    if not gc.isenabled():
        return _parsed(text)
    gc.disable()
    try:
        return _parsed(text)
    finally:
        gc.enable()


def _parsed(text: bytes) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return json.loads(text)  # accepts more, such as NaN and half a surrogate pair


def _checked_length(header_length: str | int, body_bytes: int) -> int:
    text = str(header_length).strip()
    if not (text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS) or int(text) > body_bytes:
        raise ProtocolError(
            f"{HEADER_LENGTH} is {header_length!r}; it must be an integer from 0 to the body's {body_bytes} bytes"
        )
    return int(text)


def _field(owner: Mapping[str, Any], key: str, kind: type, where: str) -> Any:
    value = owner.get(key)
    if value is not None and not isinstance(value, kind):
        raise ProtocolError(f"{where}: {key!r} must be {_TYPE_NAMES[kind]}")
    return value


def _parameters(owner: Mapping[str, Any], where: str) -> Parameters:
    parameters: dict[str, Parameter] | None = owner.get("parameters")
    if type(parameters) is not dict:
        parameters = _field(owner, "parameters", dict, where)
    if not parameters:
        return {}
    for key, value in parameters.items():
        if not isinstance(value, _PARAMETER_TYPES):
            raise ProtocolError(f"{where}: parameter {key!r} must be a boolean, a number or a string")
    return parameters


def _requested_outputs(header: Mapping[str, Any]) -> Iterable[RequestedOutput]:
    for output in _field(header, "outputs", list, "the request") or ():
        if not isinstance(output, dict) or not isinstance(output.get("name"), str):
            raise ProtocolError("the request: each of 'outputs' must be an object with a 'name'")
        yield RequestedOutput(output["name"], _parameters(output, f"output {output['name']!r}"))


def _describe_tensors(field: str, entries: object) -> list[_DescribedTensor]:
    if not isinstance(entries, list):
        raise ProtocolError(f"{field!r} must be a list of tensors")
    if len(entries) > MAX_TENSORS:
        raise ProtocolError(f"{field!r} hold {len(entries)} tensors; send at most {MAX_TENSORS}")
    described = {}
    for entry in entries:
        tensor = _describe_tensor(field, entry)
        described[tensor.header.name] = tensor
    if len(described) != len(entries):
        raise ProtocolError(f"duplicate tensor in {field!r}: {', '.join([entry['name'] for entry in entries])}")
    return [*described.values()]


def _decoders(tensors: Sequence[_DescribedTensor], binary: memoryview) -> tuple[Callable[[], Tensor], ...]:
    """Decoders of tensors whose sizes must be those of the binary data."""
    decoders: list[Callable[[], Tensor]] = []
    position, total = 0, binary.nbytes
    for header, size, values in tensors:
        if size is None:
            decoders.append(partial(from_values, header.name, header.datatype, header.shape, values))
            continue
        if size > total - position:
            left = f"{total - position} bytes are left in the body"
            raise ProtocolError(f"tensor {header.name!r}: '{BINARY_SIZE}' is {size!r}, but {left}")
        part = binary[position : position + size]
        decoders.append(partial(view_raw, header.name, header.datatype, header.shape, part))
        position += size
    if position != total:
        sizes = f"the tensors' '{BINARY_SIZE}' sum to {position}"
        raise ProtocolError(f"the binary data have {total} bytes, but {sizes}")
    return tuple(decoders)


def _describe_tensor(field: str, entry: object) -> _DescribedTensor:
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
        raise ProtocolError(f"each of {field!r} must be an object with a 'name'")
    name, datatype, shape = entry["name"], entry.get("datatype"), entry.get("shape")
    if not isinstance(shape, list):
        raise ProtocolError(f"tensor {name!r}: 'shape' must be a list of integers")
    if not isinstance(datatype, str) or datatype not in DTYPES:
        raise unknown_datatype(name, datatype)
    header = TensorHeader(name, datatype, checked_shape(name, shape))
    parameters = entry.get("parameters")
    if type(parameters) is not dict:
        parameters = _field(entry, "parameters", dict, f"tensor {name!r}") or {}
    if "shared_memory_region" in parameters:
        raise ProtocolError(f"tensor {name!r}: shared memory is not supported; send the data in the request")
    if BINARY_SIZE not in parameters:
        if "data" not in entry:
            raise ProtocolError(f"tensor {name!r} has neither 'data' nor the parameter '{BINARY_SIZE}'")
        return _DescribedTensor(header, None, entry["data"])
    size = parameters[BINARY_SIZE]
    if not isinstance(size, int) or isinstance(size, bool) or size < 0:
        raise ProtocolError(f"tensor {name!r}: '{BINARY_SIZE}' is {size!r}; it must be a number of bytes in the body")
    return _DescribedTensor(header, size, None)


def _identity(request_id: str, parameters: Parameters) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if request_id:
        fields["id"] = request_id
    if parameters:
        fields["parameters"] = dict(parameters)
    return fields


def _finite(header: Mapping[str, Any]) -> dict[str, Any]:
    """Replace numbers that JSON lacks in a model server's parameters."""
    if not header.get("parameters"):
        return dict(header)
    parameters = {
        key: None if isinstance(value, float) and not isfinite(value) else value
        for key, value in header["parameters"].items()
    }
    return {**header, "parameters": parameters}


def _requested(output: RequestedOutput) -> dict[str, Any]:
    if not output.parameters:
        return {"name": output.name}
    return {"name": output.name, "parameters": dict(output.parameters)}


def _encode_tensors(tensors: Sequence[Tensor], binary: frozenset[str]) -> tuple[list[Any], list[Buffer]]:
    entries: list[Any] = []
    buffers: list[Buffer] = []
    for tensor in tensors:
        entry: dict[str, Any] = {"name": tensor.name, "shape": tensor.array.shape, "datatype": tensor.datatype}
        if tensor.name in binary:
            raw = encode_raw_array(tensor.array)
            entry["parameters"] = {BINARY_SIZE: len(raw)}
            buffers.append(raw)
        else:
            entry["data"] = to_values(tensor)
        entries.append(entry)
    return entries, buffers


def _join(header: Mapping[str, Any], raw: Sequence[Buffer]) -> tuple[list[Buffer], int]:
    encoded = _encode(header)
    return [encoded, *raw], len(encoded)


def _encode(header: Mapping[str, Any]) -> bytes:
    """Encode JSON; NaN and infinities become null."""
    try:
        return orjson.dumps(header)
    except TypeError:  # half a surrogate pair, or an integer beyond 64 bits
        return _ENCODER.encode(_finite(header)).encode()
