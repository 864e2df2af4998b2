"""Tensors: every encoding round trips, shares memory if possible, and is validated."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from trimtab_protocol import DTYPES, ProtocolError, Tensor
from trimtab_protocol.tensors import bytes_array, decode_raw, encode_raw, from_values, to_values

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
        ("FP32", [True], b"1234", "must hold integers"),
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
        ("FP32", [1], [None], "but holds NoneType"),
        ("INT8", [1], [1.5], "data of INT8 must be integers, but holds float"),
        ("UINT8", [1], [-1], "a value does not fit UINT8"),
        ("INT8", [1], [200], "a value does not fit INT8"),
        ("BOOL", [1], [1], "data of BOOL must be true or false, but holds int"),
        ("BYTES", [1], [1], "data of BYTES must be strings, but holds int"),
        ("BF16", [1], [1.0], "BF16 has no JSON form"),
        ("FP32", [2], [1.0], r"shape \[2\] needs 2 elements; got 1"),
        ("FP32", [2, 2], [[1.0, 2.0], [3.0]], r"nested data does not have shape \[2, 2\]"),
        ("FP32", [2, 2], [[1.0, 2.0], 3.0], r"nested data does not have shape \[2, 2\]"),
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
