"""The gRPC spelling: the messages of `inference.GRPCInferenceService`, declared here as a table.

They live in a descriptor pool of their own. MLServer's and Triton's generated modules each register package `inference`
in protobuf's default pool and exclude each other there; a private pool is at home in any process, beside either of
them. Field numbers and types are the protocol's, so the bytes are the same.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError, Message

from trimtab_protocol.errors import ProtocolError
from trimtab_protocol.messages import (
    InferRequest,
    InferResponse,
    Parameter,
    Parameters,
    PendingRequest,
    RequestedOutput,
    TensorHeader,
)
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
)
from trimtab_protocol.text import told
from trimtab_protocol.wire_format import take_out

SERVICE = "inference.GRPCInferenceService"
_PACKAGE = "inference"
_Field = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    "bool": _Field.TYPE_BOOL,
    "bytes": _Field.TYPE_BYTES,
    "double": _Field.TYPE_DOUBLE,
    "float": _Field.TYPE_FLOAT,
    "int32": _Field.TYPE_INT32,
    "int64": _Field.TYPE_INT64,
    "string": _Field.TYPE_STRING,
    "uint32": _Field.TYPE_UINT32,
    "uint64": _Field.TYPE_UINT64,
}
_PARAMETERS = "map InferParameter"
# message → field → (number, type); "repeated T" and "map T" (from string to T) as in a .proto file.
_MESSAGES: Mapping[str, Mapping[str, tuple[int, str]]] = {
    "InferParameter": {  # one of these is set
        "bool_param": (1, "bool"),
        "int64_param": (2, "int64"),
        "string_param": (3, "string"),
        "double_param": (4, "double"),
        "uint64_param": (5, "uint64"),
    },
    "InferTensorContents": {
        "bool_contents": (1, "repeated bool"),
        "int_contents": (2, "repeated int32"),
        "int64_contents": (3, "repeated int64"),
        "uint_contents": (4, "repeated uint32"),
        "uint64_contents": (5, "repeated uint64"),
        "fp32_contents": (6, "repeated float"),
        "fp64_contents": (7, "repeated double"),
        "bytes_contents": (8, "repeated bytes"),
    },
    "ServerLiveRequest": {},
    "ServerLiveResponse": {"live": (1, "bool")},
    "ServerReadyRequest": {},
    "ServerReadyResponse": {"ready": (1, "bool")},
    "ModelReadyRequest": {"name": (1, "string"), "version": (2, "string")},
    "ModelReadyResponse": {"ready": (1, "bool")},
    "ServerMetadataRequest": {},
    "ServerMetadataResponse": {"name": (1, "string"), "version": (2, "string"), "extensions": (3, "repeated string")},
    "ModelMetadataRequest": {"name": (1, "string"), "version": (2, "string")},
    "ModelMetadataResponse.TensorMetadata": {
        "name": (1, "string"),
        "datatype": (2, "string"),
        "shape": (3, "repeated int64"),
    },
    "ModelMetadataResponse": {
        "name": (1, "string"),
        "versions": (2, "repeated string"),
        "platform": (3, "string"),
        "inputs": (4, "repeated ModelMetadataResponse.TensorMetadata"),
        "outputs": (5, "repeated ModelMetadataResponse.TensorMetadata"),
    },
    "ModelInferRequest.InferInputTensor": {
        "name": (1, "string"),
        "datatype": (2, "string"),
        "shape": (3, "repeated int64"),
        "parameters": (4, _PARAMETERS),
        "contents": (5, "InferTensorContents"),
    },
    "ModelInferRequest.InferRequestedOutputTensor": {"name": (1, "string"), "parameters": (2, _PARAMETERS)},
    "ModelInferRequest": {
        "model_name": (1, "string"),
        "model_version": (2, "string"),
        "id": (3, "string"),
        "parameters": (4, _PARAMETERS),
        "inputs": (5, "repeated ModelInferRequest.InferInputTensor"),
        "outputs": (6, "repeated ModelInferRequest.InferRequestedOutputTensor"),
        "raw_input_contents": (7, "repeated bytes"),
    },
    "ModelInferResponse.InferOutputTensor": {
        "name": (1, "string"),
        "datatype": (2, "string"),
        "shape": (3, "repeated int64"),
        "parameters": (4, _PARAMETERS),
        "contents": (5, "InferTensorContents"),
    },
    "ModelInferResponse": {
        "model_name": (1, "string"),
        "model_version": (2, "string"),
        "id": (3, "string"),
        "parameters": (4, _PARAMETERS),
        "outputs": (5, "repeated ModelInferResponse.InferOutputTensor"),
        "raw_output_contents": (6, "repeated bytes"),
    },
}
_RAW_INPUT_CONTENTS = _MESSAGES["ModelInferRequest"]["raw_input_contents"][0]
_ONE_OF = {"InferParameter": "parameter_choice"}
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
METHODS = ("ServerLive", "ServerReady", "ServerMetadata", "ModelReady", "ModelMetadata", "ModelInfer")


def _camel(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_"))


def _add_field(message: descriptor_pb2.DescriptorProto, owner: str, name: str, number: int, kind: str) -> None:
    *label, base = kind.split()
    field = message.field.add(name=name, number=number, label=_Field.LABEL_OPTIONAL)
    if label:
        field.label = _Field.LABEL_REPEATED
    if label == ["map"]:
        entry = message.nested_type.add(name=f"{_camel(name)}Entry")
        entry.options.map_entry = True
        _add_field(entry, f"{owner}.{entry.name}", "key", 1, "string")
        _add_field(entry, f"{owner}.{entry.name}", "value", 2, base)
        base = f"{owner}.{entry.name}"
    if base in _SCALARS:
        field.type = _SCALARS[base]
    else:
        field.type = _Field.TYPE_MESSAGE
        field.type_name = f".{_PACKAGE}.{base}"


def _describe() -> bytes:
    """The protocol as a serialized file descriptor, its service too."""
    file = descriptor_pb2.FileDescriptorProto(name="open_inference_grpc.proto", package=_PACKAGE, syntax="proto3")
    declared: dict[str, descriptor_pb2.DescriptorProto] = {}
    for name in sorted(_MESSAGES, key=lambda name: name.count(".")):  # owners before what is nested in them
        owner, _, own = name.rpartition(".")
        message = declared[owner].nested_type.add(name=own) if owner else file.message_type.add(name=own)
        declared[name] = message
        for field, (number, kind) in _MESSAGES[name].items():
            _add_field(message, name, field, number, kind)
        if name in _ONE_OF:
            message.oneof_decl.add(name=_ONE_OF[name])
            for declared_field in message.field:
                declared_field.oneof_index = 0
    service = file.service.add(name=SERVICE.rpartition(".")[2])
    for method in METHODS:
        kinds = {
            f"{end}put_type": f".{_PACKAGE}.{method}{what}" for end, what in (("in", "Request"), ("out", "Response"))
        }
        service.method.add(name=method, **kinds)
    return file.SerializeToString()


def _declare() -> Mapping[str, type[Message]]:
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(FILE)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}")) for name in _MESSAGES
    }


FILE = _describe()
"""For those who ask a server what it speaks (reflection)."""
MESSAGES: Mapping[str, type[Message]] = _declare()
_Request: Any = MESSAGES["ModelInferRequest"]
_Response: Any = MESSAGES["ModelInferResponse"]


def method_path(method: str) -> str:
    """The path of a method, as `grpc` channels want it: `/inference.GRPCInferenceService/ModelInfer`."""
    return f"/{SERVICE}/{method}"


def request_class(method: str) -> Any:
    """The request message of a method in `METHODS`."""
    return MESSAGES[f"{method}Request"]


def response_class(method: str) -> Any:
    """The response message of a method in `METHODS`."""
    return MESSAGES[f"{method}Response"]


def read_request(data: Buffer, most_typed_bytes: int) -> PendingRequest:
    """Read a serialised ModelInferRequest up to its tensors' descriptions; raw tensors share its memory.

    Args:
        data: the message as received.
        most_typed_bytes: of everything but raw contents, of which protobuf makes many times as many.

    Raises:
        ProtocolError: it is malformed, or larger than that.
    """
    rest, raw = take_out(data, _RAW_INPUT_CONTENTS, most_typed_bytes)
    try:
        message = _Request.FromString(rest)
    except DecodeError as error:
        raise ProtocolError(f"the message is no ModelInferRequest of Open Inference Protocol V2: {error}") from error
    return _pending(message, raw, len(rest))


def request_from_message(message: Any) -> InferRequest:
    """Read a ModelInferRequest, raw or with typed contents. Raises ProtocolError where it is malformed."""
    return _pending(message, message.raw_input_contents, 0).decode()


def _pending(message: Any, raw: Sequence[Buffer], typed_bytes: int) -> PendingRequest:
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
    decoders = _decoders("inputs", message.inputs, raw)
    inputs = tuple(_header(tensor) for tensor in message.inputs)
    slow = is_slow(inputs, whole_bytes=sum(map(len, raw)), values_bytes=typed_bytes)
    return PendingRequest(request, inputs, slow, typed_bytes, decoders)


def response_from_message(message: Any) -> InferResponse:
    """Read a ModelInferResponse, raw or with typed contents. Raises ProtocolError where it is malformed."""
    return InferResponse(
        model_name=message.model_name,
        model_version=message.model_version,
        id=message.id,
        parameters=_read_parameters(message.parameters),
        outputs=tuple(decoder() for decoder in _decoders("outputs", message.outputs, message.raw_output_contents)),
    )


def request_to_message(request: InferRequest) -> Any:
    """Write a ModelInferRequest with raw contents."""
    message = _Request(model_name=request.model_name, model_version=request.model_version, id=request.id)
    _write_parameters(message.parameters, request.parameters)
    _write_tensors(message.inputs, message.raw_input_contents, request.inputs)
    for output in request.requested_outputs:
        _write_parameters(message.outputs.add(name=output.name).parameters, output.parameters)
    return message


def response_to_message(response: InferResponse) -> Any:
    """Write a ModelInferResponse with raw contents."""
    message = _Response(model_name=response.model_name, model_version=response.model_version, id=response.id)
    _write_parameters(message.parameters, response.parameters)
    _write_tensors(message.outputs, message.raw_output_contents, response.outputs)
    return message


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


def _decoders(field: str, tensors: Any, raw: Sequence[Buffer]) -> tuple[Callable[[], Tensor], ...]:
    if len(tensors) > MAX_TENSORS:
        raise ProtocolError(f"{field!r} hold {len(tensors)} tensors; send at most {MAX_TENSORS}")
    if raw and len(raw) != len(tensors):
        raise ProtocolError(
            f"{len(tensors)} {field} came with {len(raw)} raw contents; send one for each, or none and typed contents"
        )
    names = [tensor.name for tensor in tensors]
    if len(set(names)) != len(names):
        raise ProtocolError(f"{field!r} name a tensor twice: {', '.join(names)}")
    if raw:
        # MLServer writes contents without a value beside raw ones: a presence that says nothing.
        both = next(
            (tensor.name for tensor in tensors if tensor.HasField("contents") and tensor.contents.ListFields()), None
        )
        if both is not None:
            raise ProtocolError(f"{field!r}: {told(both)} has typed contents beside raw ones; send either")
        return tuple(
            partial(decode_raw, tensor.name, tensor.datatype, tensor.shape, buffer)
            for tensor, buffer in zip(tensors, raw, strict=True)
        )
    return tuple(partial(_read_contents, tensor) for tensor in tensors)


def _read_contents(tensor: Any) -> Tensor:
    if "shared_memory_region" in tensor.parameters:
        raise ProtocolError(f"tensor {tensor.name!r}: shared memory is not supported; send the data in the request")
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
            raise ProtocolError(f"tensor {tensor.name!r}: {tensor.datatype} goes into {right}, not {descriptor.name}")


def _write_tensors(entries: Any, raw: Any, tensors: Iterable[Tensor]) -> None:
    for tensor in tensors:
        entries.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        raw.append(bytes(encode_raw(tensor)))
