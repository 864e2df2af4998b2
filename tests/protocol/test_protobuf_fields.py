"""Protobuf field parser: equal to protobuf, zero-copy for raw tensors, with bounded object counts."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab_protocol import InferRequest, ProtocolError, Tensor, grpc_messages
from trimtab_protocol.protobuf_fields import MAX_FIELDS, extract_field

REQUEST = InferRequest(
    "m",
    (Tensor.of("x", np.arange(6, dtype=np.float32).reshape(2, 3)), Tensor.of("y", np.ones((2, 1), np.int64))),
    id="7",
)
SERIALISED = grpc_messages.request_to_message(REQUEST).SerializeToString()


def test_extraction_equals_protobuf_without_copies():
    pending = grpc_messages.read_request(SERIALISED, 1000)
    read = pending.decode()

    assert [(tensor.name, tensor.datatype, tensor.shape) for tensor in pending.inputs] == [
        ("x", "FP32", (2, 3)),
        ("y", "INT64", (2, 1)),
    ]
    assert (read.model_name, read.id) == ("m", "7")
    for given_, there in zip(REQUEST.inputs, read.inputs, strict=True):
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
