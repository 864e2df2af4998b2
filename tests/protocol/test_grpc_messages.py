"""gRPC messages: byte for byte those of MLServer and Triton, and parsed without copies in bounded memory."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab_protocol import InferRequest, InferResponse, ProtocolError, RequestedOutput, Tensor, grpc_messages
from trimtab_protocol.protobuf_fields import MAX_FIELDS, extract_field
from trimtab_protocol.tensors import bytes_array

REQUEST = InferRequest(
    "digits",
    (
        Tensor.of("image", np.arange(6, dtype=np.float32).reshape(2, 3)),
        Tensor("label", "BYTES", bytes_array([b"a", b"\xff"], (2,))),
    ),
    model_version="1",
    id="7",
    parameters={"timeout": 5, "note": "n", "flag": True},
    requested_outputs=(RequestedOutput("y", {"k": "v"}),),
)
EXCHANGE = """
import sys
from {module} import {name} as theirs
from trimtab_protocol import grpc_messages
ours = grpc_messages.request_class("ModelInfer").FromString(bytes.fromhex(sys.argv[1]))
copy = theirs.ModelInferRequest.FromString(ours.SerializeToString())
assert (copy.model_name, copy.id, copy.inputs[0].name, list(copy.inputs[0].shape)) == ("digits", "7", "image", [2, 3])
assert copy.parameters["timeout"].int64_param == 5 and copy.outputs[0].parameters["k"].string_param == "v"
assert copy.SerializeToString(deterministic=True) == ours.SerializeToString(deterministic=True)
def shape(message):
    of = lambda f: (f.number, f.type, f.is_repeated, f.message_type and f.message_type.full_name)
    inner = {{name: fields for nested in message.nested_types for name, fields in shape(nested).items()}}
    return {{message.full_name: {{f.name: of(f) for f in message.fields}}, **inner}}
def known(ours, theirs):
    for name, fields in ours.items():
        if name == "inference.InferParameter":  # some know fewer kinds
            fields = {{field: fields[field] for field in theirs[name]}}
        if name.endswith("Metadata.ParametersEntry") or name.endswith("MetadataResponse.ParametersEntry"):
            if name not in theirs:  # MLServer's alone
                continue
        elif name.startswith("inference.ModelMetadataResponse") and "parameters" not in theirs[name]:
            fields = {{field: of for field, of in fields.items() if field != "parameters"}}
        assert fields.items() <= theirs[name].items(), name
for method in grpc_messages.METHODS:
    for kind, of in (("Request", grpc_messages.request_class), ("Response", grpc_messages.response_class)):
        known(shape(of(method).DESCRIPTOR), shape(getattr(theirs, method + kind).DESCRIPTOR))
for name in ("InferParameter", "InferTensorContents"):
    file = ours.DESCRIPTOR.file
    known(shape(file.message_types_by_name[name]), shape(getattr(theirs, name).DESCRIPTOR))
print("same")
"""


@pytest.mark.parametrize(("module", "name"), [("mlserver.grpc", "dataplane_pb2"), ("tritonclient.grpc", "service_pb2")])
def test_same_bytes_as_other_implementations(module, name):
    message = grpc_messages.request_to_message(REQUEST).SerializeToString()

    done = subprocess.run(
        [sys.executable, "-c", EXCHANGE.format(module=module, name=name), message.hex()],
        capture_output=True,
        text=True,
        check=False,
    )

    assert (done.returncode, done.stdout) == (0, "same\n"), done.stderr


def read(message):
    return grpc_messages.read_request(message.SerializeToString(), 2**20).decode()


def test_request_round_trips():
    decoded = read(grpc_messages.request_to_message(REQUEST))

    assert (decoded.model_name, decoded.model_version, decoded.id) == ("digits", "1", "7")
    assert dict(decoded.parameters) == REQUEST.parameters
    assert decoded.requested_outputs == REQUEST.requested_outputs
    np.testing.assert_array_equal(decoded.inputs[0].array, REQUEST.inputs[0].array)
    assert decoded.inputs[1].array.tolist() == [b"a", b"\xff"]


def test_response_round_trips():
    response = InferResponse("digits", REQUEST.inputs, id="7", parameters={"trimtab.expected_accuracy": 0.5})

    decoded = grpc_messages.response_from_message(grpc_messages.response_to_message(response))

    assert decoded.parameters == {"trimtab.expected_accuracy": 0.5}
    np.testing.assert_array_equal(decoded.outputs[0].array, REQUEST.inputs[0].array)


@pytest.mark.parametrize(
    ("datatype", "field", "values"),
    [
        ("BOOL", "bool_contents", [True, False]),
        ("INT8", "int_contents", [-1, 2]),
        ("INT64", "int64_contents", [-(2**40), 2]),
        ("UINT8", "uint_contents", [1, 2]),
        ("UINT64", "uint64_contents", [2**63, 2]),
        ("FP32", "fp32_contents", [0.5, 2.0]),
        ("FP64", "fp64_contents", [0.1, 2.0]),
        ("BYTES", "bytes_contents", [b"a", b"\xff"]),
    ],
)
def test_typed_contents_are_read(datatype, field, values):
    message = grpc_messages.request_class("ModelInfer")(model_name="m")
    getattr(message.inputs.add(name="x", datatype=datatype, shape=[2]).contents, field).extend(values)

    assert read(message).inputs[0].array.tolist() == values


def a_message(**tensor):
    message = grpc_messages.request_class("ModelInfer")(model_name="m")
    message.inputs.add(**{"name": "x", "datatype": "FP32", "shape": [1], **tensor})
    return message


def test_empty_contents_beside_raw_ones_are_ignored():
    """So MLServer answers over gRPC."""
    message = a_message(contents={})
    message.raw_input_contents.append(np.float32(1.5).tobytes())

    assert read(message).inputs[0].array.tolist() == [1.5]


def test_invalid_messages_are_rejected():
    two_raw = a_message()
    two_raw.raw_input_contents.extend([b"1234", b"1234"])
    both = a_message(contents={"fp32_contents": [1.0]})
    both.raw_input_contents.append(b"1234")
    wrong_field = a_message()
    wrong_field.inputs[0].contents.int64_contents.append(1)
    unset = a_message()
    unset.parameters["timeout"].SetInParent()
    duplicate = a_message()
    duplicate.inputs.add(name="x")

    for message, pattern in [
        (two_raw, "1 inputs with 2 raw contents"),
        (both, "x has typed and raw contents"),
        (wrong_field, "FP32 requires fp32_contents"),
        (unset, "parameter 'timeout' has no value"),
        (duplicate, "duplicate tensor in 'inputs'"),
        (a_message(datatype="FP16"), "FP16 has no typed contents; send raw contents"),
        (a_message(), r"shape \[1\] needs 1 elements"),
    ]:
        with pytest.raises(ProtocolError, match=pattern):
            read(message)


@pytest.mark.parametrize("raw", [[], [b"\x00\x00\x80?"]])
def test_shared_memory_tensor_is_rejected(raw):
    message = grpc_messages.request_class("ModelInfer")(model_name="digits", raw_input_contents=raw)
    for name in ("x", "z"):
        tensor = message.inputs.add(name=name, datatype="FP32", shape=[1])
    tensor.parameters["shared_memory_region"].string_param = "region"

    with pytest.raises(ProtocolError, match="tensor 'z': shared memory is not supported"):
        read(message)


RAW_REQUEST = InferRequest(
    "m",
    (Tensor.of("x", np.arange(6, dtype=np.float32).reshape(2, 3)), Tensor.of("y", np.ones((2, 1), np.int64))),
    id="7",
)
SERIALISED = grpc_messages.request_to_message(RAW_REQUEST).SerializeToString()


def test_extraction_equals_protobuf_without_copies():
    pending = grpc_messages.read_request(SERIALISED, 1000)
    read = pending.decode()

    assert [(tensor.name, tensor.datatype, tensor.shape) for tensor in pending.inputs] == [
        ("x", "FP32", (2, 3)),
        ("y", "INT64", (2, 1)),
    ]
    assert (read.model_name, read.id) == ("m", "7")
    for given_, there in zip(RAW_REQUEST.inputs, read.inputs, strict=True):
        np.testing.assert_array_equal(there.array, given_.array)
        assert np.shares_memory(there.array, np.frombuffer(SERIALISED, np.uint8))


def test_non_raw_fields_are_bounded():
    many = SERIALISED + b"\x2a\x00" * 600  # empty inputs: two bytes here, a hundred in memory

    with pytest.raises(ProtocolError, match="more than 1000 bytes besides raw contents; send large tensors as raw"):
        grpc_messages.read_request(many, 1000)
    with pytest.raises(ProtocolError, match=f"more than {MAX_FIELDS} fields"):
        extract_field(b"\x3a\x00" * (MAX_FIELDS + 1), 7, 1000)


@given(st.binary(max_size=200))
def test_any_bytes_are_split_or_rejected(data):
    try:
        rest, taken = extract_field(data, 7, 1000)
    except ProtocolError:
        return
    assert len(rest) + sum(view.nbytes for view in taken) <= len(data)


@given(st.integers(0, len(SERIALISED) - 1), st.integers(0, 255))
def test_damaged_message_is_parsed_or_rejected(place, byte):
    damaged = bytearray(SERIALISED)
    damaged[place] = byte
    try:
        grpc_messages.read_request(bytes(damaged), 1000).decode()
    except ProtocolError:
        return
