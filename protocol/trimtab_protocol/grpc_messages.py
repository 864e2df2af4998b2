"""gRPC encoding: the messages of `inference.GRPCInferenceService`, declared in `open_inference_grpc.proto`.

They are registered in a private descriptor pool. The generated modules of MLServer and Triton both register package
`inference` in protobuf's default pool and exclude each other; a private pool works beside either. Field numbers and
types are the protocol's, so the encoding is identical.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

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
from trimtab_protocol.protobuf_fields import extract_field
from trimtab_protocol.sanitize import printable
from trimtab_protocol.tensors import (
    BYTES,
    MAX_TENSORS,
    Buffer,
    Tensor,
    bytes_array,
    checked_shape,
    decode_raw,
    dtype_of,
    encode_raw,
    from_values,
    is_slow,
    view_raw,
)

SERVICE = "inference.GRPCInferenceService"
_ONE_BYTE_LENGTH = 127
"""Longest string whose length protobuf encodes in one byte."""
_CONTENTS = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    BYTES: "bytes_contents",
}


def _declared() -> tuple[bytes, Any]:
    """The protocol's file as compiled, and its service in a pool of our own."""
    compiled = Path(__file__).with_name("open_inference_grpc.binpb").read_bytes()
    file: bytes = descriptor_pb2.FileDescriptorSet.FromString(compiled).file[0].SerializeToString()
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file)
    return file, pool.FindServiceByName(SERVICE)


FILE, _SERVICE = _declared()
"""For server reflection."""
METHODS: tuple[str, ...] = tuple(_SERVICE.methods_by_name)


def method_path(method: str) -> str:
    """Path of a method for `grpc` channels: `/inference.GRPCInferenceService/ModelInfer`."""
    return f"/{SERVICE}/{method}"


def request_class(method: str) -> Any:
    return GetMessageClass(_SERVICE.methods_by_name[method].input_type)


def response_class(method: str) -> Any:
    return GetMessageClass(_SERVICE.methods_by_name[method].output_type)


_Request = request_class("ModelInfer")
_Response = response_class("ModelInfer")
_RAW_INPUT_CONTENTS: int = _Request.DESCRIPTOR.fields_by_name["raw_input_contents"].number


def read_request(data: Buffer, max_typed_bytes: int) -> PendingRequest:
    """Read a serialised ModelInferRequest up to its tensors' descriptions; raw tensors share its memory.

    Raises ProtocolError if it is malformed, or has more than `max_typed_bytes` besides raw contents, of which protobuf
    makes many times as many.
    """
    rest, raw = extract_field(data, _RAW_INPUT_CONTENTS, max_typed_bytes)
    shared = len(rest) <= MAX_SHARED_BYTES
    request, tensors, inputs, typed = (_shared_header if shared else _read_header)(rest)
    decoders = _decoders("inputs", tensors, inputs, raw, typed)
    slow = is_slow(inputs, whole_bytes=sum(map(len, raw)), values_bytes=len(rest))
    return PendingRequest(request, inputs, slow, len(rest), decoders, shared)


def _read_header(text: bytes) -> tuple[InferRequest, Any, tuple[TensorHeader, ...], str | None]:
    """The request without raw contents, its tensors, their headers, and the name of the first with typed contents."""
    try:
        message = _Request.FromString(text)
    except DecodeError as error:
        raise ProtocolError(f"the message is not a ModelInferRequest of Open Inference Protocol V2: {error}") from error
    request = InferRequest(
        model_name=message.model_name,
        model_version=message.model_version,
        id=message.id,
        parameters=_read_parameters(message.parameters),
        inputs=(),
        requested_outputs=tuple(
            RequestedOutput(output.name, _read_parameters(output.parameters)) for output in message.outputs
        ),
    )
    return request, message.inputs, *_read_tensors("inputs", message.inputs)


_shared_header = lru_cache(MAX_SHARED_HEADERS)(_read_header)  # clients repeat the headers of their requests


def response_from_message(message: Any) -> InferResponse:
    """Read a ModelInferResponse, raw or with typed contents. ProtocolError if it is invalid."""
    headers, typed = _read_tensors("outputs", message.outputs)
    decoders = _decoders("outputs", message.outputs, headers, message.raw_output_contents, typed)
    return InferResponse(
        model_name=message.model_name,
        model_version=message.model_version,
        id=message.id,
        parameters=_read_parameters(message.parameters),
        outputs=tuple([decoder() for decoder in decoders]),
    )


def request_to_message(request: InferRequest) -> Any:
    message = _Request(model_name=request.model_name, model_version=request.model_version, id=request.id)
    _write_parameters(message.parameters, request.parameters)
    _write_tensors(message.inputs, message.raw_input_contents, request.inputs)
    for output in request.requested_outputs:
        _write_parameters(message.outputs.add(name=output.name).parameters, output.parameters)
    return message


def response_to_message(response: InferResponse) -> Any:
    message = _Response(model_name=response.model_name, model_version=response.model_version, id=response.id)
    _write_parameters(message.parameters, response.parameters)
    _write_tensors(message.outputs, message.raw_output_contents, response.outputs)
    return message


def metadata_to_message(metadata: Mapping[str, Any]) -> Any:
    """Write a ModelMetadataResponse from metadata as REST has it; model and tensors may each have `parameters`.

    A text among those of the model that some clients could not read is left out: by the specification's newest text
    field 6 holds text, and what stands there is text to such a client only where its length is written in one byte.
    """
    message = response_class("ModelMetadata")(
        name=metadata["name"], versions=metadata["versions"], platform=metadata["platform"]
    )
    for tensors, field in ((metadata["inputs"], message.inputs), (metadata["outputs"], message.outputs)):
        for tensor in tensors:
            entry = field.add(name=tensor["name"], datatype=tensor["datatype"], shape=tensor["shape"])
            _write_parameters(entry.parameters, tensor.get("parameters", {}))
    parameters = {name: value for name, value in metadata.get("parameters", {}).items() if _reads_as_text(value)}
    _write_parameters(message.parameters, parameters)
    return message


def _reads_as_text(value: Parameter) -> bool:
    return not isinstance(value, str) or len(value.encode()) <= _ONE_BYTE_LENGTH


def _read_parameters(entries: Any) -> Parameters:
    if not entries:
        return {}
    parameters: dict[str, Parameter] = {}
    for key, value in entries.items():
        choice = value.WhichOneof("parameter_choice")
        if choice is None:
            raise ProtocolError(f"parameter {key!r} has no value; set a boolean, an integer, a double or a string")
        parameters[key] = getattr(value, choice)
    return parameters


def _write_parameters(entries: Any, parameters: Parameters) -> None:
    for key, value in parameters.items():
        match value:
            case bool():
                entries[key].bool_param = value
            case int():
                entries[key].int64_param = value
            case float():
                entries[key].double_param = value
            case str():
                entries[key].string_param = value


def _header(tensor: Any) -> TensorHeader:
    dtype_of(tensor.name, tensor.datatype)
    return TensorHeader(tensor.name, tensor.datatype, checked_shape(tensor.name, tensor.shape))


def _read_tensors(field: str, tensors: Any) -> tuple[tuple[TensorHeader, ...], str | None]:
    """The headers of tensors, and the name of the first with typed contents. MLServer sets contents without values."""
    if len(tensors) > MAX_TENSORS:
        raise ProtocolError(f"{field!r} hold {len(tensors)} tensors; send at most {MAX_TENSORS}")
    region = next((tensor.name for tensor in tensors if "shared_memory_region" in tensor.parameters), None)
    if region is not None:
        raise ProtocolError(f"tensor {region!r}: shared memory is not supported; send the data in the request")
    names = [tensor.name for tensor in tensors]
    if len(set(names)) != len(names):
        raise ProtocolError(f"duplicate tensor in {field!r}: {', '.join(names)}")
    typed = next((tensor for tensor in tensors if tensor.HasField("contents") and tensor.contents.ListFields()), None)
    return tuple([_header(tensor) for tensor in tensors]), None if typed is None else printable(typed.name)


def _decoders(
    field: str, tensors: Any, headers: Sequence[TensorHeader], raw: Sequence[Buffer], typed: str | None
) -> tuple[Callable[[], Tensor], ...]:
    if not raw:
        return tuple([partial(_read_contents, tensor) for tensor in tensors])
    if len(raw) != len(tensors):
        raise ProtocolError(
            f"{len(tensors)} {field} with {len(raw)} raw contents; send one for each, or none and typed contents"
        )
    if typed is not None:
        raise ProtocolError(f"{field!r}: {typed} has typed and raw contents; send only one")
    pairs = zip(headers, raw, strict=True)
    return tuple([partial(view_raw, header.name, header.datatype, header.shape, buffer) for header, buffer in pairs])


def _read_contents(tensor: Any) -> Tensor:
    dtype_of(tensor.name, tensor.datatype)
    field = _CONTENTS.get(tensor.datatype)
    if field is None:
        raise ProtocolError(f"tensor {tensor.name!r}: {tensor.datatype} has no typed contents; send raw contents")
    values = list(getattr(tensor.contents, field))
    _refuse_other_contents(tensor, field)
    if tensor.datatype != BYTES:
        return from_values(tensor.name, tensor.datatype, tensor.shape, values)
    shape = checked_shape(tensor.name, tensor.shape)
    raw = encode_raw(Tensor(tensor.name, BYTES, bytes_array(values, (len(values),))))
    return decode_raw(tensor.name, BYTES, shape, raw)


def _refuse_other_contents(tensor: Any, right: str) -> None:
    for descriptor, _ in tensor.contents.ListFields():
        if descriptor.name != right:
            raise ProtocolError(f"tensor {tensor.name!r}: {tensor.datatype} requires {right}, not {descriptor.name}")


def _write_tensors(entries: Any, raw: Any, tensors: Iterable[Tensor]) -> None:
    for tensor in tensors:
        entries.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        raw.append(bytes(encode_raw(tensor)))
