"""Tensors in every encoding, REST messages in both directions, and errors of invalid ones."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from trimtab_protocol import DTYPES, InferRequest, InferResponse, ProtocolError, RequestedOutput, Tensor, rest
from trimtab_protocol.tensors import MAX_BYTES_ELEMENTS, bytes_array, decode_raw, encode_raw, from_values, to_values

NUMERIC = sorted(set(DTYPES) - {"BYTES", "BF16"})


@st.composite
def numeric_tensors(draw, *, infinite=True):
    datatype = draw(st.sampled_from(NUMERIC))
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
    elements = (
        hnp.from_dtype(DTYPES[datatype], allow_nan=False, allow_infinity=infinite)
        if datatype.startswith("FP")
        else None
    )
    array = draw(hnp.arrays(DTYPES[datatype], shape, elements=elements))
    return Tensor("x", datatype, array)


@given(numeric_tensors())
def test_raw_round_trip(tensor):
    decoded = decode_raw("x", tensor.datatype, tensor.shape, encode_raw(tensor))

    np.testing.assert_array_equal(decoded.array, tensor.array)
    assert decoded.array.dtype == tensor.array.dtype


@given(numeric_tensors(infinite=False))  # JSON has no infinities: they are answered as null
def test_json_round_trip(tensor):
    decoded = from_values("x", tensor.datatype, list(tensor.shape), to_values(tensor))

    np.testing.assert_array_equal(decoded.array, tensor.array)
    assert decoded.array.dtype == tensor.array.dtype


@given(st.lists(st.binary(max_size=9), max_size=6))
def test_bytes_round_trip(values):
    tensor = Tensor("x", "BYTES", bytes_array(values, (len(values),)))

    assert decode_raw("x", "BYTES", [len(values)], encode_raw(tensor)).array.tolist() == values


def test_decoding_and_encoding_share_memory():
    buffer = bytearray(16)
    tensor = decode_raw("x", "FP32", [4], buffer)
    buffer[0:4] = np.float32(2.5).tobytes()

    assert tensor.array[0] == 2.5
    assert np.shares_memory(np.frombuffer(encode_raw(tensor), np.uint8), tensor.array)


def test_strided_arrays_encode_in_row_order():
    array = np.arange(6, dtype=np.int32).reshape(2, 3).T

    assert bytes(encode_raw(Tensor.of("x", array))) == np.ascontiguousarray(array).tobytes()


def test_nested_and_flat_json_data_are_the_same():
    nested = from_values("x", "INT64", [2, 2], [[1, 2], [3, 4]])
    flat = from_values("x", "INT64", [2, 2], [1, 2, 3, 4])

    np.testing.assert_array_equal(nested.array, flat.array)


@pytest.mark.parametrize(
    ("datatype", "shape", "buffer", "message"),
    [
        ("FP31", [1], b"1234", "tensor 'x': unknown datatype 'FP31'; use one of BOOL, "),
        (7, [1], b"1234", "unknown datatype 7"),
        ("FP32", [2], b"1234", r"shape \[2\] of FP32 needs 8 bytes; got 4"),
        ("FP32", [-1], b"1234", r"shape \[-1\] must hold integers of at least 0"),
        ("FP32", ["1"], b"1234", "must hold integers"),
        ("FP32", [2**20, 2**21], b"1234", "too many elements"),
        ("FP32", [0, 2**62], b"", "too many elements"),
        ("FP32", [1] * 33, b"1234", "33 dimensions are too many; at most 32"),
        ("BYTES", [1], b"\x05\0\0\0ab", "element 0 of its BYTES ends past the data"),
        ("BYTES", [2], b"\x01\0\0\0a", r"shape \[2\] needs 2 elements; got 1"),
    ],
)
def test_bad_raw_tensors(datatype, shape, buffer, message):
    with pytest.raises(ProtocolError, match=message):
        decode_raw("x", datatype, shape, buffer)


@pytest.mark.parametrize(
    ("datatype", "shape", "values", "message"),
    [
        ("FP32", [1], "1.0", "tensor 'x': data must be a list"),
        ("FP32", [1], ["1.0"], "data of FP32 must be numbers, but holds str"),
        ("FP32", [1], [True], "data of FP32 must be numbers, but holds bool"),
        ("INT8", [1], [1.5], "data of INT8 must be integers, but holds float"),
        ("UINT8", [1], [-1], "a value does not fit UINT8"),
        ("BOOL", [1], [1], "data of BOOL must be true or false, but holds int"),
        ("BYTES", [1], [1], "data of BYTES must be strings, but holds int"),
        ("BF16", [1], [1.0], "BF16 has no JSON form"),
        ("FP32", [2], [1.0], r"shape \[2\] needs 2 elements; got 1"),
        ("FP32", [2, 2], [[1.0, 2.0], [3.0]], r"nested data does not have shape \[2, 2\]"),
        ("FP32", [2], [[1.0], [2.0]], "data of FP32 must be numbers, but holds list"),
    ],
)
def test_bad_json_tensors(datatype, shape, values, message):
    with pytest.raises(ProtocolError, match=message):
        from_values("x", datatype, shape, values)


def test_bytes_that_are_not_text_have_no_json_form():
    with pytest.raises(ProtocolError, match="not UTF-8; ask for binary data"):
        to_values(Tensor("x", "BYTES", bytes_array([b"\xff"], (1,))))


def test_unsupported_dtype_is_reported_by_name():
    with pytest.raises(ProtocolError, match="numpy dtype complex128 has no datatype"):
        Tensor.of("x", np.zeros(1, np.complex128))


IMAGE = Tensor.of("image", np.arange(12, dtype=np.float32).reshape(2, 6))
LABEL = Tensor("label", "BYTES", bytes_array([b"a", b"\xff\x00"], (2,)))


def joined(buffers):
    return b"".join(bytes(buffer) for buffer in buffers)


def body(**fields):
    return json.dumps(fields).encode()


def tensor(**fields):
    return {"name": "x", "shape": [1], "datatype": "FP32", "data": [1.0], **fields}


VALID = body(inputs=[tensor()])


def test_binary_request_round_trips():
    request = InferRequest(
        "digits",
        (IMAGE, LABEL),
        id="7",
        parameters={"timeout": 5, "note": "n", "share": 0.5, "flag": True},
        requested_outputs=(RequestedOutput("y", {"binary_data": True}),),
    )
    buffers, length = rest.encode_request(request)

    decoded = rest.decode_request("digits", joined(buffers), str(length))

    assert (decoded.id, decoded.parameters, decoded.requested_outputs) == (
        request.id,
        request.parameters,
        request.requested_outputs,
    )
    np.testing.assert_array_equal(decoded.inputs[0].array, IMAGE.array)
    assert decoded.inputs[1].array.tolist() == [b"a", b"\xff\x00"]


def test_response_round_trips_as_json_and_binary():
    response = InferResponse("digits", (IMAGE,), id="7", parameters={"trimtab.read.variant": "small"})

    for binary in (frozenset[str](), frozenset({"image"})):
        buffers, length = rest.encode_response(response, binary)
        decoded = rest.decode_response(joined(buffers), length)

        assert (length is None) == (not binary)
        assert (decoded.model_name, decoded.id, decoded.parameters) == ("digits", "7", response.parameters)
        np.testing.assert_array_equal(decoded.outputs[0].array, IMAGE.array)


def test_json_and_binary_tensors_mix():
    header = body(
        inputs=[
            tensor(name="a"),
            {"name": "b", "shape": [2], "datatype": "INT8", "parameters": {"binary_data_size": 2}},
        ]
    )

    decoded = rest.decode_request("m", header + b"\x01\x02", len(header))

    assert [t.array.tolist() for t in decoded.inputs] == [[1.0], [1, 2]]


@pytest.mark.parametrize(
    ("parameters", "outputs", "expected"),
    [
        ({}, (), set()),
        ({"binary_data_output": True}, (), {"y", "z"}),
        ({}, (RequestedOutput("y", {"binary_data": True}), RequestedOutput("z")), {"y"}),
        ({"binary_data_output": True}, (RequestedOutput("y", {"binary_data": False}), RequestedOutput("z")), {"z"}),
    ],
)
def test_requested_outputs_are_binary(parameters, outputs, expected):
    request = InferRequest("m", (), parameters=parameters, requested_outputs=outputs)
    produced = [Tensor.of(name, np.zeros(1)) for name in ("y", "z")]

    assert rest.binary_outputs(request, produced) == expected


def test_unknown_fields_and_nulls_are_ignored():
    decoded = rest.decode_request("m", body(inputs=[tensor(shade=3)], id=None, parameters=None, mood="calm"), None)

    assert decoded.inputs[0].name == "x"


@pytest.mark.parametrize(
    ("sent", "length", "message"),
    [
        (b"{", None, "the JSON header cannot be read"),
        (b"[" * 100_000, None, "the JSON header cannot be read"),
        (b"[]", None, "the JSON header must be an object"),
        (
            b"{}",
            "three",
            "Inference-Header-Content-Length is 'three'; it must be an integer from 0 to the body's 2 bytes",
        ),
        (b"{}", "99", "must be an integer from 0"),
        (body(), None, "'inputs' must be a list of tensors"),
        (body(inputs=[3]), None, "each of 'inputs' must be an object with a 'name'"),
        (body(inputs=[tensor(shape=4)]), None, "tensor 'x': 'shape' must be a list of integers"),
        (body(inputs=[tensor(), tensor()]), None, "duplicate tensor in 'inputs'"),
        (body(inputs=[{"name": "x", "shape": [1], "datatype": "FP32"}]), None, "neither 'data' nor the parameter"),
        (body(inputs=[tensor(parameters={"binary_data_size": 4})]), None, "is 4, but 0 bytes are left in the body"),
        (body(inputs=[tensor(parameters={"binary_data_size": "4"})]), None, "'binary_data_size' is '4'"),
        (body(inputs=[tensor(parameters=[])]), None, "tensor 'x': 'parameters' must be an object"),
        (body(inputs=[tensor(parameters={"shared_memory_region": "r"})]), None, "shared memory is not supported"),
        (body(inputs=[tensor()], id=4), None, "'id' must be a string"),
        (
            body(inputs=[tensor()], parameters={"timeout": [1]}),
            None,
            "parameter 'timeout' must be a boolean, a number or",
        ),
        (body(inputs=[tensor()], outputs={}), None, "'outputs' must be a list"),
        (body(inputs=[tensor()], outputs=[{}]), None, "each of 'outputs' must be an object with a 'name'"),
        (body(inputs=[tensor(datatype="BYTES", data=["\ud800"])]), None, "half a surrogate pair"),
        (VALID + b"abc", len(VALID), "3 bytes, but the tensors' 'binary_data_size' sum to 0"),
    ],
)
def test_bad_bodies(sent, length, message):
    with pytest.raises(ProtocolError, match=message):
        rest.decode_request("m", sent, length)


@pytest.mark.parametrize("value", ["\ud800", 2**70, -(2**70)])
def test_values_beyond_utf8_and_64_bits_are_transported(value):
    """Of parameters, which clients and model servers choose."""
    buffers, length = rest.encode_request(InferRequest("m", (Tensor.of("x", np.ones(1)),), parameters={"p": value}))
    assert rest.decode_request("m", joined(buffers), length).parameters["p"] == value


def test_non_finite_numbers_become_null():
    outputs = (Tensor.of("y", np.array([1.0, np.nan, np.inf], np.float32)),)
    answer = InferResponse("m", outputs, parameters={"score": float("nan")})
    buffers, _ = rest.encode_response(answer, frozenset())

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    read = json.loads(joined(buffers), parse_constant=refuse)
    assert read["outputs"][0]["data"] == [1.0, None, None]
    assert read["parameters"] == {"score": None}


def test_excessive_bytes_elements_are_rejected_early():
    raw = bytes(4) * (MAX_BYTES_ELEMENTS + 1)
    with pytest.raises(ProtocolError, match="elements of BYTES are too many"):
        decode_raw("x", "BYTES", [MAX_BYTES_ELEMENTS + 1], raw)
    with pytest.raises(ProtocolError, match="needs 2 elements; got more"):
        decode_raw("x", "BYTES", [2], raw)


def test_requests_share_what_their_equal_headers_say():
    buffers, length = rest.encode_request(InferRequest("m", (Tensor.of("x", np.arange(2, dtype=np.float32)),)))
    header = bytes(buffers[0])
    values = [np.array([n, n + 1], np.float32) for n in (1, 5)]
    first, second = [rest.read_request("m", header + array.tobytes(), length) for array in values]

    assert first.shared
    assert first.request is second.request
    for pending, array in zip((first, second), values, strict=True):
        np.testing.assert_array_equal(pending.decode().inputs[0].array, array)
    with pytest.raises(ProtocolError, match="4 bytes are left"):
        rest.read_request("m", header + bytes(4), length)
    assert not rest.read_request("m", VALID, None).shared
    assert rest.read_request("other", header + bytes(8), length).request.model_name == "other"
